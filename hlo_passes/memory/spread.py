"""What XLA:TPU's packing of a module may come to, while it is not known what will be packed.

    packed   ·       ·  ·                 each of these holds some of what is small on the chip;
     bytes   · ·  · ·· ·· ··· ·· · ·      the same plan, by what XLA decides after the hook
           ──────────────────────────

XLA:TPU places buffers in the order of their starts, each in the smallest gap. What it takes to
VMEM, and the copies that it makes for that, come later: one buffer more or less moves all that
follow, so that the total jumps by a tenth. Of some plans it hardly does. A search for what fits
finds plans of which one packing is good; what matters is that most are.
"""

from __future__ import annotations

import numpy as np

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.memory.assignment import assign_offsets
from hlo_passes.memory.usage import BACKENDS, measure_memory

# Packings that are drawn, in turn with these shares of what is small on the chip.
_DRAWS = 64
_ON_CHIP = (0.3, 0.7)

# What takes no more than this part of the chip's memory is small.
_SMALL = 1 / 8


def drawn_heaps(module: Module, machine: Machine) -> tuple[int, ...]:
    """Returns the bytes that the heap of `module` takes where XLA holds this or that on the chip:
    a sample, the same each time.

    Args:
      module: as it will be given to XLA, with nothing known of what is held on the chip.
      machine: a TPU.

    O(draws x packing).
    """
    ranges = compute_live_ranges(analyze_dataflow(module))
    heap = measure_memory(ranges, machine.platform, machine=machine).heap
    if not heap:
        return (0,)
    backend, chip = BACKENDS[machine.platform], machine.on_chip_memory
    small = chip.capacity_bytes * _SMALL if chip is not None else 0
    groups = np.unique([h.group for h in heap], return_inverse=True)[1]
    can_leave = np.ones(groups.max() + 1, np.bool_)
    can_leave[groups[[h.size > small for h in heap]]] = False
    totals: list[int] = []
    for draw in range(_DRAWS):
        drawn = np.random.default_rng(draw).random(len(can_leave))
        held = can_leave & (drawn < _ON_CHIP[draw % len(_ON_CHIP)])
        left = [k for k, group in enumerate(groups) if not held[group]]
        packing = assign_offsets(
            [heap[k].size for k in left],
            [heap[k].events for k in left],
            backend.alignment,
            groups=[int(groups[k]) for k in left],
            strategies=backend.strategies,
        )
        totals.append(packing.total)
    return tuple(totals)
