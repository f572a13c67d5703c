"""How fast a step within a budget could be at best, whatever stays and whatever is streamed.

    budget  │ fixed │ tables │ load │ weights that stay │  m  │ next │
                                                          └─ is read while the next arrives

Let m be the largest weight that a plan streams. While it is read it lies in the arena. So
either the weights that stay leave room for m and the least weight beside it, and everything
else crosses the link; or they leave room for m alone, and then the link stands still while a
weight of m bytes is read, for whatever arrived then would lie beside it. The least over all
m bounds every plan.

Where a weight is donated, what takes its place goes back; the same bytes that cannot stay leave by
the other direction of the link, or by the same, where there is one for both.

What loops move crosses the same link, and they take no less time than that.

`bounds.lower_bound_s` adds what the order of the reads says: the link cannot run ahead of
the memory. Neither bound implies the other.
"""

from __future__ import annotations

from hlo_passes.placing.problem import Problem
from hlo_passes.simulator.bounds import Demand, lower_bound_s
from hlo_passes.simulator.events import queue_of


def budget_lower_bound_s(problem: Problem, budget: int) -> float:
    """Returns seconds that no plan within `budget` undercuts on this machine model.

    O(n log n) in ticks and weights, for each distinct size of a weight.
    """
    link = problem.link
    room = budget - problem.fixed_bytes - problem.arena.tables
    headroom = (room - problem.load + problem.stored_load).tolist()
    least_headroom = min(headroom, default=room)
    compute_s = max(float(problem.clock[-1]), problem.link_floor_s)
    if not problem.movables or sum(m.size for m in problem.movables) <= least_headroom:
        return compute_s
    demands = [
        Demand(m.size, link.source, link.destination, m.reads[0].start, m.reads[0].end)
        for m in problem.movables
    ]
    streamed = sum(m.size for m in problem.movables) - max(0, max(headroom))
    return max(
        compute_s,
        _both_ways_s(problem, max(0, max(headroom))),
        problem.link_floor_s + max(0, streamed) / link.bytes_per_s,
        _link_s(problem, max(headroom)),
        lower_bound_s(
            problem.costs.tolist(), demands, problem.machine, headroom, max(0, least_headroom)
        ),
    )


def _both_ways_s(problem: Problem, room: int) -> float:
    """The seconds for which what cannot stay occupies the way out, and all of the link where it has
    but one queue."""
    link, out = problem.link, problem.link_out
    stored = sum(m.size for m in problem.movables if m.store is not None)
    out_s = max(0, stored - room) / out.bytes_per_s
    if queue_of(link) != queue_of(out):
        return out_s
    # What stays saves its bytes both ways.
    fetched = sum(m.size for m in problem.movables)
    both = 1 / link.bytes_per_s + 1 / out.bytes_per_s
    unstored_s = (fetched - stored) / link.bytes_per_s
    return max(out_s, unstored_s + stored * both - room * both) + problem.link_floor_s


def _link_s(problem: Problem, room: int) -> float:
    """The least time over all sizes of the largest streamed weight."""
    smallest = min(m.size for m in problem.movables)
    total = sum(m.size for m in problem.movables)
    rate = problem.link.bytes_per_s
    found = float("inf")
    for largest in sorted({m.size for m in problem.movables}):
        alone = total - max(0, room - largest)
        beside = total - max(0, room - largest - smallest)
        streamed = sum(m.size for m in problem.movables if m.size <= largest)
        if streamed < alone:
            continue  # Then a larger one is streamed as well.
        still_s = _standing_still_s(problem, largest, room)
        found = min(found, beside / rate, alone / rate + still_s)
    return found


def _standing_still_s(problem: Problem, size: int, room: int) -> float:
    """Compute of the ticks that read a weight of `size` bytes first, less that of as many as
    could stay."""
    ticks = {m.reads[0].start for m in problem.movables if m.size == size}
    seconds = sorted(problem.costs[list(ticks)].tolist())
    staying = max(0, room - size) // size
    return sum(seconds[: max(0, len(seconds) - staying)])
