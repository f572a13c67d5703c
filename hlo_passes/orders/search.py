"""Looks for an order in which less is live at once, by moving few steps.

    load   ▁▂▃▅▇█▅▃▂▁      while the peak is above the capacity: of the moves that relieve it
              ↑  ╰─ P        (see `orders.moves`), with the moved steps where they do least harm,
              ╰ y            the best one is made

Where the least cut at the peak is no lower than the peak, no order is better. In between, the
problem is NP-hard (Sethi, "Complete register allocation problems", SIAM J. Comput. 4, 1975),
and a search by single moves may end above the least.

XLA's own list scheduler (xla/service/hlo_memory_scheduler.cc) builds an order from the front,
and takes what frees most bytes next. Here an order that is good stays as it is, but for what
has to move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.orders.load import Indices, Load, OrderProblem
from hlo_passes.orders.moves import Move, least_cuts, releases

# Steps that are looked at in all. To look at an order takes as many as it has, and what calls
# of numpy take.
_EFFORT = 20_000_000
_EFFORT_OF_CALLS = 2000

# Pieces that a move is made in at most; and of those, how many are tried alone.
_MOST_PIECES, _MOST_ALONE = 64, 16

type _Spot = Literal["far", "calm", "near"]
"""Where steps go: as far from the peak as they can, where least is live, right beside it."""

_SPOTS: tuple[_Spot, ...] = ("far", "calm", "near")


def lower_loads(problem: OrderProblem, capacity: int) -> list[Load]:
    """Returns ever better orders, of which the last has a peak of at most `capacity`, or one as
    low as was found.

    The first is the present one; each next one has a lower peak. The effort is bounded: some
    7,000 orders of 1,000 steps are looked at, or 200 of 100,000.
    """
    search = _Search(capacity)
    load, found = problem.present, [problem.present]
    while load.peak > capacity:
        better = search.better(load)
        if better is None:
            break
        load = better
        if load.peak < found[-1].peak:  # Else it is only reached less often.
            found.append(load)
    return found


class _Piece(NamedTuple):
    """Steps that move as one block, to before a step or to behind it."""

    steps: frozenset[int]
    is_pulled: bool


type _Candidate = tuple[Load, int]
"""An order, and how many steps move for it."""


class _Search:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._effort = 0

    def better(self, load: Load) -> Load | None:
        """The best of the orders that one move leads to; None when none is better."""
        for find in (_released, _cut):
            best, best_rank = None, (*self._rank(load), 0)
            for at in sorted({int(load.peaks[0]), int(load.peaks[-1])}):
                for candidate, steps in find(load, at):
                    if self._effort > _EFFORT:
                        return best
                    rank = (*self._rank(candidate), steps)
                    if rank < best_rank and candidate.is_allowed:
                        best, best_rank = candidate, rank
            if best is not None:
                return best
        return None

    def _rank(self, load: Load) -> tuple[int, int]:
        """What is lower is better: the peak, and how often it is reached. All orders within
        the capacity are equally good."""
        self._effort += load.problem.steps + _EFFORT_OF_CALLS
        if load.peak <= self._capacity:
            return self._capacity, 0
        return load.peak, len(load.peaks)


def _released(load: Load, at: int) -> Iterator[_Candidate]:
    for move in dict.fromkeys(releases(load, at)):
        yield from _made(load, _connected(load, move), at)


def _cut(load: Load, at: int) -> Iterator[_Candidate]:
    """What least cuts can lead to, made as a whole, in part, or step by step."""
    for move in dict.fromkeys(least_cuts(load, at)):
        connected = _connected(load, move)
        yield from _made(load, connected, at)
        if len(connected) > 1:
            for piece in connected[:_MOST_ALONE]:
                yield from _made(load, [piece], at)
        single = [_Piece(frozenset({s}), True) for s in _in_order(load, move.pulled)]
        single += [_Piece(frozenset({s}), False) for s in _in_order(load, move.pushed)[::-1]]
        if len(single) > len(connected):
            yield from _made(load, single, at)


def _connected(load: Load, move: Move) -> list[_Piece]:
    """A move in pieces with no dependence between them, in an order in which each can go far."""
    pieces = [_Piece(steps, True) for steps in _components(load, move.pulled)]
    return pieces + [_Piece(steps, False) for steps in _components(load, move.pushed)[::-1]]


def _components(load: Load, steps: frozenset[int]) -> list[frozenset[int]]:
    """The parts of `steps` that dependences connect, by first place."""
    problem, left = load.problem, set(steps)
    found: list[frozenset[int]] = []
    for step in _in_order(load, steps):
        if step not in left:
            continue
        left.remove(step)
        pending, part = [step], {step}
        while pending:
            one = pending.pop()
            for other in chain(problem.before[one], problem.after[one]):
                if other in left:
                    left.remove(other)
                    part.add(other)
                    pending.append(other)
        found.append(frozenset(part))
    return found


def _in_order(load: Load, steps: Iterable[int]) -> list[int]:
    return sorted(steps, key=load.place.__getitem__)


def _made(load: Load, pieces: list[_Piece], at: int) -> Iterator[_Candidate]:
    """Yields the different orders with all of `pieces` moved to one kind of spot."""
    if not 0 < len(pieces) <= _MOST_PIECES:
        return
    pivot, seen = int(load.order[at]), set[bytes]()
    for spot in _SPOTS:
        moved = load
        for piece in pieces:
            place = _place(moved, piece, int(moved.place[pivot]), spot)
            if place is None:
                break
            moved = _inserted(moved, piece.steps, place)
        else:
            if moved.order.tobytes() not in seen:
                seen.add(moved.order.tobytes())
                yield moved, sum(len(piece.steps) for piece in pieces)


def _place(load: Load, piece: _Piece, at: int, spot: _Spot) -> int | None:
    """The place in front of which a piece can be set, on its side of place `at`."""
    edges = load.problem.before if piece.is_pulled else load.problem.after
    ties = {other for step in piece.steps for other in edges[step]} - piece.steps
    places = load.place[list(ties)]
    if piece.is_pulled:
        free = np.arange(int(places.max(initial=-1)) + 1, at + 1)
    else:
        free = np.arange(at + 1, int(places.min(initial=load.problem.steps)) + 1)
    free = free[_is_free(load, piece, free)]
    if not len(free):
        return None
    match spot:
        case "far":
            return int(free[0] if piece.is_pulled else free[-1])
        case "near":
            return int(free[-1] if piece.is_pulled else free[0])
        case "calm":
            return int(free[np.argmin(load.between[free])])


def _is_free(load: Load, piece: _Piece, places: Indices) -> npt.NDArray[np.bool_]:
    """Where a piece stands under as many asynchronous operations as it does now.

    Of a piece that brings some along, or stands under different ones, only the result tells.
    """
    problem, steps = load.problem, np.array(list(piece.steps), np.intp)
    under = np.unique(load.open[load.place[steps[problem.takes_time[steps]]]])
    if problem.opens[steps].any() or len(under) != 1:
        return np.ones(len(places), np.bool_)
    return load.open[places] == under[0]


def _inserted(load: Load, steps: Iterable[int], place: int) -> Load:
    """The order with `steps`, in their order, in front of what is at `place`."""
    chosen = np.sort(load.place[list(steps)])
    kept = np.ones(load.problem.steps, np.bool_)
    kept[chosen] = False
    ahead, behind = load.order[:place], load.order[place:]
    order = np.concatenate([ahead[kept[:place]], load.order[chosen], behind[kept[place:]]])
    return Load(load.problem, order)
