"""Finds what there is to say of a scheduled program's memory: see `memplan.report.findings`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hlo_passes.analysis.dataflow import Buffer, Value, analyze_dataflow
from hlo_passes.analysis.donation import donations
from hlo_passes.analysis.launches import count_launches
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.analysis.pages import PageAccess, PageUse, origin, page_reads
from hlo_passes.analysis.sharing import Target
from hlo_passes.analysis.traffic import traffic
from hlo_passes.edits.idle import idle_temporaries
from hlo_passes.fusions.pairs import fusion_pairs
from hlo_passes.fusions.traffic import fusion_traffic
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Instruction, Module
from hlo_passes.layouts.plan import Converted, conversion_bytes, converted, plan_layouts
from hlo_passes.layouts.relayouts import relayouts
from hlo_passes.loops.host_transfers import nests
from hlo_passes.memory.usage import MemoryUsage, latest_values, measure_memory
from hlo_passes.placing.ticks import EntryTicks, entry_ticks
from hlo_passes.plan import LiveRange, LogicalTime
from hlo_passes.reading.buffer_assignment import buffer_assignment
from hlo_passes.simulator.cost import instruction_costs, stream_bytes_per_s
from memplan.paths import siblings
from memplan.report.findings import (
    DonationView,
    Findings,
    Group,
    GroupedBy,
    HeapView,
    IdleView,
    KernelView,
    LayoutView,
    PagesView,
    PairView,
    RelayoutView,
    RestingView,
)
from memplan.report.names import Names

# Buffers with allocations of their own, which are there for the whole step.
_THERE_ANYWAY = ("parameter", "output", "constant")

# They wait for bytes, and work on none.
_TRANSFERS = frozenset({"copy-start", "copy-done", "async-start", "async-done"})


class Inspector:
    """Looks into one scheduled program.

    Args:
      module: with XLA's own buffer assignment, the heap is as that has it.
      target: whose compiler made it.
      machine: predicts seconds; without it there are none.

    Attributes:
      module: the program.
      names: of its instructions.

    Raises:
      UnscheduledModuleError: when the module has no schedule.

    Complexity: that of `find_allocations`.
    """

    def __init__(self, module: Module, target: Target, machine: Machine | None = None) -> None:
        self.module = module
        self._target: Target = target
        self._machine = machine
        self._ranges = compute_live_ranges(analyze_dataflow(module))
        self.names = Names(self._ranges, {})
        self._usage: MemoryUsage = measure_memory(self._ranges, target, machine=machine)
        self._bytes_per_s = None if machine is None else stream_bytes_per_s(machine)
        self._costs: Mapping[int, float] | None = (
            None if machine is None else instruction_costs(module, machine)
        )

    def findings(self) -> Findings:
        """Returns what there is to say of the program."""
        layouts = self._layouts()
        return Findings(
            held=self._grouped(),
            heap=self._heap(),
            idle=tuple(self._idle()),
            resting=tuple(self._resting()),
            relayouts=tuple(self._relayouts()),
            layouts=layouts[0],
            saved_by_layouts=layouts[1],
            donations=tuple(self._donations()),
            kernels=tuple(sorted(self._kernels(), key=lambda k: -k.moved_bytes)),
            hbm=fusion_traffic(self.module),
            pairs=tuple(self._pairs()),
            launches=count_launches(self.module, thunks)
            if (thunks := self.module.thunks)
            else None,
            pages=tuple(self._pages()),
        )

    @cached_property
    def held(self) -> tuple[tuple[Value, int], ...]:
        """What is in device memory at the peak, each block of bytes once: who defines it, and its
        bytes."""
        anyway = (
            (b.first, b.size)
            for b in self._ranges.dataflow.buffers
            if b.memory_space == DEVICE_MEMORY_SPACE and b.kind in _THERE_ANYWAY
        )
        live = ((h.value, h.size) for h in latest_values(self._usage.live))
        return (*anyway, *live)

    def _grouped(self) -> dict[GroupedBy, tuple[Group, ...]]:
        held = [(value.instruction, size) for value, size in self.held]
        return {
            "source": _groups((self.source(i), size) for i, size in held),
            "scope": _groups((self._scope(i), size) for i, size in held),
            "opcode": _groups((i.opcode, size) for i, size in held),
        }

    def source(self, i: Instruction) -> str:
        """The line that a group of buffers is called by."""
        if self.names.about(i).opcode == "parameter":
            return "arguments" if i.opcode == "parameter" else "copies of arguments"
        return self.names.step(i).source_line

    def _scope(self, i: Instruction) -> str:
        """What stands in front of an operation: jit(step)/layer_3 of jit(step)/layer_3/dot; of
        an argument, or a copy of one, its name up to the first key: state of
        state['params'][0]."""
        if self.names.about(i).opcode == "parameter":
            return re.split(r"[.\[]", self.names.label(i))[0]
        return self.names.about(i).op_name.rpartition("/")[0]

    def _heap(self) -> HeapView | None:
        usage = self._usage
        if usage.peak is None:
            return None
        said = buffer_assignment(self.module)
        heap = None if said is None else said.heap()
        return HeapView(
            allocated=None if said is None else said.size("temporary"),
            predicted=usage.temp_bytes,
            live=usage.lower_bound_bytes if heap is None else heap[1].size,
            padding=sum(h.value.shape.padding_bytes for h in latest_values(usage.live)),
            assigned=None if heap is None else sum(b.size for b, _ in heap[0].buffers),
            peak=self.names.step(usage.peak if heap is None else heap[1].instruction),
        )

    def _idle(self) -> Iterator[IdleView]:
        """Those of the entry, the most bytes and time first."""
        for idle in idle_temporaries(self._ranges, self._ticks):
            start, end = idle.ticks
            yield IdleView(
                self.names.step(idle.maker)._replace(instruction=idle.buffer.name),
                idle.size,
                idle.ticks,
                self._seconds_between(start, end),
                self.names.step(idle.after),
                self.names.step(idle.before),
                at_peak=self._peak is not None and start <= self._peak < end,
            )

    def _resting(self) -> Iterator[RestingView]:
        """The most bytes first. Of what has a part of its path in common, all is told as one."""
        if self._peak is None:
            return
        found = {
            self.names.label(p) or p.name: (buffer, rest)
            for p in self.module.entry.parameters
            if p.shape.is_array and p.shape.memory_space == DEVICE_MEMORY_SPACE
            for buffer in (self._ranges.dataflow.buffer_at(p),)
            if (rest := self._rest(buffer, self._peak)) is not None
        }
        views: list[RestingView] = []
        for name, members in siblings(found).items():
            buffers = [found[m][0] for m in members]
            rests = [found[m][1] for m in members]
            start, end = max(r.start for r in rests), min(r.end for r in rests)
            views.append(
                RestingView(
                    name,
                    sum(b.size for b in buffers),
                    len(buffers),
                    self._seconds_between(start, end),
                    self._link_seconds(buffers),
                )
            )
        yield from sorted(views, key=lambda v: (-v.size, v.name))

    def _rest(self, buffer: Buffer, tick: LogicalTime) -> LiveRange | None:
        """The ticks around one for which nobody reads or writes an argument's bytes; None where
        somebody does then."""
        written = (v.instruction for v in buffer.values if v.instruction.opcode != "parameter")
        worked_on = [self._ticks.tick_of[i.id] for i in (*written, *_readers(buffer))]
        if tick in worked_on:
            return None
        before = max((t + 1 for t in worked_on if t < tick), default=0)
        return LiveRange(before, min((t for t in worked_on if t > tick), default=self._ticks.end))

    def _link_seconds(self, buffers: Iterable[Buffer]) -> float | None:
        """Of bringing arguments from the host in each step, and of taking there what lies in the
        places of those that are donated."""
        if self._machine is None:
            return None
        device, host = self._machine.host_link.destination, self._machine.host_link.source
        come = [b.size for b in buffers if _readers(b)]
        go = [b.size for b in buffers if len(b.values) > 1]
        return sum(self._machine.transfer_seconds(size, host, device) for size in come) + sum(
            self._machine.transfer_seconds(size, device, host) for size in go
        )

    @cached_property
    def _ticks(self) -> EntryTicks:
        return entry_ticks(self._ranges, self._target)

    @cached_property
    def _peak(self) -> LogicalTime | None:
        return None if self._usage.peak is None else self._ticks.tick_of.get(self._usage.peak.id)

    @cached_property
    def _clock(self) -> npt.NDArray[np.float64]:
        """Seconds of compute before each tick."""
        seconds = [self._seconds_of(i) or 0.0 for i in self._ticks.instructions]
        return np.concatenate([[0.0], np.cumsum(seconds)])

    def _seconds_between(self, start: LogicalTime, end: LogicalTime) -> float | None:
        """Of compute in these ticks, half-open."""
        return None if self._costs is None else float(self._clock[end] - self._clock[start])

    def _layouts(self) -> tuple[tuple[LayoutView, ...], int]:
        """The arguments to be given in other layouts, and bytes that this saves."""
        parameters = self.module.entry.parameters
        results = range(max(1, len(self.module.entry.root.shape.tuple_shapes)))
        free = plan_layouts(self.module, range(len(parameters)), results)
        views = [
            LayoutView(
                self.names.label(parameters[n]) or parameters[n].name,
                str(parameters[n].shape),
                parameters[n].shape.byte_size,
                _braced(parameters[n].shape.layout.minor_to_major),
                _braced(order),
            )
            for n, order in free.parameters.items()
        ]
        saved = conversion_bytes(self.module) - free.bytes_after
        return tuple(sorted(views, key=lambda v: (-v.size, v.name))), saved if views else 0

    def _relayouts(self) -> Iterator[RelayoutView]:
        wanted = {c.reader.id: c for c in converted(self.module)}
        for r in relayouts(self.module):
            found = wanted.get(r.instruction.id)
            seconds = self._seconds_of(r.instruction)
            yield RelayoutView(
                self.names.step(r.instruction),
                r.kind,
                str(r.instruction.shape),
                r.moved_bytes,
                None if seconds is None else seconds * r.executions,
                "" if found is None else self._why(found),
                found is not None and self._can_be_told(found),
            )

    def _can_be_told(self, found: Converted) -> bool:
        """XLA:TPU writes all products as convolutions. Others take matrices in rows only."""
        ends = (found.given, found.taken)
        is_between = all(d is not None and d.instruction.opcode == "convolution" for d in ends)
        return self._target == "tpu" and is_between

    def _why(self, found: Converted) -> str:
        said = [
            f"{self._called(demand.instruction)} {verb} {_braced(demand.order)}"
            for demand, verb in ((found.taken, "takes"), (found.given, "gives"))
            if demand is not None
        ]
        return ", ".join(said)

    def _called(self, i: Instruction) -> str:
        if i.opcode == "parameter":
            return self.names.label(i) or i.name
        line = self.module.source_line(self.names.about(i))
        return f"%{i.name} ({line})" if line else f"%{i.name}"

    def _donations(self) -> Iterator[DonationView]:
        for d in donations(self._ranges):
            name = self.names.label(d.parameter) or d.parameter.name
            part = "{" + ",".join(map(str, d.index)) + "}" if d.index else ""
            yield DonationView(name + part, d.size, d.fate, d.why)

    def _kernels(self) -> Iterator[KernelView]:
        moved = traffic(self.module)
        for computation_id, nest in nests(self.module).items():
            for i in self.module.computations[computation_id].instructions:
                if i.id not in moved or i.opcode in _TRANSFERS:
                    continue
                ways = moved[i.id].read, moved[i.id].written
                size = sum(way.get(DEVICE_MEMORY_SPACE, 0) for way in ways)
                seconds = self._seconds_of(i)
                yield KernelView(
                    self.names.step(i),
                    f"{i.proto.fusion_kind} fusion" if i.opcode == "fusion" else i.opcode,
                    nest.executions,
                    size * nest.executions,
                    None if seconds is None else seconds * nest.executions,
                )

    def _pages(self) -> Iterator[PagesView]:
        loops = nests(self.module)
        found: dict[tuple[int, PageAccess], list[PageUse]] = {}
        for use in page_reads(self.module):
            if use.instruction.computation_id in loops:
                buffer = self._ranges.dataflow.buffer_at(use.pool)
                found.setdefault((buffer.instruction.id, use.access), []).append(use)
        for (_, access), uses in found.items():
            shape = uses[0].pool.shape
            yield PagesView(
                self._pool_name(uses[0]),
                str(shape),
                shape.byte_size // math.prod(shape.dimensions[: -len(access.pool) + 1]),
                access.tokens,
                access.sequences,
                access.pages,
                access.window,
                sum(loops[use.instruction.computation_id].executions for use in uses),
                self.names.step(uses[0].instruction),
            )

    def _pool_name(self, use: PageUse) -> str:
        found = origin(self._ranges.dataflow, use)
        name = "" if found.argument is None else self.names.label(found.argument)
        if not name:
            return f"%{self._ranges.dataflow.buffer_at(use.pool).instruction.name}"
        return "a copy of " * found.is_copy + name + "[i]" * found.of_stack

    def _pairs(self) -> Iterator[PairView]:
        for p in fusion_pairs(self.module):
            yield PairView(
                self.names.step(p.producer),
                self.names.step(p.consumer),
                str(p.shape),
                p.saved,
                None if self._bytes_per_s is None else p.saved / self._bytes_per_s,
                p.reason,
                p.why,
                "" if p.conversion is None else p.conversion.name,
            )

    def _seconds_of(self, i: Instruction) -> float | None:
        """Of one execution."""
        return None if self._costs is None else self._costs.get(i.id, 0.0)


def _braced(minor_to_major: Iterable[int]) -> str:
    return "{" + ",".join(map(str, minor_to_major)) + "}"


def _readers(buffer: Buffer) -> list[Instruction]:
    return [use.instruction for value in buffer.values for use in value.uses]


def _groups(held: Iterable[tuple[str, int]]) -> tuple[Group, ...]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for name, size in held:
        sizes[name].append(size)
    groups = (Group(name, sum(found), len(found)) for name, found in sizes.items())
    return tuple(sorted(groups, key=lambda g: (-g.size, g.name)))
