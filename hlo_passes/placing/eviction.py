"""When what goes to the host leaves: as early as it can, waited for as late as memory allows.

    tick       0     1     2     3     4     5     6     7
    temporary  written           free              fetched again
    eviction         start═══════════════ done
               [──────── its bytes ───────)

So do evicted temporaries, and results that the program returns in host memory (`stores`), which
nobody fetches again. The copy starts as soon as there is something to copy, while others may
still read it. From `free` on nobody does, and its bytes are held for nothing but the copy: until
that has ended, at a link `prefetch.LINK_MARGIN` times slower than it says, or somebody else needs
them. Then the step waits for it. A result has to be there when the program returns it.

The copies go one after the other: the oldest is the first to end, and waiting for a later one
is waiting for all before it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hlo_passes.hardware.machine import Link
from hlo_passes.placing.prefetch import LINK_MARGIN, Fetch
from hlo_passes.placing.problem import Departure, Evicted


def schedule_evictions(
    evictions: Sequence[Evicted],
    fetches: Sequence[Fetch],
    load: npt.NDArray[np.int64],
    capacity: int,
    costs: npt.NDArray[np.float64],
    link: Link,
) -> list[Departure]:
    """Chooses the ticks of each eviction.

    Args:
      evictions: in the order of `written`.
      fetches: what is brought to the device, refetches among them; each holds its bytes while
        it is read, if not longer.
      load: int64[ticks], bytes of temporaries, each evicted one until `free`.
      capacity: bytes of the arena that holds all of these.
      costs: float64[ticks], seconds of compute.
      link: away from the device.

    O(ticks + evictions + fetches).
    """
    ticks = len(load)
    needed = np.concatenate([load, [0]]).astype(np.int64)
    due = [ticks if e.returned is None else e.returned for e in evictions]
    change = np.zeros(ticks + 1, np.int64)
    for fetch in fetches:
        change[fetch.reads.start] += fetch.size
        change[fetch.reads.end] -= fetch.size
        if fetch.eviction is not None:
            due[fetch.eviction] = min(due[fetch.eviction], fetch.reads.start)
    needed += np.cumsum(change)
    room = (capacity - needed).tolist()
    seconds = costs.tolist()

    departures = [Departure(e.written, e.free) for e in evictions]
    by_free = sorted(range(len(evictions)), key=lambda n: evictions[n].free)
    ends = [0.0] * len(evictions)
    now = link_free = 0.0
    held = issued = freed = 0
    waiting: list[int] = []  # Nobody reads them any more; in the order of the link.
    for tick in range(ticks + 1):
        while issued < len(evictions) and evictions[issued].written <= tick:
            begin = max(now + link.latency_s, link_free)
            link_free = begin + evictions[issued].size / link.bytes_per_s * LINK_MARGIN
            ends[issued] = link_free
            issued += 1
        while freed < len(by_free) and evictions[by_free[freed]].free <= tick:
            insort(waiting, by_free[freed])
            held += evictions[by_free[freed]].size
            freed += 1
        still: list[int] = []
        for n in waiting:
            is_needed = held > room[tick] or due[n] <= tick or not evictions[n].holder
            if is_needed or ends[n] <= now or tick == ticks:
                now = max(now, ends[n])
                held -= evictions[n].size
                departures[n] = Departure(evictions[n].written, tick)
            else:
                still.append(n)
        waiting = still
        if tick < ticks:
            now += seconds[tick]
    return departures
