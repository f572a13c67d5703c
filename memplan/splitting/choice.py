"""Which regions of a program are run in chunks, so that less than so many bytes are live.

At the equation where most is live, the largest array there is the seed of regions: each of its
dimensions, for a few numbers of chunks, and for a few sizes down to which arrays around it are cut
as well. Of those that bring down what is live, the one that moves the fewest bytes more is taken,
and the search goes on with the program that has it as a loop.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import Remat, Scan, decode, name, programs, with_programs
from memplan.splitting.live import Live, live_in, within
from memplan.splitting.loops import in_chunks
from memplan.splitting.regions import Graph, Region, grow
from memplan.streams.fusion import bytes_of
from memplan.streams.leading_axis import aval_of, shape_of
from memplan.streams.programs import without_dead

_SHARES = (1, 8, 64, math.inf)
"""Of a seed's bytes: arrays as large as these parts of it are cut as well."""
_SEEDS = 3
"""Arrays at an equation that are tried, the largest first."""
_ROUNDS = 256
"""Regions that are looked for, at most."""
_LEAST = 1 / 16
"""Of what is above the aim: what is no larger is no seed."""
_SMALLEST = 1 << 18
"""Bytes: a smaller array is no seed. A loop around it saves nothing that counts on any device."""
_TRIP = 1 << 18
"""Bytes: what an equation costs in each trip besides what it moves, some tenths of a microsecond of
a device's memory."""


@dataclass(frozen=True)
class Split:
    """What of a program is run in chunks.

    Attributes:
      parts: how many.
      seed: the equation whose result is the largest array that is never there as a whole.
      dimension: of that.
      size: equations in the loop.
      line: of the user's program, where that is known of the equation, or of one around it; else
        ``""``.
    """

    parts: int
    seed: JaxprEqn
    dimension: int
    size: int
    line: str

    def __str__(self) -> str:
        aval = aval_of(self.seed.outvars[0])
        at = f" ({self.line})" if self.line else ""
        return (
            f"{self.parts} chunks along dimension {self.dimension} of "
            f"{aval.dtype}{list(aval.shape)}{at}, {self.size} operations"
        )


@dataclass(frozen=True)
class _Found:
    """A program with one more region in chunks.

    Attributes:
      share: of the seed's bytes that arrays have which are cut as well.
      gain: by how much less it is above the aim, in bytes, summed over equations.
      cost: bytes that it moves more.
      is_enough: whether no more than the aim is live in the loop.
    """

    jaxpr: Jaxpr
    split: Split
    share: float
    gain: int
    cost: int
    is_enough: bool


def split(jaxpr: Jaxpr, aim: int) -> tuple[Jaxpr, tuple[Split, ...]]:
    """Runs parts of a program in chunks until no more than `aim` bytes are live besides what it is
    given, or nothing helps.

    Args:
      jaxpr: without calls (see `programs.inline_all_calls`).

    Returns:
      The program, the very object that was given where nothing is to be done or helps; and what is
      in chunks.
    """
    new, splits = _Splitting(aim).run(without_dead(jaxpr))
    return (new, splits) if splits else (jaxpr, ())


class _Splitting:
    """Of one program, which may be the body of a loop."""

    def __init__(self, aim: int) -> None:
        self.aim = aim
        self.splits: list[Split] = []
        # Equations (by what they are, not what they say) and arrays for which nothing was found.
        self._refused = dict[int, JaxprEqn]()
        self._hopeless = set[Var]()
        # What was chosen for a seed, for the next one like it.
        self._chosen: dict[object, tuple[int, float]] = {}

    def run(self, jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[Split, ...]]:
        for _ in range(_ROUNDS):
            live, graph = live_in(jaxpr), Graph(jaxpr)
            over = [(load, n) for n, load in enumerate(live.loads) if load > self.aim]
            found = None
            for load, n in sorted(over, reverse=True):
                if id(jaxpr.eqns[n]) in self._refused:
                    continue
                found = self._at(graph, live, load, n)
                if found is not None:
                    break
                self._refused[id(jaxpr.eqns[n])] = jaxpr.eqns[n]
            if found is None:
                break
            jaxpr = found
        return jaxpr, tuple(self.splits)

    def _at(self, graph: Graph, live: Live, load: int, n: int) -> Jaxpr | None:
        """The program with less live at an equation; None where nothing helps."""
        eqn = graph.eqns[n]
        own = within(eqn)
        if own > load / 2:
            return self._inside(graph.jaxpr, load, n) or self._from(graph, live, eqn.outvars)
        made = (v for v in live.arrays[n] if v in graph.maker)
        seeds = sorted(made, key=lambda v: (-bytes_of([v]), graph.maker[v]))
        large = [v for v in seeds[:_SEEDS] if bytes_of([v]) >= _LEAST * (load - self.aim)]
        return self._from(graph, live, large)

    def _inside(self, jaxpr: Jaxpr, load: int, n: int) -> Jaxpr | None:
        """The program with less live in what is inside an equation."""
        eqn = jaxpr.eqns[n]
        if not isinstance(decode(eqn), Scan | Remat):
            return None
        own = within(eqn)
        found = [
            _Splitting(self.aim - (load - own)).run(program.jaxpr) for program in programs(eqn)
        ]
        new = with_programs(eqn, [inner for inner, _ in found])
        if within(new) >= own:
            return None
        self.splits += [s for _, more in found for s in more]
        self._refused[id(new)] = new
        return jaxpr.replace(eqns=[*jaxpr.eqns[:n], new, *jaxpr.eqns[n + 1 :]])

    def _from(self, graph: Graph, live: Live, seeds: Sequence[Var]) -> Jaxpr | None:
        """The program with a region around one of some arrays in chunks."""
        for seed in seeds:
            if seed in self._hopeless or bytes_of([seed]) < _SMALLEST:
                continue
            kind = name(graph.eqns[graph.maker[seed]]), seed.aval
            found = [*self._around(graph, live, seed, self._chosen.get(kind))]
            if found:
                best = max(
                    found, key=lambda f: (f.is_enough, f.gain / f.cost if f.is_enough else f.gain)
                )
                self._chosen[kind] = best.split.dimension, best.share
                self.splits.append(best.split)
                return best.jaxpr
            self._hopeless.add(seed)
        return None

    def _around(
        self, graph: Graph, live: Live, seed: Var, chosen: tuple[int, float] | None
    ) -> Iterator[_Found]:
        """The regions around an array that bring down what is live."""
        ways = [chosen] if chosen else itertools.product(range(len(shape_of(seed))), _SHARES)
        seen = set[frozenset[int]]()
        for d, share in ways:
            divisors = _divisors(shape_of(seed)[d])
            region = None
            if divisors:
                region = grow(graph, seed, d, divisors[0], int(bytes_of([seed]) / share))
            if region is None or seed not in region.cut:
                continue
            if (key := frozenset(region.axes)) in seen:
                continue
            seen.add(key)
            if (found := self._in_chunks(graph, live, seed, region, divisors, share)) is not None:
                yield found

    def _in_chunks(
        self,
        graph: Graph,
        live: Live,
        seed: Var,
        region: Region,
        divisors: Sequence[int],
        share: float,
    ) -> _Found | None:
        """A region in as many chunks as bring what is live in its loop down to the aim, or as gain
        anything."""
        first = divisors[0]
        jaxpr = in_chunks(graph.jaxpr, region, first)
        now = live_in(jaxpr)
        loop = _loop_of(jaxpr, graph)
        at = next(n for n, eqn in enumerate(jaxpr.eqns) if eqn is loop)
        own = within(jaxpr.eqns[at]) * first
        rest = now.loads[at] - own // first
        possible = [p for p in divisors if _divides(region, p)]
        parts = next(
            (p for p in possible if rest + own // p <= self.aim or own // p < rest / 16),
            possible[-1],
        )
        if parts != first:
            jaxpr = in_chunks(graph.jaxpr, region, parts)
            now = live_in(jaxpr)
        gain = self._over(live) - self._over(now)
        if gain <= 0 or max(now.loads) > max(live.loads):
            return None
        loop = _loop_of(jaxpr, graph)
        loads = zip(now.loads, jaxpr.eqns, strict=True)
        is_enough = next(load for load, eqn in loads if eqn is loop) <= self.aim
        cost = _moved(graph, region, parts) + parts * len(region.axes) * _TRIP
        d = region.cut[seed]
        maker = graph.eqns[graph.maker[seed]]
        line = _line_of(maker, *(graph.eqns[n] for n in sorted(region.axes)))
        found = Split(parts, maker, d, len(region.axes), line)
        return _Found(jaxpr, found, share, gain, cost, is_enough)

    def _over(self, live: Live) -> int:
        return sum(max(load - self.aim, 0) for load in live.loads)


def _loop_of(jaxpr: Jaxpr, graph: Graph) -> JaxprEqn:
    """The scan that a program has and the one before has not."""
    known = {id(eqn) for eqn in graph.eqns}
    new = [eqn for eqn in jaxpr.eqns if id(eqn) not in known and isinstance(decode(eqn), Scan)]
    (loop,) = new
    return loop


def _line_of(*eqns: JaxprEqn) -> str:
    """The line of the first equation that says one: not all that jax derives do."""
    return next(filter(None, (source_info_util.summarize(e.source_info) for e in eqns)), "")


@functools.lru_cache(1 << 10)
def _divisors(size: int) -> Sequence[int]:
    """Numbers of chunks that a dimension is cut into: its divisors, each at least half as large
    again as the one before."""
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    found = list[int]()
    for parts in sorted({*small, *(size // n for n in small)})[1:]:
        if not found or parts >= 1.5 * found[-1]:
            found.append(parts)
    return found


def _divides(region: Region, parts: int) -> bool:
    sizes = [shape_of(v)[d] for v, d in region.cut.items()]
    return math.gcd(*sizes, *(axis.within for axis in region.axes.values())) % parts == 0


def _moved(graph: Graph, region: Region, parts: int) -> int:
    """Bytes that are read and written more than without chunks: what each of them has whole, and
    what they are summed to."""
    whole, summed = set[Var](), set[Var]()
    for n, axis in region.axes.items():
        for v, d in graph.arrays(n, axis):
            if d is None:
                (summed if v in graph.eqns[n].outvars else whole).add(v)
    return (parts - 1) * (bytes_of(whole) + 2 * bytes_of(summed))
