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

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hlo_passes.hardware.machine import Link
from hlo_passes.placing import _schedule
from hlo_passes.placing.prefetch import LINK_MARGIN, Fetch, fetch_rows
from hlo_passes.placing.problem import Departure, Evicted


def schedule_evictions(
    evictions: Sequence[Evicted],
    fetches: Sequence[Fetch],
    load: npt.NDArray[np.int64],
    capacity: int,
    costs: npt.NDArray[np.float64],
    busy: npt.NDArray[np.float64],
    link: Link,
    margin: float = LINK_MARGIN,
) -> list[Departure]:
    """Chooses the ticks of each eviction.

    Args:
      evictions: in the order of `written`.
      fetches: what is brought to the device, refetches among them; each holds its bytes while
        it is read, if not longer.
      load: int64[ticks], bytes of temporaries, each evicted one until `free`.
      capacity: bytes of the arena that holds all of these.
      costs: float64[ticks], seconds of compute; busy: those for which that moves bytes on
        `link` itself.
      link: away from the device.
      margin: how much slower than it says it may be.

    O(ticks + evictions + fetches).
    """
    departures = _schedule.schedule_evictions(
        eviction_rows(evictions),
        fetch_rows(fetches),
        load,
        costs,
        busy,
        capacity,
        link.bytes_per_s,
        link.latency_s,
        margin,
    )
    return [Departure(*ticks) for ticks in departures]


def eviction_rows(evictions: Sequence[Evicted]) -> npt.NDArray[np.int64]:
    """What `_schedule` knows of evictions."""
    rows = [
        (e.size, e.written, e.free, -1 if e.returned is None else e.returned, bool(e.holder))
        for e in evictions
    ]
    return np.array(rows, np.int64).ravel()
