"""The fastest choice of evictions and recomputations whose arena fits when it is packed.

    choose ──► pack the fastest ──► one fits? ──► search for better ──► done
       ▲             │ too large, at some ticks             ▲
       │             ├─ repair: more is taken there ───────┤
       └─ reserve ◄──┘ that many bytes stay free there      │
              └─ none left ──► choose for far less, and give back what packs ──┘

A choice whose load fits may take more when it is packed. Where it does, more is taken at those
ticks; else more is left free there, and all choose again; and also where a choice fits that is
much slower than one that nearly did. What was taken for far less than the budget is given back,
half by half, as long as the rest packs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.choice import EditChoice, work_on
from hlo_passes.edits.greedy import Terms, complete
from hlo_passes.edits.search import EditSearch
from hlo_passes.fitting.solution import Solution, edited, placed
from hlo_passes.placing import placement
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Edits

# How often choices are made anew, with more bytes left free where packing exceeded the budget;
# how often at most after one fitted; and how close to the fastest that one is soon enough.
_ROUNDS = 8
_ROUNDS_MORE = 2
_NEAR = 1.02

# What part of the arena is left free at least, where packing failed or, if that is not known,
# everywhere.
_PARTS = 128

# How many choices are packed each time, the fastest first, and on the terms of how many the
# next ones are made.
_PACKED = 3
_AGAIN = 8

# How often more is taken where a packing was above the capacity.
_REPAIRS = 4

# How many packings it takes at most to give back what was taken for far less, and from how much
# above the fastest choice that is known that is done.
_GIVEN_BACK = 32
_SLOW = 1.05

# Where none of them is packed within the budget: parts of the arena that are left free, and how
# many choices are packed that were made for far less.
_TIGHT = (0, 1 / 32, 1 / 16)
_PACKED_TIGHT = 12

type _Bytes = npt.NDArray[np.int64]  # One number a tick.


def fit_with_edits(
    orders: Iterable[tuple[Problem, Edits]], budget: int, slots: int | None, search_s: float
) -> Solution | None:
    """Evicts and recomputes until the packed arena fits; None where no choice is known to.

    Args:
      orders: the module in some orders, each with what put it there, which the result is to
        say. The fastest choice that is found in any of them is taken; where there is none, the
        one with least live at once is gone through first once more.
      budget: device bytes.
      slots: at most so many streamed arrays on the device at once.
      search_s: seconds to search for a faster choice than the first that fits.
    """
    best: _Packed | None = None
    fitting: _Fitting | None = None
    tried: list[_Fitting] = []
    terms: list[Terms] = []
    for posed, order in orders:
        tried.append(_Fitting(posed, order, budget, slots, terms))
        found = tried[-1].best(best)
        if found is not best:
            best, fitting = found, tried[-1]
        terms = tried[-1].terms  # What is good in one order is so in the next one.
    fastest_s = min((f.fastest_s for f in tried if f.fastest_s < np.inf), default=0.0)
    for last in sorted(tried, key=lambda f: f.peak) if best is None else ():
        best, fitting = last.tight(), last
        if best is not None:
            break
    if fitting is None or best is None:
        return None
    if best.step_time_s > fastest_s * _SLOW:
        best = fitting.given_back(best)
    return fitting.improved(best, search_s)


@dataclass(frozen=True, eq=False)
class _Packed:
    """A choice that fits, and the bytes that were left free for it."""

    fitted: Solution
    chosen: EditChoice
    reserve: _Bytes

    @property
    def step_time_s(self) -> float:
        return self.fitted.choice.step_time_s


class _Fitting:
    def __init__(
        self, posed: Problem, order: Edits, budget: int, slots: int | None, terms: list[Terms]
    ) -> None:
        self._posed, self._order, self._budget, self._slots = posed, order, budget, slots
        self._capacity = budget - posed.fixed_bytes - posed.arena.base
        self._work = work_on(posed)
        self._search = EditSearch(self._work, self._capacity, slots)
        self.terms = terms
        self.fastest_s = np.inf  # Of all choices, packed or not.
        self._tried: set[frozenset[object]] = set()

    @property
    def peak(self) -> int:
        """The most bytes that are live at once with nothing edited."""
        return int(self._work.load.max(initial=0))

    def improved(self, best: _Packed, search_s: float) -> Solution:
        """The result of a search from `best`, a choice in this order."""
        if search_s <= 0:
            return best.fitted
        better = self._search.improved(best.chosen, best.reserve, search_s)
        improved = self._packed(better) if better is not best.chosen else None
        if isinstance(improved, Solution) and improved.choice.step_time_s < best.step_time_s:
            return improved
        return best.fitted

    def best(self, best: _Packed | None) -> _Packed | None:
        """The fastest choice that fits; `best`, known from another order, if none is faster."""
        fastest_s = 0.0  # Of what is still to be packed, as far as is known.
        rounds_left = _ROUNDS
        reserve = np.zeros_like(self._work.load)
        more = np.full_like(reserve, self._capacity // _PARTS)
        while rounds_left and (best is None or best.step_time_s > fastest_s * _NEAR):
            rounds_left -= 1
            choices = self._choices(reserve)
            if not choices:  # The load cannot be brought down so far.
                more = more // 2
                reserve = np.maximum(reserve - more, 0)
                if not more.any() or not reserve.any():
                    break
                continue
            fastest_s = min(fastest_s or np.inf, choices[0].step_time_s)
            self.fastest_s = min(self.fastest_s, fastest_s)
            found, excess = self._first_that_packs(choices, best, reserve)
            if found is not None:
                rounds_left = min(rounds_left, _ROUNDS_MORE)
                if best is None or found.step_time_s < best.step_time_s:
                    best = found
            if excess is not None and excess.any():
                more = np.where(excess > 0, np.maximum(excess, self._capacity // _PARTS), 0)
            elif excess is None:
                more = 2 * more  # It made no difference to any choice.
            reserve = reserve + more
        return best

    def tight(self) -> _Packed | None:
        """A choice that fits among those that take more gaps than the load alone needs."""
        for part in _TIGHT:
            free = int(part * self._capacity)
            choices = self._work.choose_deeper(self._capacity - free, self._slots)
            reserve = np.full_like(self._work.load, free)
            found, _ = self._first_that_packs(choices, None, reserve, _PACKED_TIGHT)
            if found is not None:
                return found
        lowest = (EditChoice(None, taken, 0.0) for taken in self._work.lowest())
        nothing = np.zeros_like(self._work.load)
        return self._first_that_packs(list(lowest), None, nothing, _PACKED_TIGHT)[0]

    def given_back(self, best: _Packed) -> _Packed:
        """Keeps after all what need not go, as XLA packs it: of all that is taken, of half of it,
        and so on, the dearest first."""
        chosen, capacity = best.chosen, self._capacity
        taken = chosen.taken.copied()
        taken.load -= best.reserve
        parts = deque([taken.dearest])
        left = _GIVEN_BACK
        while parts and left:
            now = taken.taken
            part = [(n, start) for n, start in parts.popleft() if start in now.get(n, {})]
            less = taken.copied()
            less.give_back(capacity, part)
            if less.all == taken.all:
                continue  # Even their load has no room.
            left -= 1
            found = self._packed(replace(chosen, taken=less))
            if isinstance(found, Solution) and found.choice.step_time_s <= best.step_time_s:
                chosen = replace(chosen, taken=less, step_time_s=found.choice.step_time_s)
                best, taken = _Packed(found, chosen, np.zeros_like(best.reserve)), less
            elif len(part) > 1:
                parts += part[: len(part) // 2], part[len(part) // 2 :]
        return best

    def _repaired(self, chosen: EditChoice, excess: _Bytes, best_s: float) -> _Packed | None:
        """The same gaps, and more where the packing is above the capacity, until it fits; None
        where it does not, or where a step takes `best_s` seconds then."""
        taken, reserve = chosen.taken.copied(), np.zeros_like(excess)
        for _ in range(_REPAIRS):
            more = np.where(excess > 0, np.maximum(excess, self._capacity // _PARTS), 0)
            taken.load += more
            reserve += more
            complete(taken, self._capacity, self._work.smallest)
            seconds = taken.step_seconds(self._capacity, self._slots)
            if not more.any() or seconds >= best_s:
                return None
            repaired = EditChoice(chosen.terms, taken.copied(), seconds)
            found = self._packed(repaired)
            if isinstance(found, Solution):
                return _Packed(found, repaired, reserve)
            excess = found
        return None

    def _choices(self, reserve: _Bytes) -> list[EditChoice]:
        """Different ways to bring the load down, the fastest first."""
        choices = self._work.choose(self._capacity, self._slots, reserve, self.terms)
        self.terms = [c.terms for c in choices[:_AGAIN] if c.terms is not None] or self.terms
        if choices and not choices[0].waits:
            return choices
        rounded = self._search.rounded(reserve)
        return sorted((*choices, *rounded), key=lambda c: c.step_time_s)

    def _first_that_packs(
        self,
        choices: list[EditChoice],
        best: _Packed | None,
        reserve: _Bytes,
        most: int = _PACKED,
    ) -> tuple[_Packed | None, _Bytes | None]:
        """The fastest of the first `most` choices that fits; and of those that do not by how many
        bytes the nearest is above the capacity, at each tick. None where there was none."""
        best_s = np.inf if best is None else best.step_time_s
        faster = (c for c in choices if c.step_time_s < best_s)
        promising = {c.taken.all: c for c in faster if c.taken.all not in self._tried}
        excesses: list[_Bytes] = []
        fitting: _Packed | None = None
        for chosen in islice(promising.values(), most):
            self._tried.add(chosen.taken.all)
            found = self._packed(chosen)
            if isinstance(found, Solution):
                fitting = _Packed(found, chosen, reserve)
                break
            excesses.append(found)
            if len(excesses) == 1:
                repaired = self._repaired(chosen, found, best_s)
                if repaired is not None:
                    fitting = repaired
                    break
        return fitting, min(excesses, key=lambda e: int(e.max(initial=0)), default=None)

    def _packed(self, chosen: EditChoice) -> Solution | _Bytes:
        """Or by how many bytes the packing is above the capacity at each tick."""
        edits = self._work.edits(chosen.taken)
        again = edited(self._posed, edits)
        choice = placed(again, self._budget, self._slots)
        if not isinstance(choice, placement.Choice):
            return before_edits(self._posed, again, choice)
        done = replace(edits, order=self._order.order)
        decisions = self._work.decisions(chosen.taken, self._capacity)
        return Solution(again, choice, done, self._posed, decisions)


def before_edits(
    posed: Problem, edited: Problem, excess: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Bytes at the ticks of a module from those of an edited one. What is new stands in front of
    what needs it."""
    at = {i.name: tick for tick, i in enumerate(posed.ticks.instructions)}
    found = np.zeros(posed.ticks.end, np.int64)
    tick = posed.ticks.end - 1
    for i, above in zip(reversed(edited.ticks.instructions), excess[::-1], strict=True):
        tick = at.get(i.name, tick)
        found[tick] = max(found[tick], above)
    return found
