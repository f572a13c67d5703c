"""Which buffers get bytes of their own, and which take over another's.

    parameters, constants, outputs        one allocation each
    a temporary that fits an output's     lies in that allocation while it is not yet, or
    or a donated argument's allocation    no longer, needed
    a temporary whose operand dies        lies where the operand lay (see `sharing`)
    every other temporary                 the heap: `assignment` finds its offset

The order of these decisions is that of xla/service/buffer_assignment.cc (buffers by
decreasing size, BufferAssigner::AssignSingleHloBuffer), and the heap is replayed as in
xla/service/heap_simulator/heap_simulator.cc (HeapSimulator::RunComputation).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from hlo_passes.dataflow import Buffer, Dataflow, Value
from hlo_passes.live_ranges import LiveRanges
from hlo_passes.plan import LiveRange
from hlo_passes.sharing import Target, can_share


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


def find_allocations(
    ranges: LiveRanges, target: Target, memory_space: int = 0, apart: Collection[int] = ()
) -> Allocations:
    """Decides for every buffer of a memory space where its bytes come from.

    Args:
      apart: ids of values that share bytes with nobody (a planner moves them).
    """
    dataflow = ranges.dataflow
    buffers = [b for b in dataflow.buffers if b.memory_space == memory_space and b.size > 0]
    # The TPU compiler leaves the caller's allocations alone (seen with libtpu of jax 0.12).
    reused = _reuse_allocations(ranges, target, buffers, apart) if target != "tpu" else {}
    on_heap = [b for b in buffers if b.kind == "temp" and b.id not in reused]
    heap = _replay_heap(ranges, target, on_heap, apart)
    return Allocations(_held_throughout(heap) if target == "tpu" else heap, reused)


def _reuse_allocations(
    ranges: LiveRanges, target: Target, buffers: list[Buffer], apart: Collection[int]
) -> dict[int, int]:
    """Finds the temporaries and outputs that fit into an allocation that exists anyway."""
    dataflow = ranges.dataflow
    held: dict[int, list[Value]] = {}  # buffer with an allocation → the values in it
    reusable: list[Buffer] = []
    placed_in: dict[int, int] = {}
    # The proto lists callees first, and XLA goes through the callers first.
    computation = {c: -n for n, c in enumerate(dataflow.module.computations)}
    place = {i: n for n, i in enumerate(dataflow.module.instructions)}

    def order(b: Buffer) -> tuple[int, bool, tuple[int, int]]:
        definers = (v.instruction for v in b.values)
        first = min((computation[i.computation_id], place[i.id]) for i in definers)
        return -b.size, not b.live_out, first

    ordered = sorted(buffers, key=order)
    for b in ordered:
        if b.kind in ("constant", "tuple"):
            continue
        if b.kind == "parameter":
            held[b.id] = list(b.values)
            if b.live_out:
                reusable.append(b)
            continue
        if any(v.id in apart for v in b.values):
            continue
        for owner in (*_operand_allocations(dataflow, b, placed_in, reusable), *reversed(reusable)):
            if _fits(ranges, target, b, owner, held[owner.id]):
                held[owner.id].extend(b.values)
                placed_in[b.id] = owner.id
                break
        else:
            if b.live_out:
                held[b.id] = list(b.values)
                reusable.append(b)
    return placed_in


def _operand_allocations(
    dataflow: Dataflow, b: Buffer, placed_in: dict[int, int], reusable: list[Buffer]
) -> list[Buffer]:
    found: list[Buffer] = []
    for v in b.values:
        if v.index == ():
            for operand in v.instruction.operand_ids:
                held = dataflow.buffer_at(dataflow.module.instructions[operand])
                owner = dataflow.buffers[placed_in.get(held.id, held.id)]
                if owner in reusable:
                    found.append(owner)
    return found


def _fits(ranges: LiveRanges, target: Target, b: Buffer, owner: Buffer, held: list[Value]) -> bool:
    if b.size > owner.size or (b.live_out and b.size != owner.size):
        return False
    for new in b.values:
        for old in held:
            if _interfere(ranges, target, new, old):
                return False
            if new.instruction.opcode == "copy" and any(
                p.instruction.id in new.instruction.operand_ids for p in old.positions
            ):
                return False
    return True


def _interfere(ranges: LiveRanges, target: Target, a: Value, b: Value) -> bool:
    one, two = ranges.of_value[a.id], ranges.of_value[b.id]
    if not one.overlaps(two):
        return False
    if one.end == two.start + 1:
        return not _may_take_over(ranges, target, a, b)
    if two.end == one.start + 1:
        return not _may_take_over(ranges, target, b, a)
    return True


def _may_take_over(ranges: LiveRanges, target: Target, dying: Value, born: Value) -> bool:
    last = max(dying.positions, key=lambda p: ranges.time_of[p.instruction.id])
    return (
        born.instruction.opcode != "copy"
        and last.instruction.id in born.instruction.operand_ids
        and can_share(ranges.dataflow, target, last, born.instruction, born.index)
    )


def _replay_heap(
    ranges: LiveRanges, target: Target, buffers: list[Buffer], apart: Collection[int]
) -> tuple[HeapRange, ...]:
    """Walks through time, allocating what is defined and releasing what dies."""
    dataflow = ranges.dataflow
    values = [v for b in buffers for v in b.values]
    values.sort(key=lambda v: (*ranges.of_value[v.id], v.id))
    tracked = {v.id for v in values}
    defined: dict[int, list[Value]] = {}
    freed: dict[int, list[Value]] = {}
    last_time = {v.id: ranges.of_value[v.id].end - 1 for v in values}
    for v in values:
        defined.setdefault(ranges.of_value[v.id].start, []).append(v)
        freed.setdefault(last_time[v.id], []).append(v)
    clock = 0
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    group: dict[int, int] = {}
    first_of: dict[int, Value] = {}

    def release(v: Value) -> None:
        nonlocal clock
        died[v.id] = clock
        clock += 1

    def dying_operand(v: Value, time: int) -> Value | None:
        if len(dataflow.buffer_of(v).values) > 1 or v.id in apart:
            return None
        if v.instruction.opcode == "copy":
            return None
        for operand in v.instruction.operand_ids:
            o = dataflow.value_at(dataflow.module.instructions[operand])
            if (
                o.id in tracked
                and o.id not in apart
                and last_time[o.id] == time
                and o in freed.get(time, ())
                and len(dataflow.buffer_of(o).values) == 1
                and o.instruction.id in v.instruction.operand_ids
                and can_share(dataflow, target, o.positions[0], v.instruction, v.index)
            ):
                return o
        return None

    for time in sorted({*defined, *freed}):
        for v in defined.get(time, ()):
            buffer = dataflow.buffer_of(v)
            if buffer.id in first_of:
                group[v.id] = group[first_of[buffer.id].id]
            elif (operand := dying_operand(v, time)) is not None:
                release(operand)
                freed[time].remove(operand)
                group[v.id] = group[operand.id]
                last_time[operand.id] = last_time[v.id]
            else:
                group[v.id] = v.id
                first_of[buffer.id] = v
            born[v.id] = clock
            clock += 1
        for v in freed.get(time, ()):
            release(v)
    size: dict[int, int] = {}
    for v in values:
        size[group[v.id]] = max(size.get(group[v.id], 0), dataflow.buffer_of(v).size)
    return tuple(
        HeapRange(v, group[v.id], size[group[v.id]], LiveRange(born[v.id], died[v.id] + 1))
        for v in values
    )


def _held_throughout(heap: tuple[HeapRange, ...]) -> tuple[HeapRange, ...]:
    """Closes the gaps between the values of a group: the TPU compiler gives its bytes to
    nobody else in between (seen with libtpu of jax 0.12)::

        a loop's slot    read ─┤      ├─ written again, further down in the body
        elsewhere        the gap is free       TPU: it is not
    """
    upcoming: dict[int, int] = {}
    held: list[HeapRange] = []
    for h in sorted(heap, key=lambda h: h.events, reverse=True):
        start, end = h.events
        held.append(h._replace(events=LiveRange(start, max(end, upcoming.get(h.group, end)))))
        upcoming[h.group] = start
    return tuple(sorted(held, key=lambda h: (h.events.start, h.value.id)))
