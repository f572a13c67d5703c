"""Transfers as they were scheduled when it was predicted how a selection is packed.

    tick of the module   0   1   2           3
    edited               0   1   2  c   c'   3      what runs again stands in front of its reader;
    a fetch, issued at 3            ├────────┤      what is issued for that tick, in front of it

A search goes by what it predicts of packing, and packing is chaotic: with transfers that are
scheduled anew, among the clones, a choice that was found to fit may not fit any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from hlo_passes.edits.gaps import Temporary
from hlo_passes.edits.state import Fitted
from hlo_passes.fitting.repacking import excess_of
from hlo_passes.placing import placement
from hlo_passes.placing.prefetch import Fetch
from hlo_passes.placing.problem import Departure, Problem, fetches
from hlo_passes.plan import LiveRange, LogicalTime


def as_predicted(
    predicted: Fitted,
    temporaries: Sequence[Temporary],
    before: Problem,
    after: Problem,
    budget: int,
) -> placement.Choice | None:
    """Schedules what moves in an edited module as it was when its packing was predicted; None where
    something else moves there, or XLA's packing does not come within `budget` bytes.

    Args:
      temporaries: of `before`, the module that was edited; `after` is the edited one.
    """
    first = first_ticks(before, after)

    def name(of: int, others: Sequence[str]) -> str:
        return temporaries[of].name if of >= 0 else others[-1 - of]

    evicted, moved = [e.buffer for e in before.evictions], [m.buffer for m in before.movables]
    departures = {
        name(of, evicted): Departure(first[start], first[done])
        for of, (start, done) in predicted.departures.items()
    }
    starts: dict[tuple[str, LogicalTime], deque[LogicalTime]] = defaultdict(deque)
    for (of, read), start in predicted.starts:
        starts[name(of, moved), read].append(first[start])
    jobs = _jobs(after, first, starts)
    is_same = len(jobs) >= len(starts) and departures.keys() == {e.buffer for e in after.evictions}
    if not is_same or any(start is None for _, start in jobs):
        return None
    jobs.sort(key=lambda job: job[0].reads)
    found = placement.scheduled(
        after,
        budget,
        [departures[e.buffer] for e in after.evictions],
        [fetch for fetch, _ in jobs],
        [start for _, start in jobs if start is not None],
    )
    return found if found is not None and not excess_of(after, found, budget) else None


def first_ticks(before: Problem, after: Problem) -> list[LogicalTime]:
    """Of each tick of a module, and of its end, that of the edited one at which what runs again in
    front of it begins. An element of a tuple may have come to stand before that."""
    tick_of = {i.name: tick for tick, i in enumerate(after.ticks.instructions)}
    ends = (tick_of[i.name] + 1 for i in before.ticks.instructions)
    return [0, *accumulate(ends, max)]


def _jobs(
    after: Problem,
    first: Sequence[LogicalTime],
    starts: Mapping[tuple[str, LogicalTime], deque[LogicalTime]],
) -> list[tuple[Fetch, LogicalTime | None]]:
    """The fetches of an edited module, and when each is issued; where none was scheduled for a
    reader, the copy before is kept for it, and without one the fetch has no tick."""
    found: list[tuple[Fetch, LogicalTime | None]] = []
    last: dict[str, int] = {}
    for fetch in fetches(after.movables):
        left = starts.get((fetch.buffer, bisect_right(first, fetch.reads.start) - 1))
        start = left.popleft() if left else None
        at = last.get(fetch.buffer)
        if start is None and at is not None:
            kept, begun = found[at]
            reads = LiveRange(kept.reads.start, fetch.reads.end)
            found[at] = replace(kept, reads=reads), begun
        else:
            last[fetch.buffer] = len(found)
            found.append((fetch, start))
    return found
