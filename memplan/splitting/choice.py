"""Which regions of a program are run in chunks, so that less than so many bytes are live.

At the equation where most is live, the largest array there is the seed of regions: each of its
dimensions, for a few numbers of chunks, and for a few sizes down to which arrays around it are cut
as well. Of those that bring down what is live, the one that does so for the fewest bytes moved more
is taken, and the search goes on with the program that has it as a loop. That may end with small
loops beside a large one that would have done: so it is done again with the one that brings down
most, and the better program is taken.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    Cond,
    Remat,
    Scan,
    While,
    decode,
    name,
    programs,
    with_programs,
)
from hlo_passes.plan import Split
from memplan.splitting.again import kept_for_late, made_again
from memplan.splitting.live import (
    Live,
    Step,
    live_in,
    live_in_chunk,
    live_through,
    readers_in,
    results_of,
    steps_of,
    within,
)
from memplan.splitting.loops import combined_in, in_chunks
from memplan.splitting.regions import Chunks, Graph, Region, grow
from memplan.splitting.shards import WHOLE, Shards
from memplan.streams.fusion import bytes_of
from memplan.streams.leading_axis import aval_of, shape_of
from memplan.streams.programs import without_dead

_SHARES = (1, 8, 64, math.inf)
"""Of a seed's bytes: arrays as large as these parts of it are cut as well."""
_SEEDS = 3
"""Arrays at an equation that are tried, the largest first."""
_FINEST = 1 / 64
"""Of an aim: how near others are to it."""
_ROUNDS = 256
"""Regions that are looked for, at most."""
_LEAST = 1 / 16
"""Of what is above the aim: what is no larger is no seed."""
_SMALLEST = 1 << 18
"""Bytes: a smaller array is no seed. A loop around it saves nothing that counts on any device."""
_LITTLE = 1 / 64
"""Of what is live: for less than that there are no more chunks, and no other loops."""
_ALIKE = 1.1
"""Bytes moved: to move so much more is worth fewer loops, between which arrays are whole."""
_IN_LOOP = 1 / 4
"""Of an aim: as much there may be in a loop, however much is live around it, which may be in chunks
later, or moved. Next to nothing in a loop is the finest chunks, which are slow."""
_TRIP = 1 << 18
"""Bytes: what an equation costs in each trip besides what it moves, some tenths of a microsecond of
a device's memory."""
_LINE, _SECTOR = 512, 64
"""Bytes that lie one after another: so many are read or written as fast as any, a row of a TPU's
tiles or some sectors of a GPU's memory; and fewer than those, no chunk has of a large array."""


@dataclass(frozen=True)
class _Found:
    """A program with one more region in chunks.

    Attributes:
      graph, seed: of the region, which has some arrays made again.
      share: of the seed's bytes that arrays have which are cut as well.
      gain: by how much less it is above the aim, in bytes, summed over equations.
      cost: bytes that it moves more.
      is_enough: whether no more than the aim is live in the loop.
    """

    graph: Graph
    seed: Var
    region: Region
    chunks: Chunks
    share: float
    gain: int
    cost: int
    is_enough: bool


def split(
    jaxpr: Jaxpr, aim: int, patterns: Sequence[str] = ("*",), shards: Shards = WHOLE
) -> tuple[Jaxpr, tuple[Split, ...]]:
    """Runs parts of a program in chunks until no more than `aim` bytes are live besides what it is
    given, or nothing helps.

    Args:
      jaxpr: without calls (see `programs.inline_all_calls`).
      patterns: glob patterns of `Split.line`: what is in chunks matches one of them.
      shards: how its arrays lie on the devices. Bytes are those of each.

    Returns:
      The program, the very object that was given where nothing is to be done or helps; and what is
      in chunks.
    """
    return _split(jaxpr, aim, patterns, _Known(shards))


def _split(
    jaxpr: Jaxpr, aim: int, patterns: Sequence[str], known: _Known
) -> tuple[Jaxpr, tuple[Split, ...]]:
    shards = known.shards
    before, near = max(live_in(jaxpr, shards).loads, default=0), int(aim * (1 + _LITTLE))
    found: list[tuple[int, float, Jaxpr, tuple[Split, ...]]] = [(before, 0, jaxpr, ())]
    for best, factor in (_cheapest, _ALIKE), (_widest, 1):
        splitting = _Splitting(aim, patterns, known, best)
        new, splits = splitting.run(jaxpr)
        live = max(live_in(new, shards).loads, default=0)
        if splits and live < before:
            found.append((max(live, near), splitting.cost * factor, new, splits))
    _, _, new, splits = min(found, key=lambda f: f[:2])
    return new, splits


def splittings(
    jaxpr: Jaxpr, aims: Iterable[int], patterns: Sequence[str] = ("*",), shards: Shards = WHOLE
) -> Iterator[tuple[int, Jaxpr, tuple[Split, ...]]]:
    """What `split` makes of a program with each of some aims, the largest first: the aim, and that.

    Near what cannot be in chunks, a little less is many more of them. There aims are added, so that
    each program has at most twice as many as the one before, as far as dimensions allow. The last
    one is that with the first aim that nothing helped to come near.
    """
    found, known = dict[int, tuple[Jaxpr, tuple[Split, ...]]](), _Known(shards)
    pending = sorted(aims)
    last, parts = 0, math.inf
    while pending:
        aim = pending[-1]
        if aim not in found:
            found[aim] = _split(jaxpr, aim, patterns, known)
        new, splits = found[aim]
        most = max((s.parts for s in splits), default=math.inf)
        between = (last + aim) // 2
        if most > 2 * parts and between - aim > aim * _FINEST:
            pending.append(between)
            continue
        pending.pop()
        last, parts = aim, most
        yield aim, new, splits
        # What has no chunks may be all of that; loops get smaller by the aim until then.
        if max(live_in(new, shards).loads, default=0) > aim / _IN_LOOP:
            return


@dataclass(frozen=True, eq=False)
class _Now:
    """A program, and what is live in it.

    Attributes:
      loops: of regions that were looked at, as loops; by seed, dimension and the bytes of an array
        down to which the cut goes.
    """

    graph: Graph
    steps: Sequence[Step]
    live: Live
    loops: dict[tuple[Var, int, int], _Loop | None] = field(
        default_factory=dict[tuple[Var, int, int], "_Loop | None"]
    )

    @staticmethod
    def of(jaxpr: Jaxpr, shards: Shards) -> _Now:
        steps = steps_of(jaxpr, shards)
        return _Now(Graph(jaxpr, shards), steps, live_through(steps, results_of(jaxpr)))

    def loop(self, seed: Var, d: int, parts: int, least: int) -> _Loop | None:
        """The region around an array as a loop (see `grow`), once for all aims; None where there is
        none."""
        key = seed, d, least
        if key not in self.loops:
            region = grow(self.graph, seed, d, parts, least)
            has_seed = region is not None and seed in region.cut
            self.loops[key] = _Loop(self, region) if region and has_seed else None
        return self.loops[key]


class _Loop:
    """A region that is run as a loop over chunks, however many.

    Attributes:
      loads: bytes that are live in each step of the program with that loop, without those inside
        it; `at`: which of the steps it is.
      edges: bytes of what it is given and leaves in chunks.
      possible: the chunks there may be, the largest first.
    """

    def __init__(self, now: _Now, region: Region) -> None:
        self.region, self._graph = region, now.graph
        graph, shards = now.graph, now.graph.shards
        before, after = graph.beside(region)
        self._eqns = [(graph.eqns[n], axis) for n, axis in sorted(region.axes.items())]
        self._leaving, results = graph.leaving(region), results_of(graph.jaxpr)
        self._readers = readers_in(eqn for eqn, _ in self._eqns)
        for v, combine in self._leaving.items():
            # What adds chunks up fuses, what writes them does not.
            self._readers.setdefault(v, []).append("elementwise" if combine else "other")
        makes = list[tuple[Var, int]]()
        for v, combine in self._leaving.items():
            dtype = aval_of(v).dtype
            size, wide = shards.bytes(v), combined_in(combine, dtype)
            if wide != dtype:
                makes.append((v, size // dtype.itemsize * np.dtype(wide).itemsize))
            elif v not in results:
                makes.append((v, size))
        given = graph.given(region)
        steps = [now.steps[n] for n in before], [now.steps[n] for n in after]
        live = live_through([*steps[0], Step(given, makes), *steps[1]], results)
        self.loads, self.at = live.loads, len(before)
        self.edges = {v: shards.bytes(v) for v in (*given, *self._leaving) if v in region.cut}
        self.possible = [
            chunks
            for chunks in _chunkings(region.rows, is_even=shards is not WHOLE)
            if all(
                size < _SMALLEST or _run(region, chunks, v) >= _SECTOR
                for v, size in self.edges.items()
            )
        ]
        self._own: dict[Chunks, int] = {}

    def own(self, chunks: Chunks) -> int:
        """Bytes that are live inside it while it is at a chunk."""
        if chunks not in self._own:
            self._own[chunks] = live_in_chunk(
                self._eqns,
                chunks,
                self._graph.shards,
                cut=self.region.cut,
                readers=self._readers,
                leaving=self._leaving,
            )
        return self._own[chunks]


class _Known:
    """Programs that were looked at already, of one search: that which is given and those inside
    are so for each aim.

    Attributes:
      shards: how the arrays of all of them lie on the devices.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._found: dict[int, tuple[Jaxpr, _Now]] = {}

    def now(self, jaxpr: Jaxpr) -> _Now:
        """A program without what nobody reads."""
        if id(jaxpr) not in self._found:
            self._found[id(jaxpr)] = jaxpr, _Now.of(without_dead(jaxpr), self.shards)
        return self._found[id(jaxpr)][1]


class _Splitting:
    """Of one program, which may be the body of a loop.

    Attributes:
      splits: what is in chunks.
      cost: bytes that it moves more.
    """

    def __init__(
        self,
        aim: int,
        patterns: Sequence[str],
        known: _Known,
        best: Callable[[_Found], tuple[bool, float]],
    ) -> None:
        self.aim, self.patterns, self._known, self._best = aim, patterns, known, best
        self.shards = known.shards
        self.splits: list[Split] = []
        self.cost = 0
        # Equations (by what they are, not what they say) and arrays for which nothing was found.
        self._refused = dict[int, JaxprEqn]()
        self._hopeless = set[Var]()
        # What was chosen for a seed, for the next one like it.
        self._chosen: dict[object, tuple[int, float]] = {}

    def run(self, jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[Split, ...]]:
        now, near = self._known.now(jaxpr), self.aim * (1 + _LITTLE)
        for _ in range(_ROUNDS):
            eqns = now.graph.eqns
            over = [(load, n) for n, load in enumerate(now.live.loads) if load > near]
            found = None
            for load, n in sorted(over, reverse=True):
                if id(eqns[n]) in self._refused:
                    continue
                found = self._at(now, load, n)
                if found is not None:
                    break
                self._refused[id(eqns[n])] = eqns[n]
            if found is None:
                break
            now = _Now.of(found, self.shards)
        return now.graph.jaxpr, tuple(self.splits)

    def _at(self, now: _Now, load: int, n: int) -> Jaxpr | None:
        """The program with less live at an equation; None where nothing helps."""
        eqn = now.graph.eqns[n]
        if (own := within(eqn, self.shards)) > load / 2:
            aim = self.aim - (load - own)
            inside = self._inside(eqn, aim)
            is_enough = inside is not None and within(inside[0], self.shards) <= aim
            around = None if is_enough else self._around_one(now, n, eqn.outvars)
            if inside is None or (around is not None and around.is_enough):
                return around and self._taken(around)
            new, splitting = inside
            self.splits += splitting.splits
            self.cost += splitting.cost * _trips(eqn)
            self._refused[id(new)] = new
            eqns = now.graph.jaxpr.eqns
            return now.graph.jaxpr.replace(eqns=[*eqns[:n], new, *eqns[n + 1 :]])
        seeds = sorted(now.live.at(n), key=lambda v: (-self.shards.bytes(v), now.live.born[v]))
        large = [v for v in seeds[:_SEEDS] if self.shards.bytes(v) >= _LEAST * (load - self.aim)]
        found = self._around_one(now, n, large)
        return found and self._taken(found)

    def _inside(self, eqn: JaxprEqn, aim: int) -> tuple[JaxprEqn, _Splitting] | None:
        """An equation with less live in what is inside it, and the splitting of that."""
        if not isinstance(decode(eqn), Scan | While | Cond | Remat):
            return None
        inside = _Splitting(aim, self.patterns, self._known, self._best)
        new = with_programs(eqn, [inside.run(program.jaxpr)[0] for program in programs(eqn)])
        less = within(new, self.shards) < within(eqn, self.shards)
        return (new, inside) if less else None

    def _around_one(self, now: _Now, n: int, seeds: Sequence[Var]) -> _Found | None:
        """The region around one of some arrays with which less is live at an equation."""
        for seed in seeds:
            if seed in self._hopeless or self.shards.bytes(seed) < _SMALLEST:
                continue
            kind = name(now.graph.eqns[now.graph.maker[seed]]), seed.aval
            found = [*self._around(now, seed, self._chosen.get(kind))]
            if not any(f.is_enough for f in found):
                found += self._around_again(now, seed, n)
            if found:
                best = max(found, key=self._best)
                if best.graph is now.graph:
                    self._chosen[kind] = best.region.cut[seed], best.share
                return best
            self._hopeless.add(seed)
        return None

    def _taken(self, found: _Found) -> Jaxpr:
        """The program with a region in chunks."""
        self.splits.append(_said(found))
        self.cost += found.cost
        new = in_chunks(found.graph, found.region, found.chunks)
        self._carry_on(new)
        return new

    def _carry_on(self, jaxpr: Jaxpr) -> None:
        if self.shards is not WHOLE:
            self.shards.carry_on(jaxpr, {})

    def _around_again(self, now: _Now, seed: Var, n: int) -> Iterator[_Found]:
        """The region around an array that is made again for those that read it late."""
        wanted = kept_for_late(now.graph, now.live, seed, n)
        made = made_again(now.graph, now.live, wanted, n) if wanted else None
        if made is None:
            return
        jaxpr, names = made
        self._carry_on(jaxpr)
        again = _Now.of(jaxpr, self.shards)
        gain = self._over(now.live.loads) - self._over(again.live.loads)
        for found in self._around(again, names[seed], None):
            if found.gain + gain > 0:
                yield replace(found, gain=found.gain + gain)

    def _around(self, now: _Now, seed: Var, chosen: tuple[int, float] | None) -> Iterator[_Found]:
        """The regions around an array that bring down what is live."""
        ways = [chosen] if chosen else itertools.product(range(len(shape_of(seed))), _SHARES)
        seen = set[frozenset[int]]()
        for d, share in ways:
            divisors = _divisors(shape_of(seed)[d] // self.shards.along(seed, d))
            if len(divisors) == 1:
                continue
            least = int(self.shards.bytes(seed) / share)
            loop = now.loop(seed, d, divisors[1], least)
            if loop is None:
                continue
            region = loop.region
            line = _line_of(now.graph, seed, region)
            if not any(fnmatch.fnmatchcase(line, pattern) for pattern in self.patterns):
                continue
            if (key := frozenset(region.axes)) in seen:
                continue
            seen.add(key)
            if (found := self._in_chunks(now, seed, loop, share)) is not None:
                yield found

    def _in_chunks(self, now: _Now, seed: Var, loop: _Loop, share: float) -> _Found | None:
        """A region in as many chunks as bring what is live in its loop down to the aim, or as gain
        anything."""
        if not loop.possible:
            return None
        region, rest = loop.region, loop.loads[loop.at]
        most = loop.own(loop.possible[-1])
        least = most + (most + rest) * _LITTLE
        enough = max(self.aim - rest, least, int(self.aim * _IN_LOOP))
        chunks = loop.possible[
            bisect_left(loop.possible, True, key=lambda chunks: loop.own(chunks) <= enough)
        ]
        own = loop.own(chunks)
        loads = [*loop.loads]
        # What is above the aim in the loop, is so in each of its equations.
        loads[loop.at : loop.at + 1] = [rest + own] * len(region.axes)
        gain = self._over(now.live.loads) - self._over(loads)
        if gain <= 0 or max(loads) > max(now.live.loads):
            return None
        cost = _moved(now.graph, region, chunks.parts) + chunks.parts * len(region.axes) * _TRIP
        for v, size in loop.edges.items():
            cost += int(size * max(_LINE / _run(region, chunks, v) - 1, 0))
        is_enough = rest + own <= self.aim
        return _Found(now.graph, seed, region, chunks, share, gain, cost, is_enough)

    def _over(self, loads: Iterable[int]) -> int:
        return sum(max(load - self.aim, 0) for load in loads)


def _cheapest(found: _Found) -> tuple[bool, float]:
    return found.is_enough, found.gain / found.cost if found.is_enough else found.gain


def _widest(found: _Found) -> tuple[bool, float]:
    return found.is_enough, found.gain


def _trips(eqn: JaxprEqn) -> int:
    says = decode(eqn)
    return says.length if isinstance(says, Scan) else 1


def _said(found: _Found) -> Split:
    seed, region = found.seed, found.region
    aval = aval_of(seed)
    return Split(
        found.chunks.parts,
        f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
        (size := bytes_of([seed])),
        found.chunks.of(size),
        region.cut[seed],
        len(region.axes),
        _line_of(found.graph, seed, region),
    )


def lines_in(jaxpr: Jaxpr) -> Iterator[str]:
    """The lines of the user's that a program is from."""
    for eqn in jaxpr.eqns:
        yield source_info_util.summarize(eqn.source_info)
        for program in programs(eqn):
            yield from lines_in(program.jaxpr)


def _line_of(graph: Graph, seed: Var, region: Region) -> str:
    """The line that makes an array, or of the first equation of its region that says one: not all
    that jax derives do."""
    numbers = [graph.maker[seed], *sorted(region.axes)]
    lines = (source_info_util.summarize(graph.eqns[n].source_info) for n in numbers)
    return next(filter(None, lines), "")


@functools.lru_cache(1 << 10)
def _divisors(size: int) -> Sequence[int]:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})


@functools.lru_cache(1 << 10)
def _chunkings(rows: int, *, is_even: bool) -> Sequence[Chunks]:
    """Ways to cut so many rows, each into at least half as many chunks again as the one before: of
    the same size, and where few are, of which the first one is smaller. That one is beside the
    loop, so that collectives would be there twice."""
    found, before = list[Chunks](), 1
    for parts in _divisors(rows)[1:]:
        while parts > 3 * before and not is_even:
            before *= 2
            found.append(Chunks(rows, -(-rows // before)))
        if parts >= 1.5 * before:
            found.append(Chunks(rows, rows // parts))
            before = parts
    return found


def _moved(graph: Graph, region: Region, parts: int) -> int:
    """Bytes that are read and written more than without chunks: what each of them has whole, and
    what they are summed to."""
    whole, summed = set[Var](), set[Var]()
    for n, axis in region.axes.items():
        for v, d in graph.arrays(n, axis):
            if d is None:
                (summed if v in graph.eqns[n].outvars else whole).add(v)
    size = graph.shards.bytes
    return (parts - 1) * (sum(map(size, whole)) + 2 * sum(map(size, summed)))


def _run(region: Region, chunks: Chunks, v: Var) -> int:
    """The bytes that a chunk has of an array which lie one after another there."""
    d, shape = region.cut[v], shape_of(v)
    return chunks.of(shape[d]) * math.prod(shape[d + 1 :]) * aval_of(v).dtype.itemsize
