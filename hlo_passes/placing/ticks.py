"""The entry schedule as the planner sees it: ticks, managed transfers, everything else.

    entry      p  start  a   while  done  b   tuple
    tick                 c0  c1           c2  c3            see `plan`
    transfer      └─────────────────┘     └ read at 2
    workspace                [──)                           what the loop needs inside

A *managed transfer* brings an entry parameter from host memory to the device, takes a
temporary there and brings it back (`edits`), or takes a result there (`stores`); it has no tick,
for the planner decides where it stands. What a called computation needs inside
belongs to the tick of the instruction that calls it. Everything that is neither is a
`Resident`: bytes that are on the device during a range of ticks whatever the planner does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.analysis.dataflow import Buffer, Value
from hlo_passes.analysis.host_copies import evicted_copies, host_copies
from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.analysis.sharing import Target
from hlo_passes.analysis.stores import steady_parameters, stored_copies
from hlo_passes.ir import DEVICE_MEMORY_SPACE, ON_CHIP_MEMORY_SPACE, Instruction, Module
from hlo_passes.memory.allocations import HeapRange, find_allocations
from hlo_passes.memory.assignment import assign_offsets, peak_load
from hlo_passes.plan import LiveRange, LogicalTime

# What is smaller than this fraction of a workspace is no block of its own.
_WORKSPACE_BLOCKS = 16


class Read(NamedTuple):
    """One direct user of a transferred value.

    Attributes:
      user: the instruction.
      tick: when it reads.
      last: the tick of the last read of the same bytes through what `user` makes of them
        (bitcasts, tuples, in-place updates); ``last >= tick``.
    """

    user: Instruction
    tick: LogicalTime
    last: LogicalTime


@dataclass(frozen=True, slots=True, eq=False)
class ManagedTransfer:
    """A copy between host and device memory that the entry makes of a parameter or temporary.

    Attributes:
      source: the parameter's instruction, or the one whose result is evicted and fetched, or
        stored.
      start, done: the pair that copies it; where the target has no such pair (CPU), None, or of
        a store no start.
      size: bytes on the device.
      reads: of what it brings to the device, in schedule order; none of an eviction or a store.
      is_written: an in-place operation overwrites the copy, so that a second copy made
        afterwards would not be the same.
      lives_out: the entry returns the copy.
      evicts: it takes `source` away; otherwise it brings it.
      home: of a store, the donated argument whose place on the host it takes, if there is one.
      lies_in: of a store, the argument in the bytes of whose copy its source lies, if it does.
    """

    source: Instruction
    start: Instruction | None
    done: Instruction | None
    size: int
    reads: tuple[Read, ...]
    is_written: bool
    lives_out: bool
    evicts: bool = False
    home: Instruction | None = None
    lies_in: Instruction | None = None


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes on the device that the planner does not move.

    Attributes:
      name: the HLO instruction that defines the buffer; for ``"workspace"`` the one that
        needs it inside.
      size: bytes.
      live_range: in ticks, half-open; to the end when the entry returns it. A donated
        argument that others lie in lives until its last reader.
      kind: ``"parameter"``, ``"constant"`` and ``"output"`` have allocations of their own;
        ``"temp"`` and ``"workspace"`` share the arena that ``temp_size_in_bytes`` counts; a
        ``"colocated"`` is a temporary that takes no bytes of its own: it lies in those of the
        output `owner` before that is there, or of the donated argument `owner` after that has
        been read; an ``"on_chip"`` is one that XLA is known to hold there (`learned`).
      owner: of what is colocated, the name of the buffer that it lies in.
    """

    name: str
    size: int
    live_range: LiveRange
    kind: Literal["parameter", "constant", "output", "temp", "workspace", "colocated", "on_chip"]
    owner: str = ""


@dataclass(frozen=True, eq=False)
class EntryTicks:
    """The entry computation in ticks.

    Attributes:
      instructions: c0, c1, ...: the entry's schedule without parameters and without the
        starts and dones of managed transfers.
      tick_of: instruction id to tick, for every instruction that runs on its own. One
        without a tick has the tick of the next that has; one of a called computation that
        of its caller.
      transfers: in the order of their starts (on CPU: of the parameters).
      residents: by start.
      holders: id of a value of the dataflow to the resident in whose bytes it lies, of those
        that share the arena.
    """

    instructions: tuple[Instruction, ...]
    tick_of: Mapping[int, LogicalTime]
    transfers: tuple[ManagedTransfer, ...]
    residents: tuple[Resident, ...]
    holders: Mapping[int, Resident]

    @property
    def end(self) -> LogicalTime:
        """The tick after the last instruction."""
        return len(self.instructions)


def entry_ticks(
    ranges: LiveRanges, target: Target, host_parameters: Collection[int] | None = None
) -> EntryTicks:
    """Maps the live ranges of a scheduled module to the planner's ticks.

    Args:
      ranges: of the module before planning.
      target: whose rules of sharing bytes hold.
      host_parameters: numbers of the entry parameters that are managed on a target whose
        HLO has no transfers (CPU): they are read where the parameter is. None: managed is
        what a copy-start and copy-done of the entry bring from memory space 5 to 0. A
        parameter that is read in any other way (by a fusion that reads host memory, through
        an asynchronous slice) is not. A donated parameter is managed only where a store takes
        its place, which is managed too: it cannot be fetched again after the output that lies
        in it was written. What copies another one is compute.

    Complexity: that of `find_allocations`, and linear in the positions.
    """
    module = ranges.dataflow.module
    managed = _managed(module, host_parameters)
    hidden = {i.id for m in managed for i in (m.start, m.done) if i is not None}
    instructions = tuple(
        i for i in module.entry.instructions if i.opcode != "parameter" and i.id not in hidden
    )
    view = _View(ranges, instructions, managed)
    residents = sorted(view.residents(target), key=lambda r: (r.live_range, r.name))
    return EntryTicks(
        instructions,
        view.tick_of,
        tuple(view.transfer(m) for m in managed),
        tuple(residents),
        view.holders,
    )


class _Managed(NamedTuple):
    source: Instruction
    start: Instruction | None
    done: Instruction | None
    evicts: bool = False
    stores: bool = False
    home: Instruction | None = None

    @property
    def copy(self) -> Instruction:
        """The instruction whose users read what was copied."""
        return self.done or self.source


def _managed(module: Module, host_parameters: Collection[int] | None) -> list[_Managed]:
    stores = [
        _Managed(copy.source, copy.start, copy.done, evicts=True, stores=True, home=copy.home)
        for copy in stored_copies(module)
    ]
    if host_parameters is None:
        return [
            *(_Managed(*copy) for copy in host_copies(module)),
            *(_Managed(*copy) for copy in evicted_copies(module)),
            *stores,
        ]
    chosen = (p for p in steady_parameters(module) if p.parameter_number in host_parameters)
    return [*(_Managed(p, None, None) for p in chosen), *stores]


class _View:
    """The module seen through the ticks."""

    def __init__(
        self, ranges: LiveRanges, instructions: Sequence[Instruction], managed: Sequence[_Managed]
    ) -> None:
        self.ranges = ranges
        self.dataflow = ranges.dataflow
        self.entry = ranges.dataflow.module.entry
        self.instructions = instructions
        self.tick_of = _ticks(ranges, instructions)
        # The copies go with their pairs, and so do a pair's token and table of pointers.
        pairs = {i.id for m in managed for i in (m.copy, m.start) if i is not None}
        self.moved = {v.id for v in self.dataflow.values if v.instruction.id in pairs}
        self.hidden = pairs - {m.source.id for m in managed}
        self.stored = {m.copy.id for m in managed if m.stores}
        # A buffer's id → the argument or temporary of which it is a copy.
        self.copied = {
            self.dataflow.buffer_at(m.copy).id: m.source
            for m in managed
            if not m.evicts and m.start is not None
        }
        self.holders: dict[int, Resident] = {}

    @property
    def end(self) -> LogicalTime:
        return len(self.instructions)

    def transfer(self, m: _Managed) -> ManagedTransfer:
        if m.evicts:
            return ManagedTransfer(
                m.source,
                m.start,
                m.done,
                m.source.shape.byte_size,
                reads=(),
                is_written=False,
                lives_out=m.stores,
                evicts=True,
                home=m.home,
                lies_in=self.copied.get(self.dataflow.buffer_at(m.source).id),
            )
        buffer = self.dataflow.buffer_at(m.copy)
        # What takes the place of an argument on CPU (`stores`) shares its bytes, and comes later.
        values = [v for v in buffer.values if v.instruction.id not in self.stored]
        returned = {p.instruction for v in values for p in v.positions}
        users = self.dataflow.users.get(m.copy.id, ())
        reads = [Read(u, self.tick_of[u.id], self._last_read(u, buffer)) for u in users]
        return ManagedTransfer(
            m.source,
            m.start,
            m.done,
            m.copy.shape.byte_size,
            tuple(sorted(reads, key=lambda r: r.tick)),
            is_written=sum(not v.is_phi for v in values) > 1,
            lives_out=buffer.live_out and self.entry.root in returned,
        )

    def _last_read(self, user: Instruction, buffer: Buffer) -> LogicalTime:
        """The last tick at which `user`, or what it hands the bytes on to, reads `buffer`;
        the end when the entry returns them."""
        holders = {p.instruction.id for p in buffer.positions}
        readers = {u.instruction.id for u in buffer.uses}
        last, queue, seen = 0, [user], {user.id}
        for i in queue:
            if i is self.entry.root and i.id in holders:
                return self.end
            # A transfer takes no tick.
            last = max(last, self.tick_of[i.id] - (i.id in self.hidden))
            if i.id not in holders:
                continue
            for u in self.dataflow.users.get(i.id, ()):
                if u.id not in seen and (u.id in holders or u.id in readers):
                    seen.add(u.id)
                    queue.append(u)
        return last

    def residents(self, target: Target) -> Iterator[Resident]:
        allocations = find_allocations(self.ranges, target, apart=frozenset(self.moved))
        hosts = set(allocations.reused.values())
        for b in self.dataflow.buffers:
            is_there = b.values[0].shape.memory_space == DEVICE_MEMORY_SPACE
            if is_there and b.memory_space == ON_CHIP_MEMORY_SPACE:
                yield Resident(self._name(b), b.size, self._ticks_of(b.values), "on_chip")
            if b.memory_space != DEVICE_MEMORY_SPACE or b.size == 0:
                continue
            if b.id in allocations.reused:
                # What only a called computation sees costs the entry nothing.
                if any(self._in_entry(v) for v in b.values):
                    owner = self.dataflow.buffers[allocations.reused[b.id]]
                    live = self._ticks_of(b.values)
                    yield Resident(self._name(b), b.size, live, "colocated", self._name(owner))
                continue
            if b.kind in ("temp", "tuple") or any(v.id in self.moved for v in b.values):
                continue
            if b.kind == "constant" and not any(self._in_entry(v) for v in b.values):
                continue  # It is part of the code, and no value of the entry.
            live = LiveRange(0, self.end)
            if b.kind == "output":
                live = LiveRange(self._ticks_of(b.values).start, self.end)
            elif b.id in hosts:
                live = LiveRange(0, self._ticks_of(self._unbroken(b)).end)
            yield Resident(self._name(b), b.size, live, b.kind)
        groups: dict[int, list[HeapRange]] = {}
        for h in allocations.heap:
            # What is worked on in place in a copy from the host lies there.
            is_copy = self.dataflow.buffer_of(h.value).id in self.copied
            if h.value.id not in self.moved and not is_copy:
                groups.setdefault(h.group, []).append(h)
        inside: defaultdict[LogicalTime, list[HeapRange]] = defaultdict(list)
        carried: defaultdict[LogicalTime, list[HeapRange]] = defaultdict(list)
        for members in groups.values():
            live = self._ticks_of([h.value for h in members])
            if seen := [h.value for h in members if self._in_entry(h.value)]:
                resident = Resident(self._value_name(seen[0]), members[0].size, live, "temp")
                self.holders |= {h.value.id: resident for h in members}
                yield resident
                for h in members:
                    if not self._in_entry(h.value):
                        carried[self.tick_of[h.value.instruction.id]].append(h)
            elif live.end - live.start > 1:
                # What runs asynchronously holds it for longer than the tick of its start.
                name = self.instructions[live.start].name
                yield Resident(name, members[0].size, live, "workspace")
            else:
                for tick in self._ticks_of_runs(members[0].value.instruction.computation_id):
                    inside[tick] += members
        for tick, members in inside.items():
            name = self.instructions[tick].name
            for size in _workspaces(members, carried[tick]):
                yield Resident(name, size, LiveRange(tick, tick + 1), "workspace")

    def _ticks_of_runs(self, computation_id: int) -> set[LogicalTime]:
        """The ticks of the instructions of the entry that run a computation."""
        found = set[LogicalTime]()
        for caller in call_graph(self.dataflow.module).callers[computation_id]:
            if caller.computation_id == self.entry.id:
                found.add(self.tick_of[caller.id])
            else:
                found |= self._ticks_of_runs(caller.computation_id)
        return found

    def _unbroken(self, buffer: Buffer) -> Sequence[Value]:
        """The values of an argument that follow on each other: it, and what is updated in place.
        Between them and a result that is copied there at last, others may have the bytes."""
        values = sorted(buffer.values, key=lambda v: self.ranges.of_value[v.id].start)
        end = 0
        for n, v in enumerate(values):
            # By ticks: what a called computation leaves free in between is nobody else's.
            live = self._ticks_of([v])
            if n and live.start > end:
                return values[:n]
            end = max(end, live.end)
        return values

    def _in_entry(self, value: Value) -> bool:
        return any(p.instruction.computation_id == self.entry.id for p in value.positions)

    def _name(self, buffer: Buffer) -> str:
        """A buffer's first value, as the entry sees it."""

        def order(v: Value) -> tuple[bool, LogicalTime, int]:
            in_call = v.instruction.computation_id != self.entry.id
            return in_call, self.tick_of[v.instruction.id], v.id

        return self._value_name(min(buffer.values, key=order))

    def _value_name(self, value: Value) -> str:
        """Its definition; of what several callers run, its place in the entry."""
        callers = call_graph(self.dataflow.module).callers.get(value.instruction.computation_id, ())
        positions = (p for p in value.positions if p.instruction.computation_id == self.entry.id)
        return str(value if len(callers) < 2 else next(positions, value))

    def _ticks_of(self, values: Sequence[Value]) -> LiveRange:
        first = min(self.ranges.of_value[v.id].start for v in values)
        start = self.tick_of[self.ranges.sequence[first].id]
        last = max(self.ranges.of_value[v.id].end - 1 for v in values)
        if last >= self.ranges.end:
            return LiveRange(start, self.end)
        reader = self.ranges.sequence[last].id
        # A transfer takes no tick: what it reads last is free for the instruction behind it.
        return LiveRange(start, self.tick_of[reader] + (reader not in self.hidden))


def _workspaces(inside: Sequence[HeapRange], carried: Sequence[HeapRange]) -> Iterator[int]:
    """The blocks of bytes that a called computation needs beside the state that the caller
    holds for it: those of its peak, and what packing adds.

    The state's bytes are free while no value of it lives: from the last read of a loop's
    slot until the next layer is fetched into it. Not on TPU, see `find_allocations`.
    """

    def packed(heap: Sequence[HeapRange]) -> int:
        return assign_offsets(
            [h.size for h in heap], [h.events for h in heap], groups=[h.group for h in heap]
        ).total

    held = sum({h.group: h.size for h in carried}.values())
    total = left = min(packed(inside), max(0, packed([*inside, *carried]) - held))
    _, moment = peak_load(
        [h.size for h in inside], [h.events for h in inside], groups=[h.group for h in inside]
    )
    at_peak = {h.group: h.size for h in inside if h.events.start <= moment < h.events.end}
    for size in sorted(at_peak.values(), reverse=True):
        if total <= _WORKSPACE_BLOCKS * size and size <= left:
            left -= size
            yield size
    if left:
        yield left


def _ticks(ranges: LiveRanges, instructions: Sequence[Instruction]) -> dict[int, LogicalTime]:
    own = {i.id: tick for tick, i in enumerate(instructions)}
    tick_of: dict[int, LogicalTime] = {}
    tick = len(instructions)
    # Backwards: what runs inside an instruction stands before it on the time line.
    for i in reversed(ranges.sequence):
        tick = tick_of[i.id] = own.get(i.id, tick)
    return tick_of
