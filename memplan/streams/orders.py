"""Stacks that do not lie in rows.

A ring works on rows: arrays whose last dimension is the innermost. A stack that lies otherwise
is seen as one whose memory is rows of the same bytes, and what is sliced off is turned back
where a layer takes it, which XLA does within what reads it:

    w [L, D, H, K] {1,3,2,0}  ─ seen ─►  [L, H, K, D]  ─ slot ─►  [H, K, D]  ─ back ─►  [D, H, K]

Orders are minor to major, as XLA has them. TPUs lay out by themselves what would be padded in
rows, and memplan lays out what XLA would have to convert; see `memplan.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec as P

type Order = tuple[int, ...]
"""All dimensions of a stack, minor to major."""

type OrderOf = Callable[[Any, Sequence[int]], Order | None]
"""How the target has an array of a dtype and a shape; None where that cannot be told."""


def lies_in_rows(order: Order) -> bool:
    return list(order) == sorted(order, reverse=True)


def is_outside_tiles(order: Order) -> bool:
    """Whether a TPU, which keeps the two minor axes in tiles of rows and lanes, keeps the slices
    along the leading axis apart. In a matrix that axis may be that of the rows of tiles."""
    return 0 not in (order[:2] if len(order) > 2 else order[:1])


def order_of_view(order: Order, rank: int) -> Order | None:
    """Returns the order of a stack seen with its leading axis split in two, or its leading two
    axes joined, as an array of `rank` dimensions; None where no slice is one piece of memory,
    since another axis is around the leading one."""
    more = rank - len(order)
    outer, leading = max(1, 1 - more), max(1, 1 + more)
    if order[-outer:] != tuple(reversed(range(outer))):
        return None
    return (*(d + more for d in order[:-outer]), *reversed(range(leading)))


def seen_in_rows(stack: Any, order: Order | None) -> Any:
    """A stack as rows of the same memory; one without an order lies in them."""
    return stack if order is None else lax.transpose(stack, order[::-1])


def seen_as_it_was(stack: Any, order: Order | None) -> Any:
    """The stack again."""
    return stack if order is None else lax.transpose(stack, inverse(order[::-1]))


def slice_in_rows(array: Any, order: Order | None) -> Any:
    """What is to be a slice of a stack so seen."""
    return seen_in_rows(array, _of_slice(order))


def slice_as_it_was(array: Any, order: Order | None) -> Any:
    """A slice of a stack so seen, turned back."""
    return seen_as_it_was(array, _of_slice(order))


def aval_in_rows(aval: Any, order: Order | None) -> Any:
    """Shape and dtype of a slice of a stack so seen."""
    if order is None:
        return aval
    dimensions, spec = _of_slice(order)[::-1], aval.sharding.spec
    return aval.update(
        shape=tuple(aval.shape[d] for d in dimensions),
        sharding=aval.sharding.update(spec=P(*(spec[d] for d in dimensions))),
    )


def _of_slice(order: Order | None) -> Any:
    return None if order is None else tuple(d - 1 for d in order[:-1])


def inverse(permutation: Order) -> Order:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))
