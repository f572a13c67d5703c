"""Schedules that hold when kernels and transfers take more or less than they are said to.

    margin 1      start ════ done │ read        a transfer that takes longer is waited for
    margin 3      start ═══════ ····· │ read    it has time left, and its bytes are held for longer

How much earlier than needed a transfer starts is its *margin*: how much slower than its model the
link may be. Which one is worth the bytes, steps say that are drawn (`timeline.drawn_step_times`):
of each solution a few margins are scheduled and packed, and that is taken of which 99 of 100 steps
take the least time. What is there already is among them, so that it is never worse by these draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from hlo_passes.fitting.solution import Solution, placed
from hlo_passes.placing import placement
from hlo_passes.placing.issued import issue
from hlo_passes.placing.prefetch import LINK_MARGIN
from hlo_passes.simulator.timeline import UNDISTURBED, Jitter, drawn_step_times, plan_events

# A transfer that takes as long as one of 100 does, in standard deviations of a normal number.
_ONE_OF_100 = 2.33

# Further margins, and one with which the bytes alone decide: no step takes so many transfers.
_MARGINS = (LINK_MARGIN, 2.0, 3.0, 5.0, 1e6)

# Of solutions that cost more than the best by this factor no other margin makes up for that.
_NEAR = 1.05


def steadiest(
    solutions: Iterable[Solution], budget: int, slots: int | None, jitter: Jitter
) -> Solution:
    """Returns the solution of which 99 of 100 steps cost the least, with transfers as early as is
    best for that: one of those given, or the same with another margin.

    Args:
      solutions: at least one; those that cost far more than the cheapest are left out.
      budget: device bytes, within which each is packed.

    O(solutions · (what placing takes + events · `Jitter.steps`)).
    """
    found = list(solutions)
    cheapest_s = min(s.choice.cost_s for s in found)
    near = [s for s in found if s.choice.cost_s <= _NEAR * cheapest_s]
    ways = (way for solution in near for way in _ways(solution, budget, slots, jitter))
    return min(ways, key=lambda way: _cost_s(way, jitter))


def percentile_99(drawn: np.ndarray) -> float:
    """Returns the seconds that 99 of 100 drawn steps take at most."""
    return float(np.quantile(drawn, 0.99, method="higher"))


def _ways(solution: Solution, budget: int, slots: int | None, jitter: Jitter) -> Iterator[Solution]:
    yield solution
    if not solution.choice.fetches and not solution.posed.evictions:
        return
    for margin in (1 + _ONE_OF_100 * jitter.variation, *_MARGINS):
        choice = placed(replace(solution.posed, margin=margin), budget, slots)
        if isinstance(choice, placement.Choice):
            yield replace(solution, choice=choice)


def _cost_s(solution: Solution, jitter: Jitter) -> float:
    """Of one step of 100, with what is charged beside its seconds."""
    posed, choice = solution.posed, solution.choice
    events = plan_events(posed.costs.tolist(), issue(posed, choice, ()))
    drawn = drawn_step_times(events, posed.machine, UNDISTURBED, jitter)
    return percentile_99(drawn) + choice.cost_s - choice.step_time_s
