"""What any selection of choices costs at least: the program of `linear_program`, solved.

    choices ──► samples ──► program ──► fractions, bound
                   ▲                       │
                   └── ticks in between ◄──┘ at which the fractions do not fit

Leaving ticks out, giving gaps away (their bytes are gone at no cost) and merging gaps into ones
of which any part can be chosen can only lower the bound. What is returned is not the solver's
word for the optimum but the value of its dual solution, which bounds the program from below
whatever the solver's tolerances (Neumaier and Shcherbina, "Safe bounds in linear and
mixed-integer linear programming", Mathematical Programming 99, 2004, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from hlo_passes.edits.choice_bytes import Profile, least_bytes, most_bytes
from hlo_passes.edits.choices import Choices
from hlo_passes.edits.gap_groups import Groups, merge, single
from hlo_passes.edits.linear_program import PRICE, Floats, Model, build

# So many ticks are looked at first, and so many more in each further round, where memory
# is short between them.
_SAMPLES = 150
_MORE_SAMPLES = 50
_ROUNDS = 3

# So many gaps are variables of the bound; the rest are given away.
_GAPS = 1500

# How many steps of the simplex method a linear program may take, which are seconds. Without its
# solution the bound is a weaker one.
_ITERATIONS = 50_000


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The fractions with which the bound is reached.

    Attributes:
      bound_s: seconds; of `relax` those of its objective, which bounds nothing.
      samples: the ticks looked at, in order.
      evicted, recomputed: float64[gaps].
      staying: float64[weights].
    """

    bound_s: float
    samples: tuple[int, ...]
    evicted: Floats
    recomputed: Floats
    staying: Floats


def lower_bound_s(choices: Choices, capacity: int) -> float:
    """Returns seconds that no plan of these choices within `capacity` bytes undercuts;
    infinity when there is no such plan.

    It is a bound on plans that `choices` can say: whoever recomputes for less may be faster.

    More than 1,500 gaps are merged as in `gap_groups`; of what are more then, the largest are
    chosen about, and the others are given away.
    """
    bound_s = _tightened_s(choices, capacity)
    return math.inf if bound_s is None else bound_s


def relax(choices: Choices, capacity: int) -> Relaxation | None:
    """Returns fractions that nearly reach the bound, and move and recompute little; None when not
    even fractions fit into `capacity` bytes. Of the ticks only those that are looked at first."""
    if (least_bytes(choices) > capacity).any() or not choices.ticks:
        return None
    samples = sample_ticks(choices, capacity)
    groups = _grouped(choices, samples)
    return _solve(choices, groups, _modelled(groups, capacity, samples), PRICE)


def _tightened_s(choices: Choices, capacity: int) -> float | None:
    """Solves the program, and again with the ticks at which the fractions do not fit."""
    if (least_bytes(choices) > capacity).any():
        return None
    if not choices.ticks:
        return choices.in_busy_s
    samples = sample_ticks(choices, capacity)
    bound_s = 0.0
    for rounds_left in reversed(range(_ROUNDS)):
        groups = _grouped(choices, samples)
        model = _modelled(groups, capacity, samples)
        found = _solve(choices, groups, model)
        if found is None:
            return None
        bound_s = max(bound_s, found.bound_s)
        if not rounds_left:
            break
        kept = model.evict.keys() | model.recompute.keys()
        given_away = {i for g in set(_all(groups.members)) - kept for i in groups.members[g]}
        more = _crowded_between(choices, capacity, found, given_away)
        if not more:
            break
        samples = tuple(sorted({*samples, *more}))
    return bound_s


def _grouped(choices: Choices, samples: Sequence[int]) -> Groups:
    return merge(choices, samples) if len(choices.gaps) > _GAPS else single(choices)


def _modelled(groups: Groups, capacity: int, samples: tuple[int, ...]) -> Model:
    kept = _largest(groups.choices, capacity)
    return build(groups.choices, capacity, samples, kept, groups.merged)


def _untouched(choices: Choices, bound_s: float) -> Relaxation:
    none = np.zeros(len(choices.gaps))
    return Relaxation(bound_s, (), none, none, np.zeros(len(choices.weights)))


def _largest(choices: Choices, capacity: int) -> tuple[int, ...]:
    """The gaps that are chosen about: those open while memory is short, the largest first."""
    short = np.concatenate([[0], np.cumsum(most_bytes(choices) > capacity)])

    def rank(i: int) -> tuple[bool, int]:
        gap = choices.gaps[i]
        return bool(short[gap.end] > short[gap.start]), gap.size

    indices = _all(choices.gaps)
    if len(indices) <= _GAPS:
        return tuple(indices)
    return tuple(sorted(sorted(indices, key=rank, reverse=True)[:_GAPS]))


def sample_ticks(choices: Choices, capacity: int) -> tuple[int, ...]:
    """Returns at most 150 ticks: of each of as many stretches the one with most bytes.

    Stretches are short where there is much compute, and where memory is short.
    """
    if choices.ticks <= _SAMPLES:
        return tuple(range(choices.ticks))
    most = most_bytes(choices)
    measure = np.full(choices.ticks, 1 / choices.ticks)
    for share in (choices.costs, (most > capacity).astype(np.float64)):
        if share.sum() > 0:
            measure += share / share.sum()
    stretch = np.floor(np.cumsum(measure) / (measure.sum() * (1 + 1e-12)) * _SAMPLES).astype(int)
    return _fullest(most, stretch)


def _fullest(
    bytes_: npt.NDArray[np.int64] | Floats, stretch: npt.NDArray[np.int64]
) -> tuple[int, ...]:
    """Of each run of equal `stretch` the tick with most bytes."""
    order = np.lexsort((-bytes_, stretch))
    _, first = np.unique(stretch[order], return_index=True)
    return tuple(sorted(order[first].tolist()))


def _crowded_between(
    choices: Choices, capacity: int, found: Relaxation, given_away: set[int]
) -> tuple[int, ...]:
    """Ticks at which the fractions do not fit: of each stretch between samples the fullest."""
    if choices.ticks == len(found.samples):
        return ()
    profile = Profile(choices.ticks)
    for i, gap in enumerate(choices.gaps):
        gone = 1.0 if i in given_away else found.evicted[i] + found.recomputed[i]
        profile.add(gap.start, gap.end, -gap.size * gone)
    for weight, share in zip(choices.weights, found.staying, strict=True):
        profile.add(0, choices.ticks, weight.size * share)
        for live in weight.reads:
            profile.add(live.start, live.end, weight.size * (1 - share))
    over = choices.load + profile.sums() - capacity
    fullest = _fullest(over, np.searchsorted(found.samples, np.arange(choices.ticks)))
    crowded = [t for t in fullest if over[t] > 1e-6 * max(1, capacity)]
    return tuple(sorted(crowded, key=lambda t: -over[t])[:_MORE_SAMPLES])


def _solve(choices: Choices, groups: Groups, model: Model, price: float = 0.0) -> Relaxation | None:
    """Returns the fractions, and as `bound_s` what the solution proves of the objective."""
    objective = model.objective(price)
    # scipy's stubs know of no sparse matrices here.
    solved = cast("Callable[..., Any]", linprog)(
        objective,
        model.at_most,
        model.limits,
        model.equal,
        model.targets,
        np.stack([model.low, model.high], axis=1),
        method="highs",
        options={"maxiter": _ITERATIONS},
    )
    if solved.status == 2:
        return None
    if solved.status != 0:  # The solver gave up: that compute takes time is still true.
        return replace(_untouched(choices, float(choices.costs.sum())), samples=model.samples)
    units = _dual_value(model, objective, solved.ineqlin.marginals, solved.eqlin.marginals)
    return _fractions(choices, groups, model, solved.x, units * model.second)


def _fractions(
    choices: Choices, groups: Groups, model: Model, x: Floats, bound_s: float
) -> Relaxation:
    """Reads a solution: what is chosen of a group is chosen of each of its gaps."""
    evicted, recomputed = np.zeros((2, len(choices.gaps)))
    for fractions, columns in ((evicted, model.evict), (recomputed, model.recompute)):
        for group, column in columns.items():
            fractions[list(groups.members[group])] = x[column]
    staying = np.zeros(len(choices.weights))
    for i, column in model.stay.items():
        staying[i] = x[column]
    return Relaxation(bound_s, model.samples, evicted, recomputed, staying)


def _all(of: Sequence[object]) -> range:
    return range(len(of))


def _dual_value(model: Model, objective: Floats, at_most: Floats, equal: Floats) -> float:
    """What multipliers of the rows prove: for any of them, those of `at_most` not positive,
    c x ≥ y b + the least of (c - y A) x over the box."""
    at_most = np.minimum(at_most, 0.0)
    reduced = objective - model.at_most.T @ at_most - model.equal.T @ equal
    least = np.minimum(reduced * model.low, reduced * model.high)
    return float(at_most @ model.limits + equal @ model.targets + least.sum())
