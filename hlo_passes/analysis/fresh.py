"""Which kernels are the first to write to memory that the system clears for them.

    live at a time    ▂▂▅▃▃▅▅▇▇▃▂▇▁
    first touched     ▂ ▃    ▂          wherever more is live than ever before

On a CPU a program's temporaries are one allocation of each call, and its results another each. One
that is larger than what the C library keeps for later comes from the system, page by page as it is
written to: which can take longer than to compute what is written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping

from hlo_passes.analysis.dataflow import Buffer, analyze_dataflow
from hlo_passes.analysis.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.ir import Module
from hlo_passes.memoize import memoized
from hlo_passes.plan import LiveRange, LogicalTime

# The most that glibc keeps of an allocation: DEFAULT_MMAP_THRESHOLD_MAX of malloc/malloc.c.
_KEPT_BYTES = 32 << 20


@memoized
def fresh_bytes(module: Module) -> Mapping[int, int]:
    """Returns by instruction of the entry the bytes that it is the first to touch; a loop or branch
    has those of what runs in it. Nothing of a module without a schedule. O(n log n)."""
    if not module.is_scheduled:
        return {}
    ranges = compute_live_ranges(analyze_dataflow(module))
    entry = module.entry.instructions
    times = [ranges.time_of[i.id] for i in entry]
    found: dict[int, int] = defaultdict(int)
    rises = dict(_rises(ranges))
    if sum(rises.values()) > _KEPT_BYTES:
        for time, size in rises.items():
            found[entry[bisect_left(times, time)].id] += size
    for buffer in ranges.dataflow.buffers:
        # A result in the place of an argument is of that one's buffer.
        if buffer.kind == "output" and buffer.size > _KEPT_BYTES:
            found[entry[bisect_left(times, _life(buffer, ranges).start)].id] += buffer.size
    return found


def _rises(ranges: LiveRanges) -> Iterator[tuple[LogicalTime, int]]:
    """Yields by how much what is live of the temporaries exceeds all before. What is read last may
    give its bytes to what is written then."""
    changes: dict[LogicalTime, int] = defaultdict(int)
    for buffer in ranges.dataflow.buffers:
        if buffer.kind == "temp":
            start, end = _life(buffer, ranges)
            changes[start] += buffer.size
            changes[max(start + 1, end - 1)] -= buffer.size
    live = most = 0
    for time, change in sorted(changes.items()):
        live += change
        if live > most:
            yield time, live - most
            most = live


def _life(buffer: Buffer, ranges: LiveRanges) -> LiveRange:
    lives = [ranges.of_value[value.id] for value in buffer.values]
    return LiveRange(min(of.start for of in lives), max(of.end for of in lives))
