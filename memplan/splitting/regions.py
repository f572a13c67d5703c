"""The equations around a large array that are cut together.

From an array and one of its dimensions the cut goes on to those that make it and read it, as far as
arrays are large::

    x [n, d] ─► dot ─► logits [n, v] ─► max ─► [n] ─► sub ─► exp ─► sum ─► [n] ─► log ─► ... ─► loss
                  w [d, v]                                                        (a sum of chunks)

What every chunk has whole, or what is summed over all of them, is outside; and so is whatever needs
that, for it comes after the last chunk.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import Jaxpr, JaxprEqn, Var

from memplan.splitting.axes import Axis, sums_alike, ways_of
from memplan.splitting.shards import Shards
from memplan.streams.leading_axis import shape_of


@dataclass(frozen=True)
class Region:
    """What is run in chunks.

    Attributes:
      axes: how each of its equations is cut, by their numbers.
      cut: the dimension of each array that it makes, or takes, in chunks.
      blocks: a chunk has a part of each of so many blocks of that dimension, as many as it has
        shards: so none has to come from another device.
    """

    axes: Mapping[int, Axis]
    cut: Mapping[Var, int]
    blocks: int = 1

    @property
    def rows(self) -> int:
        """Into how many parts of a size each block of everything can be cut."""
        sizes = [shape_of(v)[d] for v, d in self.cut.items()]
        return math.gcd(*sizes, *(axis.within for axis in self.axes.values())) // self.blocks


@dataclass(frozen=True)
class Chunks:
    """How many rows of a region each of its chunks has.

    Attributes:
      rows: of the region (see `Region.rows`).
      each: of a chunk; the first one has those that are left.
    """

    rows: int
    each: int

    @property
    def parts(self) -> int:
        """How many chunks there are."""
        return -(-self.rows // self.each)

    def of(self, size: int) -> int:
        """Of so many bytes, or elements along what is cut, what a chunk has."""
        return size * self.each // self.rows


class Graph:
    """Who makes and who reads the arrays of a program. Sets of its equations are the bits of an
    integer: a program has thousands of them, and is asked for what needs what thousands of times.
    """

    def __init__(self, jaxpr: Jaxpr, shards: Shards) -> None:
        self.jaxpr, self.shards = jaxpr, shards
        self.eqns: Sequence[JaxprEqn] = jaxpr.eqns
        self.maker = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.readers: dict[Var, list[int]] = {}
        for n, eqn in enumerate(jaxpr.eqns):
            for v in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
                self.readers.setdefault(v, []).append(n)
        # What has effects stays in order.
        effects = [n for n, eqn in enumerate(jaxpr.eqns) if eqn.effects]
        needed = [
            {self.maker[a] for a in e.invars if isinstance(a, Var) and a in self.maker}
            for e in jaxpr.eqns
        ]
        for previous, n in itertools.pairwise(effects):
            needed[n].add(previous)
        self._before, self._after = [0] * len(needed), [0] * len(needed)
        for n, makers in enumerate(needed):
            for maker in makers:
                self._before[n] |= self._before[maker] | 1 << maker
        for n in reversed(range(len(needed))):
            for maker in needed[n]:
                self._after[maker] |= self._after[n] | 1 << n

    def around(self, v: Var) -> Iterator[int]:
        if v in self.maker:
            yield self.maker[v]
        yield from self.readers.get(v, ())

    def arrays(self, n: int, axis: Axis) -> list[tuple[Var, int | None]]:
        """The operands and results of an equation, with the dimension that is cut of each."""
        return [(v, d) for v, d in axis.pairs(self.eqns[n]) if isinstance(v, Var)]

    def readers_of(self, ns: Collection[int]) -> list[int]:
        """The other equations that read what some make."""
        made = (v for n in ns for v in self.eqns[n].outvars)
        return sorted({r for v in made for r in self.readers.get(v, ())}.difference(ns))

    def before(self, ns: Iterable[int]) -> int:
        """The equations that some need."""
        return functools.reduce(operator.or_, (self._before[n] for n in ns), 0)

    def after(self, ns: Iterable[int]) -> int:
        """The equations that need some."""
        return functools.reduce(operator.or_, (self._after[n] for n in ns), 0)

    def beside(self, region: Region) -> tuple[list[int], list[int]]:
        """The equations outside a region: those that are run before it, and after it."""
        numbers = sorted(region.axes)
        early, late = self.before(numbers), self.after(numbers)
        outside = [n for n in range(len(self.eqns)) if n not in region.axes]
        is_first = {
            n: bool(early >> n & 1 or (not late >> n & 1 and n < numbers[0])) for n in outside
        }
        return [n for n in outside if is_first[n]], [n for n in outside if not is_first[n]]

    def given(self, region: Region) -> list[Var]:
        """What a region's equations read and do not make."""
        made = {v for n in region.axes for v in self.eqns[n].outvars}
        taken = (a for n in sorted(region.axes) for a in self.eqns[n].invars)
        return list(dict.fromkeys(a for a in taken if isinstance(a, Var) and a not in made))

    def leaving(self, region: Region) -> dict[Var, str | None]:
        """What a region makes for others, and how chunks of it are combined (see `Axis`)."""
        results = {a for a in self.jaxpr.outvars if isinstance(a, Var)}
        return {
            v: axis.combine(k)
            for n, axis in sorted(region.axes.items())
            for k, v in enumerate(self.eqns[n].outvars)
            if v in results or any(r not in region.axes for r in self.readers.get(v, ()))
        }


def _bits(ns: Iterable[int]) -> int:
    return functools.reduce(operator.or_, (1 << n for n in ns), 0)


def grow(graph: Graph, seed: Var, dimension: int, parts: int, least: int) -> Region | None:
    """The region around an array that is cut into so many parts.

    Args:
      parts: of each shard.
      least: bytes of an array from which on the cut goes to those around it.

    Returns:
      None where nothing around the array can be cut so, or it lies on the devices in several ways.
    """
    blocks = graph.shards.along(seed, dimension)
    growing = _Growing(graph, parts * blocks, least, {seed: dimension})
    growing.spread(seed)
    growing.settle()
    growing.finish()
    cut = growing.taken()
    if any(graph.shards.along(v, d) not in (1, blocks) for v, d in cut.items()):
        return None
    return Region(growing.axes, cut, blocks) if growing.axes else None


@dataclass
class _Growing:
    """A region on its way.

    Attributes:
      members: the equations in `axes`, as bits.
      early: equations that make what every chunk needs whole: they are done before the first.
      late: equations that need what is combined of all chunks, or that are not cut themselves and
        read what is: they come after the last one.
    """

    graph: Graph
    parts: int
    least: int
    cut: dict[Var, int]
    axes: dict[int, Axis] = field(default_factory=dict[int, Axis])
    members: int = 0
    early: int = 0
    late: int = 0

    def spread(self, seed: Var) -> None:
        """Takes in what is around, the largest arrays first: a smaller one may be what every chunk
        needs whole. And of those as large first what every chunk has a part of: an equation that
        contracts what it could share would end the region."""
        count = itertools.count()
        arrays: list[tuple[int, bool, int, Var, int | None]] = []

        def push(v: Var, n: int | None = None) -> None:
            size = self.graph.shards.bytes(v)
            heapq.heappush(arrays, (-size, n is not None, next(count), v, n))

        push(seed)
        while arrays:
            _, is_sum, _, v, sum_ = heapq.heappop(arrays)
            for n in self.graph.around(v) if sum_ is None else [sum_]:
                axis = None if n in self.axes else self._fitting(n)
                if axis is None:
                    continue
                if not axis.is_map and not is_sum:
                    push(v, n)
                    continue
                for found in self._take(n, axis):
                    push(found)

    def settle(self) -> None:
        """Takes in what is between its equations, and leaves out what needs what cannot be."""
        while True:
            needed = self.graph.before(self.axes)
            between = [n for n in self.graph.readers_of(self.axes) if needed >> n & 1]
            if not between:
                return
            for n in between:
                if (axis := self._fitting(n)) is not None:
                    self._take(n, axis)
                if n not in self.axes:
                    self._leave_out(n)
                    break

    def finish(self) -> None:
        """Takes in what may as well be done to the parts of a sum as to it, such as to transpose
        it: what is summed lies then as others read it."""
        combines = {
            v: combine
            for n, axis in self.axes.items()
            for k, v in enumerate(self.graph.eqns[n].outvars)
            if (combine := axis.combine(k)) is not None
        }
        results = {v for v in self.graph.jaxpr.outvars if isinstance(v, Var)}
        pending = list(combines)
        while pending:
            v = pending.pop()
            readers = self.graph.readers.get(v, ())
            if v in results or len(readers) != 1:
                continue
            eqn = self.graph.eqns[readers[0]]
            if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
                continue
            size = self.graph.shards.bytes
            if size(eqn.outvars[0]) <= size(v) and sums_alike(eqn, combines):
                self.axes[readers[0]] = Axis((None,), (None,), ("sum",))
                combines[eqn.outvars[0]] = "sum"
                pending.append(eqn.outvars[0])

    def _leave_out(self, n: int) -> None:
        """Leaves out all that needs an equation that is not cut."""
        self.late |= 1 << n | self.graph.after([n])
        self.axes = {n: axis for n, axis in self.axes.items() if not self.late >> n & 1}
        self.members &= ~self.late

    def _fitting(self, n: int) -> Axis | None:
        """How an equation is cut, where what it shares with the region is cut already."""
        if (self.early | self.late) >> n & 1:
            return None
        found = None
        for axis, arrays in ways_of(self.graph.eqns[n]):
            if not any(d is not None and self.cut.get(v) == d for v, d in arrays):
                continue
            if axis.within % self.parts:
                continue
            if all(self._agrees(v, d) for v, d in arrays):
                if axis.is_map:
                    return axis
                found = found or axis
        return found

    def _agrees(self, v: Var, d: int | None) -> bool:
        if d is None:  # Nothing that is made in chunks.
            return self.graph.maker.get(v) not in self.axes
        return self.cut.get(v, d) == d and shape_of(v)[d] % self.parts == 0

    def _take(self, n: int, axis: Axis) -> Sequence[Var]:
        """Takes an equation in, unless others of the region would come before and after it; the
        large arrays that are cut by that."""
        eqn = self.graph.eqns[n]
        whole = [v for v, d in self.graph.arrays(n, axis) if d is None and v in self.graph.maker]
        made = {self.graph.maker[v] for v in whole} - {n}
        early = _bits(made) | self.graph.before(made)
        late = 0 if axis.is_map else self._after_combined(n, axis)
        if (early | late) & self.members or early >> n & 1:
            return ()
        self.early |= early
        self.late |= late
        self.axes[n] = axis
        self.members |= 1 << n
        new = list[Var]()
        for v, d in self.graph.arrays(n, axis):
            if d is not None and v not in self.cut:
                self.cut[v] = d
                if self.graph.shards.bytes(v) >= self.least:
                    new.append(v)
        # What it reads is asked first: a product has its chunks from there.
        return sorted(new, key=lambda v: v in eqn.outvars)

    def _after_combined(self, n: int, axis: Axis) -> int:
        results = zip(self.graph.eqns[n].outvars, axis.results, strict=True)
        readers = [r for v, d in results if d is None for r in self.graph.readers.get(v, ())]
        return _bits(readers) | self.graph.after(readers)

    def taken(self) -> dict[Var, int]:
        """What the region's equations take and make in chunks."""
        arrays = (pair for n, axis in self.axes.items() for pair in self.graph.arrays(n, axis))
        return {v: d for v, d in arrays if d is not None}
