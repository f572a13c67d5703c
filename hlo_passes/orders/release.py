"""An order in which what frees memory runs as soon as it can.

    before   g1  g2  g3  d3  d2  d1        d1 reads g1 for the last time, and leaves less
    after    g1  d1  g2  d2  g3  d3

What is pulled forward frees more than it makes, so that less is live from there to where it was.
The peak may stay what it is (`orders.search` is for that), but around it there is less to evict or
to compute again.

List scheduling with the bytes that are freed as the priority is as old as register allocation
(Goodman and Hsu, "Code scheduling and register allocation in large basic blocks", ICS 1988); here
the present order stays where it is within the capacity anyway.
"""

from __future__ import annotations

import heapq

import numpy as np

from hlo_passes.orders.load import Load, OrderProblem


def released_early(problem: OrderProblem, capacity: int) -> Load:
    """Returns the present order with what frees bytes pulled forward, over places where more than
    `capacity` bytes are live. Its peak is no higher than that of the present one.

    What begins or ends something asynchronous stays, and what takes time stays under as many of
    these as it is.

    O((steps + touches) · log steps).
    """
    return _Release(problem, capacity).order()


class _Release:
    def __init__(self, problem: OrderProblem, capacity: int) -> None:
        self._problem = problem
        self._sizes = problem.present.sizes.tolist()
        self._workspace = problem.workspace.tolist()
        self._opens = problem.opens.tolist()
        self._takes_time = problem.takes_time.tolist()
        self._under = problem.present.open.tolist()
        # The first place from each on, where too much is live.
        places = np.where(problem.present.at > capacity, np.arange(problem.steps), problem.steps)
        self._above = np.minimum.accumulate(places[::-1])[::-1].tolist()
        self._touched: list[list[int]] = [[] for _ in range(problem.steps)]
        for holding, steps in enumerate(problem.touches):
            for step in steps:
                self._touched[step].append(holding)
        # What is not yet there of what a step stands behind, and of what touches a holding.
        self._waits = [len(set(earlier)) for earlier in problem.before]
        self._left = [len(steps) for steps in problem.touches]
        self._is_done = [False] * problem.steps
        self._open = 0
        self._live = 0

    def order(self) -> Load:
        order: list[int] = []
        for step in range(self._problem.steps):
            ready = [step] if not self._is_done[step] else []
            while ready:
                one = heapq.heappop(ready)
                if one != step and not self._is_pulled(one, step):
                    continue
                order.append(one)
                for other in self._run(one):
                    heapq.heappush(ready, other)
        return Load(self._problem, np.array(order, np.intp))

    def _is_pulled(self, step: int, behind: int) -> bool:
        """Whether `step` is to run now, behind the step that is next in the present order."""
        if self._is_done[step] or self._waits[step] or self._opens[step]:
            return False
        if not self._takes_time[step]:  # Another name for the same bytes.
            return self._made(step) <= self._freed(step)
        if self._under[step] != self._open or self._above[behind + 1] >= step:
            return False
        made, freed = self._made(step), self._freed(step)
        return (
            made < freed and self._live + made + self._workspace[step] <= self._problem.present.peak
        )

    def _made(self, step: int) -> int:
        """Bytes that it is the first to touch."""
        touched = (h for h in self._touched[step] if self._left[h] == len(self._problem.touches[h]))
        return sum(self._sizes[h] for h in touched)

    def _freed(self, step: int) -> int:
        """Bytes that it is the last to touch."""
        return sum(self._sizes[h] for h in self._touched[step] if self._left[h] == 1)

    def _run(self, step: int) -> set[int]:
        """Takes note that `step` has run; returns which others that may have made ready."""
        self._is_done[step] = True
        self._live += self._made(step) - self._freed(step)
        self._open += self._opens[step]
        ready: set[int] = set()
        for holding in self._touched[step]:
            self._left[holding] -= 1
            if self._left[holding] == 1:
                last = (s for s in self._problem.touches[holding] if not self._is_done[s])
                ready.update(last)
        for later in set(self._problem.after[step]):
            self._waits[later] -= 1
            if not self._waits[later]:
                ready.add(later)
        return ready
