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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax.core import Atom
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    Along,
    BroadcastInDim,
    Concatenate,
    Cond,
    Convolution,
    Cumulative,
    DotGeneral,
    DynamicSlice,
    DynamicUpdateSlice,
    Gather,
    Iota,
    Pad,
    Reduction,
    Remat,
    Reshape,
    Reverse,
    Scan,
    Scatter,
    ShardingConstraint,
    Slice,
    Sort,
    Split,
    Squeeze,
    Stack,
    TopK,
    Transpose,
    Unstack,
    While,
    decode,
    is_elementwise,
    is_sum,
    is_unchanged,
    name,
    programs,
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
        ``"sum"``, ``"max"``, ``"min"``, ``"prod"``, ``"and"``, ``"or"``, ``"xor"``; ``"fold"``: an
        operand is what the chunk before has made of it; None where all chunks have the same.
      folds: of each result that is folded, which operand that is.
      inside: how the programs inside are cut (as of `equations.programs`).
    """

    operands: tuple[Dimension, ...]
    results: tuple[Dimension, ...]
    combines: tuple[str | None, ...] = ()
    folds: Mapping[int, int] = field(default_factory=dict[int, int])
    inside: tuple[Inside, ...] = ()

    @property
    def within(self) -> int:
        """The greatest common divisor of all sizes that are cut inside; 0 where none is."""
        return math.gcd(*(inside.rows for inside in self.inside))

    def combine(self, k: int) -> str | None:
        """What becomes of two chunks' parts of a result that has no dimension that is cut."""
        return self.combines[k] if self.combines else None

    def pairs(self, eqn: JaxprEqn) -> list[tuple[Atom, Dimension]]:
        """The operands and results of its equation, with the dimension that is cut of each."""
        arrays, dimensions = (*eqn.invars, *eqn.outvars), (*self.operands, *self.results)
        return [*zip(arrays, dimensions, strict=True)]

    @property
    def is_map(self) -> bool:
        """Whether each chunk has a part of every result."""
        return all(d is not None for d in self.results)


@dataclass(frozen=True)
class Inside:
    """How a program inside an equation is cut.

    Attributes:
      axes: of its equations, by their numbers; all others are the same in every chunk.
      cut: the dimension of each array that is cut.
    """

    axes: Mapping[int, Axis]
    cut: Mapping[Var, int]

    @property
    def rows(self) -> int:
        """The greatest common divisor of all sizes that are cut."""
        sizes = (shape_of(v)[d] for v, d in self.cut.items())
        return math.gcd(*sizes, *(axis.within for axis in self.axes.values()))


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
        case Convolution(left, right, result, in_feature_groups, in_batch_groups):
            if not in_batch_groups:
                yield Axis((left[0], None), (result[0],))
            if not (in_feature_groups or in_batch_groups):
                yield Axis((None, right[0]), (result[1],))
            if not in_feature_groups:
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
        case Cumulative(dimension) | Sort(dimension) | Split(dimension) | TopK(dimension):
            yield from _along(operands, results, (dimension,))
        case Pad(around):
            yield from _along(operands, results, [d for d, n in enumerate(around) if any(n)])
        case DynamicSlice() | DynamicUpdateSlice() | Slice():
            yield from _along(operands, results, ())
        case Scan() | While() | Cond() | Remat():
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
            yield Axis((None, d, k), (None,), ("fold",), {0: 0})
    kept = [d for d in range(len(array)) if d not in {*scatter.inserted, *scatter.batches[0]}]
    for d, k in zip(kept, scatter.window, strict=True):
        if updates[k] == array[d]:
            yield Axis((d, None, k), (d,))


# --- programs inside ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Nest:
    """An equation with programs inside.

    Attributes:
      bodies: the programs.
      given, made: which operand the first input of each is, and which result its first one.
      again: of what a loop carries, the result of a trip and the input of the next one.
      first_stack, first_stacked: the first operand, and result, of which the program has one
        dimension fewer.
      whole: inputs on which depends how often a loop runs.
    """

    bodies: tuple[Jaxpr, ...]
    given: int
    again: tuple[tuple[Atom, Var], ...] = ()
    first_stack: float = math.inf
    first_stacked: float = math.inf
    whole: frozenset[Var] = frozenset()

    @property
    def alike(self) -> Iterator[tuple[Atom, Atom]]:
        """Arrays of two programs that are one for who gives them, or takes them."""
        first, *others = self.bodies
        for other in others:
            yield from zip(first.invars, other.invars, strict=True)
            yield from zip(first.outvars, other.outvars, strict=True)


def _nest(eqn: JaxprEqn) -> _Nest:
    inside = programs(eqn)
    bodies, given = tuple(program.jaxpr for program in inside), inside[0].first
    match decode(eqn):
        case Scan(body, constants, carried) as scan:
            carries = body.invars[constants : scan.first_stack]
            again = tuple(zip(body.outvars[:carried], carries, strict=True))
            return _Nest(bodies, given, again, scan.first_stack, carried)
        case While(body=body, body_constants=constants) as loop:
            carries = body.invars[constants:]
            again = tuple(zip(body.outvars, carries, strict=True))
            whole = frozenset(v for v, asked in zip(carries, loop.asked, strict=True) if asked)
            return _Nest(bodies, given, again, whole=whole)
        case _:
            return _Nest(bodies, given)


def _around(eqn: JaxprEqn) -> Iterator[Axis]:
    """The axes of loops and branches, and of what is computed again: those along which all of their
    programs can be cut. What a loop adds up in what it carries, chunks add to one another's."""
    nest = _nest(eqn)
    if any(body.consts for body in nest.bodies):
        return
    cutting, body = _Cutting(nest), nest.bodies[0]
    before = [None] * nest.given
    seen = list[Mapping[Var, int]]()
    for v in [*body.invars, *body.outvars]:
        for d in range(len(_shape(v))):
            if not isinstance(v, Var) or any(known.get(v) == d for known in seen):
                continue
            found = cutting.cut_from(v, d)
            if found is None:
                continue
            inside, combines = found
            cut = inside[0].cut
            seen.append(cut)
            operands = [cut.get(v) for v in body.invars]
            results = [cut.get(v) if isinstance(v, Var) else None for v in body.outvars]
            combined = [combines.get(v) if isinstance(v, Var) else None for v in body.outvars]
            yield Axis(
                (*before, *_with_stacks(operands, nest.first_stack)),
                _with_stacks(results, nest.first_stacked),
                tuple(combined),
                {
                    k: nest.given + body.invars.index(given)
                    for k, (_, given) in enumerate(nest.again)
                    if combined[k] == "fold"
                },
                inside,
            )


def _with_stacks(dims: Sequence[Dimension], first_stack: float) -> tuple[Dimension, ...]:
    return tuple(d if d is None else d + (k >= first_stack) for k, d in enumerate(dims))


class _Cutting:
    """Programs whose arrays are cut together with one of them."""

    def __init__(self, nest: _Nest) -> None:
        self.nest = nest
        self.tied = dict[Var, list[Var]]()
        for a, b in (*nest.again, *nest.alike):
            if isinstance(a, Var) and isinstance(b, Var):
                self.tied.setdefault(a, []).append(b)
                self.tied.setdefault(b, []).append(a)
        self.around = dict[Var, list[tuple[int, int]]]()
        for body, n, eqn in self._equations():
            for v in dict.fromkeys(a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var)):
                self.around.setdefault(v, []).append((body, n))

    def _equations(self) -> Iterator[tuple[int, int, JaxprEqn]]:
        for k, body in enumerate(self.nest.bodies):
            for n, eqn in enumerate(body.eqns):
                yield k, n, eqn

    def cut_from(self, v: Var, d: int) -> tuple[tuple[Inside, ...], Mapping[Var, str]] | None:
        """How the programs are cut, and which results are combined; None where something cannot
        be."""
        cut, combines = {v: d}, dict[Var, str]()
        axes = [dict[int, Axis]() for _ in self.nest.bodies]
        pending = [v]
        while pending:
            v = pending.pop()
            for tied in self.tied.get(v, ()):
                if tied not in cut:
                    cut[tied] = cut[v]
                    pending.append(tied)
            for body, n in self.around.get(v, ()):
                if n in axes[body]:
                    continue
                eqn = self.nest.bodies[body].eqns[n]
                axis = _agreeing(eqn, cut)
                if axis is None:
                    return None
                axes[body][n] = axis
                for a, own in axis.pairs(eqn):
                    if isinstance(a, Var) and own is not None and a not in cut:
                        cut[a] = own
                        pending.append(a)
                for k, result in enumerate(eqn.outvars):
                    if (combine := axis.combine(k)) is not None:
                        combines[result] = combine
        if not self._is_cut_everywhere(cut, axes) or self.nest.whole & cut.keys():
            return None
        known = self._combined(axes, combines)
        return None if known is None else (tuple(Inside(own, cut) for own in axes), known)

    def _is_cut_everywhere(
        self, cut: Mapping[Var, int], axes: Sequence[Mapping[int, Axis]]
    ) -> bool:
        """Whether what is cut is so wherever it is read."""

        def along(a: Atom) -> Dimension:
            return cut.get(a) if isinstance(a, Var) else None

        # What is around an array that is cut has an axis by now.
        for body, known in zip(self.nest.bodies, axes, strict=True):
            for n, axis in known.items():
                if any(along(a) != d for a, d in axis.pairs(body.eqns[n])):
                    return False
        return all(along(a) == along(b) for a, b in (*self.nest.again, *self.nest.alike))

    def _combined(
        self, axes: Sequence[Mapping[int, Axis]], combines: Mapping[Var, str]
    ) -> Mapping[Var, str] | None:
        """What is combined; None where that is no result, and does not become one by what may as
        well be done to the parts: such results are added."""
        carried = ((r, g) for r, g in self.nest.again if g not in self.nest.whole)
        sums = [found for r, g in carried if (found := self._added_up(r, g)) is not None]
        adding = {n for s in sums for n in s.adding}
        known = dict(combines)
        for body, n, eqn in self._equations():
            read = any(a in known for a in eqn.invars if isinstance(a, Var))
            if not read or (body, n) in adding:
                continue
            if n in axes[body] or not sums_alike(eqn, known):
                return None
            known |= dict.fromkeys(eqn.outvars, "sum")
        if "fold" in known.values() or any(a in known for a in self.tied):
            return None
        for s in sums:
            combined = [isinstance(a, Var) and known.get(a) == "sum" for a in s.added]
            if any(combined):
                if not all(combined):
                    return None
                known[s.result] = "fold"
        return known

    def _added_up(self, result: Atom, given: Var) -> _AddedUp | None:
        """What a loop adds to what it carries, if it does nothing else with that."""
        (body,) = self.nest.bodies
        added, adding = list[Atom](), set[tuple[int, int]]()
        v = given
        while v is not result:
            readers = self.around.get(v, [])
            readers = [at for at in readers if v in body.eqns[at[1]].invars]
            if len(readers) != 1 or v in body.outvars:
                return None
            (at,) = readers
            eqn = body.eqns[at[1]]
            others = [a for a in eqn.invars if a is not v]
            if not is_unchanged(eqn) and not (is_sum(eqn) and len(others) == 1):
                return None
            adding.add(at)
            added += others
            (v,) = eqn.outvars
        is_read = any(v in body.eqns[n].invars for _, n in self.around.get(v, []))
        if is_read or sum(r is v for r in body.outvars) != 1:
            return None
        return _AddedUp(v, added, adding)


@dataclass(frozen=True)
class _AddedUp:
    """What a loop carries and only adds to: the result of a trip, what is added, and by which
    equations (program, number)."""

    result: Var
    added: Sequence[Atom]
    adding: Collection[tuple[int, int]]


@functools.lru_cache(1 << 16)
def ways_of(eqn: JaxprEqn) -> Sequence[tuple[Axis, Sequence[tuple[Var, Dimension]]]]:
    """The axes of an equation along which none of its arrays is cut in two dimensions, each with
    which dimension is cut of each array."""
    found = list[tuple[Axis, Sequence[tuple[Var, Dimension]]]]()
    for axis in axes_of(eqn):
        arrays = [(a, d) for a, d in axis.pairs(eqn) if isinstance(a, Var)]
        cut = dict[Var, Dimension]()
        if all(d is None or cut.setdefault(v, d) == d for v, d in arrays):
            found.append((axis, arrays))
    return found


def whole_in(eqn: JaxprEqn) -> Axis:
    """An equation that every chunk does as it is."""
    return Axis((None,) * len(eqn.invars), (None,) * len(eqn.outvars))


def sums_alike(eqn: JaxprEqn, combines: Mapping[Var, str]) -> bool:
    """Whether the sum of what it makes of chunks is what it makes of their sum."""
    if not all(isinstance(a, Var) and combines.get(a) == "sum" for a in eqn.invars):
        return False
    match decode(eqn):
        case Reshape() | Squeeze() | Transpose() | BroadcastInDim() | Reduction(kind="sum"):
            return True
        case _ if name(eqn) == "convert_element_type":
            before, after = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
            floats = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
            return floats and after.itemsize >= before.itemsize
        case _:
            return is_sum(eqn) or name(eqn) in ("neg", "slice", "split", "rev")


def _counts(eqn: JaxprEqn, axis: Axis) -> bool:
    """Whether a chunk of it has numbers of its own."""
    says = decode(eqn)
    return isinstance(says, Iota) and axis.results[0] == says.dimension


def _agreeing(eqn: JaxprEqn, cut: Mapping[Var, int]) -> Axis | None:
    """How an equation is cut where these arrays are; None where it cannot be."""
    found = None
    for axis, arrays in ways_of(eqn):
        if _counts(eqn, axis):
            continue  # A chunk in there does not know which it is.
        if all(cut.get(v, d) == d for v, d in arrays) and any(v in cut for v, _ in arrays):
            if axis.is_map:
                return axis
            found = found or axis
    return found
