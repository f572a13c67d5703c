"""What XLA takes for a choice, packed once more as the module it will be.

ticks        a b c d          lives of 4, packed in one order
instructions a s s b d c d    lives of 7: packed in another
"""

from __future__ import annotations

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.memory.usage import measure_memory
from hlo_passes.placing.issued import issue
from hlo_passes.placing.placement import Choice
from hlo_passes.placing.problem import Problem
from hlo_passes.rewrite.transfers import move_copies


def excess_of(posed: Problem, choice: Choice, budget: int) -> int:
    """Returns by how many bytes a choice is above the budget as XLA packs it; 0 where it comes
    within `budget`.

    XLA:GPU packs by the length of lives, in instructions of the module as it will be, and a
    slightly other length can be another packing: of plans with some dozen evictions one in three
    took up to a fifth more than it did when it was packed by ticks. So the module is written and
    packed once more. XLA:TPU packs as things come, which ticks tell as well; and where there is one
    memory transfers are calls, of which it depends on the packing what they wait for.
    """
    if posed.machine.platform != "gpu" or posed.machine.has_one_memory:
        return 0
    module = move_copies(posed.module, issue(posed, choice))
    ranges = compute_live_ranges(analyze_dataflow(module))
    return max(0, measure_memory(ranges, "gpu").total_bytes - budget)
