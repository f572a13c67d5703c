"""Analyses of what never changes run once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate


def memoized[Subject, **More, Result](
    analysis: Callable[Concatenate[Subject, More], Result],
) -> Callable[Concatenate[Subject, More], Result]:
    """Has an analysis of a frozen subject (a `Module`, a `Dataflow`) run once for each, and for
    each of its further arguments, which can be keys.

    The passes ask for the same facts of the same module: the planner's cost model and its
    bounds for the traffic, planning and reporting for the dataflow. What was found is kept with
    the subject and goes with it, as by ``functools.cached_property``.
    """

    @wraps(analysis)
    def kept(subject: Subject, *args: More.args, **kwargs: More.kwargs) -> Result:
        found: dict[object, Result] = vars(subject).setdefault("_found", {})
        key = (analysis, args, *kwargs.items())
        if key not in found:
            found[key] = analysis(subject, *args, **kwargs)
        return found[key]

    return kept
