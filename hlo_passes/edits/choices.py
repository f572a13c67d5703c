"""What can be done about memory that runs short, as numbers: no HLO from here on.

    tick        written        start ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄ end
    temporary   ├── read ── read ┤ a gap: nobody reads  ├ read ──
    kept        ████████████████████████████████████████████████
    evicted     ████████████████                        ████████   out while the gap begins, in
                    └─ can leave from here                 before it ends
    recomputed  ████████████████                        ████████   made again right before `end`

Each *gap* is kept, evicted or recomputed; each *weight* stays on the device or is streamed. What
decides is a budget in bytes at every tick, the time that each direction of the link needs for what
moves, and the time of what is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hlo_passes.plan import LiveRange, LogicalTime


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of ticks in which a temporary is on the device and nobody reads it.

    Attributes:
      value: number of the temporary. Its gaps share one eviction: the copy on the host stays
        clean.
      size: bytes that are free during the gap if it is not kept.
      written: the tick from which a copy to the host can start.
      start: the first tick at which the bytes can be away.
      end: the tick of the next reader, at which they must be back; ``start < end``.
      is_evictable: it can be copied to the host.
      recompute_s: seconds of compute to make it again; None where it cannot be.
    """

    value: int
    size: int
    written: LogicalTime
    start: LogicalTime
    end: LogicalTime
    is_evictable: bool
    recompute_s: float | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """An argument on the host that may stay on the device instead.

    Attributes:
      size: bytes.
      reads: ticks at which it has to be on the device, in order and disjoint.
      may_stay: False where it is decided that it is streamed.
    """

    size: int
    reads: tuple[LiveRange, ...]
    may_stay: bool


@dataclass(frozen=True, eq=False)
class Choices:
    """Everything there is to choose.

    Attributes:
      costs: float64[ticks], seconds of compute of each.
      load: int64[ticks], bytes live on the device when every gap is kept; weights apart.
      gaps, weights: what can be chosen about.
      out_bytes_per_s, in_bytes_per_s: of the link, away from the device and towards it.
      latency_s: of a transfer, at least.
      shared_queue: the two directions share one queue (a link that is not full duplex).
      in_busy_s: seconds for which other transfers towards the device occupy the link.
    """

    costs: npt.NDArray[np.float64]
    load: npt.NDArray[np.int64]
    gaps: tuple[Gap, ...]
    weights: tuple[Weight, ...]
    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float
    shared_queue: bool
    in_busy_s: float = 0.0

    @property
    def ticks(self) -> int:
        return len(self.costs)
