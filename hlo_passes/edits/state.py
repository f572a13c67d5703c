"""Gaps that are taken: what that does to the bytes and the seconds of each tick.

To run an instruction again, its operands have to be there: one that is away comes back then
already, and stays; one that is dead is held, or made again as well. How, `gap_state.h` says: some
ten thousand gaps are tried for a plan, so that is written in C++.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.edits._gap_state import Catalog, State
from hlo_passes.edits.gaps import Temporary, written_over
from hlo_passes.placing.eviction import eviction_rows
from hlo_passes.placing.prefetch import LINK_MARGIN, fetch_rows
from hlo_passes.placing.problem import Problem, fetches
from hlo_passes.plan import LogicalTime
from hlo_passes.simulator.events import queue_of

Action = Literal["evict", "recompute"]


class Taken(NamedTuple):
    """A gap that is not kept: `action`, and the tick at which the bytes are there again."""

    action: Action
    end: LogicalTime


class Fitted(NamedTuple):
    """A selection's transfers, in ticks of the module without edits.

    Attributes:
      packed: bytes of the packed arena, above its base.
      cost_s: predicted seconds of a step, and what is charged beside them.
      departures: of each eviction, by the number of its temporary, or -1 less its own among those
        that leave whatever is taken, the ticks at which it is issued and waited for.
      starts: of each fetch the number of its temporary, or -1 less that of the movable, with the
        tick of its first reader; and the tick at which it is issued, in this order. What runs again
        in front of a reader of the same may have one of its own.
    """

    packed: int
    cost_s: float
    departures: Mapping[int, tuple[LogicalTime, LogicalTime]]
    starts: Sequence[tuple[tuple[int, LogicalTime], LogicalTime]]


def catalog(posed: Problem, temporaries: tuple[Temporary, ...]) -> Catalog:
    """What all states of the entry of a module have in common: its temporaries, and what moves
    whatever is taken."""
    makers: dict[int, int] = {}
    arena = posed.arena
    large = [r for k, r in enumerate(arena.temporaries) if k not in arena.small]
    number = {id(r): k for k, r in enumerate(large)}
    dataflow, holders = posed.ranges.dataflow, posed.ticks.holders
    # What is read behind the last tick is part of what the program hands back.
    end = posed.ticks.end
    returned = {t.number for t in temporaries if any(r.tick == end for r in t.reads)}
    moved = fetches(posed.movables)
    weights = {m.buffer: k for k, m in enumerate(posed.movables)}
    rows = [
        (
            t.size,
            t.added,
            t.beside,
            makers.setdefault(t.maker.id, len(makers)),
            number.get(id(holders.get(dataflow.value_at(t.handle).id)), -1),
            t.written,
            posed.costs[t.written],
            posed.charges[t.written],
            bool(t.obstacle) or t.number in returned,
            t.operands is not None,
            [r.tick for r in t.reads],
            [
                (-2 - weights.get(o.weight, -1) if o.temporary is None else o.temporary, o.until)
                for o in t.operands or ()
            ],
            over,
        )
        for t, over in zip(
            temporaries,
            written_over(dataflow, posed.machine.platform, temporaries),
            strict=True,
        )
    ]
    holding = {r.name: k for k, r in enumerate(large) if r.kind == "temp"}
    # The last copy of an argument is the one in whose bytes its successor lies.
    holding |= {f.buffer: len(large) + k for k, f in enumerate(moved)}
    into, out = posed.link, posed.link_out
    return Catalog(
        rows,
        np.array([m.size for m in posed.movables], np.int64),
        (posed.costs, posed.in_busy, posed.out_busy),
        (
            into.bytes_per_s,
            into.latency_s,
            out.bytes_per_s,
            out.latency_s,
            LINK_MARGIN,
            posed.prices.byte_s,
            queue_of(into) == queue_of(out),
            posed.can_evict,
        ),
        (
            fetch_rows(moved),
            np.array([weights[f.buffer] for f in moved], np.int64),
            eviction_rows(posed.evictions),
        ),
        (
            np.array([(r.size, *r.live_range) for r in large], np.int64).ravel(),
            np.array([holding.get(e.holder, -1) for e in posed.evictions], np.int64),
            np.array(sorted(_joined(posed)), np.int64),
            arena.alignment,
            arena.in_order,
            arena.smallest,
            arena.table,
        ),
    )


def _joined(posed: Problem) -> Iterator[LogicalTime]:
    """The ticks at which something else is written into the bytes of what shares the arena."""
    dataflow, tick_of = posed.ranges.dataflow, posed.ticks.tick_of
    members: defaultdict[int, list[LogicalTime]] = defaultdict(list)
    for value, resident in posed.ticks.holders.items():
        members[id(resident)].append(tick_of[dataflow.values[value].instruction.id])
    for ticks in members.values():
        yield from sorted(ticks)[1:]


class EditState:
    """Temporaries, and what is done with their gaps.

    Args:
      of: the temporaries.
      load: int64[ticks], bytes of the device at each tick with everything kept.
      costs: float64[ticks], seconds of compute of each.
      depth: how many instructions that run again may follow on each other, for one that is
        needed; with 0 nothing runs again.

    Attributes:
      load, costs: the same, with what was selected.
    """

    def __init__(
        self,
        of: Catalog,
        load: npt.NDArray[np.int64],
        costs: npt.NDArray[np.float64],
        depth: int,
    ) -> None:
        self._become(load, costs)
        self._state = State(of, self.load, self.costs, depth)

    def _become(self, load: npt.NDArray[np.int64], costs: npt.NDArray[np.float64]) -> None:
        self.load, self.costs = load.astype(np.int64), costs.copy()

    def copied(self) -> EditState:
        """Returns another one with the same gaps taken."""
        return self.with_load(0)

    def with_load(self, more: npt.NDArray[np.int64] | int) -> EditState:
        """Returns another one with the same gaps taken, and so many bytes more at each tick."""
        other = EditState.__new__(EditState)
        other._become(self.load + more, self.costs)
        other._state = self._state.copied(other.load, other.costs)
        return other

    @property
    def gaps(self) -> frozenset[tuple[int, LogicalTime, Action, LogicalTime]]:
        """Of every gap that is taken the temporary, its start, what is done with it, its end."""
        return frozenset(self._state.gaps())

    @property
    def by_temporary(self) -> Mapping[int, Mapping[LogicalTime, Taken]]:
        """Of each temporary with gaps that are taken, the start of each (an access) to what is
        done with it, in order."""
        found: dict[int, dict[LogicalTime, Taken]] = {}
        for n, start, action, end in self._state.gaps():
            found.setdefault(n, {})[start] = Taken(action, end)
        return found

    def accesses(self, n: int) -> list[LogicalTime]:
        """The ticks at which a temporary is needed, its making first."""
        return self._state.accesses(n)

    def evict(self, n: int, start: LogicalTime) -> None:
        """Evicts a temporary during the gap from `start`."""
        self._state.evict(n, start)

    def recompute(self, n: int, start: LogicalTime, capacity: int, most_s: float) -> bool:
        """Recomputes a temporary at the end of the gap from `start`, if its operands can be
        there, all that has to run again for it costs no more than `most_s` seconds, and the
        load comes nearer to `capacity` by it. Else nothing changes."""
        return self._state.recompute(n, start, capacity, most_s)

    def take(self, capacity: int, link_price: float, link_s: float, smallest: int) -> None:
        """Takes gaps until the load is within `capacity`; see `greedy`."""
        self._state.take(capacity, link_price, link_s, smallest)

    def improve(
        self,
        capacity: int,
        packed: int,
        terms: Iterable[tuple[float, float]],
        smallest: int,
        slots: int | None,
        times: int,
    ) -> None:
        """Searches for gaps with which a step takes less, so many times.

        Args:
          packed: bytes above which the compiler's packing, as far as it is known, counts as slower.
          terms: of which gaps are taken: a link's price, and seconds at that price.
          smallest: temporaries of fewer bytes are left alone.
        """
        rows = np.array(list(terms), np.float64).ravel()
        self._state.improve(capacity, packed, rows, smallest, -1 if slots is None else slots, times)

    def cost_s(self, capacity: int, slots: int | None) -> float:
        """Predicts the step's time, its transfers scheduled as they will be in the plan, but not
        packed, and what is charged beside it; infinity where it does not fit. What the load has in
        reserve is not lent to transfers either."""
        return self._state.cost(capacity, -1 if slots is None else slots)

    def fitted(self, capacity: int, slots: int | None) -> Fitted:
        """Schedules the transfers, with fewer bytes for them until the compiler's packing of the
        arena is within `capacity`, as far as it is known: what it goes by is known only of the
        module that is written."""
        found = self._state.fitted(capacity, -1 if slots is None else slots)
        packed, cost_s, departures, fetches = found
        return Fitted(
            packed,
            cost_s,
            {of: (start, done) for of, start, done in departures},
            [((of, first), start) for of, first, start in fetches],
        )

    @property
    def dearest(self) -> list[tuple[int, LogicalTime]]:
        """Temporary and start of every gap that is taken, the dearest first."""
        return self._state.dearest()

    def give_back(
        self, capacity: int, among: Iterable[tuple[int, LogicalTime]] | None = None
    ) -> None:
        """Keeps those temporaries after all whose bytes turned out not to be needed.

        Args:
          capacity: bytes within which the load stays.
          among: temporary and start of the gaps that may be kept, in this order; by default
            all, the dearest first.
        """
        self._state.give_back(capacity, self.dearest if among is None else list(among))
