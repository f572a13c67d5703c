"""When each transfer starts: as late as is safe, as early as the budget allows.

A *fetch* brings one weight to the device for a group of reads. It holds its bytes from
its start until after its last read:

    tick       0    1    2    3    4    5    6
    fetch a    start═════ done
               [──────── a's bytes ──────)
    fetch b         start ════════ done
                    [──────────── b's bytes ────)

Fetches are issued in the order in which they are first read. For one link that carries
one stream this order (earliest deadline first) meets all deadlines if any order does
(Jackson 1955; Liu and Layland 1973), and each start is then taken as

    max(earliest tick from which its bytes fit under the capacity,
        just-in-time tick: the last from which the link still delivers everything in time)

so that memory is not held for longer than the link needs, and the link never waits for
anything but memory. When the link is the bottleneck the just-in-time tick is 0 and the
capacity decides alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hlo_passes.hardware.machine import Link
from hlo_passes.placing import _schedule
from hlo_passes.plan import LiveRange, LogicalTime

LINK_MARGIN = 1.5
"""How much slower than the model a real link may be before a just-in-time start is late, where
nothing is known of how it varies (`fitting.steady` chooses by that)."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One transfer to be scheduled.

    Attributes:
      buffer: HLO name of the parameter that moves, or of the temporary that comes back.
      size: bytes it takes on the device.
      reads: from the tick of its first reader to the tick after its last.
      eviction: of a temporary, the number of the eviction that must be done before.
    """

    buffer: str
    size: int
    reads: LiveRange
    eviction: int | None = None


class DoesNotFit(Exception):
    """At `tick`, `bytes_needed` must be live at once, whatever starts when."""

    def __init__(self, tick: int, bytes_needed: int) -> None:
        super().__init__(f"{bytes_needed} bytes are live at tick {tick}")
        self.tick = tick
        self.bytes_needed = bytes_needed


def least_capacity(fetches: Sequence[Fetch], load: np.ndarray) -> tuple[int, int]:
    """Returns the least arena in which `fetches` can be scheduled, and the tick that sets it.

    At every tick what is read there must be live: a fetch cannot hold less than its
    `reads`, and starting each exactly there is a schedule.

    Args:
      load: int64[ticks], bytes of other temporaries live at each tick.
    """
    change = np.zeros(len(load) + 1, np.int64)
    sizes = [f.size for f in fetches]
    np.add.at(change, [f.reads.start for f in fetches], sizes)
    np.subtract.at(change, [f.reads.end for f in fetches], sizes)
    needed = load + np.cumsum(change)[:-1]
    if not needed.size:
        return 0, 0
    tick = int(needed.argmax())
    return int(needed[tick]), tick


def fetch_rows(fetches: Sequence[Fetch]) -> npt.NDArray[np.int64]:
    """What `_schedule` knows of fetches."""
    rows = [(f.size, *f.reads, -1 if f.eviction is None else f.eviction) for f in fetches]
    return np.array(rows, np.int64).ravel()


def schedule_starts(
    fetches: Sequence[Fetch],
    load: npt.NDArray[np.int64],
    capacity: int,
    clock: npt.NDArray[np.float64],
    busy: npt.NDArray[np.float64],
    link: Link,
    slots: int | None = None,
    *,
    departures: Sequence[tuple[LogicalTime, LogicalTime]] = (),
    ring_alignment: int | None = None,
    margin: float = LINK_MARGIN,
) -> list[LogicalTime]:
    """Chooses the start tick of each fetch.

    Args:
      fetches: ordered by first read.
      load: int64[ticks], bytes of other temporaries live at each tick.
      capacity: bytes of the arena that holds both.
      clock: float64[ticks + 1], seconds of compute before each tick.
      busy: float64[ticks], seconds for which that moves bytes on `link` itself.
      link: what the fetches travel on.
      slots: at most so many fetches hold bytes at any tick; None for no such limit.
      departures: of each eviction the ticks at which it is issued and waited for; what it took
        away may come back from then on.
      ring_alignment: a fetch also waits until some gap between the fetches that are live,
        rounded up to so many bytes, has room for it: what a compiler that places buffers as
        they come (TPU) needs. None for one that does not.
      margin: how much slower than it says the link may be.

    Returns:
      Start ticks, in the order of `fetches`, never decreasing.

    Raises:
      DoesNotFit: when some tick needs more than `capacity`, or more than `slots` fetches.

    Time O(sum of the fetches' ranges in ticks).
    """
    starts, tick, needed = _schedule.schedule_starts(
        fetch_rows(fetches),
        np.array(departures, np.int64).ravel(),
        load,
        clock,
        busy,
        capacity,
        link.bytes_per_s,
        link.latency_s,
        margin,
        -1 if slots is None else slots,
        -1 if ring_alignment is None else ring_alignment,
    )
    if tick >= 0:
        raise DoesNotFit(tick, needed)
    return starts
