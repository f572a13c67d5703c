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

# Primitives whose result at an index needs their operands at that index only.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
    name ne neg nextafter not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
    """.split()
)
_REDUCTIONS = frozenset(
    f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "and", "or", "xor")
)


def splits_leading_axis(eqn: JaxprEqn) -> bool:
    """Whether an equation only splits an array's leading axis in two, or joins the leading two
    axes: a host array's buffer stays where it is, seen in another shape."""
    if eqn.primitive.name != "reshape":
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
    if eqn.ctx.compute_type is not None:
        return None
    name, params, shape = eqn.primitive.name, eqn.params, shape_of(eqn.outvars[0])
    if name == "sharding_constraint":
        return Rule((True,)) if _keeps_leading_axis(params["sharding"]) else None
    if params.get("sharding") is not None or params.get("out_sharding") is not None:
        return None
    shapes = [shape_of(v) for v in eqn.invars]
    if name in _REDUCTIONS and shapes[0]:
        return Rule((True,), 0 in params["axes"])
    if not shape:
        return None
    if name in ELEMENTWISE and all(len(s) in (0, len(shape)) for s in shapes):
        return Rule(tuple(s[:1] == shape[:1] for s in shapes))  # Axes of length 1 are repeated.
    match name:
        case "broadcast_in_dim" if len(shapes) == 1:
            kept = params["broadcast_dimensions"][:1] == (0,) and shapes[0][0] == shape[0]
            return Rule((kept,))
        case "iota" if not shapes and params["dimension"]:
            return Rule(())
        case "reshape" if len(shapes) == 1 and params["dimensions"] is None:
            return Rule((True,)) if shapes[0][:1] == shape[:1] else None
        case "squeeze" if 0 not in params["dimensions"]:
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
