"""Turns a selection of gaps into edits of the entry, and says what a step with them takes.

    temporary   written ── read ─┤ gap: evicted ├── reads ──┤ gap: recomputed ├── reads
    piece       the original     │              refetch      │                 a clone

A temporary falls into *pieces*, one behind each gap that was taken. Every read has its piece:
the last that is there. A clone reads its operands like any other instruction, at the tick in
front of which it stands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.choice_bytes import least_bytes
from hlo_passes.choices import Choices, Gap, Recipe, Selection, Weight
from hlo_passes.eviction import schedule_evictions
from hlo_passes.gaps import Temporary, bitcast_sources, find_temporaries
from hlo_passes.improve import improve
from hlo_passes.placement import step_seconds
from hlo_passes.plan import (
    Decision,
    Edits,
    Eviction,
    LiveRange,
    LogicalTime,
    Recompute,
    Refetch,
)
from hlo_passes.prefetch import DoesNotFit, Fetch, schedule_starts
from hlo_passes.problem import Evicted, Problem, fetches
from hlo_passes.relaxation import lower_bound_s
from hlo_passes.selection import Action, Rates, TakenGaps, complete, select
from hlo_passes.timeline import queue_of

# What is tried: seconds of the step that a second of a link is worth, from next to nothing,
# when links have time to spare, to more than one of compute; and how long chains of what runs
# again may be. Without any, everything can be evicted: no other choice makes do with less.
_TRIED = (
    (1e-3, 0),
    *((price, depth) for price in (1e-3, 0.1, 0.3, 1.0, 3.0) for depth in (1, 3, 16)),
)

_DEEPEST = _TRIED[-1][1]

# A selection with which a step takes less than this, over its compute, is not improved.
_GOOD_ENOUGH = 1.001

# Temporaries below this share of the peak are left alone: they are many and hold little.
_SMALLEST_SHARE = 1 / 4096

# How many decisions a plan tells of.
_TOLD = 256


@dataclass(frozen=True)
class EditChoice:
    """Edits, and what they are for.

    Attributes:
      edits: of the module of the problem.
      decisions: see `Plan`.
      step_time_s: predicted, before packing.
    """

    edits: Edits
    decisions: tuple[Decision, ...]
    step_time_s: float


def least_edits(posed: Problem) -> Edits:
    """Returns the edits with which the arena's load is as low as was found, whatever they take;
    all weights on the host are streamed."""
    work = Work(posed)
    if not work.load.size:
        return Edits()
    selections = (work.select(0, *tried) for tried in (*_TRIED[:1], *_TRIED[-3:]))
    return edits_of(posed, min(selections, key=lambda s: int(s.load.max())))


def choose_edits(
    posed: Problem, capacity: int, slots: int | None = None, search_s: float = 0.0
) -> EditChoice | None:
    """Chooses what to evict and what to recompute, so that the load of the arena fits.

    Args:
      posed: a module without edits but for its order; its weights on the host are streamed.
      capacity: bytes of the arena above its base.
      slots: at most so many streamed arrays on the device at once.
      search_s: seconds to look for something better than what a few greedy selections give.

    Returns:
      The fastest choice found, before packing; None when the load cannot be brought down to
      `capacity`.
    """
    work = Work(posed)
    best: tuple[float, TakenGaps] | None = None
    for price, depth in _TRIED if work.rates.can_evict else _TRIED[-3:]:
        taken = work.select(capacity, price, depth)
        seconds = work.step_seconds(taken, capacity, slots)
        if seconds < (np.inf if best is None else best[0]):
            best = seconds, taken
    if best is None:
        return None
    if search_s > 0 and best[0] > float(posed.clock[-1]) * _GOOD_ENOUGH:
        best = work.improve(best, capacity, slots, search_s)
    decisions = work.decisions(best[1], capacity)
    return EditChoice(edits_of(posed, best[1]), decisions, best[0])


def edits_of(posed: Problem, taken: TakenGaps) -> Edits:
    """Writes down what was taken as edits of the module of `posed`."""
    return _Writer(posed, taken).edits()


def edited_lower_bound_s(posed: Problem, budget: int) -> float:
    """Returns seconds that no plan within `budget` undercuts, whatever it evicts, recomputes
    and streams, with the compute in this order; infinity when there is no plan."""
    work = Work(posed)
    choices, _ = work.choices(posed.load, may_stay=True)
    return lower_bound_s(choices, budget - posed.fixed_bytes - posed.arena.tables)


def least_load(posed: Problem) -> npt.NDArray[np.int64]:
    """Returns int64[ticks], bytes that no edits can go below at each tick by itself."""
    choices, _ = Work(posed).choices(posed.load, may_stay=True)
    return least_bytes(replace(choices, weights=()))


class Work:
    """A problem as `select` takes it.

    Attributes:
      temporaries, rates: of the entry.
    """

    def __init__(self, posed: Problem) -> None:
        self._posed = posed
        self.temporaries = find_temporaries(posed.ranges, posed.ticks)
        self._streamed = fetches(posed.movables, posed.clock, 0.0)
        self._weights = np.zeros_like(posed.arena.load)
        for fetch in self._streamed:
            self._weights[fetch.reads.start : fetch.reads.end] += fetch.size
        can_evict = posed.machine.platform != "cpu"
        self.rates = Rates(
            posed.link_out.bytes_per_s if can_evict else 0.0,
            posed.link.bytes_per_s if can_evict else 0.0,
            posed.link.latency_s,
            {t.maker.id: float(posed.costs[t.written]) for t in self.temporaries},
        )

    @property
    def load(self) -> npt.NDArray[np.int64]:
        """Bytes at each tick with every temporary kept and every weight fetched when read."""
        return self._posed.arena.load + self._weights

    @property
    def smallest(self) -> int:
        """Bytes below which a temporary is left alone."""
        share = int(self.load.max(initial=0) * _SMALLEST_SHARE)
        return max(share, self._posed.arena.smallest)

    def select(self, capacity: int, link_price: float, depth: int) -> TakenGaps:
        return select(
            self.temporaries,
            self.load,
            self._posed.costs,
            self.rates,
            capacity,
            link_price,
            depth,
            self.smallest,
        )

    def choices(
        self, load: npt.NDArray[np.int64], smallest: int = 0, *, may_stay: bool
    ) -> tuple[Choices, list[tuple[int, LogicalTime]]]:
        """The same as numbers, and of each gap the temporary and the tick at which it starts;
        temporaries of fewer than `smallest` bytes have none.

        A recipe is what the maker takes alone, and its share of that where it makes several
        things: what must be there for it may be there for other reasons, too. So nothing that
        can be done is cheaper than the choices say.
        """
        posed = self._posed
        made = Counter(t.maker.id for t in self.temporaries)
        gaps: list[Gap] = []
        starts: list[tuple[int, LogicalTime]] = []
        for t in self.temporaries:
            if t.obstacle or t.size < smallest:
                continue
            recipes: tuple[Recipe, ...] = ()
            if t.operands is not None:
                seconds = self.rates.maker_s[t.maker.id] / made[t.maker.id]
                recipes = (Recipe(seconds, 0, (t.maker.id,)),)
            for start, end in pairwise(sorted({t.written, *(r.tick for r in t.reads)})):
                if end > start + 1 and (recipes or self.rates.can_evict):
                    can_evict = self.rates.can_evict
                    gap = Gap(t.number, t.size, t.written + 1, start + 1, end, can_evict, recipes)
                    gaps.append(gap)
                    starts.append((t.number, start))
        out = posed.link_out if self.rates.can_evict else posed.link
        choices = Choices(
            posed.costs,
            load,
            tuple(gaps),
            tuple(Weight(m.size, _disjoint(m.reads), may_stay) for m in posed.movables),
            out.bytes_per_s * out.engines,
            posed.link.bytes_per_s * posed.link.engines,
            posed.link.latency_s,
            queue_of(out) == queue_of(posed.link),
            in_busy_s=posed.link_floor_s,
        )
        return choices, starts

    def improve(
        self, best: tuple[float, TakenGaps], capacity: int, slots: int | None, search_s: float
    ) -> tuple[float, TakenGaps]:
        """Searches with mixed-integer programs; what they choose is carried out, and completed,
        to see what it is worth."""
        choices, starts = self.choices(self._posed.arena.load, self.smallest, may_stay=False)
        number = {start: k for k, start in enumerate(starts)}
        found = [best]

        def carried_out(selection: Selection) -> TakenGaps:
            taken = TakenGaps(self.temporaries, self.load, self._posed.costs, self.rates, _DEEPEST)
            for k in selection.evicted:
                if starts[k][1] in taken.accesses[starts[k][0]]:
                    taken.evict(*starts[k])
            for k, _ in sorted(selection.recomputed, key=lambda r: choices.gaps[r[0]].end):
                if starts[k][1] not in taken.taken[starts[k][0]]:
                    taken.recompute(*starts[k], capacity, np.inf)
            complete(taken, capacity, 1.0, self.smallest)
            taken.give_back(capacity)
            return taken

        def evaluate(selection: Selection) -> float:
            taken = carried_out(selection)
            seconds = self.step_seconds(taken, capacity, slots)
            if seconds < found[0][0]:
                found[0] = seconds, taken
            return seconds

        evicted: set[int] = set()
        recomputed: list[tuple[int, int]] = []
        for n, gaps in enumerate(best[1].taken):
            for start, taken in gaps.items():
                k = number.get((n, start))
                if k is not None and taken.action == "evict":
                    evicted.add(k)
                elif k is not None:
                    recomputed.append((k, 0))
        start = Selection(frozenset(evicted), tuple(sorted(recomputed)), frozenset())
        improve(choices, capacity, start, search_s, evaluate)
        return found[0]

    def step_seconds(self, selection: TakenGaps, capacity: int, slots: int | None) -> float:
        """Predicts the step's time; infinity where it does not fit."""
        if selection.load.max(initial=0) > capacity:
            return np.inf
        load = selection.load - self._weights
        evicted: list[Evicted] = []
        jobs = list(self._streamed)
        order = sorted(self.temporaries, key=lambda t: t.written)
        for t in order:
            found = _pieces(selection, t)
            if not any(piece.action == "evict" for piece in found):
                continue
            gone = min(selection.taken[t.number])
            evicted.append(Evicted(t.name, t.size, t.written + 1, gone + 1, holder=t.name))
            for piece in found:
                if piece.action == "evict":
                    jobs.append(Fetch(t.name, t.size, piece.reads, len(evicted) - 1))
                    load[piece.reads.start : piece.reads.end] -= t.size
        jobs.sort(key=lambda f: f.reads)
        posed = self._posed
        departures = schedule_evictions(
            evicted, jobs, load, capacity, selection.costs, posed.link_out
        )
        for eviction, departure in zip(evicted, departures, strict=True):
            load[eviction.free : departure.done] += eviction.size
        clock = np.concatenate([[0.0], np.cumsum(selection.costs)])
        try:
            starts = schedule_starts(
                jobs,
                load,
                capacity,
                clock,
                posed.link,
                slots,
                releases={n: d.done for n, d in enumerate(departures)},
            )
        except DoesNotFit:
            return np.inf
        edited = replace(posed, costs=selection.costs, clock=clock, evictions=tuple(evicted))
        return step_seconds(edited, jobs, starts, departures)

    def decisions(self, selection: TakenGaps, capacity: int) -> tuple[Decision, ...]:
        """What became of the temporaries that are idle while the load is over `capacity`."""
        over = np.concatenate([[0], np.cumsum(self.load > capacity)])
        clock, names = self._posed.clock, [i.name for i in self._posed.ticks.instructions]
        found: list[Decision] = []
        for t in self.temporaries:
            accesses = sorted({t.written, *(r.tick for r in t.reads)})
            for start, end in pairwise(accesses):
                if end <= start + 1 or over[end] == over[start + 1]:
                    continue
                taken = selection.taken[t.number].get(start)
                can_move = self.rates.can_evict and not t.obstacle
                can_repeat = t.operands is not None and not t.obstacle
                obstacle = t.obstacle or ("" if can_repeat else f"%{t.maker.name} cannot run again")
                found.append(
                    Decision(
                        t.name,
                        t.size,
                        taken.action if taken is not None else "keep",
                        names[start],
                        names[end],
                        float(clock[end] - clock[start + 1]),
                        self.rates.moving_s(t.size, is_away=False) if can_move else None,
                        self.rates.maker_s[t.maker.id] if can_repeat else None,
                        obstacle,
                    )
                )
        found.sort(key=lambda d: (-d.size, d.buffer, -d.idle_s))
        return tuple(found[:_TOLD])


def _disjoint(reads: Sequence[LiveRange]) -> tuple[LiveRange, ...]:
    """The same ticks in ranges that do not touch."""
    found: list[LiveRange] = []
    for read in reads:
        if found and read.start <= found[-1].end:
            found[-1] = LiveRange(found[-1].start, max(found[-1].end, read.end))
        else:
            found.append(read)
    return tuple(found)


class _Piece(NamedTuple):
    """A temporary from a gap's end until the next gap.

    Attributes:
      action: how it came to be there.
      reads: from its first access to the tick after its last.
    """

    action: Action
    reads: LiveRange


def _pieces(selection: TakenGaps, t: Temporary) -> list[_Piece]:
    """The pieces behind the gaps that were taken, in order; the original is not among them."""
    accesses, taken = selection.accesses[t.number], selection.taken[t.number]
    found: list[_Piece] = []
    starts = sorted(taken)
    for n, start in enumerate(starts):
        last = starts[n + 1] if n + 1 < len(starts) else accesses[-1]
        found.append(_Piece(taken[start].action, LiveRange(taken[start].end, last + 1)))
    return found


class _Reader(NamedTuple):
    tick: LogicalTime
    name: str
    via: str


class _Writer:
    """Writes a selection down as edits."""

    def __init__(self, posed: Problem, selection: TakenGaps) -> None:
        self._selection = selection
        self._temporaries = selection.temporaries
        self._names = [i.name for i in posed.ticks.instructions]
        self._tick_of_name = {name: tick for tick, name in enumerate(self._names)}
        self._bitcast_of = bitcast_sources(posed.module, selection.temporaries)
        self._pieces = [_pieces(selection, t) for t in selection.temporaries]
        # Who reads each piece, by (temporary, piece).
        self._readers: defaultdict[tuple[int, int], list[_Reader]] = defaultdict(list)
        self._recomputes: list[Recompute] = []
        self._clones: dict[tuple[int, LogicalTime], str] = {}
        self._count: defaultdict[str, int] = defaultdict(int)
        self._makers: dict[tuple[int, LogicalTime], int] = {}
        self._refetches: defaultdict[int, list[Refetch]] = defaultdict(list)
        self._written: set[tuple[int, int]] = set()

    def edits(self) -> Edits:
        for t in self._temporaries:
            for read in t.reads:
                self._read(t.number, _Reader(read.tick, read.reader, read.via))
        # The first pieces first: what stands at one tick is ordered by who reads whom.
        for n, k in sorted(self._readers, key=lambda p: self._pieces[p[0]][p[1]].reads):
            self._write(n, k)
        evictions = [self._eviction(t) for t in self._temporaries]
        return Edits((), tuple(self._recomputes), tuple(e for e in evictions if e is not None))

    def _read(self, n: int, reader: _Reader) -> None:
        """Takes note of a reader, and of those of what it needs in turn."""
        k = self._serving(n, reader.tick)
        if k is None:
            return
        via = reader.via
        if via in self._bitcast_of and self._serving(n, self._tick_of_name[via]) == k:
            return  # The bitcast itself reads the piece.
        is_new = (n, k) not in self._readers
        self._readers[n, k].append(reader)
        piece = self._pieces[n][k]
        if not is_new or piece.action == "evict":
            return
        t = self._temporaries[n]
        tick = piece.reads.start
        key = t.maker.id, tick
        if key in self._clones:
            return
        name = self._clones[key] = self._name(t.maker.name)
        for operand in t.operands or ():
            if operand.temporary is not None:
                self._read(operand.temporary, _Reader(tick, name, operand.via))

    def _serving(self, n: int, tick: LogicalTime) -> int | None:
        """The piece of a temporary that is read at `tick`; None for the original."""
        found = [k for k, piece in enumerate(self._pieces[n]) if piece.reads.start <= tick]
        return found[-1] if found else None

    def _name(self, original: str) -> str:
        self._count[original] += 1
        return f"{original}.again{self._count[original]}"

    def _write(self, n: int, k: int) -> None:
        """Writes the clones of a piece, those that they read first."""
        if (n, k) in self._written:
            return
        self._written.add((n, k))
        t, piece = self._temporaries[n], self._pieces[n][k]
        tick = self._first_tick(n, k)
        before = self._names[tick]
        readers = [(r.name, r.via) for r in self._readers[n, k]]
        if piece.action == "recompute":
            for operand in t.operands or ():
                m = operand.temporary
                below = None if m is None else self._serving(m, tick)
                if m is not None and below is not None:
                    self._write(m, below)
        direct, bitcasts = self._shown_as(t, before, readers)
        if piece.action == "recompute":
            self._write_maker(t, tick, before, direct)
        else:
            self._refetches[n].append(Refetch(before, direct))
        self._recomputes += bitcasts

    def _first_tick(self, n: int, k: int) -> LogicalTime:
        """What is fetched comes for its first reader; what is made again when all is there."""
        if self._pieces[n][k].action == "recompute":
            return self._pieces[n][k].reads.start
        return min(r.tick for r in self._readers[n, k])

    def _shown_as(
        self, t: Temporary, before: str, readers: Sequence[tuple[str, str]]
    ) -> tuple[tuple[str, ...], list[Recompute]]:
        """Makes the bitcasts through which a piece is read anew.

        Returns:
          Who reads the piece itself, and the bitcasts, each behind what it is a bitcast of.
        """
        names: dict[str, str] = {}
        pending = [via for _, via in readers if via != t.name]
        while pending:
            via = pending.pop()
            if via != t.name and via not in names:
                names[via] = self._name(via)
                pending.append(self._bitcast_of[via])
        served = [*readers, *((names[via], self._bitcast_of[via]) for via in names)]

        def readers_of(via: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys(reader for reader, seen in served if seen == via))

        order = sorted(names, key=lambda via: self._tick_of_name[via])
        bitcasts = [Recompute(names[via], via, before, readers_of(via)) for via in order]
        return readers_of(t.name), bitcasts

    def _write_maker(
        self, t: Temporary, tick: LogicalTime, before: str, readers: tuple[str, ...]
    ) -> None:
        key = t.maker.id, tick
        name = self._clones[key]
        if t.handle is t.maker:
            self._recomputes.append(Recompute(name, t.name, before, readers))
            return
        element = self._name(t.name)
        if key in self._makers:
            at = self._makers[key]
            made = self._recomputes[at]
            self._recomputes[at] = replace(made, readers=(*made.readers, element))
        else:
            self._makers[key] = len(self._recomputes)
            self._recomputes.append(Recompute(name, t.maker.name, before, (element,)))
        self._recomputes.append(Recompute(element, t.name, before, readers))

    def _eviction(self, t: Temporary) -> Eviction | None:
        if not self._refetches[t.number]:
            return None
        gone = max(min(self._selection.taken[t.number]), self._tick_of_name[t.name])
        refetches = sorted(self._refetches[t.number], key=lambda r: self._tick_of_name[r.before])
        return Eviction(t.name, self._names[gone], tuple(refetches))
