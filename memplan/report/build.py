"""Reads a scheduled module, and what the analyses say of it, into a `RunView`.

The same code reads XLA's schedule and memplan's rewritten one: what a report claims of a
plan is derived from the module that is compiled, not copied from the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from custom_calls.targets import COPY_DONE, COPY_START
from hlo_passes.analysis.async_chains import async_chains
from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.analysis.collectives import collectives
from hlo_passes.analysis.dataflow import Position, Value, analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges, merged
from hlo_passes.analysis.sharing import Target
from hlo_passes.analysis.traffic import traffic
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import (
    DEVICE_MEMORY_SPACE,
    HOST_MEMORY_SPACE,
    ON_CHIP_MEMORY_SPACE,
    Instruction,
    Module,
)
from hlo_passes.loops.host_transfers import Nest, nests
from hlo_passes.memory.allocations import HeapRange, find_allocations
from hlo_passes.memory.usage import measure_memory
from hlo_passes.plan import Event, LiveRange, LogicalTime, Plan
from hlo_passes.reading.origins import ABOUT_OPERAND
from hlo_passes.simulator import energy, timeline
from hlo_passes.simulator.critical_path import binding
from hlo_passes.simulator.timeline import TransferId
from memplan.report.edited import recomputed, split_temporaries
from memplan.report.names import Names
from memplan.report.view import (
    BAND_KINDS,
    Band,
    BandKind,
    Clock,
    ComputeSpan,
    DeviceBytes,
    Held,
    LoopView,
    RunView,
    Step,
    TierUsage,
    TransferKind,
    TransferSpan,
    TransferView,
)

HELD_LIMIT = 20
"""How many of the buffers at a peak a view names."""

# Of memory spaces, where no machine names its tiers.
_TIER_NAMES = {0: "hbm", ON_CHIP_MEMORY_SPACE: "vmem", HOST_MEMORY_SPACE: "host"}


_KINDS: dict[str, BandKind] = {
    "parameter": "arguments",
    "output": "outputs",
    "constant": "constants",
}

_STARTS = ("copy-start", "async-start")
_DONES = ("copy-done", "async-done")

# What stands between a start and its done without doing work that could hide it.
_IDLE = frozenset(
    {"bitcast", "constant", "get-tuple-element", "parameter", "tuple", *_STARTS, *_DONES}
)


class CompiledBytes(Protocol):
    """What ``Compiled.memory_analysis()`` gives."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


# Calls that compute nothing: XLA:TPU's name for buffers that lie beside each other, and the
# wait for a copy on CPU.
_PASSED_ON = frozenset({"ConcatBitcast", COPY_START, COPY_DONE})


def view_run(
    name: str,
    module: Module,
    machine: Machine | None = None,
    *,
    plan: Plan | None = None,
    compiled: CompiledBytes | None = None,
) -> RunView:
    """Reads one scheduled program.

    Args:
      name: what the run is called beside others.
      module: scheduled.
      machine: names the tiers and predicts seconds; without it there are none.
      plan: the plan that `module` was rewritten by: its labels, its fences, its bound, and
        the tiers of arguments where the module itself does not tell (CPU).
      compiled: the executable's own bytes, shown in place of memplan's.

    Raises:
      UnscheduledModuleError: when the module has no schedule.

    Complexity: that of `find_allocations` and of one simulated step.
    """
    return _Builder(module, machine, plan).run(name, compiled)


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of one tier, held during `ranges`, disjoint."""

    value: Value
    size: int
    kind: BandKind
    ranges: tuple[LiveRange, ...]


class _Builder:
    def __init__(self, module: Module, machine: Machine | None, plan: Plan | None) -> None:
        self.module = module
        self.machine = machine
        self.plan = plan
        self.labels: Mapping[str, str] = {} if plan is None else plan.labels
        self.placed = {} if plan is None else {p.buffer: p.tier for p in plan.placements}
        self.target: Target = target_of(module, machine)
        self.ranges = compute_live_ranges(analyze_dataflow(module))
        self.sequence = self.ranges.sequence
        self.tick_of = {i.name: tick for tick, i in enumerate(self.sequence)}
        self.names = Names(self.ranges, self.labels)
        self.steps = tuple(map(self.names.step, self.sequence))
        self.recomputed = recomputed(self.sequence, plan)

    def run(self, name: str, compiled: CompiledBytes | None) -> RunView:
        simulated = self._simulated()
        transfers = tuple(self._transfers(simulated))
        return RunView(
            name=name,
            module=self.module.name,
            steps=self.steps,
            tiers=tuple(self._tiers()),
            device=self._device(compiled),
            transfers=transfers,
            loops=tuple(self._loops({t.loop for t in transfers if not t.on_chip})),
            order=tuple(self._order()),
            clock=None if simulated is None else self._clock(simulated),
            is_planned=self.plan is not None,
            streams=() if self.plan is None else self.plan.streams,
            left_alone={} if self.plan is None else self.plan.left_alone,
            compiler_options={} if self.plan is None else self.plan.compiler_options,
            collectives=tuple(self._collectives(simulated)),
            recomputed=self.recomputed,
            is_reordered=self.plan is not None and bool(self.plan.edits.order),
            chunks=() if self.plan is None else self.plan.splits,
            split=() if self.plan is None else split_temporaries(self.plan),
            decisions=() if self.plan is None else self.plan.decisions,
            bodies=() if self.plan is None else self.plan.bodies,
        )

    # Memory.

    def _device(self, compiled: CompiledBytes | None) -> DeviceBytes:
        if compiled is not None:
            return DeviceBytes(
                arguments=compiled.argument_size_in_bytes - self._hosted_bytes,
                outputs=compiled.output_size_in_bytes,
                aliased=compiled.alias_size_in_bytes,
                temp=compiled.temp_size_in_bytes,
                source="xla",
            )
        if self.plan is not None:
            # The planner knows what XLA will still do to a module that is only scheduled.
            planned = self.plan.prediction
            return DeviceBytes(
                arguments=planned.arguments_bytes,
                outputs=planned.outputs_bytes,
                aliased=planned.alias_bytes,
                temp=planned.temp_bytes,
                source="memplan",
            )
        usage = measure_memory(self.ranges, self.target, machine=self.machine)
        return DeviceBytes(
            arguments=usage.argument_bytes - self._hosted_bytes,
            outputs=usage.output_bytes,
            aliased=usage.alias_bytes,
            temp=usage.temp_bytes,
            source="memplan",
        )

    @property
    def _hosted_bytes(self) -> int:
        """Bytes of arguments that lie elsewhere though their shapes say device memory: on
        CPU, where XLA counts every argument as the device's."""
        if self.plan is None or self.target != "cpu":
            return 0
        elsewhere = (p.size for p in self.plan.placements if p.tier != self.plan.device_tier)
        return sum(elsewhere)

    def _tiers(self) -> Iterator[TierUsage]:
        blocks: dict[str, list[_Block]] = defaultdict(list)
        for space in sorted({b.memory_space for b in self.ranges.dataflow.buffers}):
            # On-chip memory is XLA's alone: there one buffer may be made of others' bytes
            # (ConcatBitcast), and no sum of sizes says what is taken.
            if space in self._tier_names and space != ON_CHIP_MEMORY_SPACE:
                for block in self._blocks(space):
                    blocks[self._tier_of(block.value)].append(block)
        for tier, capacity in self._capacities.items():
            if tier in blocks:
                yield self._usage(tier, capacity, blocks[tier])

    @cached_property
    def _tier_names(self) -> Mapping[int, str]:
        return tier_names(self.target, self.machine)

    @cached_property
    def _capacities(self) -> Mapping[str, int | None]:
        """By tier, device memory first."""
        if self.machine is None:
            return dict.fromkeys(self._tier_names.values())
        return {tier.name: tier.capacity_bytes for tier in self.machine.tiers}

    def _tier_of(self, value: Value) -> str:
        if value.instruction.opcode == "parameter" and value.instruction.name in self.placed:
            # On CPU the shapes do not tell.
            return self.placed[value.instruction.name]
        return self._tier_names[value.shape.memory_space]

    def _blocks(self, space: int) -> Iterator[_Block]:
        """What lies in a memory space. Arguments, outputs and constants are there for the
        whole step: XLA gives each an allocation of its own."""
        allocations = find_allocations(self.ranges, self.target, space)
        whole = (LiveRange(0, self.ranges.end),)
        for b in self.ranges.dataflow.buffers:
            if b.memory_space != space or not b.size or b.id in allocations.reused:
                continue
            if b.kind not in ("temp", "tuple"):
                yield _Block(b.first, b.size, _KINDS[b.kind], whole)
        groups: dict[int, list[HeapRange]] = defaultdict(list)
        for held in allocations.heap:
            groups[held.group].append(held)
        for members in groups.values():
            values = [held.value for held in members]
            arrived = next((value for value in values if self._arrives(value)), None)
            ranges = merged(self.ranges.of_value[value.id] for value in values)
            kind = "temporaries" if arrived is None else "transferred"
            yield _Block(arrived or values[0], members[0].size, kind, ranges)

    def _arrives(self, value: Value) -> bool:
        """Whether a transfer brings `value` from another memory."""
        return any(self._brings(position, value.shape.memory_space) for position in value.positions)

    def _brings(self, position: Position, space: int) -> bool:
        """Whether `position` is the destination of a copy from outside `space`."""
        link, index = position.instruction, position.index
        if link.custom_call_target == COPY_START:
            return True
        chain = async_chains(self.module).get(link.id)
        # In flight are its source, its destination and a flag; which is where differs.
        destination = {"copy-start": (0,), "async-start": (1,), "async-update": (1,)}
        if chain is None or destination.get(link.opcode) != index[:1]:
            return False
        operands = map(self.module.instructions.__getitem__, chain.operands)
        return any(operand.shape.memory_space != space for operand in operands)

    def _usage(self, tier: str, capacity: int | None, blocks: Sequence[_Block]) -> TierUsage:
        end = self.ranges.end
        changes: dict[BandKind, npt.NDArray[np.int64]] = {
            kind: np.zeros(end + 1, np.int64) for kind in BAND_KINDS
        }
        for block in blocks:
            for start, stop in block.ranges:
                changes[block.kind][min(start, end)] += block.size
                changes[block.kind][min(stop, end)] -= block.size
        where = np.flatnonzero(np.any([c[:end] != 0 for c in changes.values()], axis=0))
        times = sorted({0, *where.tolist()})
        bands = [
            Band(kind, tuple(np.cumsum(change)[times].tolist()))
            for kind, change in changes.items()
            if change.any()
        ]
        totals = np.sum([band.bytes for band in bands], axis=0)
        peak_time = times[int(totals.argmax())]
        held = [b for b in blocks if any(r.start <= peak_time < r.end for r in b.ranges)]
        held.sort(key=lambda b: (-b.size, b.value.id))
        return TierUsage(
            tier=tier,
            capacity_bytes=capacity,
            times=tuple(times),
            bands=tuple(bands),
            end=end,
            peak=self.steps[peak_time],
            held=tuple(self._held(b, peak_time) for b in held[:HELD_LIMIT]),
            held_count=len(held),
        )

    def _held(self, block: _Block, time: LogicalTime) -> Held:
        value = block.value
        live = next(r for r in block.ranges if r.start <= time < r.end)
        return Held(
            buffer=str(value),
            # A start's flag is no copy of the argument.
            label="" if block.kind == "temporaries" else self.names.label(value.instruction),
            kind=block.kind,
            size=block.size,
            shape=str(value.shape),
            live_range=LiveRange(live.start, min(live.end, self.ranges.end)),
            origin=self.names.step(value.instruction),
            reader=self._reader(value.instruction),
        )

    def _reader(self, i: Instruction) -> Step | None:
        """The first instruction that works on what `i` gives, through what only passes it on."""
        i = self.names.wrapped_by.get(i.computation_id, i)
        seen: set[int] = set()
        while i.id not in seen:
            seen.add(i.id)
            users = self._running(self.ranges.dataflow.users.get(i.id, ()))
            if users and users[0].opcode == "tuple" and not i.shape.is_tuple:
                # A loop's state: who reads it there.
                users = self._running(u.instruction for u in self.ranges.dataflow.buffer_at(i).uses)
            if not users:
                return None
            i = users[0]
            if i.opcode not in ABOUT_OPERAND and i.custom_call_target not in _PASSED_ON:
                return self.names.step(i)
        return None

    def _running(self, instructions: Iterable[Instruction]) -> list[Instruction]:
        """Those that run on their own, in order."""
        time_of = self.ranges.time_of
        return sorted((i for i in instructions if i.id in time_of), key=lambda i: time_of[i.id])

    # Transfers and seconds.

    def _simulated(self) -> timeline.Timeline | None:
        if self.machine is None:
            return None
        return timeline.scheduled_step(self.module, self.machine)

    def _transfers(self, simulated: timeline.Timeline | None) -> Iterator[TransferView]:
        if simulated is None:
            yield from self._unpriced()
            return
        yield from self._timed(simulated.transfers)

    def _collectives(self, simulated: timeline.Timeline | None) -> Iterator[TransferView]:
        wired = self.machine is not None and self.machine.interconnect is not None
        found = self._timed(simulated.collectives) if simulated and wired else self._unwired()
        for seen in found:
            yield replace(seen, kind="collective", label="")

    def _unwired(self) -> Iterator[TransferView]:
        """Collectives of which no machine says what they take."""
        near = next(iter(self._capacities))
        for start, i in enumerate(self.sequence):
            collective = collectives(self.module).get(i.id)
            if collective is not None and collective.done is not None:
                seen = self._transfer(start, near, "interconnect", collective.sent_bytes)
                yield replace(seen, executions=self._nest_of(i).executions)

    def _timed(self, spans: Iterable[timeline.TransferSpan]) -> Iterator[TransferView]:
        """The spans put together by what is executed."""
        executions: dict[str, list[timeline.TransferSpan]] = defaultdict(list)
        for span in spans:
            executions[_without_iteration(span.transfer)].append(span)
        for name, found in executions.items():
            first = found[0]
            seen = self._transfer(self.tick_of[name], first.source, first.destination, first.size)
            timed = (TransferSpan(s.issue, s.begin, s.end, s.hidden_s) for s in found)
            yield replace(seen, executions=len(found), spans=tuple(timed))

    def _unpriced(self) -> Iterator[TransferView]:
        """What no machine is known for."""
        moved = traffic(self.module)
        for start, instruction in enumerate(self.sequence):
            bytes_ = moved.get(instruction.id)
            if instruction.opcode not in _STARTS or bytes_ is None:
                continue
            if not bytes_.read or not bytes_.written:
                continue
            source = max(bytes_.read, key=bytes_.read.__getitem__)
            destination = max(bytes_.written, key=bytes_.written.__getitem__)
            if source != destination and {source, destination} <= self._tier_names.keys():
                ends = self._tier_names[source], self._tier_names[destination]
                # Device memory also serves what does not cross: the indices.
                near = source == DEVICE_MEMORY_SPACE
                size = bytes_.written[destination] if near else bytes_.read[source]
                seen = self._transfer(start, *ends, size)
                yield replace(seen, executions=self._nest_of(instruction).executions)

    def _transfer(
        self, start: LogicalTime, source: str, destination: str, size: int
    ) -> TransferView:
        """One execution."""
        instruction = self.sequence[start]
        done = self._done_ticks.get(instruction.id, start)
        return TransferView(
            buffer=instruction.name,
            label=self.names.label(instruction),
            kind=self._kind(instruction, source, destination),
            source=source,
            destination=destination,
            size=size,
            executions=1,
            loop=self._loop_around(instruction),
            start=start,
            done=done,
            computes_between=int(self._working[done] - self._working[start]),
        )

    def _kind(self, start: Instruction, source: str, destination: str) -> TransferKind:
        if self._tier_names.get(ON_CHIP_MEMORY_SPACE) in (source, destination):
            return "copy"
        near = next(iter(self._capacities))
        if destination != near:
            return "evict"
        # What was on the device before was brought to the host by a copy from there.
        operands = [self.module.instructions[o] for o in start.operand_ids[:1]]
        while operands and operands[0].opcode == "copy-done":
            before = self.module.instructions[operands[0].operand_ids[0]]
            operands = [self.module.instructions[o] for o in before.operand_ids]
            if operands and operands[0].shape.memory_space == DEVICE_MEMORY_SPACE:
                return "refetch"
        return "fetch"

    @cached_property
    def _working(self) -> npt.NDArray[np.int64]:
        """Of each tick how many instructions before it do work."""
        return np.cumsum([0, *(i.opcode not in _IDLE for i in self.sequence)])

    # Loops.

    @cached_property
    def _nests(self) -> Mapping[int, Nest]:
        return nests(self.module)

    def _nest_of(self, instruction: Instruction) -> Nest:
        """The nest of what `instruction` is in; of what runs asynchronously that of its start."""
        while instruction.computation_id not in self._nests:
            instruction = call_graph(self.module).callers[instruction.computation_id][0]
        return self._nests[instruction.computation_id]

    def _loop_around(self, instruction: Instruction) -> str:
        """The name of the innermost loop that `instruction` is in."""
        caller = self._nest_of(instruction).caller
        while caller is not None and caller.opcode != "while":
            caller = self._nests[caller.computation_id].caller
        return "" if caller is None else caller.name

    def _loops(self, names: Collection[str]) -> Iterator[LoopView]:
        for i in self.sequence:
            if i.opcode == "while" and i.name in names:
                nest = self._nests[i.called_computation_ids[0]]
                yield LoopView(self.names.step(i), nest.trip_count, nest.executions)

    @cached_property
    def _done_ticks(self) -> Mapping[int, LogicalTime]:
        """The tick at which what an instruction starts is waited for, by its id."""
        found: dict[int, LogicalTime] = {}
        ticks: dict[int | None, LogicalTime] = {i.id: t for t, i in enumerate(self.sequence)}
        for tick, i in enumerate(self.sequence):
            chain = async_chains(self.module).get(i.id)
            if i.custom_call_target == COPY_DONE:
                found[i.operand_ids[0]] = tick
            elif i.opcode in _DONES and chain is not None:
                found[chain.start.id] = tick
        for start, collective in collectives(self.module).items():
            if collective.done in ticks:
                found[start] = ticks[collective.done]
        return found

    def _clock(self, simulated: timeline.Timeline) -> Clock:
        assert self.machine is not None
        busy, ends = max(((s, ends) for ends, s in simulated.link_s.items()), default=(0.0, ()))
        # A plan may keep other weights on the device, and so move fewer bytes; its kernels,
        # as the final module prices them, run whatever it moves, but not twice.
        again = sum(
            span.end - span.begin
            for span in simulated.computes
            if _without_iteration(span.name) in self.recomputed
        )
        moving = busy if self.plan is None else self.plan.prediction.lower_bound_s
        return Clock(
            machine=self.machine.name,
            step_time_s=simulated.step_time_s,
            # A plan may have held kernels dearer than they are in the executable.
            lower_bound_s=min(max(simulated.compute_s - again, moving), simulated.step_time_s),
            compute_s=simulated.compute_s,
            recompute_s=again,
            stall_s=simulated.stall_s,
            link_s=busy,
            link="→".join(ends),
            interconnect_s=simulated.interconnect_s,
            binding=binding(simulated, self.machine),
            joules=energy.step_joules(self.module, self.machine, simulated),
            spans=tuple(self._spans(simulated)),
        )

    def _spans(self, simulated: timeline.Timeline) -> Iterator[ComputeSpan]:
        """The computes, with a stall in each gap between them."""
        waits: dict[float, LogicalTime] = {}
        for t in (*simulated.transfers, *simulated.collectives):
            start = self.tick_of[_without_iteration(t.transfer)]
            if t.waited:
                waits[t.end] = self._done_ticks.get(self.sequence[start].id, start)
        now = 0.0
        for span in simulated.computes:
            tick = self.tick_of[_without_iteration(span.name)]
            if span.begin > now:
                yield ComputeSpan(waits.get(span.begin, tick), now, span.begin, stall=True)
            yield ComputeSpan(tick, span.begin, span.end, stall=False)
            now = span.end
        if simulated.step_time_s > now:
            last = waits.get(simulated.step_time_s, len(self.sequence) - 1)
            yield ComputeSpan(last, now, simulated.step_time_s, stall=True)

    def _order(self) -> Iterator[str]:
        if self.plan is not None:
            for fence in self.plan.fences:
                yield f"{self._event(fence.before)} → {self._event(fence.after)} ({fence.reason})"
            return
        for i in self.sequence:
            for before in i.control_predecessor_ids:
                yield f"%{self.module.instructions[before].name} → %{i.name} (control)"

    def _event(self, event: Event) -> str:
        """A plan's event with the name of what it moves: ``start:3 params['w'][0]``."""
        if self.plan is None or event.kind == "compute":
            return str(event)
        buffer = self.plan.transfers[event.index].buffer
        return f"{event} {self.labels.get(buffer, buffer)}"


def target_of(module: Module, machine: Machine | None = None) -> Target:
    """Which backend scheduled `module`: the machine's, or as it looks. Only XLA:TPU tiles arrays,
    only XLA:GPU says of a fusion which emitter takes it, and only XLA:CPU's shapes name no
    memory but one."""
    if machine is not None:
        return machine.platform
    spaces = {0}
    for i in module.entry.instructions:
        layouts = [leaf.layout for _, leaf in i.shape.leaves()]
        if any(layout.tiles for layout in layouts):
            return "tpu"
        if "fusion_backend_config" in i.backend_config:
            return "gpu"
        spaces.update(layout.memory_space for layout in layouts)
    return "cpu" if spaces == {0} else "tpu"


def tier_names(target: Target, machine: Machine | None) -> Mapping[int, str]:
    """Returns what memory spaces are called: as the machine's tiers, where there is one."""
    if machine is None:
        return {**_TIER_NAMES, 0: "dram"} if target == "cpu" else _TIER_NAMES
    return {t.memory_space: t.name for t in machine.tiers if t.memory_space is not None}


def _without_iteration(name: TransferId) -> str:
    """``copy-start.3#2``, the start in a loop's third iteration, is ``copy-start.3``."""
    return str(name).partition("#")[0]
