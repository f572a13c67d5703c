"""What the transfers of a process did, and how much of it the compute did not wait for.

         start_issued      copy_began                 copy_ended
start    ──────┴                │                          │
engine         └── queued ──────┴───────── copies ─────────┤
compute  ───────────────────────────────────────┬─ waits ──┴┬──────
                                           done_called   done_returned
                                └─── hidden ────┘
"""

import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from custom_calls.library import load

_NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One transfer, from its start to its done. Times are seconds of `time.monotonic()`."""

    transfer_id: int
    engine: int
    """`targets.TO_DEVICE` or `targets.TO_HOST`."""
    bytes: int
    run: int
    """XLA's number of the execution; equal for all devices that took part in it."""
    device: int
    sequence: int
    """The order of the starts: 0 for the first of the trace."""
    start_thread: int
    done_thread: int
    """Opaque numbers of the threads that ran the two calls."""
    start_issued: float
    copy_began: float
    copy_ended: float
    done_called: float
    done_returned: float


@contextmanager
def trace(*, capacity: int = 65_536) -> Generator[list[TransferEvent]]:
    """Records the transfers that start and end inside the `with` block.

    The list is filled when the block ends, in the order of the starts. jax returns before a
    computation has run: wait for the results (`jax.block_until_ready`) inside the block.
    Empty buffers are not transferred and leave no event. Outside a trace a transfer costs
    nothing but the test whether there is one.

    Args:
        capacity: the most transfers to record; about 100 bytes each. What comes after is
            counted, and reported by a `RuntimeWarning`.

    Raises:
        RuntimeError: when another trace of this process has not ended.
        ValueError: when `capacity` is negative.
        CustomCallLibraryError: when the C++ library is not built or cannot be loaded.
    """
    library = load()
    library.trace_begin(capacity)
    events: list[TransferEvent] = []
    try:
        yield events
    finally:
        records, dropped = library.trace_end()
        for *what, start, began, ended, called, returned in records:
            times = (start, began, ended, called, returned)
            events.append(TransferEvent(*what, *(time * _NANOSECOND for time in times)))
        events.sort(key=lambda event: event.sequence)
    if dropped:
        warnings.warn(
            f"the trace is full: {dropped} transfers after the first {capacity} are missing",
            RuntimeWarning,
            stacklevel=3,
        )


def overlap_fraction(events: Iterable[TransferEvent]) -> float:
    """The share of the copying that nothing waited for, between 0 and 1, weighted by bytes.

    A moment of a copy is waited for when any `copy_done` of the same run and device is then
    waiting: with transfers in a queue, waiting for the last is waiting for all before it.
    XLA:CPU has several threads, and one may compute while another waits; such a moment counts
    as waited for, so the share is a lower bound of what was hidden.

    Args:
        events: at least one, from `trace()`.

    Raises:
        ValueError: when there are no events.
    """
    by_place: dict[tuple[int, int], list[TransferEvent]] = {}
    for event in events:
        by_place.setdefault((event.run, event.device), []).append(event)
    if not by_place:
        raise ValueError("no transfer was traced: there is no share of nothing")
    hidden_bytes = total_bytes = 0.0
    for group in by_place.values():
        waits = _union((event.done_called, event.done_returned) for event in group)
        for event in group:
            total_bytes += event.bytes
            hidden_bytes += event.bytes * (1 - _share_within(event, waits))
    return hidden_bytes / total_bytes


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same set of moments as disjoint intervals, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _share_within(event: TransferEvent, disjoint: list[tuple[float, float]]) -> float:
    """The share of the event's copy that lies in the intervals."""
    duration = event.copy_ended - event.copy_began
    if duration <= 0:
        # Faster than the clock ticks: there was no time in which to wait.
        return 0.0
    covered = sum(
        max(0.0, min(event.copy_ended, end) - max(event.copy_began, start))
        for start, end in disjoint
    )
    return min(1.0, covered / duration)
