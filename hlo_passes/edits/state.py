"""Gaps that are taken: what that does to the bytes and the seconds of each tick.

    gap of d     ── read ┤                 ├ read ──       evicted: moved out and in
    recomputed   ── read ┤           a b c d read ──       d from c, c from b, b from a, all of
                                     └───┘                 which are dead: made again, too

The state is consistent all the time. To run an instruction again, its operands have to be
there: one that is away comes back then already, by whatever way was chosen for it, and stays;
one that is dead is held, or made again as well. That is how a whole layer comes to be
computed again from its input, and each part of it once.

What is made again only for others that are, at the same tick, is on the way: those stand in
the order of the program, and each is there until the last that reads it, and so is what waited for
them alone. They count with the most that is there at once, before the program's own result is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.gaps import Operand, Temporary
from hlo_passes.plan import LogicalTime

Action = Literal["evict", "recompute"]

Role = Literal["made", "passing", "waiting"]
"""What a temporary is to the clones before a tick: one of them makes it, for the program or for
later; for others of them only; it is there already, for them only, and for the last time."""

# A dead operand is held rather than made again if it is smaller by this factor than what is
# made from it.
_HOLD_SHARE = 16


class Taken(NamedTuple):
    """A gap that is not kept: `action`, and the tick at which the bytes are there again."""

    action: Action
    end: LogicalTime


@dataclass(frozen=True, slots=True)
class Rates:
    """What taking a temporary away and making it again costs.

    Attributes:
      out_bytes_per_s, in_bytes_per_s: of the link; 0 where nothing can be evicted.
      latency_s: of a transfer.
      maker_s: seconds of compute of an instruction, by its id.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float
    maker_s: Mapping[int, float]

    @property
    def can_evict(self) -> bool:
        return self.out_bytes_per_s > 0

    def moving_s(self, size: int, *, is_away: bool) -> float:
        """Seconds of links to take `size` bytes away, unless they are, and back."""
        seconds = size / self.in_bytes_per_s + self.latency_s
        return seconds if is_away else seconds + size / self.out_bytes_per_s + self.latency_s


class EditState:
    """Temporaries, and what is done with their gaps.

    Args:
      temporaries: of the entry.
      load: int64[ticks], bytes of the device at each tick with everything kept.
      costs: float64[ticks], seconds of compute of each.
      rates: what can be done.
      depth: how many instructions that run again may follow on each other, for one that is
        needed; with 0 nothing runs again.

    Attributes:
      load, costs: the same, with what was selected.
      accesses: of each temporary the ticks at which it is needed, its making first.
      taken: of each temporary, start of a gap (an access) to what is done with it.
    """

    def __init__(
        self,
        temporaries: Sequence[Temporary],
        load: npt.NDArray[np.int64],
        costs: npt.NDArray[np.float64],
        rates: Rates,
        depth: int,
    ) -> None:
        self.temporaries = temporaries
        self.rates = rates
        self.depth = depth
        self.load = load.copy()
        self.costs = costs.copy()
        self.clock = np.concatenate([[0.0], np.cumsum(costs)])
        self.accesses = [sorted({t.written, *(r.tick for r in t.reads)}) for t in temporaries]
        self.taken: list[dict[LogicalTime, Taken]] = [{} for _ in temporaries]
        self._made_by: defaultdict[int, list[int]] = defaultdict(list)
        for t in temporaries:
            self._made_by[t.maker.id].append(t.number)
        self._written: Counter[LogicalTime] = Counter()
        for t in temporaries:
            self._written[t.written] += t.added
        # Of each temporary what it is to the clones before a tick, and the bytes that are there
        # for these beyond those at the tick.
        self._clones: defaultdict[LogicalTime, dict[int, Role]] = defaultdict(dict)
        self._on_the_way: defaultdict[LogicalTime, int] = defaultdict(int)
        self._changed: set[LogicalTime] = set()
        self._undo: list[Callable[[], None]] = []
        # What is being tried: bytes and ticks over this capacity that it adds, and seconds, of
        # which it may add so many.
        self._capacity, self._over, self._added_s, self._most_s = 0, 0, 0.0, np.inf

    def copied(self) -> EditState:
        """Returns another one with the same gaps taken."""
        other = copy(self)
        other.load, other.costs = self.load.copy(), self.costs.copy()
        other.accesses = [list(accesses) for accesses in self.accesses]
        other.taken = [dict(taken) for taken in self.taken]
        other._clones = defaultdict(dict, {t: dict(clones) for t, clones in self._clones.items()})
        other._on_the_way = self._on_the_way.copy()
        other._changed, other._undo = set(), []
        return other

    @property
    def all(self) -> frozenset[tuple[int, LogicalTime, Taken]]:
        """Temporary and start of every gap that is taken, and what is done with it."""
        taken = enumerate(self.taken)
        return frozenset((n, start, t) for n, gaps in taken for start, t in gaps.items())

    # --- taking gaps ---------------------------------------------------------------------

    def gap_end(self, n: int, start: LogicalTime) -> LogicalTime:
        """The access behind the one at `start`."""
        accesses = self.accesses[n]
        return accesses[bisect_right(accesses, start)]

    def is_away(self, n: int) -> bool:
        """Whether a copy of a temporary is on the host already."""
        return any(t.action == "evict" for t in self.taken[n].values())

    def moving_s(self, n: int) -> float:
        """Seconds of links to evict a temporary once more."""
        return self.rates.moving_s(self.temporaries[n].size, is_away=self.is_away(n))

    def evict(self, n: int, start: LogicalTime) -> bool:
        """Evicts a temporary during the gap from `start`."""
        end = self.gap_end(n, start)
        self._set_taken(n, start, Taken("evict", end))
        self._add_load(start + 1, end, -self.temporaries[n].size)
        self._undo.clear()
        return True

    def recompute(self, n: int, start: LogicalTime, capacity: int, most_s: float) -> bool:
        """Recomputes a temporary at the end of the gap from `start`, if its operands can be
        there, all that has to run again for it takes no more than `most_s` seconds, and the
        load comes nearer to `capacity` by it. Else nothing changes."""
        end = self.gap_end(n, start)
        self._capacity, self._over, self._added_s, self._most_s = capacity, 0, 0.0, most_s
        shared = self._sibling_tick(n, start, end, capacity)
        if shared is not None:
            self._insert_access(n, shared)
            end = shared
        self._set_taken(n, start, Taken("recompute", end))
        self._add_load(start + 1, end, -self.temporaries[n].size)
        if self._make_again(n, end, 0) and self._added_s <= most_s:
            self._pass_by(n, start)
            self._count_clones()
            if self._over < 0:
                self._undo.clear()
                return True
        self._roll_back()
        return False

    @property
    def dearest(self) -> list[tuple[int, LogicalTime]]:
        """Temporary and start of every gap that is taken, the dearest first."""
        gaps = [
            (self._price_s(n, start, t.action), n, start)
            for n, taken in enumerate(self.taken)
            for start, t in taken.items()
        ]
        return [(n, start) for _, n, start in sorted(gaps, reverse=True)]

    def give_back(
        self, capacity: int, among: Iterable[tuple[int, LogicalTime]] | None = None
    ) -> None:
        """Keeps those temporaries after all whose bytes turned out not to be needed.

        Args:
          capacity: bytes within which the load stays.
          among: temporary and start of the gaps that may be kept, in this order; by default
            all, the dearest first.
        """
        for n, start in self.dearest if among is None else among:
            action, end = self.taken[n][start]
            size = self.temporaries[n].size
            if start == self._last_own_access(n) or end <= start + 1:
                continue  # Not a gap of the program's: it is made for another one only.
            if self._is_passing(n, start) or self._is_passing(n, end):
                continue
            if self.load[start + 1 : end].max(initial=0) + size > capacity:
                continue
            del self.taken[n][start]
            self.load[start + 1 : end] += size
            if action == "recompute":
                if not self._siblings_made_at(n, end):
                    self.costs[end] -= self.rates.maker_s[self.temporaries[n].maker.id]
                self._set_clone(n, end, None)
                self._count_clones()
        self._undo.clear()

    def _price_s(self, n: int, start: LogicalTime, action: Action) -> float:
        t = self.temporaries[n]
        if action == "recompute":
            return self.rates.maker_s[t.maker.id]
        return self.rates.moving_s(t.size, is_away=False)

    def _last_own_access(self, n: int) -> LogicalTime:
        t = self.temporaries[n]
        return max((r.tick for r in t.reads), default=t.written)

    # --- operands ------------------------------------------------------------------------

    def _make_again(self, n: int, tick: LogicalTime, depth: int) -> bool:
        """Runs the maker of a temporary right before `tick`."""
        t = self.temporaries[n]
        if t.operands is None or depth >= self.depth:
            return False
        if n not in self._clones[tick]:
            self._set_clone(n, tick, "made")
        if self._siblings_made_at(n, tick):
            return True
        self._add_cost(tick, self.rates.maker_s[t.maker.id])
        if self._added_s > self._most_s:
            return False
        return all(self._ensure(o, tick, t.size, depth + 1) for o in t.operands)

    def _ensure(self, operand: Operand, tick: LogicalTime, size: int, depth: int) -> bool:
        """Has an operand on the device at `tick`, for something of `size` bytes."""
        n = operand.temporary
        if n is None:
            return tick < operand.until
        accesses, t = self.accesses[n], self.temporaries[n]
        at = bisect_left(accesses, tick)
        if at == 0:
            return False  # It is not made yet.
        if at < len(accesses) and accesses[at] == tick:
            return True
        start = accesses[at - 1]
        if at == len(accesses):  # It is dead.
            self._insert_access(n, tick)
            if t.size * _HOLD_SHARE <= size or t.operands is None:
                self._keep_from(n, start)
                self._add_load(start + 1, tick + 1, t.size)
                self._pass_by(n, tick)
                return t.size * _HOLD_SHARE <= size
            self._set_taken(n, start, Taken("recompute", tick))
            self._set_clone(n, tick, "passing")
            return self._make_again(n, tick, depth)
        self._insert_access(n, tick)
        found = self.taken[n].get(start)
        if found is None:
            return True
        # It comes back for this one already, and stays.
        self._set_taken(n, start, Taken(found.action, tick))
        self._add_load(tick, found.end, t.size)
        if found.action == "evict":
            return tick > start + 1
        self._keep_from(n, found.end)
        self._set_clone(n, found.end, None)
        if not self._siblings_made_at(n, found.end):
            self._add_cost(found.end, -self.rates.maker_s[t.maker.id])
        return self._make_again(n, tick, depth)

    def _is_passing(self, n: int, tick: LogicalTime) -> bool:
        """Whether clones before `tick` are all that needs a temporary there, and later none."""
        return self._clones[tick].get(n, "made") != "made"

    def _pass_by(self, n: int, tick: LogicalTime) -> None:
        """Counts a temporary with the clones before `tick`, if that is so."""
        t, role = self.temporaries[n], self._clones[tick].get(n)
        is_own = tick == t.written or any(r.tick == tick for r in t.reads)
        is_last = tick == self.accesses[n][-1] or tick in self.taken[n]
        if is_last and not is_own and role in ("made", None):
            self._set_clone(n, tick, "passing" if role else "waiting")
            self._add_load(tick, tick + 1, -t.size)

    def _keep_from(self, n: int, tick: LogicalTime) -> None:
        """Counts a temporary at `tick` like any other."""
        if self._is_passing(n, tick):
            self._set_clone(n, tick, "made" if self._clones[tick][n] == "passing" else None)
            self._add_load(tick, tick + 1, self.temporaries[n].size)

    def _count_clones(self) -> None:
        """Brings the load up to date with what is made again on the way to something else."""
        for tick in sorted(self._changed):
            before, now = self._on_the_way[tick], self._most_on_the_way(tick)
            self._on_the_way[tick] = now
            self._undo.append(partial(self._on_the_way.__setitem__, tick, before))
            self._add_load(tick, tick + 1, now - before)
        self._changed.clear()

    def _most_on_the_way(self, tick: LogicalTime) -> int:
        """By how many bytes the clones before `tick`, with all they make and what waits for them,
        take more than what is there of it at the tick. They stand in the order of the program."""
        clones = self._clones[tick]
        made: dict[int, list[int]] = {}
        for n in sorted(clones):
            if clones[n] != "waiting":
                made.setdefault(self.temporaries[n].maker.id, []).append(n)
        last: dict[int, int] = {}
        for maker, elements in made.items():
            last.update(dict.fromkeys(elements, maker))
            for operand in self.temporaries[elements[0]].operands or ():
                if operand.temporary in clones:
                    last[operand.temporary] = maker
        gone: defaultdict[int, list[int]] = defaultdict(list)
        for n, maker in last.items():
            if clones[n] != "made":
                gone[maker].append(self.temporaries[n].size)
        there = sum(self.temporaries[n].size for n in clones if clones[n] == "waiting")
        most = there
        for maker, elements in made.items():
            left = Counter(gone[maker])
            reused = 0  # Bytes of operands over which the maker writes.
            for t in (self.temporaries[n] for n in elements):
                if t.is_written_over and left[t.size]:
                    left[t.size] -= 1
                    reused += t.size
            there += sum(self.temporaries[n].size for n in elements)
            others = sum(self.temporaries[n].size for n in elements[1:])
            beside = max(0, self.temporaries[elements[0]].beside - others)
            most = max(most, there + beside - reused)
            there -= sum(gone[maker])
        stay = sum(self.temporaries[n].size for n in clones if clones[n] == "made")
        return max(0, most - stay - self._written[tick])

    def _siblings_made_at(self, n: int, tick: LogicalTime) -> bool:
        """Whether the maker of a temporary runs before `tick` for another element already."""
        return any(
            t == ("recompute", tick)
            for other in self._made_by[self.temporaries[n].maker.id]
            if other != n
            for t in self.taken[other].values()
        )

    def _sibling_tick(
        self, n: int, start: LogicalTime, end: LogicalTime, capacity: int
    ) -> LogicalTime | None:
        """The last tick within a gap at which its maker runs again anyway, if there is room to
        keep what it makes from then on."""
        ticks = [
            t.end
            for other in self._made_by[self.temporaries[n].maker.id]
            if other != n
            for t in self.taken[other].values()
            if t.action == "recompute" and start < t.end < end
        ]
        fitting = [t for t in ticks if self.load[t:end].max(initial=0) <= capacity]
        return max(fitting, default=None)

    # --- changes that can be taken back --------------------------------------------------

    def _roll_back(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._changed.clear()

    def _set_taken(self, n: int, start: LogicalTime, taken: Taken) -> None:
        before = self.taken[n].get(start)
        self.taken[n][start] = taken

        def undo() -> None:
            if before is None:
                del self.taken[n][start]
            else:
                self.taken[n][start] = before

        self._undo.append(undo)

    def _set_clone(self, n: int, tick: LogicalTime, role: Role | None) -> None:
        """Takes note of what a temporary is to the clones before `tick`; None: nothing."""
        clones = self._clones[tick]
        before = clones.get(n)
        self._changed.add(tick)

        def put(value: Role | None) -> None:
            if value is None:
                clones.pop(n, None)
            else:
                clones[n] = value

        put(role)
        self._undo.append(partial(put, before))

    def _insert_access(self, n: int, tick: LogicalTime) -> None:
        insort(self.accesses[n], tick)
        self._undo.append(lambda: self.accesses[n].remove(tick))

    def _add_load(self, start: LogicalTime, end: LogicalTime, size: int) -> None:
        over = self.load[start:end] - self._capacity
        self._over += int(np.maximum(over + size, 0).sum() - np.maximum(over, 0).sum())
        self.load[start:end] += size

        def undo() -> None:
            self.load[start:end] -= size

        self._undo.append(undo)

    def _add_cost(self, tick: LogicalTime, seconds: float) -> None:
        before = self.costs[tick]
        self._added_s += seconds
        self.costs[tick] += seconds

        def undo() -> None:  # Not by subtraction: that rounds.
            self.costs[tick] = before

        self._undo.append(undo)
