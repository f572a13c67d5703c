"""Along which dimensions an equation can be cut into chunks.

    dot_general  [b, m, k] · [b, k, n] ─► [b, m, n]     b: 0, 0 ─► 0      m: 1, - ─► 1
                                                        n: -, 2 ─► 2      k: 2, 1 ─► sum

An *axis* is one such way: of each operand and each result a dimension, or none; where a result has
none, the chunks' results are to be combined. Cut along a dimension an array consists of contiguous
blocks; so of a reshape that merges dimensions the first one is an axis of the merged, and of one
that splits the first part of it. These are the factors of a partitioner's sharding rules (as in
Shardy's ``op_sharding_rule_registry.cc``), for a partition over time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.core import Atom
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    Along,
    BroadcastInDim,
    Concatenate,
    Convolution,
    DotGeneral,
    DynamicSlice,
    DynamicUpdateSlice,
    Gather,
    Iota,
    Reduction,
    Remat,
    Reshape,
    Reverse,
    Scan,
    Scatter,
    ShardingConstraint,
    Squeeze,
    Stack,
    Transpose,
    Unstack,
    decode,
    is_elementwise,
    is_sum,
    name,
    says_where,
)
from memplan.streams.leading_axis import aval_of, shape_of

type Dimension = int | None


@dataclass(frozen=True)
class Axis:
    """A way to cut an equation.

    Attributes:
      operands, results: which dimension of each is cut; None for one that every chunk has whole.
      combines: none where every result has one; else of each, what becomes of two chunks' results:
        ``"sum"``, ``"max"``, ``"min"``, ``"prod"``, ``"and"``, ``"or"``, ``"xor"``; ``"fold"``: the
        first operand is what the chunk before has made of it; None where all chunks have the same.
      inside: how the equations of the program inside are cut, by their numbers; all others of it
        are the same in every chunk.
      within: the greatest common divisor of all sizes that are cut in there; 0 where none is.
    """

    operands: tuple[Dimension, ...]
    results: tuple[Dimension, ...]
    combines: tuple[str | None, ...] = ()
    inside: Mapping[int, Axis] = field(default_factory=dict["int", "Axis"])
    within: int = 0

    def combine(self, k: int) -> str | None:
        """What becomes of two chunks' parts of a result that has no dimension that is cut."""
        return self.combines[k] if self.combines else None

    def pairs(self, eqn: JaxprEqn) -> list[tuple[Atom, Dimension]]:
        """The operands and results of its equation, with the dimension that is cut of each."""
        arrays, dimensions = (*eqn.invars, *eqn.outvars), (*self.operands, *self.results)
        return [*zip(arrays, dimensions, strict=True)]

    def is_one_way(self, eqn: JaxprEqn) -> bool:
        """Whether no array of its equation is cut along two dimensions."""
        found = dict[Var, Dimension]()
        cut = [(a, d) for a, d in self.pairs(eqn) if isinstance(a, Var) and d is not None]
        return all(found.setdefault(a, d) == d for a, d in cut)

    @property
    def is_map(self) -> bool:
        """Whether each chunk has a part of every result."""
        return all(d is not None for d in self.results)


@functools.lru_cache(1 << 16)
def axes_of(eqn: JaxprEqn) -> tuple[Axis, ...]:
    """The ways in which an equation can be cut; none of one that is not known."""
    if eqn.effects or says_where(eqn):
        return ()
    return tuple(_axes(eqn))


def _axes(eqn: JaxprEqn) -> Iterator[Axis]:
    operands = [_shape(a) for a in eqn.invars]
    results = [_shape(v) for v in eqn.outvars]
    match decode(eqn):
        case DotGeneral((left, right), (left_batch, right_batch)):
            yield from _product(operands, left, right, left_batch, right_batch)
        case Convolution(left, right, result, grouped):
            if not grouped:
                yield Axis((left[0], None), (result[0],))
                yield Axis((None, right[0]), (result[1],))
                yield Axis((left[1], right[1]), (None,), ("sum",))
        case Reduction(axes, kind):
            kept = [d for d in range(len(operands[0])) if d not in axes]
            yield from (Axis((d,), (k,) * len(results)) for k, d in enumerate(kept))
            if kind is not None and (aval_of(eqn.invars[0]).dtype.kind != "c" or kind == "sum"):
                yield from (
                    Axis((d,), (None,) * len(results), (kind,) * len(results)) for d in axes
                )
        case BroadcastInDim(dimensions):
            yield from _broadcast(operands, results, dimensions)
        case Iota():
            yield from (Axis((), (d,)) for d in range(len(results[0])))
        case Reshape(in_order=True):
            yield from (Axis((d,), (k,)) for d, k in _major(operands[0], results[0]))
        case Squeeze(dimensions):
            kept = [d for d in range(len(operands[0])) if d not in dimensions]
            yield from (Axis((d,), (k,)) for k, d in enumerate(kept))
        case ShardingConstraint(is_plain=True):
            yield from (Axis((d,), (d,)) for d in range(len(results[0])))
        case Transpose(permutation):
            yield from (Axis((d,), (k,)) for k, d in enumerate(permutation))
        case Stack(dimension):
            kept = [d for d in range(len(results[0])) if d != dimension]
            yield from (Axis((k,) * len(operands), (d,)) for k, d in enumerate(kept))
        case Unstack(dimension):
            kept = [d for d in range(len(operands[0])) if d != dimension]
            yield from (Axis((d,), (k,) * len(results)) for k, d in enumerate(kept))
        case Gather() as gather:
            yield from _gather(gather, operands, results)
        case Scatter() as scatter:
            yield from _scatter(scatter, operands, folds=name(eqn) == "scatter-add")
        case Along(dimensions) | Reverse(dimensions):
            yield from _along(operands, results, dimensions)
        case Concatenate(dimension):
            yield from _along(operands, results, (dimension,))
        case DynamicSlice() | DynamicUpdateSlice():
            yield from _along(operands, results, ())
        case Scan(body=body) | Remat(body=body) if not body.consts:
            yield from _around(eqn)
        case _ if is_elementwise(eqn):
            yield from _elementwise(operands, results)
        case _:
            return


def _shape(atom: Atom) -> Sequence[int]:
    return getattr(atom.aval, "shape", ())


def _elementwise(
    operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> Iterator[Axis]:
    """Operands of one element along a dimension are the same for all of it."""
    if {len(o) for o in operands} - {0} != {len(results[0])}:
        return  # Bits of one number become several.
    for d, size in enumerate(results[0]):
        cut = tuple(d if len(o) > d and o[d] == size else None for o in operands)
        yield Axis(cut, (d,) * len(results))


def _along(
    operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], dimensions: Sequence[int]
) -> Iterator[Axis]:
    rank = len(results[0])
    arrays = [o for o in operands if len(o) == rank] + list(results)
    for d in range(rank):
        if d not in dimensions and len({shape[d] for shape in arrays}) == 1:
            yield Axis(tuple(d if len(o) == rank else None for o in operands), (d,) * len(results))


def _product(
    operands: Sequence[Sequence[int]],
    left: Sequence[int],
    right: Sequence[int],
    left_batch: Sequence[int],
    right_batch: Sequence[int],
) -> Iterator[Axis]:
    for k, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        yield Axis((a, b), (k,))
    at = len(left_batch)
    for n, (shape, taken) in enumerate(
        zip(operands, ({*left, *left_batch}, {*right, *right_batch}), strict=True)
    ):
        for d in range(len(shape)):
            if d not in taken:
                yield Axis((d, None) if n == 0 else (None, d), (at,))
                at += 1
    for a, b in zip(left, right, strict=True):
        yield Axis((a, b), (None,), ("sum",))


def _broadcast(
    operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], dimensions: Sequence[int]
) -> Iterator[Axis]:
    for k, size in enumerate(results[0]):
        d = dimensions.index(k) if k in dimensions else None
        if d is not None and operands[0][d] != size:
            d = None
        yield Axis((d, *(None for _ in operands[1:])), (k,))


def _major(operand: Sequence[int], result: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Dimensions before which a reshape's operand and result have as many elements."""
    k, before = 0, 1
    for d, size in enumerate(operand):
        while k < len(result) and (result[k] == 1 or _elements(result[:k]) < before):
            k += 1
        if size > 1 and k < len(result) and _elements(result[:k]) == before:
            yield d, k
        before *= size


def _elements(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _gather(
    gather: Gather, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> Iterator[Axis]:
    array, indices = operands
    of_result = [k for k in range(len(results[0])) if k not in gather.window]
    together = dict(zip(gather.batches[1], gather.batches[0], strict=True))
    for d, k in enumerate(of_result):  # The indices' last dimension is a slice's place.
        yield Axis((together.get(d), d), (k,))
    kept = [d for d in range(len(array)) if d not in {*gather.collapsed, *gather.batches[0]}]
    for d, k in zip(kept, gather.window, strict=True):
        if gather.sizes[d] == array[d]:
            yield Axis((d, None), (k,))
    assert len(of_result) == len(indices) - 1


def _scatter(scatter: Scatter, operands: Sequence[Sequence[int]], *, folds: bool) -> Iterator[Axis]:
    array, _, updates = operands
    of_updates = [k for k in range(len(updates)) if k not in scatter.window]
    together = dict(zip(scatter.batches[1], scatter.batches[0], strict=True))
    for d, k in enumerate(of_updates):
        if d in together:
            yield Axis((together[d], d, k), (together[d],))
        elif folds:
            yield Axis((None, d, k), (None,), ("fold",))
    kept = [d for d in range(len(array)) if d not in {*scatter.inserted, *scatter.batches[0]}]
    for d, k in zip(kept, scatter.window, strict=True):
        if updates[k] == array[d]:
            yield Axis((d, None, k), (d,))


# --- programs inside ------------------------------------------------------------------------


def _around(eqn: JaxprEqn) -> Iterator[Axis]:
    """The axes of a loop, or of what is computed again: those along which all of its program can be
    cut. Of what a loop takes apart, and of what it stacks, the program has one dimension fewer."""
    match decode(eqn):
        case Scan(body, constants, carried):
            first_stack, first_stacked = constants + carried, carried
            again = [*zip(body.outvars[:carried], body.invars[constants:first_stack], strict=True)]
        case Remat(body):
            first_stack, first_stacked, again = len(eqn.invars), len(eqn.outvars), []
        case _:
            raise AssertionError(eqn)
    seen = list[Mapping[Var, int]]()
    for v in [*body.invars, *body.outvars]:
        for d in range(len(_shape(v))):
            if not isinstance(v, Var) or any(known.get(v) == d for known in seen):
                continue
            found = _Inside(body, again).cut_from(v, d)
            if found is None:
                continue
            cut, inside, combines = found
            seen.append(cut)
            operands = [cut.get(v) for v in body.invars]
            results = [cut.get(v) if isinstance(v, Var) else None for v in body.outvars]
            yield Axis(
                tuple(d if d is None else d + (k >= first_stack) for k, d in enumerate(operands)),
                tuple(d if d is None else d + (k >= first_stacked) for k, d in enumerate(results)),
                tuple(combines.get(v) if isinstance(v, Var) else None for v in body.outvars),
                inside,
                math.gcd(
                    *(shape_of(v)[d] for v, d in cut.items()), *(a.within for a in inside.values())
                ),
            )


class _Inside:
    """A program whose arrays are cut together with one of them."""

    def __init__(self, body: Jaxpr, again: Sequence[tuple[Any, Var]]) -> None:
        """
        Args:
          again: the results that become inputs of the next trip, with those.
        """
        self.body, self.again = body, again
        self.tied = dict[Any, list[Any]]()
        for result, given in again:
            if isinstance(result, Var):
                self.tied.setdefault(result, []).append(given)
                self.tied.setdefault(given, []).append(result)
        self.around = dict[Var, list[int]]()
        for n, eqn in enumerate(body.eqns):
            for v in dict.fromkeys(a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var)):
                self.around.setdefault(v, []).append(n)

    def cut_from(
        self, v: Var, d: int
    ) -> tuple[Mapping[Var, int], Mapping[int, Axis], Mapping[Var, str]] | None:
        """The dimensions of all arrays that have to be cut, how the equations are, and which
        results are combined; None where something cannot be."""
        cut, axes, combines = {v: d}, dict[int, Axis](), dict[Var, str]()
        pending = [v]
        while pending:
            v = pending.pop()
            for tied in self.tied.get(v, ()):
                if tied not in cut:
                    cut[tied] = cut[v]
                    pending.append(tied)
            for n in self.around.get(v, ()):
                if n in axes:
                    continue
                axis = _agreeing(self.body.eqns[n], cut)
                if axis is None:
                    return None
                axes[n] = axis
                eqn = self.body.eqns[n]
                for a, own in axis.pairs(eqn):
                    if isinstance(a, Var) and own is not None and a not in cut:
                        cut[a] = own
                        pending.append(a)
                for k, result in enumerate(eqn.outvars):
                    if (combine := axis.combine(k)) is not None:
                        combines[result] = combine
        return (cut, axes, combines) if self._holds(cut, axes, combines) else None

    def _holds(
        self, cut: Mapping[Var, int], axes: Mapping[int, Axis], combines: dict[Var, str]
    ) -> bool:
        """Whether what is cut is so wherever it is read, and what is combined is a result only, or
        becomes one by what may as well be done to the parts; such results are added."""
        for n, eqn in enumerate(self.body.eqns):
            axis = axes.get(n)
            dims = (None,) * len(eqn.invars) if axis is None else axis.operands
            read = [(a, d) for a, d in zip(eqn.invars, dims, strict=True) if isinstance(a, Var)]
            made = zip(eqn.outvars, axis.results, strict=True) if axis is not None else ()
            if any(cut.get(a) != d for a, d in (*read, *made)):
                return False
            if any(a in combines for a, _ in read):
                if axis is not None or not sums_alike(eqn, combines):
                    return False
                combines |= dict.fromkeys(eqn.outvars, "sum")
        if any(v in self.tied or combine == "fold" for v, combine in combines.items()):
            return False
        ends = ((cut.get(v) if isinstance(v, Var) else None, cut.get(g)) for v, g in self.again)
        return all(end == begin for end, begin in ends)


def sums_alike(eqn: JaxprEqn, combines: Mapping[Var, str]) -> bool:
    """Whether the sum of what it makes of chunks is what it makes of their sum."""
    if not all(isinstance(a, Var) and combines.get(a) == "sum" for a in eqn.invars):
        return False
    match decode(eqn):
        case Reshape() | Squeeze() | Transpose():
            return True
        case _ if name(eqn) == "convert_element_type":
            before, after = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
            floats = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
            return floats and after.itemsize >= before.itemsize
        case _:
            return is_sum(eqn) or name(eqn) == "neg"


def _counts(eqn: JaxprEqn, axis: Axis) -> bool:
    """Whether a chunk of it has numbers of its own."""
    says = decode(eqn)
    return isinstance(says, Iota) and axis.results[0] == says.dimension


def _agreeing(eqn: JaxprEqn, cut: Mapping[Var, int]) -> Axis | None:
    """How an equation is cut where these arrays are; None where it cannot be."""
    found = None
    for axis in axes_of(eqn):
        arrays = axis.pairs(eqn)
        if not axis.is_one_way(eqn) or _counts(eqn, axis):
            continue  # A chunk in there does not know which it is.
        if all(not isinstance(a, Var) or a not in cut or cut[a] == d for a, d in arrays) and any(
            isinstance(a, Var) and a in cut for a, _ in arrays
        ):
            if axis.is_map:
                return axis
            found = found or axis
    return found
