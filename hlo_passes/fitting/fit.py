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

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hlo_passes.edits import choice as edit_choice
from hlo_passes.edits.state import EditState
from hlo_passes.errors import LiveBuffer, MemoryBudgetError
from hlo_passes.fitting import steady
from hlo_passes.fitting.edits import fit_with_edits
from hlo_passes.fitting.solution import Solution, edited, placed
from hlo_passes.ir import Instruction
from hlo_passes.memoize import memoized
from hlo_passes.orders import gathers, reorder
from hlo_passes.placing import placement
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Edits
from hlo_passes.reading.origins import Origins
from hlo_passes.simulator.timeline import Jitter

# A choice replaces another one when it is faster by more than this factor.
_WORTH_IT = 0.99

# What part of the arena an order leaves for packing, where it needs more than what is live.
_PACKING = 16

# By what part of the budget the least that is known may be packed above it, and others be tried.
_WITHIN_REACH = 64

# How many choices of what stays are made.
_STAYS = 2

# How often a least budget is raised by what its packing takes more.
_LEAST_ROUNDS = 8


def fit(
    posed: Problem,
    budget: int,
    slots: int | None,
    *,
    jitter: Jitter | None = None,
    orders: Iterable[Edits] | None = None,
) -> Solution | None:
    """Finds a plan for a module whose weights are placed: by streaming them alone, if that
    hides their transfers, else the fastest of that, another order, and other edits.

    Args:
      jitter: by how much seconds vary from step to step: what is best of 99 steps of 100 is taken.
      orders: that are looked at beside XLA's; by default those that may be faster, or need less.
    """
    found = _fits(posed, budget, slots, orders)
    if found and jitter is not None:
        return steady.steadiest(found, budget, slots, jitter)
    return min(found, key=lambda f: f.choice.cost_s, default=None)


def _fits(
    posed: Problem, budget: int, slots: int | None, orders: Iterable[Edits] | None
) -> list[Solution]:
    """Those that there are; one that is good enough alone."""
    plain = _streamed(posed, Edits(), budget, slots)
    if plain is not None and _is_hidden(plain.choice.cost_s, posed):
        return [plain]
    solutions, ordered = [plain], [(posed, Edits())]
    if orders is None:
        orders = _other_orders(posed, budget, fits=plain is not None)
    for order in orders:
        ordered.append((edited(posed, order), order))
        solutions.append(found := _streamed(*ordered[-1], budget, slots))
        if found is not None and _is_hidden(found.choice.cost_s, posed):
            return [found]
    fits = any(f is not None for f in solutions)
    is_possible = functools.cache(lambda: fits or _is_within_reach(posed, budget, slots))
    solutions.append(fit_with_edits(ordered, budget, slots, is_possible))
    if not any(solutions):
        solutions.append(_fit_lowest(_lowest(posed), budget, slots))
    return [f for f in solutions if f is not None]


def _is_within_reach(posed: Problem, budget: int, slots: int | None) -> bool:
    """Whether all that lowers the load brings it within the budget, or near it."""
    least = placed(_lowest(posed).edited, budget, slots)
    return isinstance(least, placement.Choice) or 0 < least <= budget // _WITHIN_REACH


def _streamed(posed: Problem, order: Edits, budget: int, slots: int | None) -> Solution | None:
    """With nothing but weights moved."""
    choice = placed(posed, budget, slots)
    return Solution(posed, choice, order, posed) if isinstance(choice, placement.Choice) else None


def _fit_lowest(lowest: _Lowest, budget: int, slots: int | None) -> Solution | None:
    choice = placed(lowest.edited, budget, slots)
    if not isinstance(choice, placement.Choice):
        return None
    return Solution(lowest.edited, choice, lowest.edits, lowest.ordered, selection=lowest.selection)


def _other_orders(posed: Problem, budget: int, *, fits: bool) -> Iterator[Edits]:
    """Yields orders that may be faster, or need less, than that of a module that fits, or does not:
    what is gathered comes late in all of them, where it does not already."""
    if names := gathers.gathered_late(posed.module, posed.machine):
        yield Edits(names)
        posed = edited(posed, Edits(names))
    yield from _early_order(posed, 0) if fits else _lower_orders(posed, budget)


def orders_at_any_budget(posed: Problem) -> Iterator[Edits]:
    """Yields those of the orders that `fit` looks at which are the same for every budget."""
    yield from _other_orders(posed, 0, fits=True)


def _early_order(posed: Problem, capacity: int) -> Iterator[Edits]:
    """Yields the order in which bytes are freed as soon as they can be, if that is another one."""
    on_host = [m.parameter for m in posed.movables]
    if names := reorder.release_early(posed.module, posed.machine, capacity, on_host):
        yield Edits(names)


def _lower_orders(posed: Problem, budget: int) -> Iterator[Edits]:
    """Yields orders of the compute with less live at once, all weights streamed: what frees bytes
    runs early; and from there on for the budget, for one that leaves packing more, and with the
    least that is found."""
    if not posed.ticks.end:
        return
    capacity = max(0, budget - posed.fixed_bytes - posed.arena.base)
    on_host = [m.parameter for m in posed.movables]
    for early in _early_order(posed, capacity):
        yield early
        posed = edited(posed, early)
    seen: set[tuple[str, ...]] = {()}
    for room in dict.fromkeys((capacity, capacity - capacity // _PACKING, 0)):
        names = reorder.lower_peak(posed.module, posed.machine, room, on_host)
        if names not in seen:
            seen.add(names)
            yield Edits(names)


class Stay(NamedTuple):
    """Weights on the device, by name, and what a step probably costs with them there, in seconds:
    how its arena is packed is not known yet."""

    names: frozenset[str]
    cost_s: float


def choose_stay(posed: Problem, budget: int, slots: int | None) -> tuple[Stay, ...]:
    """Which weights stay when the others are streamed, and temporaries evicted or computed
    again where that is faster, or nothing else fits; in XLA's order, or another one. A few ways,
    the fastest first; none where no plan is known to keep to the budget."""
    found = list(_stays(posed, budget, slots))
    if found and _is_hidden(found[-1].cost_s, posed):
        return (found[-1],)
    for order in _other_orders(posed, budget, fits=bool(found)):
        found += _stays(edited(posed, order), budget, slots)
    if not found and _fit_lowest(_lowest(posed), budget, slots) is not None:
        return (Stay(frozenset(), np.inf),)
    fastest: dict[frozenset[str], Stay] = {}
    for stay in sorted(found, key=lambda stay: stay.cost_s):
        fastest.setdefault(stay.names, stay)
    return tuple(fastest.values())[:_STAYS]


def _stays(posed: Problem, budget: int, slots: int | None) -> Iterator[Stay]:
    """With nothing but weights moved; and where that leaves something to be gained, with some of
    them there and edits."""
    choice = placement.choose_placement(posed, budget, slots)
    if choice is not None:
        yield Stay(choice.stay, choice.cost_s)
        if _is_hidden(choice.cost_s, posed):
            return
    for names in placement.shares(posed):
        capacity = placement.capacity_beside(posed, budget, names)
        if capacity <= 0:
            continue
        chosen = edit_choice.work_on(posed.staying(names)).choose(capacity, slots)
        if chosen and chosen[0].selection.gaps:  # Without edits the search above has done better.
            yield Stay(names, chosen[0].cost_s)


def _is_hidden(cost_s: float, posed: Problem) -> bool:
    """Whether compute hides all transfers, as far as counts, and nothing is charged beside it."""
    return cost_s * _WORTH_IT <= float(posed.clock[-1])


@dataclass(frozen=True, eq=False)
class _Lowest:
    """A module edited such that it needs the least memory that is known, whatever it takes.

    Attributes:
      edits: what was done to it; `ordered`: the module after only their order.
      selection: what is taken in that; None where nothing is.
    """

    edited: Problem
    edits: Edits
    ordered: Problem
    selection: EditState | None = None


@memoized
def _lowest(posed: Problem) -> _Lowest:
    found: list[_Lowest] = []
    for order in (Edits(), *_other_orders(posed, 0, fits=False)):
        ordered = edited(posed, order)
        least, taken = edit_choice.least_edits(ordered), edit_choice.least_selection(ordered)
        done = replace(least, order=order.order)
        found.append(_Lowest(ordered, order, ordered))
        found.append(_Lowest(edited(ordered, least), done, ordered, taken))
    return min(found, key=lambda lowest: placement.unpacked_budget(lowest.edited))


@memoized
def least_budget(posed: Problem, slots: int | None) -> tuple[int, int, Problem]:
    """The least budget for which a plan is found, the tick that needs it, and the module edited
    for it."""
    lowest = _lowest(posed)
    least, tick = placement.least_budget(lowest.edited, slots)
    for _ in range(_LEAST_ROUNDS):
        found = placed(lowest.edited, least, slots)
        if isinstance(found, placement.Choice) or not found:
            break
        least += found
    return least, tick, lowest.edited


def budget_error(
    posed: Problem,
    budget: int,
    slots: int | None,
    body: Callable[[str], Problem | None] = lambda _: None,
) -> MemoryBudgetError:
    """Says what stands at the tick that needs most when every weight is streamed, and all that
    can be is evicted or computed again.

    Args:
      body: of the loop that an instruction is, by its name. Where a loop needs most, the error says
        what stands in that, in XLA's order: another with less would be looked for for names alone.
    """
    least, tick, posed = least_budget(posed, slots)
    where, at = posed, _instruction(posed, tick)
    while at is not None and (inside := body(at.name)) is not None:
        where = edited(inside, edit_choice.least_edits(inside))
        tick = placement.tightest(where)
        at = _instruction(where, tick)
    origins = Origins(where.module)
    instructions = {i.name: i for i in where.module.entry.instructions}

    def described(name: str, size: int) -> LiveBuffer:
        i = instructions.get(name.partition("{")[0])
        if i is None:
            return LiveBuffer(name, size, "")
        line = "" if i.opcode == "parameter" else origins.line(i)
        return LiveBuffer(name, size, origins.about(i).op_name, line)

    return MemoryBudgetError(
        budget=budget,
        least=least,
        instruction=at.name if at is not None else "",
        op_name=origins.about(at).op_name if at is not None else "",
        source_line=origins.line(at) if at is not None else "",
        largest=tuple(described(name, size) for size, name in _largest(where, tick)),
        fixed=posed.fixed_bytes,
        small=posed.arena.base,
        slots=slots,
        needed=placement.unpacked_budget(posed),
    )


def _instruction(posed: Problem, tick: int) -> Instruction | None:
    return posed.ticks.instructions[tick] if posed.ticks.end else None


def _largest(posed: Problem, tick: int) -> list[tuple[int, str]]:
    """The largest buffers that are live at a tick besides arguments and outputs, in bytes."""
    live = [
        (r.size, r.name)
        for r in posed.arena.temporaries
        if r.live_range.start <= tick < r.live_range.end
    ]
    live += [
        (m.size, m.buffer) for m in posed.movables if any(r.start <= tick < r.end for r in m.reads)
    ]
    return sorted(live, reverse=True)[:5]
