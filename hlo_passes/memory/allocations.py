"""Which buffers get bytes of their own, and which take over another's.

    parameters, constants, outputs        one allocation each
    a temporary that fits an output's     lies in that allocation while it is not yet, or
    or a donated argument's allocation    no longer, needed (see `colocation`)
    a temporary whose operand dies        lies where the operand lay (see `sharing`)
    every other temporary                 the heap: `assignment` finds its offset

The order of these decisions is that of xla/service/buffer_assignment.cc, and the heap is
replayed as in xla/service/heap_simulator/heap_simulator.cc (HeapSimulator::RunComputation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hlo_passes.analysis.dataflow import Buffer, Value
from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.analysis.sharing import Target, can_share, said_to_share
from hlo_passes.memoize import memoized
from hlo_passes.memory.colocation import find_colocated
from hlo_passes.plan import LiveRange, LogicalTime


class HeapRange(NamedTuple):
    """A value on the heap during a range of heap events (not of schedule time: each
    allocation and release is an event of its own, in order)."""

    value: Value
    group: int
    size: int
    events: LiveRange


@dataclass(frozen=True, eq=False)
class Allocations:
    """What XLA's buffer assignment decides before it packs.

    Attributes:
      heap: values that the heap holds. Values of equal `group` lie in the same bytes.
      reused: id of a temporary buffer to the buffer in whose allocation it lies.
    """

    heap: tuple[HeapRange, ...]
    reused: dict[int, int]


@memoized
def find_allocations(
    ranges: LiveRanges, target: Target, memory_space: int = 0, apart: frozenset[int] = frozenset()
) -> Allocations:
    """Decides for every buffer of a memory space where its bytes come from.

    Args:
      apart: ids of values that share bytes with nobody (a planner moves them).
    """
    dataflow = ranges.dataflow
    buffers = [b for b in dataflow.buffers if b.memory_space == memory_space and b.size > 0]
    if target == "tpu":
        reused = _said_colocated(ranges, memory_space, apart)
    else:
        reused = find_colocated(ranges, target, buffers, apart)
    on_heap = [b for b in buffers if b.kind == "temp" and b.id not in reused]
    heap = _replay_heap(ranges, target, on_heap, apart)
    return Allocations(_as_on_tpu(heap) if target == "tpu" else heap, reused)


def _said_colocated(
    ranges: LiveRanges, memory_space: int, apart: Collection[int]
) -> dict[int, int]:
    """Temporaries that lie in the caller's allocations as libtpu says it of a final module; before
    that, it is taken to leave them alone (seen with libtpu of jax 0.12).

    x, donated ──► fusion ──► conditional ──► fusion, an output      all of them in x's bytes
    """
    dataflow = ranges.dataflow
    module = dataflow.module
    beside: defaultdict[int, set[int]] = defaultdict(set)
    for v in dataflow.values:
        for operand, index in said_to_share(v.instruction):
            if index == v.index:
                source = module.instructions[v.instruction.operand_ids[operand]]
                a, b = dataflow.buffer_at(source).id, dataflow.buffer_of(v).id
                beside[a].add(b)
                beside[b].add(a)
    given = (n for n in beside if dataflow.buffers[n].kind == "parameter")
    owners = {n for n in given if dataflow.buffers[n].live_out}  # Others the caller keeps.
    lying = {n: [ranges.of_value[v.id] for v in dataflow.buffers[n].values] for n in owners}
    reused: dict[int, int] = {}
    queue = [(n, n) for n in sorted(owners)]
    for n, owner in queue:
        for m in sorted(beside[n]):
            b = dataflow.buffers[m]
            is_free = b.kind == "temp" and b.memory_space == memory_space and m not in reused
            lives = [ranges.of_value[v.id] for v in b.values]
            # Who reads a value last may leave its own there.
            is_free &= not any(
                a.start < old.end - 1 and old.start < a.end - 1
                for a in lives
                for old in lying[owner]
            )
            if is_free and not any(v.id in apart for v in b.values):
                reused[m] = owner
                lying[owner] += lives
                queue.append((m, owner))
    return reused


def _replay_heap(
    ranges: LiveRanges, target: Target, buffers: list[Buffer], apart: Collection[int]
) -> tuple[HeapRange, ...]:
    """Walks through time, allocating what is defined and releasing what dies."""
    dataflow = ranges.dataflow
    values = [v for b in buffers for v in b.values]
    values.sort(key=lambda v: (ranges.of_value[v.id], v.id))
    size_of = {v.id: b.size for b in buffers for v in b.values}
    alone = {b.values[0].id for b in buffers if len(b.values) == 1}
    defined: defaultdict[LogicalTime, list[Value]] = defaultdict(list)
    freed: defaultdict[LogicalTime, list[Value]] = defaultdict(list)
    last_time: dict[int, LogicalTime] = {}
    for v in values:
        start, end = ranges.of_value[v.id]
        last_time[v.id] = end - 1
        defined[start].append(v)
        freed[end - 1].append(v)
    clock = 0
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    group: dict[int, int] = {}
    group_of_buffer: dict[int, int] = {}

    def release(v: Value) -> None:
        nonlocal clock
        died[v.id] = clock
        clock += 1

    def dying_operand(v: Value, time: LogicalTime) -> Value | None:
        if v.id not in alone or v.id in apart or v.instruction.opcode == "copy":
            return None
        for operand in v.instruction.operand_ids:
            o = dataflow.value_at(dataflow.module.instructions[operand])
            if (
                last_time.get(o.id) == time
                and o.id not in died
                and o.id in alone
                and o.id not in apart
                and o.instruction.id in v.instruction.operand_ids
                and can_share(dataflow, target, o.positions[0], v.instruction, v.index)
            ):
                return o
        return None

    for time in sorted({*defined, *freed}):
        for v in defined[time]:
            buffer = dataflow.buffer_of(v)
            if buffer.id in group_of_buffer:
                group[v.id] = group_of_buffer[buffer.id]
            elif (operand := dying_operand(v, time)) is not None:
                release(operand)
                group[v.id] = group[operand.id]
                last_time[operand.id] = last_time[v.id]
            else:
                group[v.id] = group_of_buffer[buffer.id] = v.id
            born[v.id] = clock
            clock += 1
        for v in freed[time]:
            if v.id not in died:
                release(v)
    size: dict[int, int] = {}
    for v in values:
        size[group[v.id]] = max(size.get(group[v.id], 0), size_of[v.id])
    return tuple(
        HeapRange(v, group[v.id], size[group[v.id]], LiveRange(born[v.id], died[v.id] + 1))
        for v in values
    )


def _as_on_tpu(heap: tuple[HeapRange, ...]) -> tuple[HeapRange, ...]:
    held = _held_throughout([h for h in heap if not _is_scratch(h.value)])
    scratch = [h for h in heap if _is_scratch(h.value)]
    if not scratch:
        return held
    # What the sparse cores work with is one block outside the heap, whatever they run at once.
    everything = LiveRange(0, max(h.events.end for h in heap))
    group, size = min(h.group for h in scratch), max(h.size for h in scratch)
    return (*(HeapRange(h.value, group, size, everything) for h in scratch), *held)


def _is_scratch(value: Value) -> bool:
    """Whether it is part of the state of work of the sparse cores, seen in what starts or updates
    it: the operands, the results, the state (buffer assignments of libtpu of jax 0.12)."""
    i = value.instruction
    return (
        i.opcode in ("async-start", "async-update") and len(value.index) > 1 and value.index[0] == 2
    )


def _held_throughout(heap: Iterable[HeapRange]) -> tuple[HeapRange, ...]:
    """Closes the gaps between the values of a group: the TPU compiler gives its bytes to
    nobody else in between (seen with libtpu of jax 0.12)::

        a loop's slot    read ─┤      ├─ written again, further down in the body
        elsewhere        the gap is free       TPU: it is not
    """
    upcoming: dict[int, int] = {}
    held: list[HeapRange] = []
    for value, group, size, (start, end) in sorted(heap, key=lambda h: h.events, reverse=True):
        events = LiveRange(start, max(end, upcoming.get(group, end)))
        held.append(HeapRange(value, group, size, events))
        upcoming[group] = start
    return tuple(sorted(held, key=lambda h: (h.events.start, h.value.id)))
