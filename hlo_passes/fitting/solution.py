"""A module that was edited, with its weights and transfers placed such that XLA packs it within a
budget."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_passes.edits.state import EditState
from hlo_passes.fitting.repacking import excess_of
from hlo_passes.placing import placement, problem
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Decision, Edits
from hlo_passes.rewrite import edits

# What of the arena is left free, one after the other, where a packing turns out otherwise.
_LEFT_FREE = (0, 1 / 64)


@dataclass(frozen=True, eq=False)
class Solution:
    """A module that was edited, if it had to be, and how its budget is shared.

    Attributes:
      posed: the edited module.
      edited: what was done to it.
      kept: the module with its order as it is now, and nothing evicted or recomputed.
      decisions: see `Plan`.
      selection: the gaps of `kept` that are taken; None where none are.
    """

    posed: Problem
    choice: placement.Choice
    edited: Edits
    kept: Problem
    decisions: tuple[Decision, ...] = ()
    selection: EditState | None = None


def edited(posed: Problem, what: Edits) -> Problem:
    """Poses the module anew, with edits."""
    if not what:
        return posed
    on_host = [m.parameter for m in posed.movables]
    module = edits.apply(posed.module, what)
    return problem.pose(module, posed.machine, on_host, posed.in_place, posed.prices)


def placed(posed: Problem, budget: int, slots: int | None, free: int = 0) -> placement.Choice | int:
    """Streams what is on the host, such that XLA's packing fits; else as `fit_or_excess`.

    Args:
      free: bytes that transfers leave free, beside what they need.
    """
    excesses: list[int] = []
    for share in _LEFT_FREE:
        left = free + int(share * (budget - posed.fixed_bytes))
        found = placement.fit_or_excess(posed, budget, slots, left)
        if not isinstance(found, placement.Choice):
            excesses.append(found)
            break
        excesses.append(excess_of(posed, found, budget))
        if not excesses[-1]:
            return found
        if not found.fetches:
            break  # There is nothing that could come later.
        late = placement.started_late(posed, found)
        if not excess_of(posed, late, budget):
            return late
    return excesses[0]
