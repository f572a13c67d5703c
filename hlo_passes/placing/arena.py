"""How the target's compiler will pack the arena of temporaries and fetched weights.

    bytes
      │ ┌w1──┐┌w4─────┐  ┌w5───         fetches and large temporaries, by the compiler's rule
      │ ┌w0──────┐┌w3──────┐
      ├────────────────────────────     `base`
      │ small temporaries, tables

XLA assigns the offsets once more, after us: a schedule whose bytes fit at every tick is of
no use if XLA's packing of it does not. So a schedule is packed here as XLA will do it. XLA:TPU
gives offsets in the order of the starts (best fit); XLA:GPU and XLA:CPU sort all buffers by
size or by length of life first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Learned
from hlo_passes.memory.assignment import ALL_STRATEGIES, Packing, assign_offsets
from hlo_passes.memory.usage import BACKENDS
from hlo_passes.placing.prefetch import Fetch
from hlo_passes.placing.ticks import Resident
from hlo_passes.plan import LiveRange, LogicalTime

# Bytes below which the TPU compiler can well hold a temporary in VMEM (16 to 128 MiB), where it is
# not known which it does. What it does not hold there lies apart from the fetches here, so that it
# does not break up their ring in the model where it does not on the machine.
_SMALL_TEMPORARY = 4 << 20

# On TPU nothing begins within a row of a tile; what is this small pads its shapes alike.
_ROW_BYTES = 512

# The TPU compiler keeps a table of 16 KiB in HBM for every tuple, and most tuples come after
# planning, when it moves operands to VMEM slice by slice. Where no executable said how many: for
# each entry instruction that the planner sees, 8 to 19 KiB over Llama decoders of 8 to 32 layers of
# 7B's width and of half of it (libtpu 0.0.51). A second compilation costs more than a few MiB of
# HBM.
_TPU_TABLE_BYTES = 24 << 10


@dataclass(frozen=True, eq=False)
class Arena:
    """The arena before anything is fetched into it.

    Attributes:
      machine: whose compiler packs.
      temporaries: in the order of the plan's slots.
      small: offsets of those among them that lie in the base, by their index.
      base: bytes that are taken whatever is fetched, `tables` of them by the compiler, of which
        each instruction more takes `table`.
      load: int64[ticks], bytes of the other temporaries, which share the rest with fetches.
      in_order: offsets are given in the order of the starts.
      smallest: bytes below which a temporary lies in the base.
    """

    machine: Machine
    temporaries: tuple[Resident, ...]
    small: dict[int, int]
    base: int
    tables: int
    table: int
    load: npt.NDArray[np.int64]
    in_order: bool
    smallest: int

    @classmethod
    def of(
        cls,
        temporaries: tuple[Resident, ...],
        ticks: int,
        machine: Machine,
        tables: int | None,
        learned: Learned,
    ) -> Arena:
        """Sets aside what does not depend on the fetches.

        Args:
          tables: bytes of the compiler's tables, where it has nothing to add to them, nor moves
            anything to VMEM any more; None before that.
          learned: of the module. Where it says what XLA holds in VMEM, that is not among the
            temporaries.
        """
        in_order = machine.platform == "tpu"
        small: dict[int, int] = {}
        base, table, smallest = tables or 0, 0, 0
        if in_order and tables is None:
            known = learned.table_bytes
            table = _TPU_TABLE_BYTES if known is None else _rows(-(-known // max(1, ticks)))
            smallest = _SMALL_TEMPORARY if learned.on_chip is None else 0
            base = tables = table * ticks
            indices = [k for k, t in enumerate(temporaries) if t.size < smallest]
            packing = assign_offsets(
                [temporaries[k].size for k in indices],
                [temporaries[k].live_range for k in indices],
                _ROW_BYTES,
                strategies=("start",),
            )
            small = {k: base + o for k, o in zip(indices, packing.offsets, strict=True)}
            base += _rows(packing.total)
        load = live_load((t for k, t in enumerate(temporaries) if k not in small), ticks)
        return cls(machine, temporaries, small, base, tables or 0, table, load, in_order, smallest)

    def until(self, ends: Mapping[str, LogicalTime]) -> Arena:
        """Returns the arena with some of its temporaries, by name, held longer."""
        load = self.load.copy()
        held: list[Resident] = []
        for k, t in enumerate(self.temporaries):
            end = ends.get(t.name, 0) if t.kind == "temp" else 0
            if k not in self.small and end > t.live_range.end:
                load[t.live_range.end : end] += t.size
                t = replace(t, live_range=LiveRange(t.live_range.start, end))
            held.append(t)
        return replace(self, temporaries=tuple(held), load=load)

    @property
    def alignment(self) -> int:
        return BACKENDS[self.machine.platform].alignment

    def pack(self, fetches: Sequence[Fetch], starts: Sequence[int]) -> Packing:
        """Returns the offsets of the fetches, in order, then those of the temporaries."""
        backend = BACKENDS[self.machine.platform]
        n = len(fetches)
        large = [k for k in range(len(self.temporaries)) if k not in self.small]
        # What starts at one tick starts in this order, and a temporary behind the fetches.
        ranges = [
            LiveRange(start * (n + 1) + k, fetch.reads.end * (n + 1))
            for k, (fetch, start) in enumerate(zip(fetches, starts, strict=True))
        ]
        for k in large:
            start, end = self.temporaries[k].live_range
            ranges.append(LiveRange(start * (n + 1) + n, end * (n + 1)))
        packing = assign_offsets(
            [f.size for f in fetches] + [self.temporaries[k].size for k in large],
            ranges,
            backend.alignment,
            # How XLA:GPU packs depends on the instructions of the module as it will be
            # (`fitting.repacking`); these are the plan's own offsets, by whatever order is best.
            strategies=ALL_STRATEGIES if self.machine.platform == "gpu" else backend.strategies,
        )
        offsets = [self.base + offset for offset in packing.offsets]
        placed = {**self.small, **dict(zip(large, offsets[n:], strict=True))}
        everything = offsets[:n] + [placed[k] for k in range(len(self.temporaries))]
        return Packing(tuple(everything), self.base + packing.total)


def _rows(size: int) -> int:
    return -(-size // _ROW_BYTES) * _ROW_BYTES


def live_load(temporaries: Iterable[Resident], ticks: int) -> npt.NDArray[np.int64]:
    """Returns int64[ticks]: the bytes of `temporaries` that are live at each tick."""
    change = np.zeros(ticks + 1, np.int64)
    for t in temporaries:
        change[t.live_range.start] += t.size
        change[t.live_range.end] -= t.size
    return np.cumsum(change)[:-1]
