"""How often XLA:CPU hands a kernel to another of its threads.

    a ─► b ─► c ─► d        after a kernel the same thread goes on with one that waited for it;
         └──► e             others that did are handed on: e

What is handed on costs more than a small kernel takes. A chain of kernels, at most eight, or only
small buffers, are run one after another instead (xla/backends/cpu/runtime/thunk_executor.cc).
"""

from __future__ import annotations

from hlo_passes.analysis.traffic import traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.ir import Computation, Instruction, Module

# Of `ThunkExecutor::Options`: so many thunks, or bytes of every buffer, are run one by one.
_FEW, _SMALL_BYTES = 8, 512
_RUNS_OTHERS = frozenset({"while", "conditional", "call"})


def handoffs(module: Module) -> int:
    """Returns how many there are in a step, those of loops as often as they run; of branches those
    of the one with most. O(instructions)."""
    runs = {*traffic(module)}

    def inside(computation: Computation) -> int:
        count = _of_one(computation, runs)
        for i in computation.instructions:
            if i.opcode not in _RUNS_OTHERS:
                continue
            called = [inside(module.computations[c]) for c in i.called_computation_ids]
            if i.opcode == "conditional":
                count += max(called, default=0)
            else:
                trips = (trip_count(module, i) or 1) if i.opcode == "while" else 1
                count += trips * sum(called)
        return count

    return inside(module.entry)


def _of_one(computation: Computation, runs: set[int]) -> int:
    """Of its own instructions: all but those that the thread of another one goes on with."""
    # By instruction the last before it, in program order, that runs and that it waits for.
    waits_for: dict[int, int | None] = {}
    place: dict[int, int] = {}
    going_on: set[int] = set()
    is_small = True
    for n, i in enumerate(computation.instructions):
        before = [waits_for[operand] for operand in i.operand_ids if operand in waits_for]
        latest = max((b for b in before if b is not None), key=place.__getitem__, default=None)
        if i.id in runs or i.opcode in _RUNS_OTHERS:
            place[i.id] = n
            waits_for[i.id] = i.id
            is_small &= _is_small(i)
            if latest is not None:
                going_on.add(latest)
        else:
            waits_for[i.id] = latest
    count = len(place)
    if count <= _FEW or is_small:
        return 0
    return count - 1 - len(going_on)


def _is_small(i: Instruction) -> bool:
    return all(shape.byte_size <= _SMALL_BYTES for _, shape in i.shape.leaves())
