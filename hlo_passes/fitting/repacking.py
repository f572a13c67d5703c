"""What XLA takes for a choice, packed once more as the module it will be.

ticks        a b c d          lives of 4, packed in one order
instructions a s s b d c d    lives of 7: packed in another
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.memory.usage import measure_memory
from hlo_passes.placing.issued import issue
from hlo_passes.placing.placement import Choice
from hlo_passes.placing.problem import Problem
from hlo_passes.rewrite.transfers import move_copies


def excess_of(posed: Problem, choice: Choice, budget: int) -> npt.NDArray[np.int64]:
    """Returns int64[ticks]: by how many bytes what is live lies above the budget as XLA packs it;
    all 0 where it comes within `budget`.

    XLA:GPU packs by the length of lives, in instructions of the module as it will be, and a
    slightly other length can be another packing: of plans with some dozen evictions one in three
    took up to a fifth more than it did when it was packed by ticks. So the module is written and
    packed once more. XLA:TPU packs as things come, which ticks tell as well; and on CPU no transfer
    is an instruction of its own.
    """
    excess = np.zeros(posed.ticks.end, np.int64)
    if posed.machine.platform != "gpu":
        return excess
    module = move_copies(posed.module, issue(posed, choice))
    ranges = compute_live_ranges(analyze_dataflow(module))
    usage = measure_memory(ranges, "gpu")
    over = usage.total_bytes - budget
    if over <= 0:
        return excess
    # What takes no tick stands at that of the last one before it.
    tick_of = {i.id: tick for tick, i in enumerate(posed.ticks.instructions)}
    ticks = [tick_of.get(i.id, 0) for i in ranges.sequence]
    tick_at = np.maximum.accumulate(np.array(ticks))
    for h, offset in zip(usage.heap, usage.offsets, strict=True):
        above = offset + h.size - (usage.heap_bytes - over)
        if above > 0:
            live = ranges.of_value[h.value.id]
            first, last = tick_at[live.start], tick_at[min(live.end, len(ticks)) - 1]
            np.maximum(excess[first : last + 1], above, out=excess[first : last + 1])
    return excess
