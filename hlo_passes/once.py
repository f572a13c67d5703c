"""Analyses of what never changes run once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps


def once[Subject, Result](analysis: Callable[[Subject], Result]) -> Callable[[Subject], Result]:
    """Has an analysis of a frozen subject (a `Module`, a `Dataflow`) run once for each.

    The passes ask for the same facts of the same module: the planner's cost model and its
    bounds for the traffic, planning and reporting for the dataflow. What was found is kept with
    the subject and goes with it, as by ``functools.cached_property``.
    """

    @wraps(analysis)
    def kept(subject: Subject) -> Result:
        found: dict[Callable[[Subject], Result], Result] = vars(subject).setdefault("_found", {})
        if analysis not in found:
            found[analysis] = analysis(subject)
        return found[analysis]

    return kept
