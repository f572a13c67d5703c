"""What a compiled module is as a program of a cluster: see `program_of`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from custom_calls.targets import COPY_START
from hlo_passes.analysis.async_chains import async_chains
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.cluster.rings import own_slots
from hlo_passes.cluster.work import COLLECTIVE, Program, Traffic
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Instruction, Module
from hlo_passes.memory.usage import measure_memory
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.timeline import (
    Compute,
    Done,
    Exchange,
    Start,
    TimelineEvent,
    schedule_events,
    simulate,
)

_HANDED_ON = ("bitcast", "get-tuple-element", "copy-done", "async-done", "async-update")


def program_of(module: Module, machine: Machine, *, name: str, node: str, runs: int = 1) -> Program:
    """Reads a scheduled module, XLA's own or one that a plan was written into, as a program.

    Its segments are what it computes between the starts and dones of its transfers from and to the
    host, and of its collectives. Prefetches into the chip's own memory are no traffic, and what is
    waited for them belongs to the segment. A loop that moves bytes is taken apart into its
    iterations.

    What a transfer brings stays in a slot until its last reader in the entry has run; in a loop,
    until it has arrived. Slices that a loop stores, and another one fetches, are taken to be there.

    Args:
      module: final, as ``read_module(compiled)``.
      machine: what it was compiled for.

    Raises:
      MalformedModuleError: when the module is not scheduled, or a done has no start.
      NotOnMachineError: when the machine has no link for a transfer.
    """
    costs = instruction_costs(module, machine)
    events = [*schedule_events(module, costs, machine, with_synchronous=True)]
    ranges = compute_live_ranges(analyze_dataflow(module))
    reading = _Reading(module, machine, ranges, events)
    segments, traffic = reading.run()
    usage = measure_memory(ranges, machine.platform, machine=machine)
    program = Program(name, node, segments, runs, traffic=traffic)
    # Slots of what is fetched are among the temporaries that were counted.
    memory = max(0, usage.total_bytes - own_slots(program)[1])
    return replace(program, memory_bytes=memory)


@dataclass
class _Begun:
    event: Start | Exchange
    start: int
    done: int | None = None


class _Reading:
    def __init__(
        self,
        module: Module,
        machine: Machine,
        ranges: LiveRanges,
        events: Sequence[TimelineEvent],
    ) -> None:
        self._module, self._ranges, self._events = module, ranges, events
        self._chip = {machine.device_memory.name}
        if machine.on_chip_memory is not None:
            self._chip.add(machine.on_chip_memory.name)
        on_chip = {e.transfer for e in events if isinstance(e, Start) and self._is_inside(e)}
        self._own = {
            e.transfer: e
            for e in events
            if isinstance(e, Start | Exchange) and e.transfer not in on_chip
        }
        inside = [e for e in events if isinstance(e, Compute) or e.transfer in on_chip]
        timeline = simulate(inside, machine)
        self._ends = [span.end for span in timeline.computes]
        self._end = timeline.step_time_s
        self._entry = {i.name: i for i in module.entry.instructions}

    def _is_inside(self, start: Start) -> bool:
        return start.source in self._chip and start.destination in self._chip

    def run(self) -> tuple[tuple[float, ...], tuple[Traffic, ...]]:
        segments: list[float] = []
        begun: dict[int | str, _Begun] = {}
        seen: list[tuple[int, int]] = []  # Of the entry's instructions, when, and the segment.
        ends = iter(self._ends)
        closed = reached = 0.0
        awaited = 0

        def close(after: int = 0) -> int:
            """Ends a segment, if anything was computed since, or there are no more than `after`;
            returns how many there are."""
            nonlocal closed
            if reached > closed or len(segments) <= after:
                segments.append(reached - closed)
                closed = reached
            return len(segments)

        for event in self._events:
            match event:
                case Compute(name):
                    reached = next(ends)
                    if name in self._entry:
                        seen.append((self._ranges.time_of[self._entry[name].id], len(segments)))
                case Start(transfer) | Exchange(transfer):
                    if transfer in self._own:
                        # What starts behind a done is not issued before that.
                        begun[transfer] = _Begun(event, close(awaited))
                case Done(transfer):
                    if transfer in self._own and begun[transfer].done is None:
                        begun[transfer].done = awaited = close()
        reached = self._end
        close()
        traffic = self._traffic(begun, seen, len(segments))
        return tuple(segments), tuple(traffic)

    def _traffic(
        self,
        begun: Mapping[int | str, _Begun],
        seen: Sequence[tuple[int, int]],
        count: int,
    ) -> Iterator[Traffic]:
        stored = {
            name for name, of in begun.items() if isinstance(of.event, Start) and self._leaves(of)
        }
        for name, of in begun.items():
            done = count if of.done is None else min(of.done, count)
            end = done + 1
            if isinstance(of.event, Exchange):
                sent = of.event
                times = of.start, done, end, sent.seconds
                yield Traffic(str(name), COLLECTIVE, COLLECTIVE, str(name), sent.size, *times)
                continue
            start = self._entry.get(str(name))
            source = str(name)
            if name not in stored and start is not None:
                source = self._source(start, stored)
                end = max(end, self._last_read(start, seen, count))
            ends = of.event.source, of.event.destination
            yield Traffic(str(name), *ends, source, of.event.size, of.start, done, end)

    def _leaves(self, of: _Begun) -> bool:
        return isinstance(of.event, Start) and of.event.source in self._chip

    def _source(self, start: Instruction, stored: set[int | str]) -> str:
        """What of the host a fetch reads: what a store has left there, or an argument."""
        i = self._module.instructions[start.operand_ids[0]]
        while i.opcode in _HANDED_ON or i.name in stored:
            if i.name in stored:
                return i.name
            i = self._module.instructions[i.operand_ids[0]]
        return i.name

    def _last_read(self, start: Instruction, seen: Sequence[tuple[int, int]], count: int) -> int:
        """The segment after that in which the last instruction runs that reads what was fetched."""
        done = start
        if start.custom_call_target != COPY_START:
            chain = async_chains(self._module).get(start.id)
            done = start if chain is None else chain.links[-1]
        if done.shape.is_tuple:
            return 0
        buffer = self._ranges.dataflow.buffer_at(done)
        last = max(self._ranges.of_value[value.id].end for value in buffer.values) - 1
        k = bisect_right(seen, (last, count))
        if k == len(seen):
            return count
        before = seen[k - 1][1] if k else 0
        return max(before + 1, seen[k][1])
