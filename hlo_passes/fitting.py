"""How a module comes within its budget: which weights stay, and what is done to the entry.

stream weights ──► hidden by compute, and it fits? done
     │
     ▼
another order ──► fits? done
     │
     ▼
evict, recompute ──► the fastest choice whose arena fits when it is packed
     │
     ▼
all that lowers the load, whatever it takes ──► or there is no plan
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from hlo_passes import edit_choice, edit_writer, edits, placement, problem, reorder
from hlo_passes.edit_search import EditSearch
from hlo_passes.errors import LiveBuffer, MemoryBudgetError
from hlo_passes.issued import excess_of
from hlo_passes.plan import Decision, Edits
from hlo_passes.problem import Problem
from hlo_passes.selection import Terms

# A choice replaces another one when it is faster by more than this factor.
_WORTH_IT = 0.99

# How often choices are made anew, with more bytes left free where packing exceeded the budget;
# how often at most after one fitted; and how close to the fastest that one is soon enough.
_ROUNDS = 12
_ROUNDS_MORE = 4
_NEAR = 1.02

# What part of the arena is left free everywhere when it is not known where packing failed.
_PARTS = 64

# What of the arena is left free, one after the other, where a packing turns out otherwise.
_LEFT_FREE = (0, 1 / 64)

# How often a least budget is raised by what its packing takes more.
_LEAST_ROUNDS = 8

# How many choices are packed each time, the fastest first, and on the terms of how many the
# next ones are made.
_PACKED = 3
_AGAIN = 8


@dataclass(frozen=True, eq=False)
class Fitted:
    """A module that was edited, if it had to be, and how its budget is shared.

    Attributes:
      posed: the edited module.
      edited: what was done to it.
      kept: the module with its order as it is now, and nothing evicted or recomputed.
      decisions: see `Plan`.
    """

    posed: Problem
    choice: placement.Choice
    edited: Edits
    kept: Problem
    decisions: tuple[Decision, ...] = ()


def fit(posed: Problem, budget: int, slots: int | None, search_s: float) -> Fitted | None:
    """Finds a plan for a module whose weights are placed: by streaming them alone, if that
    hides their transfers, else the fastest of that, another order, and other edits."""
    choice = _placed(posed, budget, slots)
    plain: Fitted | None = None
    if isinstance(choice, placement.Choice):
        plain = Fitted(posed, choice, Edits(), posed)
        if _is_hidden(choice, posed):
            return plain
    if plain is None:
        order = _lower_order(posed, budget)
        posed = _edited(posed, order)
        choice = _placed(posed, budget, slots)
        if isinstance(choice, placement.Choice):
            return Fitted(posed, choice, order, posed)
    else:
        order = Edits()
    found = _edit(posed, order, budget, slots, search_s)
    if plain is None or found is None:
        return found or plain
    return min(plain, found, key=lambda f: f.choice.step_time_s)


def _edit(
    posed: Problem, order: Edits, budget: int, slots: int | None, search_s: float
) -> Fitted | None:
    """Evicts and recomputes until the packed arena fits; at last as much as is possible.

    A choice whose load fits may take more when it is packed. Where it does, more is left free,
    and all choose again; and also where a choice fits that is much slower than one that
    nearly did.
    """
    work = edit_choice.work_on(posed)
    capacity = budget - posed.fixed_bytes - posed.arena.base
    search = EditSearch(work, capacity, slots)

    def packed(chosen: edit_choice.EditChoice) -> Fitted | npt.NDArray[np.int64]:
        """Or by how many bytes the packing is above the capacity at each tick."""
        edits = edit_writer.edits_of(posed, chosen.taken)
        again = _edited(posed, edits)
        choice = _placed(again, budget, slots)
        if not isinstance(choice, placement.Choice):
            return _before_edits(posed, again, choice)
        done = replace(edits, order=order.order)
        return Fitted(again, choice, done, posed, work.decisions(chosen.taken, capacity))

    best: tuple[Fitted, edit_choice.EditChoice, npt.NDArray[np.int64]] | None = None
    best_s = fastest_s = np.inf
    rounds_left = _ROUNDS
    tried: set[frozenset[object]] = set()
    terms: list[Terms] = []
    reserve = np.zeros_like(work.load)
    while rounds_left and (best is None or best_s > fastest_s * _NEAR):
        rounds_left -= 1
        choices = work.choose(capacity, slots, reserve, terms)
        terms = [c.terms for c in choices[:_AGAIN] if c.terms is not None] or terms
        if not choices or choices[0].waits:
            choices = sorted((*choices, *search.rounded(reserve)), key=lambda c: c.step_time_s)
        if not choices and reserve.any():
            reserve = reserve // 2
            continue
        if not choices:
            break
        fastest_s = min(fastest_s, choices[0].step_time_s)
        faster = (c for c in choices if c.step_time_s < best_s)
        promising = {c.taken.all: c for c in faster if c.taken.all not in tried}
        excesses: list[npt.NDArray[np.int64]] = []
        for chosen in islice(promising.values(), _PACKED):
            tried.add(chosen.taken.all)
            found = packed(chosen)
            if isinstance(found, Fitted):
                if found.choice.step_time_s < best_s:
                    best, best_s = (found, chosen, reserve), found.choice.step_time_s
                    rounds_left = min(rounds_left, _ROUNDS_MORE)
                break
            excesses.append(found)
        nearest = min(excesses, key=lambda e: int(e.max(initial=0)), default=np.zeros_like(reserve))
        reserve = reserve + (nearest if nearest.any() else capacity // _PARTS)
    if best is not None:
        found, chosen, reserve = best
        better = search.improved(chosen, reserve, search_s) if search_s > 0 else chosen
        improved = packed(better) if better is not chosen else None
        if isinstance(improved, Fitted) and improved.choice.step_time_s < best_s:
            return improved
        return found
    least = edit_choice.least_edits(posed)
    again = _edited(posed, least)
    choice = _placed(again, budget, slots)
    if not isinstance(choice, placement.Choice):
        return None
    return Fitted(again, choice, replace(least, order=order.order), posed)


def _placed(
    posed: Problem, budget: int, slots: int | None
) -> placement.Choice | npt.NDArray[np.int64]:
    """Streams what is on the host, such that XLA's packing fits; else as `fit_or_excess`."""
    excesses: list[npt.NDArray[np.int64]] = []
    for share in _LEFT_FREE:
        tighter = int(budget - share * (budget - posed.fixed_bytes))
        found = placement.fit_or_excess(posed, frozenset(), tighter, slots)
        if not isinstance(found, placement.Choice):
            excesses.append(found)
            break
        excesses.append(excess_of(posed, found, budget))
        if not excesses[-1].any():
            return found
        if not found.fetches:
            break  # There is nothing that could come later.
    return excesses[0]


def _before_edits(
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


def _lower_order(posed: Problem, budget: int) -> Edits:
    """An order of the compute with less live at once, all weights streamed; or nothing."""
    if not posed.ticks.end:
        return Edits()
    capacity = budget - posed.fixed_bytes - posed.arena.base
    on_host = [m.parameter for m in posed.movables]
    return Edits(reorder.lower_peak(posed.module, posed.machine, capacity, on_host))


def _edited(posed: Problem, what: Edits) -> Problem:
    """Poses the module anew, with edits."""
    if not what:
        return posed
    on_host = [m.parameter for m in posed.movables]
    module = edits.apply(posed.module, what)
    return problem.pose(module, posed.machine, on_host, posed.in_place)


def choose_stay(posed: Problem, budget: int, slots: int | None) -> frozenset[str] | None:
    """Which weights stay when the others are streamed, and temporaries evicted or computed
    again where that is faster, or nothing else fits."""
    choice = placement.choose_placement(posed, budget, slots)
    if choice is not None and _is_hidden(choice, posed):
        return choice.stay
    found = _choose_stay(posed, budget, slots, choice)
    if found is None and (order := _lower_order(posed, budget)):
        posed = _edited(posed, order)
        choice = placement.choose_placement(posed, budget, slots)
        found = _choose_stay(posed, budget, slots, choice)
    return found


def _choose_stay(
    posed: Problem, budget: int, slots: int | None, choice: placement.Choice | None
) -> frozenset[str] | None:
    """Compares `choice` with some that evict and recompute."""
    best = (choice.step_time_s, choice.stay) if choice is not None else None
    for stay in placement.shares(posed):
        streamed = replace(posed, movables=tuple(m for m in posed.movables if m.buffer not in stay))
        capacity = placement.capacity_beside(posed, budget, stay)
        if capacity <= 0:
            continue
        chosen = edit_choice.work_on(streamed).choose(capacity, slots)
        if not chosen or not chosen[0].taken.all:
            continue  # Without edits the search above has done better.
        if best is None or chosen[0].step_time_s < best[0] * _WORTH_IT:
            best = chosen[0].step_time_s, stay
    return best[1] if best is not None else None


def _is_hidden(choice: placement.Choice, posed: Problem) -> bool:
    """Whether compute hides all transfers, as far as counts."""
    return choice.step_time_s * _WORTH_IT <= float(posed.clock[-1])


def least_budget(posed: Problem, slots: int | None) -> tuple[int, int, Problem]:
    """The least budget for which a plan is found, the tick that needs it, and the module edited
    for it."""
    ordered = _edited(posed, _lower_order(posed, 0))
    plain = (posed, ordered) if ordered is not posed else (posed,)
    edited = (_edited(p, edit_choice.least_edits(p)) for p in plain)
    best = min((*plain, *edited), key=placement.unpacked_budget)
    least, tick = placement.least_budget(best, slots)
    for _ in range(_LEAST_ROUNDS):
        found = _placed(best, least, slots)
        if isinstance(found, placement.Choice) or not found.any():
            break
        least += int(found.max())
    return least, tick, best


def budget_error(posed: Problem, budget: int, slots: int | None) -> MemoryBudgetError:
    """Says what stands at the tick that needs most when every weight is streamed, and all that
    can be is evicted or computed again."""
    least, tick, posed = least_budget(posed, slots)
    live = [
        (r.size, r.name)
        for r in posed.arena.temporaries
        if r.live_range.start <= tick < r.live_range.end
    ]
    live += [
        (m.size, m.buffer) for m in posed.movables if any(r.start <= tick < r.end for r in m.reads)
    ]
    names = {i.name: i for i in posed.module.entry.instructions}
    largest = tuple(
        LiveBuffer(name, size, names[name].op_name if name in names else "")
        for size, name in sorted(live, reverse=True)[:5]
    )
    at = posed.ticks.instructions[tick] if posed.ticks.end else None
    return MemoryBudgetError(
        budget=budget,
        least=least,
        instruction=at.name if at is not None else "",
        op_name=at.op_name if at is not None else "",
        source_line=posed.module.source_line(at) if at is not None else "",
        largest=largest,
        fixed=posed.fixed_bytes,
        slots=slots,
    )
