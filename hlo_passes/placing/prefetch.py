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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hlo_passes.hardware.machine import Link
from hlo_passes.plan import LiveRange, LogicalTime

LINK_MARGIN = 1.5
"""How much slower than the model a real link may be before a just-in-time start is late."""


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


def schedule_starts(
    fetches: Sequence[Fetch],
    load: np.ndarray,
    capacity: int,
    clock: np.ndarray,
    link: Link,
    slots: int | None = None,
    *,
    releases: Mapping[int, LogicalTime] | None = None,
    ring_alignment: int | None = None,
) -> list[int]:
    """Chooses the start tick of each fetch.

    Args:
      fetches: ordered by first read.
      load: int64[ticks], bytes of other temporaries live at each tick.
      capacity: bytes of the arena that holds both.
      clock: float64[ticks + 1], seconds of compute before each tick.
      link: what the fetches travel on.
      slots: at most so many fetches hold bytes at any tick; None for no such limit.
      releases: number of an eviction to the tick from which what it took away may come back.
      ring_alignment: a fetch also waits until some gap between the fetches that are live,
        rounded up to so many bytes, has room for it: what a compiler that places buffers as
        they come (TPU) needs. None for one that does not.

    Returns:
      Start ticks, in the order of `fetches`, never decreasing.

    Raises:
      DoesNotFit: when some tick needs more than `capacity`, or more than `slots` fetches.

    Time O(sum of the fetches' ranges in ticks), vectorised.
    """
    used = load.copy()
    held = np.zeros_like(load)
    starts: list[int] = []
    ring = None
    if ring_alignment is not None:
        ring = _Ring(capacity - int(load.max(initial=0)), ring_alignment)
    previous = 0
    for fetch, latest in zip(fetches, _just_in_time(fetches, clock, link), strict=True):
        first, end = fetch.reads
        room = capacity - fetch.size
        if used[first:end].max(initial=0) > room:
            tick = first + int(used[first:end].argmax())
            raise DoesNotFit(tick, int(used[tick]) + fetch.size)
        if slots is not None and held[first:end].max(initial=0) >= slots:
            raise DoesNotFit(first + int(held[first:end].argmax()), capacity + fetch.size)
        released = 0 if fetch.eviction is None or not releases else releases[fetch.eviction]
        low = min(max(previous, latest, released), first)
        blocked = used[low:first] > room
        if slots is not None:
            blocked |= held[low:first] >= slots
        (where,) = blocked.nonzero()
        start = low + int(where[-1]) + 1 if where.size else low
        if ring is not None:
            start = ring.place(fetch, start)
        used[start:end] += fetch.size
        held[start:end] += 1
        starts.append(start)
        previous = start
    return starts


class _Ring:
    """Fetches at the offsets that best fit gives them in the order of their starts."""

    def __init__(self, capacity: int, alignment: int) -> None:
        self._capacity = capacity
        self._alignment = alignment
        self._held: list[tuple[int, int, int]] = []  # (offset, top, end tick), by offset

    def place(self, fetch: Fetch, earliest: int) -> int:
        """Returns the first tick from `earliest` on with a gap for `fetch`, and takes it.

        Raises:
          DoesNotFit: when there is none before its first reader.
        """
        ends = sorted({end for *_, end in self._held if earliest < end <= fetch.reads.start})
        for tick in (earliest, *ends):
            self._held = [held for held in self._held if held[2] > tick]
            gaps: list[tuple[int, int]] = []  # (bytes, offset)
            floor = 0
            for bottom, top, _ in self._held:
                gaps.append((bottom - floor, floor))
                floor = -(-top // self._alignment) * self._alignment
            fitting = [gap for gap in gaps if gap[0] >= fetch.size]
            offset = min(fitting)[1] if fitting else floor
            if offset + fetch.size <= self._capacity:
                self._held.append((offset, offset + fetch.size, fetch.reads.end))
                self._held.sort()
                return tick
        raise DoesNotFit(fetch.reads.start, self._capacity + 1)


def _just_in_time(fetches: Sequence[Fetch], clock: np.ndarray, link: Link) -> list[int]:
    """The latest start ticks with which every fetch is done at its first read, if the link
    does nothing else and is `LINK_MARGIN` times slower than it says."""
    begins = np.empty(len(fetches))
    deadline = np.inf
    for i in range(len(fetches) - 1, -1, -1):
        fetch = fetches[i]
        seconds = fetch.size / link.bytes_per_s * LINK_MARGIN
        deadline = min(deadline, clock[fetch.reads.start]) - seconds
        begins[i] = deadline - link.latency_s
    ticks = np.searchsorted(clock, begins, side="right") - 1
    return np.maximum(ticks, 0).tolist()
