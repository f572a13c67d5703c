"""Which gaps are taken: a few greedy selections, the fastest of them first.

    terms ──► select ──► gaps that are taken ──► cost_s ──► the cheapest first
    prices of links,      (`greedy`)               evictions and fetches
    depths of chains                               scheduled as in a plan

What a choice is worth is what a step with it takes, its transfers scheduled as they will be in
the plan, but not packed, and what is charged beside that (`placing.prices`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.choice_bytes import least_bytes
from hlo_passes.edits.choices import Choices, Gap, Weight
from hlo_passes.edits.gaps import Temporary, find_temporaries
from hlo_passes.edits.greedy import DEAREST, Terms, select
from hlo_passes.edits.relaxation import lower_bound_s
from hlo_passes.edits.state import EditState, catalog
from hlo_passes.edits.writer import edits_of
from hlo_passes.memoize import memoized
from hlo_passes.placing.problem import Problem, disjoint, streamed_load
from hlo_passes.plan import (
    Decision,
    Edits,
    LogicalTime,
)
from hlo_passes.simulator.events import queue_of

# What is tried: prices of links and shares of the step's compute for which they are theirs,
# with chains of any length; then prices for all that moves, down from where next to nothing
# does, with chains of at most so many instructions. Where none is, everything can be
# evicted: no other choice makes do with less.
_LINK_PRICES = (0.01, 0.02, 0.03, 0.04, 0.05)
_LINK_SHARES = (0.25, 0.5, 0.75)
DEEPEST = 16
_DEPTHS = (1, 3, DEEPEST)
_FREE_OF_LINKS = (1e-3, 0.07, 0.1, 0.3, 1.0, DEAREST)

# Temporaries below this share of the peak are left alone: they are many and hold little.
_SMALLEST_SHARE = 1 / 4096

# How many decisions a plan tells of.
_TOLD = 256

# What part of the capacity is aimed at where no choice fits, or is packed, one after the other:
# what is taken for less covers more, and what of it is not needed is given back.
_AIMS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


@dataclass(frozen=True, eq=False)
class EditChoice:
    """Gaps that are taken.

    Attributes:
      selection: with it the load of the arena fits.
      cost_s: seconds of a step, and what is charged beside them, before packing.
    """

    selection: EditState
    cost_s: float


def least_edits(posed: Problem) -> Edits:
    """Returns the edits of `least_selection`."""
    taken = least_selection(posed)
    return Edits() if taken is None else work_on(posed).edits(taken)


@memoized
def least_selection(posed: Problem) -> EditState | None:
    """Returns the gaps with which the arena's load is as low as was found, whatever they take; all
    weights on the host are streamed. None where nothing runs."""
    work = work_on(posed)
    if not work.load.size:
        return None
    return min(work.lowest(0), key=lambda taken: int(taken.load.max()))


def edited_lower_bound_s(posed: Problem, budget: int) -> float:
    """Returns seconds that no plan within `budget` undercuts, whatever it evicts, recomputes
    and streams, with the compute in this order; infinity when there is no plan."""
    work = work_on(posed)
    choices, _ = work.choices(posed.load - posed.stored_load, may_stay=True)
    return lower_bound_s(choices, budget - posed.fixed_bytes - posed.arena.tables)


def least_load(posed: Problem) -> npt.NDArray[np.int64]:
    """Returns int64[ticks], bytes that no edits can go below at each tick by itself."""
    choices, _ = work_on(posed).choices(posed.load, may_stay=True)
    return least_bytes(replace(choices, weights=()))


class Work:
    """What there is to choose about a module without edits but for its order, whose weights on
    the host are streamed.

    Attributes:
      posed: the module.
      temporaries: of its entry.
      load: int64[ticks], bytes with every temporary kept and every weight fetched when read.
    """

    def __init__(self, posed: Problem, temporaries: tuple[Temporary, ...] | None = None) -> None:
        """
        Args:
          temporaries: of the module, where they are known.
        """
        self.posed = posed
        if temporaries is None:
            temporaries = find_temporaries(posed.ranges, posed.ticks)
        self.temporaries = temporaries
        self.load = streamed_load(posed)
        self._catalog = catalog(posed, self.temporaries)

    @property
    def smallest(self) -> int:
        """Bytes below which a temporary is left alone."""
        share = int(self.load.max(initial=0) * _SMALLEST_SHARE)
        return max(share, self.posed.arena.smallest)

    def choose(
        self,
        capacity: int,
        slots: int | None = None,
        reserve: npt.NDArray[np.int64] | int = 0,
    ) -> list[EditChoice]:
        """Chooses what to evict and what to recompute, so that the load of the arena fits.

        Args:
          capacity: bytes of the arena above its base.
          slots: at most so many streamed arrays on the device at once.
          reserve: int64[ticks], bytes of that which are left free, since packing takes more.

        Returns:
          Different choices, the fastest first; none when the load cannot be brought down to
          `capacity`.
        """
        found = list(self._chosen(capacity, capacity, slots, reserve, self.terms()))
        if not found:
            found = next(filter(None, self._aimed(capacity, slots, reserve)), [])
        return sorted(found, key=lambda choice: choice.cost_s)

    def choose_deeper(
        self, capacity: int, slots: int | None, reserve: npt.NDArray[np.int64] | int
    ) -> list[EditChoice]:
        """Chooses as `choose` does where nothing else fits, in every way there is."""
        found = (choice for among in self._aimed(capacity, slots, reserve) for choice in among)
        return sorted(found, key=lambda choice: choice.cost_s)

    def lowest(self, reserve: npt.NDArray[np.int64] | int) -> Iterator[EditState]:
        """Yields gaps with which the load is as low as it can be brought, whatever that takes."""
        yield self.select(0, Terms(_FREE_OF_LINKS[0], np.inf, 0), reserve)
        for depth in _DEPTHS:
            yield self.select(0, Terms(DEAREST, np.inf, depth), reserve)

    def _aimed(
        self, capacity: int, slots: int | None, reserve: npt.NDArray[np.int64] | int
    ) -> Iterator[list[EditChoice]]:
        """Yields the choices that take gaps until the load is far lower than it has to be."""
        prices = (0.1, DEAREST) if self.posed.can_evict else (DEAREST,)
        terms = [Terms(price, np.inf, DEEPEST) for price in prices]
        for aim in _AIMS:
            yield list(self._chosen(capacity, int(aim * capacity), slots, reserve, terms))

    def _chosen(
        self,
        capacity: int,
        aim: int,
        slots: int | None,
        reserve: npt.NDArray[np.int64] | int,
        among: Iterable[Terms],
    ) -> Iterator[EditChoice]:
        """Different choices whose load fits, of gaps taken until it is within `aim`."""
        seen: set[frozenset[object]] = set()
        for terms in among:
            taken = self.select(capacity, terms, reserve, aim)
            if taken.gaps not in seen:
                seen.add(taken.gaps)
                cost_s = taken.cost_s(capacity, slots)
                if cost_s < np.inf:
                    yield EditChoice(taken, cost_s)
            if not taken.gaps and taken.load.max(initial=0) <= capacity:
                break  # Nothing has to go.

    def terms(self) -> Iterator[Terms]:
        """Yields the terms that are tried."""
        compute_s = float(self.posed.clock[-1])
        if self.posed.can_evict:
            yield Terms(_FREE_OF_LINKS[0], np.inf, 0)
            for price in _LINK_PRICES:
                for share in _LINK_SHARES:
                    yield Terms(price, share * compute_s, DEEPEST)
        for price in _FREE_OF_LINKS if self.posed.can_evict else _FREE_OF_LINKS[-1:]:
            for depth in _DEPTHS:
                yield Terms(price, np.inf, depth)

    def select(
        self,
        capacity: int,
        terms: Terms,
        reserve: npt.NDArray[np.int64] | int = 0,
        aim: int | None = None,
    ) -> EditState:
        """See `greedy.select`."""
        return select(
            self._catalog,
            self.load + reserve,
            self.posed.costs,
            capacity,
            terms,
            self.smallest,
            aim,
        )

    def state(self, load: npt.NDArray[np.int64]) -> EditState:
        """With nothing taken."""
        return EditState(self._catalog, load, self.posed.costs, DEEPEST)

    def edits(self, taken: EditState) -> Edits:
        """What was taken, as edits of the module."""
        return edits_of(self.posed, self.temporaries, taken)

    def choices(
        self, load: npt.NDArray[np.int64], smallest: int = 0, *, may_stay: bool
    ) -> tuple[Choices, list[tuple[int, LogicalTime]]]:
        """The same as numbers, and of each gap the temporary and the tick at which it starts;
        temporaries of fewer than `smallest` bytes have none.

        To make one again takes what the maker takes alone, and its share of that where it makes
        several things: what must be there for it may be there for other reasons, too. So nothing
        that can be done is cheaper than the choices say.
        """
        posed = self.posed
        made = Counter(t.maker.id for t in self.temporaries)
        gaps: list[Gap] = []
        starts: list[tuple[int, LogicalTime]] = []
        for t in self.temporaries:
            if t.obstacle or t.size < smallest:
                continue
            again_s = None
            if t.operands is not None:
                again_s = float(posed.costs[t.written]) / made[t.maker.id]
            for start, end in pairwise(t.accesses):
                can_evict = self.posed.can_evict
                if end > start + 1 and (can_evict or again_s is not None):
                    gap = Gap(t.number, t.size, t.written + 1, start + 1, end, can_evict, again_s)
                    gaps.append(gap)
                    starts.append((t.number, start))
        out = posed.link_out if self.posed.can_evict else posed.link
        choices = Choices(
            posed.costs,
            load,
            tuple(gaps),
            tuple(Weight(m.size, tuple(disjoint(m.reads)), may_stay) for m in posed.movables),
            out.bytes_per_s * out.engines,
            posed.link.bytes_per_s * posed.link.engines,
            min(posed.link.latency_s, posed.link_out.latency_s),
            queue_of(out) == queue_of(posed.link),
            in_busy_s=posed.link_floor_s,
        )
        return choices, starts

    def decisions(self, selection: EditState, capacity: int) -> tuple[Decision, ...]:
        """What became of the temporaries that are idle while the load is over `capacity`."""
        over = np.concatenate([[0], np.cumsum(self.load > capacity)])
        clock, names = self.posed.clock, [i.name for i in self.posed.ticks.instructions]
        found: list[Decision] = []
        all_taken = selection.by_temporary
        for t in self.temporaries:
            for start, end in pairwise(t.accesses):
                if end <= start + 1 or over[end] == over[start + 1]:
                    continue
                taken = all_taken.get(t.number, {}).get(start)
                can_move = self.posed.can_evict and not t.obstacle
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
                        self.posed.moving_s(t.size) if can_move else None,
                        float(self.posed.costs[t.written]) if can_repeat else None,
                        obstacle,
                    )
                )
        found.sort(key=lambda d: (-d.size, d.buffer, -d.idle_s))
        return tuple(found[:_TOLD])


@memoized
def work_on(posed: Problem) -> Work:
    """Returns the `Work` of a problem, made once."""
    return Work(posed)
