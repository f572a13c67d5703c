"""Orders of dimensions, and what becomes of them where an array is seen in other dimensions.

    a f32[6,4,8]{2,1,0}  ─ reshape ─►  r f32[24,8]{1,0}        0 and 1 of a are 0 of r
    a f32[6,4,8]{2,0,1}  ─ reshape ─►  nothing: 0 of r would be 1 and 0 of a, in the wrong order
    a f32[6,4,8]{1,0,2}  ─ reshape ─►  r f32[24,8]{0,1}

A *map* says for each dimension of an operand of which *atoms* it consists, from the outer to
the inner, and the same of the result: an order of the one is one of the other if it keeps the
atoms of each dimension together. Dimensions of extent 1 are nowhere and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hlo_passes.ir import Shape

type Order = tuple[int, ...]
"""Dimensions of more than one element, minor to major."""

# Of the innermost dimension and the one around it the tiles of a TPU are made.
_TILED = 2


def order_of(shape: Shape) -> Order:
    """Returns the order in which an array's dimensions lie."""
    minor_to_major = shape.layout.minor_to_major or range(len(shape.dimensions) - 1, -1, -1)
    return tuple(d for d in minor_to_major if shape.dimensions[d] != 1)


def minor_to_major(order: Order, rank: int) -> tuple[int, ...]:
    """The whole layout: dimensions of one element are the outermost."""
    return order + tuple(d for d in range(rank - 1, -1, -1) if d not in order)


@dataclass(frozen=True)
class OrderMap:
    """How dimensions of an operand and of a result are made of the same atoms.

    Attributes:
      before: of each dimension of the operand, its atoms, outer ones first.
      after: of each dimension of the result, likewise.
      extents: of the atoms.
    """

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    extents: tuple[int, ...]

    def forward(self, order: Order) -> Order | None:
        """The result's order that lies as the operand does in `order`; None if none does."""
        return _regroup(order, self.before, self._owner_after, self.after)

    def backward(self, order: Order) -> Order | None:
        """The operand's order, from the result's."""
        return _regroup(order, self.after, self._owner_before, self.before)

    def keeps_tiles(self, order: Order, rows: int) -> bool:
        """Whether tiles of so many rows are the same ones before and after, in an order of the
        operand that has one of the result."""
        found = self.forward(order)
        if found is None:
            return False
        inner_before = [self.before[d] for d in order[:_TILED]]
        inner_after = [self.after[d] for d in found[:_TILED]]
        if inner_before[:1] != inner_after[:1]:
            return False
        if inner_before == inner_after:
            return True
        # Rows that are split or merged stay in their tiles if these end where the atoms do.
        return all(
            self.extents[atoms[-1]] % rows == 0 for atoms in inner_before[1:] + inner_after[1:]
        )

    @cached_property
    def _owner_before(self) -> dict[int, int]:
        return {atom: d for d, atoms in enumerate(self.before) for atom in atoms}

    @cached_property
    def _owner_after(self) -> dict[int, int]:
        return {atom: d for d, atoms in enumerate(self.after) for atom in atoms}


def _regroup(
    order: Order,
    atoms_from: Sequence[tuple[int, ...]],
    owner: Mapping[int, int],
    atoms_to: Sequence[tuple[int, ...]],
) -> Order | None:
    """An order of the one side's dimensions as one of the other's.

    What only the other side has (a slice is one of many) is put outermost, by its dimensions.
    """
    atoms = [a for d in reversed(order) for a in atoms_from[d] if a in owner]
    inner: list[int] = []
    while atoms:
        d = owner[atoms[0]]
        if tuple(atoms[: len(atoms_to[d])]) != atoms_to[d]:
            return None
        del atoms[: len(atoms_to[d])]
        inner.append(d)
    outer = [d for d, atoms in enumerate(atoms_to) if atoms and d not in inner]
    return tuple(reversed(outer + inner))


def aligned(before: Sequence[int], after: Sequence[int]) -> OrderMap:
    """Of arrays whose dimensions are the same ones, though not all of each: a slice, a sum."""
    extents = tuple(map(max, before, after))
    return OrderMap(
        tuple((d,) if extent != 1 else () for d, extent in enumerate(before)),
        tuple((d,) if extent != 1 else () for d, extent in enumerate(after)),
        extents,
    )


def transposed(dimensions: Sequence[int], permutation: Sequence[int]) -> OrderMap:
    """Of a transpose, whose result's dimension i is the operand's `permutation[i]`."""
    same = aligned(dimensions, dimensions)
    return OrderMap(same.before, tuple(same.before[p] for p in permutation), same.extents)


def reshaped(before: Sequence[int], after: Sequence[int]) -> OrderMap | None:
    """Of a reshape: both are the same elements in row-major order. See `refined`."""
    return refined(before, range(len(before))[::-1], after, range(len(after))[::-1])


def bitcast(before: Shape, after: Shape) -> OrderMap | None:
    """Of a bitcast: both are the same bytes, each in its own layout. See `refined`."""
    return refined(before.dimensions, order_of(before), after.dimensions, order_of(after))


def refined(
    before: Sequence[int],
    before_order: Sequence[int],
    after: Sequence[int],
    after_order: Sequence[int],
) -> OrderMap | None:
    """Takes two views of one sequence of elements apart into their common atoms.

    None where there are none, as of 6 x 4 elements seen as 8 x 3 (no other order of the one is
    an order of the other), or of no elements at all.
    """
    if 0 in before or 0 in after:
        return None
    sides = (_ends(before, before_order), _ends(after, after_order))
    cuts = sorted({1, *(end for side in sides for end, _ in side)})
    if any(outer % inner for inner, outer in pairwise(cuts)):
        return None
    extents = tuple(outer // inner for inner, outer in pairwise(cuts))
    parts = [
        {
            d: tuple(reversed(range(cuts.index(first), cuts.index(last))))
            for (first, _), (last, d) in zip([(1, -1), *side], side, strict=False)
        }
        for side in sides
    ]
    return OrderMap(
        tuple(parts[0].get(d, ()) for d in range(len(before))),
        tuple(parts[1].get(d, ()) for d in range(len(after))),
        extents,
    )


def _ends(dimensions: Sequence[int], order: Iterable[int]) -> list[tuple[int, int]]:
    """Of each dimension, from the inner to the outer: elements up to its end."""
    total, found = 1, []
    for d in order:
        if dimensions[d] != 1:
            total *= dimensions[d]
            found.append((total, d))
    return found
