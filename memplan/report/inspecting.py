"""Finds what there is to say of a scheduled program's memory: see `memplan.report.findings`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from hlo_passes.buffer_assignment import BufferAssignment
from hlo_passes.cost import instruction_costs
from hlo_passes.dataflow import Value, analyze_dataflow
from hlo_passes.donation import donations
from hlo_passes.host_transfers import nests
from hlo_passes.idle import Idle, idle_temporaries
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Instruction, Module
from hlo_passes.live_ranges import compute_live_ranges
from hlo_passes.machine import Machine
from hlo_passes.memory import MemoryUsage, measure_memory
from hlo_passes.relayouts import relayouts
from hlo_passes.sharing import Target
from hlo_passes.traffic import traffic
from memplan.report.advising import advise
from memplan.report.findings import (
    DonationView,
    Findings,
    Group,
    GroupedBy,
    HeapView,
    IdleView,
    KernelView,
    RelayoutView,
)
from memplan.report.names import Names

# A scope is what stands in front of an operation: jit(step)/layer_3 of jit(step)/layer_3/dot.
_NO_SCOPE = ""


def inspect_module(
    module: Module,
    target: Target,
    machine: Machine | None = None,
    *,
    assignment: BufferAssignment | None = None,
    donated: Collection[int] = (),
) -> Findings:
    """Looks into a scheduled program.

    Args:
      module: scheduled.
      target: whose compiler made it.
      machine: predicts seconds; without it there are none.
      assignment: XLA's own, of this module.
      donated: numbers of the parameters that the caller gives away, where that is known.

    Raises:
      UnscheduledModuleError: when the module has no schedule.

    Complexity: that of `find_allocations`.
    """
    return _Inspector(module, target, machine, assignment, donated).findings()


class _Inspector:
    def __init__(
        self,
        module: Module,
        target: Target,
        machine: Machine | None,
        assignment: BufferAssignment | None,
        donated: Collection[int],
    ) -> None:
        self._module, self._target = module, target
        self._assignment, self._donated = assignment, donated
        self._ranges = compute_live_ranges(analyze_dataflow(module))
        self._names = Names(self._ranges, {})
        self._usage: MemoryUsage = measure_memory(self._ranges, target)
        self._seconds: Mapping[int, float] | None = (
            None if machine is None else instruction_costs(module, machine)
        )

    def findings(self) -> Findings:
        found = Findings(
            held=self._held(),
            heap=self._heap(),
            idle=tuple(self._idle()),
            relayouts=tuple(self._relayouts()),
            donations=tuple(self._donations()),
            kernels=tuple(sorted(self._kernels(), key=lambda k: -k.moved_bytes)),
            advice=(),
        )
        return advise(found)

    def _held(self) -> dict[GroupedBy, tuple[Group, ...]]:
        """Of what is there at the peak, once for each block of bytes."""
        held: list[tuple[Instruction, int]] = []
        for buffer in self._ranges.dataflow.buffers:
            if buffer.memory_space == DEVICE_MEMORY_SPACE and buffer.kind in (
                "parameter",
                "output",
                "constant",
            ):
                held.append((buffer.values[0].instruction, buffer.size))
        held += [(v.instruction, v.shape.byte_size) for v in self._live()]
        return {
            "source": _grouped((self._source(i), size) for i, size in held),
            "scope": _grouped((self._scope(i), size) for i, size in held),
            "opcode": _grouped((i.opcode, size) for i, size in held),
        }

    def _live(self) -> list[Value]:
        """The temporaries at the peak; of those that share bytes the one that is there last."""
        return list(self._usage.live)

    def _source(self, i: Instruction) -> str:
        return self._names.step(i).source_line

    def _scope(self, i: Instruction) -> str:
        return self._names.about(i).op_name.rpartition("/")[0] or _NO_SCOPE

    def _heap(self) -> HeapView | None:
        usage = self._usage
        if usage.peak is None:
            return None
        heap = None if self._assignment is None else self._assignment.heap()
        return HeapView(
            allocated=None if heap is None else heap[0].size,
            predicted=usage.heap_bytes,
            live=usage.lower_bound_bytes if heap is None else heap[1].size,
            padding=sum(v.shape.padding_bytes for v in self._live()),
            assigned=None if heap is None else sum(b.size for b, _ in heap[0].buffers),
            peak=self._names.step(usage.peak if heap is None else heap[1].instruction),
        )
