"""How long each temporary lies on the device while nobody works on it.

    tick         0         1        2 ...... 8     9
    a            written   read     ·  ·  ·  ·     read        idle in [2, 9)

What is idle for long can be evicted, or computed again (`gaps`): a plan says which is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.edits.gaps import Temporary, find_temporaries
from hlo_passes.ir import Instruction
from hlo_passes.placing.ticks import EntryTicks
from hlo_passes.plan import LiveRange


@dataclass(frozen=True, slots=True)
class Idle:
    """A temporary, and the longest time for which it is idle.

    Attributes:
      buffer: the instruction whose result it is.
      maker: the one that computes it; another one where it makes several things.
      size: bytes.
      ticks: half-open, between two accesses; see `placing.ticks`.
      after, before: the instructions that make or read it last and next.
    """

    buffer: Instruction
    maker: Instruction
    size: int
    ticks: LiveRange
    after: Instruction
    before: Instruction


def idle_temporaries(ranges: LiveRanges, ticks: EntryTicks) -> tuple[Idle, ...]:
    """Returns the entry's temporaries with bytes of their own that are ever idle, the largest
    number of bytes times ticks first.

    Args:
      ranges: of a scheduled module.
      ticks: of its entry.

    O(module).
    """
    found = [
        Idle(
            t.handle,
            t.maker,
            t.size,
            gap,
            ticks.instructions[gap.start - 1],
            ticks.instructions[gap.end],
        )
        for t in find_temporaries(ranges, ticks)
        if not t.obstacle and (gap := _longest_gap(t)) is not None
    ]
    found.sort(key=lambda i: (-i.size * (i.ticks.end - i.ticks.start), i.buffer.id))
    return tuple(found)


def _longest_gap(t: Temporary) -> LiveRange | None:
    accesses = t.accesses
    gaps = (LiveRange(a + 1, b) for a, b in pairwise(accesses) if b > a + 1)
    return max(gaps, key=lambda g: g.end - g.start, default=None)
