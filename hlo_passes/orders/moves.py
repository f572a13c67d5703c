"""What could run before a step, and what behind it, so that less is live while it runs.

    order     a   b   x   P   c   y                 P: the step at the peak
    holding of x      [███████████████)             y reads x and c, and leaves little
    move y    a   b   x   c   y   P                 x ends before P; so do c and what it holds
    or x      a   b   P   x   c   y                 x begins behind P

Two ways to find such a move. A *release* looks at one holding that is live at P: what reads
it later, with all that this needs, comes before P; or what writes it, with all that needs
that, comes behind P.

A *cut* looks at all holdings at once. Which steps stand before P is a set that contains with
each step all that must stand before it. The least that can be live while P runs, in any order
at all, is the least weight of such a set, which is a minimum cut (Picard, "Maximal closure of
a graph and applications to combinatorial problems", Management Science 22, 1976)::

    source ──∞──► what must stand before P ──────►     reached: before P
    step ──∞──► what must stand before it
    step ──∞──► in ──bytes──► out ──∞──► step          a holding costs its bytes where steps
    P ──∞──► sink                                      on both sides touch it

There may be several least cuts: one is found that moves few steps, where each step that changes
sides costs a little too, and the one with the fewest steps before P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from hlo_passes.orders.load import Bytes, Indices, Load

# Holdings at a peak that are tried to be released, largest first.
_RELEASES = 16

# Steps that one release moves at most.
_LARGEST_RELEASE = 2000

# Steps to each side of a peak that a cut moves; beyond that all stays as it is.
REACH = 2000

# A flow's capacities are 32 bit numbers: all bytes together are at most so many units.
_INFINITE = 1 << 30


class Move(NamedTuple):
    """Steps that come from behind a step to before it, and from before it to behind it."""

    pulled: frozenset[int]
    pushed: frozenset[int]


def releases(load: Load, at: int) -> Iterator[Move]:
    """Yields the moves that release one of the largest holdings that are live at place `at`."""
    problem, place = load.problem, load.place.tolist()
    live = np.flatnonzero((load.first <= at) & (load.last >= at) & (load.sizes > 0))
    largest = live[np.argsort(-load.sizes[live], kind="stable")][:_RELEASES]
    none = frozenset[int]()
    for holding in largest.tolist():
        touches = problem.touches[holding]
        behind = [step for step in touches if place[step] > at]
        if pulled := _closure(problem.before, behind, lambda step: place[step] - at):
            yield Move(pulled, none)
        ahead = [step for step in touches if place[step] < at]
        if pushed := _closure(problem.after, ahead, lambda step: at - place[step]):
            yield Move(none, pushed)


def _closure(
    edges: Sequence[Sequence[int]], goals: Sequence[int], distance: Callable[[int], int]
) -> frozenset[int]:
    """All on the far side of a step that `goals` take along; none when that is too many, or
    the step itself is among them."""
    found, pending = set(goals), list(goals)
    while pending:
        for step in edges[pending.pop()]:
            far = distance(step)
            if far == 0 or len(found) > _LARGEST_RELEASE:
                return frozenset()
            if far > 0 and step not in found:
                found.add(step)
                pending.append(step)
    return frozenset(found)


def least_cuts(load: Load, at: int) -> Iterator[Move]:
    """Yields moves after which least is live while the step at place `at` runs.

    Only `REACH` places to each side are looked at. Time is that of two maximum flows there: a
    few milliseconds for hundreds of steps.
    """
    for cost_of_step in (1, 0):
        yield _Cut(load, at, cost_of_step).move()


class _Cut:
    """The network. Nodes are the places within reach, then `in` and `out` of each holding that
    may be cut, then source and sink; what lies out of reach is one with these."""

    def __init__(self, load: Load, at: int, cost_of_step: int) -> None:
        problem = load.problem
        self._low, high = max(0, at - REACH), min(problem.steps, at + REACH + 1)
        self._within = high - self._low
        self._here = load.order[self._low : high]
        self._pivot = at - self._low
        self._load = load
        step = int(load.order[at])
        cuttable = (load.first < high) & (load.last >= self._low) & (load.sizes > 0)
        # What the step itself touches is live anyway.
        cuttable[problem.touched.holding[problem.touched.step == step]] = False
        self._cuttable = np.flatnonzero(cuttable)
        self._source = self._within + 2 * len(self._cuttable)
        self._sink = self._source + 1
        self._node = load.place - self._low
        self._node[load.place < self._low] = self._source
        self._node[load.place >= high] = self._sink
        self._edges: list[tuple[Indices, Indices, Bytes]] = []
        self._connect_steps(step)
        self._connect_holdings()
        if cost_of_step:
            ahead, behind = np.arange(self._pivot), np.arange(self._pivot + 1, self._within)
            self._add(np.full(len(ahead), self._source), ahead, cost_of_step)
            self._add(behind, np.full(len(behind), self._sink), cost_of_step)

    def _connect_steps(self, step: int) -> None:
        problem, node = self._load.problem, self._node
        later, earlier = problem.needs
        is_near = node[later] < self._within
        self._add(node[later[is_near]], node[earlier[is_near]], _INFINITE)
        needed = np.array(problem.before[step], np.intp)
        self._add(np.full(len(needed), self._source), node[needed], _INFINITE)
        self._add(np.array([self._pivot]), np.array([self._sink]), _INFINITE)

    def _connect_holdings(self) -> None:
        touched, sizes = self._load.problem.touched, self._load.sizes[self._cuttable]
        entrance = np.full(len(self._load.sizes), -1)
        entrance[self._cuttable] = self._within + 2 * np.arange(len(sizes))
        is_cut = entrance[touched.holding] >= 0
        holding, step = entrance[touched.holding[is_cut]], self._node[touched.step[is_cut]]
        self._add(step, holding, _INFINITE)
        self._add(holding + 1, step, _INFINITE)
        unit = -(-int(sizes.sum()) // (_INFINITE // 2)) or 1
        across = entrance[self._cuttable]
        self._add(across, across + 1, -(-sizes // unit))

    def _add(self, start: Indices, end: Indices, capacity: Bytes | int) -> None:
        self._edges.append((start, end, np.full(len(start), capacity, np.int64)))

    def move(self) -> Move:
        start, end, capacity = map(np.concatenate, zip(*self._edges, strict=True))
        graph = csr_array((capacity, (start, end)), shape=(self._sink + 1, self._sink + 1))
        graph.data = np.minimum(graph.data, _INFINITE).astype(np.int32)
        left = graph - maximum_flow(graph, self._source, self._sink).flow
        left.eliminate_zeros()
        reached = breadth_first_order(left, self._source, return_predecessors=False)
        before = np.zeros(self._within, np.bool_)
        before[reached[reached < self._within]] = True
        ahead, behind = before[: self._pivot], before[self._pivot + 1 :]
        return Move(
            frozenset(self._here[self._pivot + 1 :][behind].tolist()),
            frozenset(self._here[: self._pivot][~ahead].tolist()),
        )
