"""From the fractions of the relaxation to a selection, and from there to a better one.

    relax ──► round_up ──► whole program, some ──► part by part ──► one choice at a time
     fractions  greedy      hundred choices free    (neighbourhoods)
                            └────────── mixed-integer programs ───┘

All programs are those of `hlo_passes.relaxation` with choices of 0 or 1. They know the
machine but not the scheduler: which transfer goes first, or how late one may start. So each
is also solved for links that are slower than they are, which leaves the scheduler some play,
and whatever is found counts only by what `evaluate` says of it. The search through
neighbourhoods, in which all but the choices around some ticks are held, follows Shaw, "Using
constraint programming and local search methods to solve vehicle routing problems", CP 1998.

The work is counted in programs and nodes, not in seconds, so that it ends with the same
selection on every machine on which the time limit does not cut it off.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, takewhile

import numpy as np
from scipy.sparse import vstack

from hlo_passes.edits.choice_bytes import device_bytes, has_options
from hlo_passes.edits.choices import Choices, Gap, Selection, Weight
from hlo_passes.edits.linear_program import PRICE, Floats, Model, build
from hlo_passes.edits.relaxation import Relaxation, relax
from hlo_passes.integer_program import minimize

# Links are taken to be so much of what they are.
_PACES = (1.0, 0.85, 0.7)

# How many gaps and weights are free at once: in the whole program, and in a neighbourhood.
_FREE = 300
_NEIGHBOURS = 60

# The most gaps that programs choose about at all; the others stay as they are.
_GAPS = 1500

# Into how many stretches of ticks the step is cut, one pass of neighbourhoods after another.
_STRETCHES = (4, 8, 16)

_NODES = 500
_GAP = 1e-3

# A selection this close to the bound is good enough.
_CLOSE = 1e-4

LIKELY = (0.5, 0.9, 0.1)
"""Fractions from which a choice is made."""

_EVICT = -1  # stands where else the index of a recipe does


def round_up(
    choices: Choices, capacity: int, relaxation: Relaxation, likely: float = 0.5
) -> Selection | None:
    """Returns a selection that fits, near `relaxation`'s fractions: what is chosen by `likely` or
    more is chosen; if that does not fit, more choices are made in order of their fraction until
    every tick fits, and those of them that then prove needless are taken back. If even that
    does not fit, fewer weights stay.

    None when it finds none, which does not mean that there is none.
    """
    staying = [i for i, share in enumerate(relaxation.staying) if share >= likely]
    staying.sort(key=lambda i: -relaxation.staying[i])
    order = _order(choices, relaxation)
    chosen = [(i, k) for i, k in order if _share(relaxation, i, k) >= likely]
    while True:
        draft = _Draft(choices, capacity, Selection(frozenset(), (), frozenset(staying)))
        for i, option in chosen:
            draft.take(i, option)
        if draft.complete(order):
            return draft.selection()
        if not staying:
            return None
        staying = staying[: len(staying) // 2]


def improve(
    choices: Choices,
    capacity: int,
    start: Selection,
    time_limit_s: float,
    evaluate: Callable[[Selection], float],
) -> Selection:
    """Searches for the selection that `evaluate` likes best.

    Args:
      capacity: bytes; all selections that are tried but `start` fit into them (`device_bytes`).
      start: where to begin; it is what is returned where nothing better is found.
      time_limit_s: when to stop, if the work is not done; looked at between linear programs
        and calls of `evaluate`, and given to the mixed-integer programs.
      evaluate: predicted seconds of a step; infinity where there is no schedule.
    """
    search = _Search(choices, capacity, evaluate, time.monotonic() + time_limit_s, start)
    relaxation = relax(choices, capacity, time_limit_s)
    if relaxation is None:
        return start
    search.enough_s = relaxation.bound_s * (1 + _CLOSE)
    for candidate in chain(_rounded(search, relaxation), _programmed(search, relaxation)):
        search.offer(candidate)
        if search.is_over:
            return search.best
    search.try_single_changes()
    return search.best


def _rounded(search: _Search, relaxation: Relaxation) -> Iterator[Selection | None]:
    for pace in _PACES:
        slower = relaxation
        if pace < 1.0:
            slower = relax(_slower(search.choices, pace), search.capacity) or relaxation
        for likely in LIKELY:
            yield round_up(search.choices, search.capacity, slower, likely)


def _programmed(search: _Search, relaxation: Relaxation) -> Iterator[Selection | None]:
    # Made when the first is asked for: they choose about what the best selection then takes.
    yield from _Programs(search, relaxation).candidates()


def _slower(choices: Choices, pace: float) -> Choices:
    return replace(
        choices,
        out_bytes_per_s=choices.out_bytes_per_s * pace,
        in_bytes_per_s=choices.in_bytes_per_s * pace,
    )


class _Draft:
    """A selection in the making, and its bytes at every tick."""

    def __init__(self, choices: Choices, capacity: int, selection: Selection) -> None:
        self._choices, self._capacity = choices, capacity
        self._gone = dict.fromkeys(selection.evicted, _EVICT) | dict(selection.recomputed)
        self._staying = set(selection.staying)
        self._bytes = device_bytes(choices, selection)
        self._needed = Counter(
            needed
            for i, option in self._gone.items()
            if option != _EVICT
            for needed in choices.gaps[i].recipes[option].needs
        )

    def selection(self) -> Selection:
        return Selection(
            frozenset(i for i, option in self._gone.items() if option == _EVICT),
            tuple(sorted((i, k) for i, k in self._gone.items() if k != _EVICT)),
            frozenset(self._staying),
        )

    @property
    def fits(self) -> bool:
        return bool((self._bytes <= self._capacity).all())

    def complete(self, order: Iterable[tuple[int, int]]) -> bool:
        """Makes choices of `order`, (gap, recipe or eviction), until every tick fits, and takes
        back what is needless. Returns whether it fits."""
        taken: list[int] = []
        for i, option in order:
            gap = self._choices.gaps[i]
            if self._is_over(gap.start, gap.end) and self.take(i, option):
                taken.append(i)
        for i in reversed(taken):
            self.put_back(i)
        return self.fits

    def take(self, i: int, option: int) -> bool:
        """Evicts or recomputes a gap that is kept, if nothing speaks against it."""
        if i in self._gone:
            return False
        if option != _EVICT:
            if any(n in self._gone for n in self._choices.gaps[i].recipes[option].needs):
                return False
        if self._needed[i]:
            return False
        self._gone[i] = option
        self._count(i, option, 1)
        return True

    def put_back(self, i: int) -> bool:
        """Keeps a gap that is not kept, if that fits."""
        gap, option = self._choices.gaps[i], self._gone[i]
        if (self._bytes[gap.start : gap.end] + gap.size > self._capacity).any():
            return False
        del self._gone[i]
        self._count(i, option, -1)
        return True

    def _is_over(self, start: int, end: int) -> bool:
        return bool((self._bytes[start:end] > self._capacity).any())

    def _count(self, i: int, option: int, sign: int) -> None:
        gap = self._choices.gaps[i]
        self._bytes[gap.start : gap.end] -= sign * gap.size
        if option == _EVICT:
            return
        for live, size in gap.recipes[option].holds:
            self._bytes[live.start : live.end] += sign * size
        for needed in gap.recipes[option].needs:
            self._needed[needed] += sign


def _order(choices: Choices, relaxation: Relaxation) -> list[tuple[int, int]]:
    """All options of gaps: the largest fraction first, of equals the largest gap, and evicted
    before recomputed."""
    options = [(i, _EVICT) for i, gap in enumerate(choices.gaps) if gap.is_evictable]
    options += [(i, k) for i, gap in enumerate(choices.gaps) for k in range(len(gap.recipes))]
    return sorted(
        options,
        key=lambda option: (-_share(relaxation, *option), -choices.gaps[option[0]].size, option),
    )


def _share(relaxation: Relaxation, i: int, option: int) -> float:
    if option == _EVICT:
        return float(relaxation.evicted[i])
    return relaxation.recomputed[i][option]


def _largest_first(choices: Choices) -> list[int]:
    weights = choices.weights
    return sorted(
        (i for i, weight in enumerate(weights) if weight.may_stay), key=lambda i: -weights[i].size
    )


@dataclass(eq=False)
class _Search:
    """The best selection so far, by `evaluate`."""

    choices: Choices
    capacity: int
    evaluate: Callable[[Selection], float]
    deadline: float
    best: Selection
    best_s: float = math.inf
    enough_s: float = 0.0
    _tried: set[Selection] = field(default_factory=set[Selection])

    def __post_init__(self) -> None:
        self.offer(self.best)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.best_s <= self.enough_s or self.left_s <= 0

    def offer(self, selection: Selection | None) -> bool:
        """Keeps `selection` if it is the best. Returns whether it is."""
        if selection is None or selection in self._tried or self.is_over:
            return False
        self._tried.add(selection)
        seconds = self.evaluate(selection)
        if seconds >= self.best_s:
            return False
        self.best, self.best_s = selection, seconds
        return True

    def try_single_changes(self) -> None:
        """Changes what is done with one gap, or whether one weight stays, for as long as that
        helps."""
        helped = True
        while helped and not self.is_over:
            untried = takewhile(lambda _: not self.is_over, self._changed(self.best))
            helped = any(map(self.offer, untried))

    def _changed(self, selection: Selection) -> Iterator[Selection]:
        choices = self.choices
        for i, gap in _by_size(choices.gaps):
            gone = dict.fromkeys(selection.evicted, _EVICT) | dict(selection.recomputed)
            if i not in gone:
                continue
            del gone[i]
            options = [_EVICT] if gap.is_evictable else []
            for option in [None, *options, *range(len(gap.recipes))]:
                draft = _Draft(choices, self.capacity, _selection(gone, selection.staying))
                if (option is None or draft.take(i, option)) and draft.fits:
                    yield draft.selection()
        for i, _ in _by_size(choices.weights):
            staying = selection.staying ^ {i}
            draft = _Draft(choices, self.capacity, replace(selection, staying=staying))
            if choices.weights[i].may_stay and draft.fits:
                yield draft.selection()


def _selection(gone: dict[int, int], staying: Iterable[int]) -> Selection:
    return Selection(
        frozenset(i for i, option in gone.items() if option == _EVICT),
        tuple(sorted((i, k) for i, k in gone.items() if k != _EVICT)),
        frozenset(staying),
    )


def _by_size[T: (Gap, Weight)](items: Sequence[T]) -> list[tuple[int, T]]:
    return sorted(enumerate(items), key=lambda item: -item[1].size)


class _Programs:
    """Mixed-integer programs around the best selection of a search. They choose about what that
    takes now and what seems worth it, so that later ones take nothing else either."""

    def __init__(self, search: _Search, relaxation: Relaxation) -> None:
        self._search, self._samples = search, relaxation.samples
        chosen = search.best.evicted | {i for i, _ in search.best.recomputed}
        shares = [
            float(evicted) + sum(recomputed)
            for evicted, recomputed in zip(relaxation.evicted, relaxation.recomputed, strict=True)
        ]

        def interest(i: int) -> tuple[bool, bool, int]:
            """What is torn comes first, then what is chosen, then what is large."""
            is_torn = max(relaxation.evicted[i], *relaxation.recomputed[i], 0.0) < 0.99
            taken = shares[i] > 0.01
            return not (is_torn and taken), not (taken or i in chosen), -search.choices.gaps[i].size

        gaps = [i for i, g in enumerate(search.choices.gaps) if has_options(g)]
        ranked = sorted(gaps, key=interest)
        self._first = ranked[:_FREE]
        self._kept = sorted({*ranked[:_GAPS], *chosen})
        order = _order(search.choices, relaxation)
        kept = set(self._kept)
        self._order = [option for option in order if option[0] in kept]
        self._models: dict[float, Model] = {}
        self._are_solved = True

    def candidates(self) -> Iterator[Selection | None]:
        """Yields what each program proposes; the caller moves the best of the search, around
        which the next one is written."""
        weights = _largest_first(self._search.choices)
        for pace in _PACES:
            yield self._proposal(pace, self._first, weights[:_FREE])
        if self._are_solved and len(self._kept) <= _FREE and len(weights) <= _FREE:
            return  # No part knows better than the whole.
        reached = math.inf
        while self._search.best_s < reached:
            reached = self._search.best_s
            for stretches in _STRETCHES:
                for pace in _PACES:
                    for gaps, near in self._neighbourhoods(stretches):
                        yield self._proposal(pace, gaps, near)

    def _neighbourhoods(self, stretches: int) -> Iterator[tuple[list[int], list[int]]]:
        """For each of so many stretches of ticks the largest gaps that begin or end there, and
        the largest weights that are read there."""
        choices = self._search.choices
        edges = np.linspace(0, choices.ticks, stretches + 1).astype(int).tolist()
        for low, high in pairwise(edges):
            gaps = [
                i
                for i in self._kept
                if low <= choices.gaps[i].start < high or low < choices.gaps[i].end <= high
            ]
            weights = [
                i
                for i in _largest_first(choices)
                if any(live.start < high and low < live.end for live in choices.weights[i].reads)
            ]
            gaps.sort(key=lambda i: -choices.gaps[i].size)
            if gaps or weights:
                yield gaps[:_NEIGHBOURS], weights[:_NEIGHBOURS]

    def _proposal(
        self, pace: float, gaps: Sequence[int], weights: Sequence[int]
    ) -> Selection | None:
        """The best the program knows with only these gaps and weights free, made to fit."""
        search = self._search
        model = self._model(pace)
        low, high = _held(model, search.best, frozenset(gaps), frozenset(weights))
        x, is_optimal = _solve(model, low, high, search.left_s / 2)
        self._are_solved &= is_optimal
        if x is None:
            return None
        draft = _Draft(search.choices, search.capacity, _read(model, x))
        return draft.selection() if draft.complete(self._order) else None

    def _model(self, pace: float) -> Model:
        if pace not in self._models:
            choices = self._search.choices
            load = choices.load.copy()
            kept = set(self._kept)
            for i, gap in enumerate(choices.gaps):
                # `build` gives away what it is not to choose about: these are kept.
                if i not in kept and has_options(gap):
                    load[gap.start : gap.end] += gap.size
            slower = _slower(replace(choices, load=load), pace)
            self._models[pace] = build(slower, self._search.capacity, self._samples, self._kept)
        return self._models[pace]


def _held(
    model: Model, selection: Selection, gaps: frozenset[int], weights: frozenset[int]
) -> tuple[Floats, Floats]:
    """The box of `model` with all choices but those of `gaps` and `weights` as in `selection`."""
    low, high = model.low.copy(), model.high.copy()
    recomputed = set(selection.recomputed)
    for i, column in model.evict.items():
        if i not in gaps:
            low[column] = high[column] = float(i in selection.evicted)
    for (i, k), column in model.recipe.items():
        if i not in gaps:
            low[column] = high[column] = float((i, k) in recomputed)
    for i, column in model.stay.items():
        if i not in weights:
            low[column] = high[column] = float(i in selection.staying)
    return low, high


def _solve(
    model: Model, low: Floats, high: Floats, time_limit_s: float
) -> tuple[Floats | None, bool]:
    """The best point found with choices of 0 or 1, None when none was; and whether no other is
    better."""
    is_choice = np.zeros(len(low), dtype=np.bool_)
    for columns in (model.evict, model.recipe, model.stay, model.drop):
        is_choice[list(columns.values())] = True
    solved = minimize(
        model.objective(PRICE),
        is_choice,
        low,
        high,
        vstack([model.at_most, model.equal]),
        np.concatenate([np.full(len(model.limits), -np.inf), model.targets]),
        np.concatenate([model.limits, model.targets]),
        seconds=max(0.01, time_limit_s),
        nodes=_NODES,
        gap=_GAP,
    )
    return solved.x, solved.best


def _read(model: Model, x: Floats) -> Selection:
    return Selection(
        frozenset(i for i, column in model.evict.items() if x[column] > 0.5),
        tuple(key for key, column in model.recipe.items() if x[column] > 0.5),
        frozenset(i for i, column in model.stay.items() if x[column] > 0.5),
    )
