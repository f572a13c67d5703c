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

from hlo_passes import edit_choice, edit_writer, edits, placement, problem, reorder
from hlo_passes.errors import LiveBuffer, MemoryBudgetError
from hlo_passes.plan import Decision, Edits
from hlo_passes.problem import Problem
from hlo_passes.selection import Terms

# A choice replaces another one when it is faster by more than this factor.
_WORTH_IT = 0.99

# What packing may lose of the arena, as a share of it.
_FRAGMENTATION = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4)

# How many choices are packed for each of these shares, the fastest first, and on the terms of
# how many the next share is tried.
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
    choice = placement.fit(posed, frozenset(), budget, slots)
    plain = Fitted(posed, choice, Edits(), posed) if choice is not None else None
    if choice is not None and _is_hidden(choice, posed):
        return plain
    if plain is None:
        capacity = budget - posed.fixed_bytes - posed.arena.base
        on_host = [m.parameter for m in posed.movables]
        order = Edits(reorder.lower_peak(posed.module, posed.machine, capacity, on_host))
        posed = _edited(posed, order)
        choice = placement.fit(posed, frozenset(), budget, slots)
        if choice is not None:
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
    """Evicts and recomputes until the packed arena fits; at last as much as is possible."""
    work = edit_choice.work_on(posed)
    capacity = budget - posed.fixed_bytes - posed.arena.base

    def packed(chosen: edit_choice.EditChoice) -> Fitted | None:
        edits = edit_writer.edits_of(posed, chosen.taken)
        again = _edited(posed, edits)
        choice = placement.fit(again, frozenset(), budget, slots)
        if choice is None:
            return None
        done = replace(edits, order=order.order)
        return Fitted(again, choice, done, posed, work.decisions(chosen.taken, capacity))

    tried: set[frozenset[object]] = set()
    terms: list[Terms] = []
    for share in _FRAGMENTATION:
        target = int(capacity * (1 - share))
        choices = work.choose(capacity, slots, target, terms)
        terms = [c.terms for c in choices[:_AGAIN]]
        new = [c for c in choices if c.taken.all not in tried]
        for chosen in new[:_PACKED]:
            tried.add(chosen.taken.all)
            found = packed(chosen)
            if found is None:
                continue
            better = work.improve(chosen, target, slots, search_s) if search_s > 0 else chosen
            improved = packed(better) if better is not chosen else None
            if improved is not None and improved.choice.step_time_s < found.choice.step_time_s:
                return improved
            return found
    least = edit_choice.least_edits(posed)
    again = _edited(posed, least)
    choice = placement.fit(again, frozenset(), budget, slots)
    if choice is None:
        return None
    return Fitted(again, choice, replace(least, order=order.order), posed)


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
    edited = _edited(posed, edit_choice.least_edits(posed))
    best = min((posed, edited), key=placement.unpacked_budget)
    return *placement.least_budget(best, slots), best


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
