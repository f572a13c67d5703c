"""Which equations work on each index of an array's leading axis by itself.

m [L, D] ──┐                        slices of a and m give a slice of the result,
a [L, D] ──┤ mul ─► [L, D]          lr is needed whole
lr []    ──┘
g [L, D] ── reduce_sum ─► []        each slice gives a partial result
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.core import Atom, ShapedArray
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding, Sharding

from hlo_passes.equations import (
    BroadcastInDim,
    Iota,
    Reduction,
    Reshape,
    ShardingConstraint,
    Squeeze,
    decode,
    is_elementwise,
    says_sharding,
    says_where,
)


def splits_leading_axis(eqn: JaxprEqn) -> bool:
    """Whether an equation only splits an array's leading axis in two, or joins the leading two
    axes: a host array's buffer stays where it is, seen in another shape."""
    if not isinstance(decode(eqn), Reshape):
        return False
    shapes = sorted((shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])), key=len)
    return len(shapes[1]) == len(shapes[0]) + 1 and shapes[0][1:] == shapes[1][2:]


Extent = tuple[tuple[int, ...], int]
"""Length of the leading axis (none for a scalar) and number of elements."""


class Rule(NamedTuple):
    """How an equation works on slices along its leading axis.

    Attributes:
      sliced: which operands are sliced; a slice of the result needs the others whole.
      reduces: it gives a partial result of each slice, not a slice of the result.
    """

    sliced: tuple[bool, ...]
    reduces: bool = False

    @property
    def is_uniform(self) -> bool:
        """Each slice is the same, and made of nothing that is sliced."""
        return not any(self.sliced)


def rule_of(eqn: JaxprEqn) -> Rule | None:
    """Returns None for an equation that does not work on slices."""
    if eqn.effects or len(eqn.outvars) != 1 or not all(map(is_plain, (*eqn.invars, *eqn.outvars))):
        return None
    if says_where(eqn):
        return None
    shapes, shape = [shape_of(v) for v in eqn.invars], shape_of(eqn.outvars[0])
    decoded = decode(eqn)
    if isinstance(decoded, ShardingConstraint):
        return Rule((True,)) if _keeps_leading_axis(decoded.sharding) else None
    if says_sharding(eqn):
        return None
    if isinstance(decoded, Reduction) and shapes[0]:
        return Rule((True,), 0 in decoded.axes)
    if not shape:
        return None
    if is_elementwise(eqn) and all(len(s) in (0, len(shape)) for s in shapes):
        return Rule(tuple(s[:1] == shape[:1] for s in shapes))  # Axes of length 1 are repeated.
    match decoded:
        case BroadcastInDim(dimensions) if len(shapes) == 1:
            return Rule((dimensions[:1] == (0,) and shapes[0][0] == shape[0],))
        case Iota(dimension) if not shapes and dimension:
            return Rule(())
        case Reshape(in_order=True) if len(shapes) == 1:
            return Rule((True,)) if shapes[0][:1] == shape[:1] else None
        case Squeeze(dimensions) if 0 not in dimensions:
            return Rule((True,))
        case _:
            return None


def _keeps_leading_axis(sharding: Sharding) -> bool:
    """Whether each device has all of the leading axis: then a slice is sharded alike."""
    return isinstance(sharding, NamedSharding) and not any(sharding.spec[:1])


def is_plain(atom: Atom) -> bool:
    """Whether it is an array of numbers whose type names no sharding."""
    aval = atom.aval
    if not isinstance(aval, ShapedArray) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return False
    return all(axis is None for axis in aval.sharding.spec)


def aval_of(atom: Atom) -> ShapedArray:
    return cast(ShapedArray, atom.aval)


def shape_of(atom: Atom) -> tuple[int, ...]:
    return aval_of(atom).shape


def itemsize_of(atom: Atom) -> int:
    return aval_of(atom).dtype.itemsize


def extent_of(atom: Atom) -> Extent:
    return shape_of(atom)[:1], math.prod(shape_of(atom))


def bytes_of(atom: Atom) -> int:
    return math.prod(shape_of(atom)) * itemsize_of(atom)


def is_reduction(eqn: JaxprEqn) -> bool:
    rule = rule_of(eqn)
    return rule is not None and rule.reduces


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    return (a for a in atoms if isinstance(a, Var))
