"""The fastest choice of evictions and recomputations whose arena fits when it is packed.

    choices of all orders ──► the fastest are packed ──► one fits? ──► done
       ▲                          │ too large
       │                          ├─ cut where more was live than counted; searched on from there
       └─ more is left free ◄─────┘     does not even the least that is known come near? no plan
              └─ none fits ──► choose for far less

A choice whose load fits may take more when it is packed. Where other buffers lie in the bytes of
outputs and donated arguments than before, more is live than had been counted, and a search goes on
with that, at those ticks. The rest is chaotic: of choices that differ little one fits, and the
other does not. So several are packed; where one does not fit, it is known how wrong was what had
been predicted of its packing, and the search counts that, too; and all choose again with more left
free everywhere. From what fits then, a search goes on to what is faster and still fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.choice import EditChoice, work_on
from hlo_passes.edits.search import EditSearch, affordable
from hlo_passes.fitting.predicted import as_predicted, first_ticks
from hlo_passes.fitting.solution import Solution, edited, placed
from hlo_passes.placing import placement
from hlo_passes.placing.problem import Problem, streamed_load
from hlo_passes.plan import Edits

# Parts of the arena that are left free, and how many choices are packed then, the fastest first: at
# first with none, then with all others together. How close to the fastest one is soon enough.
_STAGES = (
    ((0,), 3),
    ((1 / 4096, 1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4), 6),
)
_NEAR = 1.02

# From how many choices, the fastest, better ones are searched for; and of how many it is predicted
# what they are packed to. An order whose choices are slower than the fastest by more than this
# factor is given up.
_IMPROVED = 2
_LIKELY = 8
_FAR = 1.2

# By what part of the arena a packing may be predicted to be above it, and be tried all the same.
_HOPELESS = 1 / 8

# Where a packing was above the capacity, how often a search goes on from there.
_REPAIRS = 2

# How many packings it takes at most to give back what need not go.
_GIVEN_BACK = 24

# How often a choice that is packed is improved, and by which factor it has to be.
_ROUNDS = 6
_WORTH_IT = 1.002

# How much longer is searched where what is packed takes far longer than the fastest.
_LONGER = 5

# Where none of them is packed within the budget: parts of the arena that are left free, and how
# many choices are packed that were made for far less, for each of them.
_TIGHT = (0, 1 / 32, 1 / 16)
_PACKED_TIGHT = 2


def fit_with_edits(
    orders: Iterable[tuple[Problem, Edits]],
    budget: int,
    slots: int | None,
    is_possible: Callable[[], bool],
) -> Solution | None:
    """Evicts and recomputes until the packed arena fits; None where no choice is known to.

    Args:
      orders: the module in some orders, each with what put it there, which the result is to
        say. The fastest choice that is found in any of them is taken; where there is none, the
        one with least live at once is gone through first once more.
      budget: device bytes.
      slots: at most so many streamed arrays on the device at once.
      is_possible: whether it is worth going on where the first choices do not fit.
    """
    tried = [_Fitting(posed, order, budget, slots) for posed, order in orders]
    best, cheapest_s = _first_that_packs(tried, is_possible)
    if best is None and is_possible():
        by_peak = sorted(tried, key=lambda fitting: fitting.peak)
        best, cheapest_s = next(filter(None, (fitting.tight() for fitting in by_peak)), None), 0.0
    if best is None:
        return None
    if best.cost_s > cheapest_s * _FAR:
        nearest = [f.nearest for f in tried if f.nearest is not None]
        near = [c.fitting.searched(c.choice, c.free, _LONGER) for c in nearest]
        best = _fastest_packed(near, len(near), best) or best
    if best.cost_s > cheapest_s * _NEAR:
        better = best.fitting.improved(best, cheapest_s)
        # Where what is predicted of packing does not lead there, the packing itself has to tell.
        if better is best or better.cost_s > cheapest_s * _FAR:
            better = best.fitting.given_back(better)
        best = better
    return best.solution


def _first_that_packs(
    tried: Sequence[_Fitting], is_possible: Callable[[], bool]
) -> tuple[_Packed | None, float]:
    """The fastest choice in any order, as far as is known, that fits when it is packed; and the
    seconds of the fastest of all, packed or not. Those that leave more free are looked at, all
    together, where none that leaves nothing comes near."""
    best, cheapest_s = None, np.inf
    for stage, (parts, packings) in enumerate(_STAGES):
        if stage and best is None and not is_possible():
            break
        found = [c for part in parts for c in _candidates(tried, part)]
        if not found:
            break  # The load cannot be brought down so far.
        found.sort(key=lambda c: c.choice.cost_s)
        cheapest_s = min(cheapest_s, found[0].choice.cost_s)
        fast = {id(c.fitting) for c in found if c.choice.cost_s <= cheapest_s * _FAR}
        tried = [fitting for fitting in tried if id(fitting) in fast]
        begun = found[:_IMPROVED]
        if stage:
            begun += [c for c in found[_IMPROVED:] if not c.over][:_IMPROVED]
        found += [c.fitting.searched(c.choice, c.free) for c in begun]
        best = _fastest_packed(found, packings, best)
        if best is not None and best.cost_s <= cheapest_s * _NEAR:
            break
    return best, cheapest_s


def _candidates(tried: Sequence[_Fitting], part: float) -> list[_Candidate]:
    """The fastest choices that leave such a part of the arena free, in any order."""
    choices = [(c, f) for f in tried for c in f.choices(part) if not f.has_packed(c)]
    choices.sort(key=lambda pair: pair[0].cost_s)
    return [f.candidate(c, int(part * f.capacity)) for c, f in choices[:_LIKELY]]


def _fastest_packed(
    candidates: Iterable[_Candidate], count: int, best: _Packed | None = None
) -> _Packed | None:
    """The fastest that fits among so many candidates, and `best`. First what is probably packed
    within the capacity, then what is probably not."""
    likely = {
        (id(c.fitting), c.choice.selection.gaps): c
        for c in candidates
        if c.over <= _HOPELESS * c.fitting.capacity and not c.fitting.has_packed(c.choice)
    }
    fastest = sorted(likely.values(), key=lambda c: (c.over > 0, c.choice.cost_s))
    for candidate in fastest[:count]:
        if best is None or candidate.choice.cost_s < best.cost_s:
            found = candidate.fitting.packed_or_repaired(candidate, best)
            best = min(filter(None, (best, found)), key=lambda p: p.cost_s, default=None)
    return best


class _Candidate(NamedTuple):
    """A choice for a module in one order, with `free` bytes of the arena left free, int64[ticks]
    bytes for what is live `uncounted`, and by how many bytes its packing is probably above it.
    """

    fitting: _Fitting
    choice: EditChoice
    free: int
    uncounted: npt.NDArray[np.int64]
    over: int


class _Excess(NamedTuple):
    """By how many bytes a packing is above the capacity; and int64[ticks], the bytes that are live
    then, which are more than was counted where the compiler puts other buffers into the bytes of
    outputs and donated arguments than before."""

    over: int
    load: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Packed:
    """A choice that fits, and the bytes that were left free for it."""

    fitting: _Fitting
    solution: Solution
    chosen: EditChoice
    free: int

    @property
    def cost_s(self) -> float:
        return self.solution.choice.cost_s


class _Fitting:
    """The module in one order."""

    def __init__(self, posed: Problem, order: Edits, budget: int, slots: int | None) -> None:
        self._posed, self._order, self._budget, self._slots = posed, order, budget, slots
        self.capacity = budget - posed.fixed_bytes - posed.arena.base
        self._work = work_on(posed)
        self._search = EditSearch(self._work, self.capacity, slots)
        self._tried: set[frozenset[object]] = set()
        self._uncounted = np.zeros_like(self._work.load)
        # Of what was found above the capacity what is the closest to it.
        self.nearest: _Candidate | None = None

    @property
    def peak(self) -> int:
        """The most bytes that are live at once with nothing edited."""
        return int(self._work.load.max(initial=0))

    def choices(self, part: float) -> list[EditChoice]:
        """Different ways to bring the load down.

        Args:
          part: of the arena that is left free.
        """
        reserve = self._uncounted + int(part * self.capacity)
        found = self._work.choose(self.capacity, self._slots, reserve)
        found += self._search.rounded(reserve)
        return list({choice.selection.gaps: choice for choice in found}.values())

    def has_packed(self, choice: EditChoice) -> bool:
        return choice.selection.gaps in self._tried

    def candidate(self, choice: EditChoice, free: int = 0) -> _Candidate:
        over = max(0, self._search.over(choice.selection))
        return _Candidate(self, choice, free, self._uncounted, over)

    def searched(self, choice: EditChoice, free: int = 0, longer: int = 1) -> _Candidate:
        """What a search from a choice finds that is faster, or packed closer to the capacity."""
        found = self.candidate(self._search.improved(choice.selection, longer=longer), free)
        if found.over and (self.nearest is None or found.over < self.nearest.over):
            self.nearest = found
        return found

    def tight(self) -> _Packed | None:
        """A choice that fits among those that take more gaps than the load alone needs."""
        for part in _TIGHT:
            free = int(part * self.capacity)
            reserve = self._uncounted + free
            choices = self._work.choose_deeper(self.capacity, self._slots, reserve)[:_IMPROVED]
            found = [self.searched(choice, free) for choice in choices]
            best = _fastest_packed(found, _PACKED_TIGHT)
            if best is not None:
                return best
        lowest = [
            EditChoice(taken, taken.cost_s(self.capacity, self._slots))
            for taken in self._work.lowest(self._uncounted)
        ]
        found = [*map(self.searched, lowest), *map(self.candidate, lowest)]
        return _fastest_packed(found, _PACKED_TIGHT)

    def packed_or_repaired(self, candidate: _Candidate, best: _Packed | None) -> _Packed | None:
        """A choice if it fits when it is packed, with more taken where it does not; None where it
        does not then, or would be no faster than `best`."""
        chosen, free = candidate.choice, candidate.free
        if self.has_packed(chosen):
            return None
        self._tried.add(chosen.selection.gaps)
        found = self._packed(chosen, free)
        if isinstance(found, Solution):
            return _Packed(self, found, chosen, free)
        return self._repaired(candidate, found, np.inf if best is None else best.cost_s)

    def improved(self, best: _Packed, cheapest_s: float) -> _Packed:
        """What a search from a choice that is packed finds that is faster and packed as well. What
        was left free for its packing may be used as far as the next one fits.

        Args:
          cheapest_s: seconds of the fastest that is known, packed or not; where `best` takes far
            longer, it is searched for longer.
        """
        taken, within = best.chosen.selection.with_load(-best.free), self.capacity
        for _ in range(_ROUNDS):
            longer = _LONGER if best.cost_s > cheapest_s * _FAR else 1
            chosen = self._search.improved(taken, within, longer)
            predicted = self.capacity + self._search.over(chosen.selection)
            if chosen.cost_s * _WORTH_IT > best.cost_s or predicted > within:
                break
            if self.has_packed(chosen):
                break
            self._tried.add(chosen.selection.gaps)
            found = self._packed(chosen, 0)
            if isinstance(found, Solution):
                best, taken = _Packed(self, found, chosen, 0), chosen.selection
            else:
                within = predicted - found.over
        return best

    def given_back(self, best: _Packed) -> _Packed:
        """Keeps after all what need not go, as XLA packs it: of all that is taken, of half of it,
        and so on, the dearest first."""
        chosen, taken = best.chosen, best.chosen.selection.with_load(-best.free)
        parts = deque([taken.dearest])
        left = affordable(_GIVEN_BACK, len(self._work.load))
        while parts and left:
            now = taken.by_temporary
            part = [(n, start) for n, start in parts.popleft() if start in now.get(n, {})]
            less = taken.copied()
            less.give_back(self.capacity, part)
            if less.gaps == taken.gaps or self._search.over(less) > _HOPELESS * self.capacity:
                continue  # Even their load has no room, or their packing.
            left -= 1
            found = self._packed(replace(chosen, selection=less), 0)
            if isinstance(found, Solution) and found.choice.cost_s <= best.cost_s:
                chosen = replace(chosen, selection=less, cost_s=found.choice.cost_s)
                best, taken = _Packed(self, found, chosen, 0), less
            elif len(part) > 1:
                parts += part[: len(part) // 2], part[len(part) // 2 :]
        return best

    def _repaired(self, candidate: _Candidate, found: _Excess, best_s: float) -> _Packed | None:
        """What a search from a choice that does not fit finds, once it is known where more was live
        than had been counted, and by how much its packing was not what was predicted; None where
        that is not packed within the capacity either, or a step takes `best_s` seconds then."""
        taken, free, uncounted = candidate.choice.selection, candidate.free, candidate.uncounted
        for _ in range(_REPAIRS):
            live = int(found.load.max(initial=0)) - self.capacity
            wrong = found.over - max(self._search.over(taken), live)
            more = np.where(found.load > self.capacity, found.load - taken.load + free, 0)
            more = np.maximum(more, 0)
            uncounted = uncounted + more
            self._uncounted = np.maximum(self._uncounted, uncounted)
            taken = taken.with_load(more)
            chosen = self._search.improved(taken, self.capacity - max(0, wrong))
            if self.has_packed(chosen) or chosen.cost_s >= best_s:
                return None
            self._tried.add(chosen.selection.gaps)
            packed = self._packed(chosen, free)
            if isinstance(packed, Solution):
                return _Packed(self, packed, chosen, free)
            taken, found = chosen.selection, packed
        return None

    def _packed(self, chosen: EditChoice, free: int) -> Solution | _Excess:
        """Packs a choice.

        Args:
          free: bytes that transfers leave free.
        """
        edits = self._work.edits(chosen.selection)
        again = edited(self._posed, edits)
        choice = self._as_predicted(chosen, again) or placed(again, self._budget, self._slots, free)
        if not isinstance(choice, placement.Choice):
            return _Excess(choice, self._load_of(again))
        done = replace(edits, order=self._order.order)
        decisions = self._work.decisions(chosen.selection, self.capacity)
        return Solution(again, choice, done, self._posed, decisions, chosen.selection)

    def _as_predicted(self, chosen: EditChoice, again: Problem) -> placement.Choice | None:
        """With the transfers as they were scheduled when its packing was predicted, if that comes
        within the capacity."""
        found = chosen.selection.fitted(self.capacity, self._slots)
        if found.packed > self.capacity:
            return None
        return as_predicted(found, self._work.temporaries, self._posed, again, self._budget)

    def _load_of(self, again: Problem) -> npt.NDArray[np.int64]:
        """The load of the edited module at the ticks of the one that was edited: what runs again
        counts where it is needed."""
        return np.maximum.reduceat(streamed_load(again), first_ticks(self._posed, again)[:-1])
