"""What the checker knows of a program: values, and who reads them when. See `verify`.

    entry        p   start  a   done  b = fusion(done, a)   bitcast(b)   c
    tick                    c0        c1                    c2           c3
    values       argument   a         copy of p ─► transfer i
                            └ read at 1                 b ─────────────── read at 3

One walk along the schedule carries a table from every position (an instruction, or an
element of its tuple) to the value whose bytes lie there. Instructions that only show bytes
under another name hand the entry on; whatever else has a result starts a value. What is
fetched is no one value: each user meets the copy that serves its tick. An eviction reads what
it takes away until it is done, and its copy in host memory is read by those that bring it back, or
by who called the program; a fetch reads the argument, whose place such a copy may take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Instruction, Module, Shape, ShapeIndex
from hlo_passes.plan import LogicalTime, Plan, Slot, Transfer
from hlo_passes.verify.hlo import (
    PASSING,
    RUNNING,
    View,
    begun,
    describe,
    ends_of,
    position_name,
    view_of,
)
from hlo_passes.verify.inside import Inside, needs_bytes
from hlo_passes.verify.memory import Memory
from hlo_passes.verify.program import Program, serving_transfer, unserved
from hlo_passes.verify.taking import Taking


@dataclass(slots=True, eq=False)
class Value:
    """Bytes that one instruction or one transfer writes.

    Attributes:
      name: what its slot is called.
      writer: the instruction that defines it; of a transfer what it copies.
      written: the tick from which its bytes change.
      last_read: the last tick at which they are needed; the writer's, if nothing needs them.
      last_used: of these the last at which an instruction writes or reads them; −1 if none
        does.
      first_use: of a transfer: tick of the first instruction that names it.
      needs_slot: it lies in device memory and nothing gives it a place there but a slot.
      over: the values that it may have been written over, if it has no slot of its own.
      copied: of a copy in the same layout: the value that it copies.
      under: the operand in whose bytes it lies, if it has no slot of its own.
      is_taken: nothing may be written over it.
      followed_at: the tick at which a result is written to its bytes that is not written over
        it; what lies there in between must be gone by then.
      written_over: the first instruction that has to leave a result in its bytes.
      home: the donated argument in whose bytes it lies until the program returns them.
      slots: those called by its name, or by another name of the same bytes.
      is_used: an instruction reads them.
      readers: transfers that read them between their start and their done.
    """

    name: str
    writer: Instruction
    size: int
    written: LogicalTime
    last_read: LogicalTime
    last_used: LogicalTime = -1
    transfer: Transfer | None = None
    first_use: LogicalTime | None = None
    needs_slot: bool = True
    is_taken: bool = False
    followed_at: LogicalTime | None = None
    written_over: Instruction | None = None
    home: Value | None = None
    over: Sequence[Value] = ()
    copied: Value | None = None
    under: Value | None = None
    slots: list[Slot] = field(default_factory=list[Slot])
    readers: list[Transfer] = field(default_factory=list[Transfer])
    is_used: bool = False

    def read(self, tick: LogicalTime) -> None:
        """Takes note that an instruction needs the bytes at `tick`."""
        self.last_read = max(self.last_read, tick)
        self.last_used = max(self.last_used, tick)
        self.is_used = True

    def leave(self, transfer: Transfer) -> None:
        """Takes note that `transfer` reads the bytes; at its done they are no longer needed."""
        self.last_read = max(self.last_read, transfer.done - 1)
        self.readers.append(transfer)

    def hold(self, above: Value) -> None:
        """Takes note that `above` lies in the bytes, and needs them as long as it is needed."""
        self.is_taken, above.under = True, self
        self.last_read = max(self.last_read, above.last_read)
        self.read(above.last_used)
        self.readers += above.readers

    @property
    def is_free_from(self) -> LogicalTime:
        """The tick at which all have read the bytes."""
        # A transfer is not done reading before the tick of its done.
        return max(self.last_read, *(t.done for t in self.readers), 0)

    @property
    def bottom(self) -> Value:
        """The value whose slot it lies in."""
        value = self
        while value.under is not None:
            value = value.under
        return value


class Replay:
    """One walk along the schedule that knows at every position whose bytes lie there.

    Attributes:
      values: in the order in which they are written, the transfers' first.
      apart: those of them that have memory beside the arena: arguments, outputs, constants.
      inside: what instructions need for what they run.
      argument_bytes, output_bytes, aliased_bytes: of the device, as in ``memory_analysis()``.
    """

    def __init__(self, program: Program, plan: Plan, platform: str = "") -> None:
        self.program, self.module = program, program.module
        self.values: list[Value] = []
        self.apart: set[Value] = set()
        self.argument_bytes = self.output_bytes = self.aliased_bytes = 0
        self._memory = Memory(self.module)
        self._taking = Taking(self.module, self._memory, platform)
        self.inside = Inside(self.module, self._memory, self._taking)
        self._on_device = {p.parameter for p in plan.placements if p.tier == plan.device_tier}
        self._donated = {(a.parameter, a.parameter_index) for a in self.module.input_output_aliases}
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)
        for slot in plan.slots:
            self._slots[slot.buffer].append(slot)
        self._copies: defaultdict[str, list[Value]] = defaultdict(list)
        for t in plan.transfers:
            name, source = f"{t.buffer}#{t.id}", program.moving(t.buffer)
            assert source is not None  # `verify` has looked at the transfers.
            copy = Value(name, source, t.size, t.start, t.start, transfer=t)
            copy.slots += self._slots[name]
            if t.kind == "prefetch":
                self._copies[t.buffer].append(copy)
            self.values.append(copy)
        self._held: dict[int, Mapping[ShapeIndex, Value]] = {}
        for t in plan.transfers:
            if t.buffer in program.stored:
                self._held[program.stored[t.buffer].done.id] = {(): self.values[t.id]}
        finish = ends_of(program.compute)
        for p in self.module.entry.parameters:
            self._step(p, 0, 0)
        for tick, i in enumerate(program.compute):
            self._step(i, tick, finish[i.id])
        self._return()
        self._evict(plan)
        for copies in self._copies.values():
            self._check_used(copies)

    def _check_used(self, copies: Sequence[Value]) -> None:
        for copy in copies:
            if copy.transfer is not None and copy.first_use is None:
                raise VerificationError(
                    f"transfer {copy.transfer.id} serves no use of %{copy.transfer.buffer}",
                    describe(self.module, copy.writer),
                    "Leave it out: nothing says when its bytes are free again.",
                )

    def dying(self, i: Instruction, tick: LogicalTime) -> frozenset[View]:
        """The parts of operands that are temporaries, and read for the last time at `tick`."""
        return frozenset(
            View(n, index)
            for n, o in enumerate(i.operand_ids)
            for index, v in self._held.get(o, {}).items()
            if v.last_read <= tick and v not in self.apart
        )

    def _step(self, i: Instruction, tick: LogicalTime, finish: LogicalTime) -> None:
        operands = [self._look_up(operand, tick) for operand in i.operand_ids]
        if i.opcode not in PASSING:
            for operand in operands:
                for value in operand.values():
                    value.read(finish)
        held: dict[ShapeIndex, Value] = {}
        for index, shape in i.shape.leaves():
            base, is_written = self._base(i, index, operands)
            if base is not None:
                if index or i.opcode not in RUNNING:  # Under its name is what it needs inside.
                    base.slots += self._slots.get(position_name(i, index), ())
                if is_written and base.written_over is None:
                    base.written_over = i
                held[index] = base
            elif i.opcode == "parameter":
                held[index] = self._argument(i, index, shape)
            else:
                held[index] = self._result(i, index, shape, tick, operands)
        self._held[i.id] = held

    def _base(
        self, i: Instruction, index: ShapeIndex, operands: Sequence[Mapping[ShapeIndex, Value]]
    ) -> tuple[Value | None, bool]:
        """The value in whose bytes a result has to lie, and whether it is written over there."""
        if i.opcode == "conditional":
            parts, is_kept = self._memory.branches(i, index)
            part, is_written = (parts[0] if parts else None), not is_kept
        else:
            part, is_written = self._memory.part(i, index)
        if part is None or part.operand >= len(operands):
            return None, False
        return operands[part.operand].get(part.part), is_written

    def _look_up(self, operand: int, tick: LogicalTime) -> Mapping[ShapeIndex, Value]:
        source = self.program.fetched.get(operand)
        if source is None:
            return self._held[operand]
        transfers = [c.transfer for c in self._copies[source.name] if c.transfer is not None]
        serving = serving_transfer(transfers, tick)
        if serving is None:
            raise unserved(self.program, source, transfers, tick)
        copy = self.values[serving.id]
        if copy.written_over is not None:
            raise VerificationError(
                f"%{source.name} is read at tick {tick} from transfer {serving.id}, but "
                f"%{copy.written_over.name} has written over that copy",
                self.program.at(min(tick, self.program.end - 1)),
                "Fetch it again.",
            )
        copy.first_use = tick if copy.first_use is None else copy.first_use
        copy.read(tick)
        return {(): copy}

    def _argument(self, p: Instruction, index: ShapeIndex, shape: Shape) -> Value:
        # The caller may look at an argument again, unless it gave it away.
        is_donated = (p.parameter_number, index) in self._donated
        last = 0 if is_donated else self.program.end - 1
        used = -1 if is_donated else last
        value = Value(position_name(p, index), p, shape.byte_size, 0, last, used)
        value.needs_slot = p.parameter_number in self._on_device and needs_bytes(p, shape)
        value.is_taken = not is_donated
        self.argument_bytes += value.size if value.needs_slot else 0
        value.slots += self._slots.get(value.name, ())
        self.values.append(value)
        self.apart.add(value)
        return value

    def _result(
        self,
        i: Instruction,
        index: ShapeIndex,
        shape: Shape,
        tick: LogicalTime,
        operands: Sequence[Mapping[ShapeIndex, Value]],
    ) -> Value:
        value = Value(position_name(i, index), i, shape.byte_size, tick, tick, tick)
        value.needs_slot = needs_bytes(i, shape)
        for name in _defining_names(self.module, i, index):
            value.slots += self._slots.get(name, ())
        if i.opcode == "constant":
            value.needs_slot, value.is_taken = False, True
            value.read(self.program.end)
            self.apart.add(value)
        if value.needs_slot:
            value.over = [
                v
                for n, operand in enumerate(operands)
                for part, v in operand.items()
                if v.size == value.size and self._taking.is_allowed(i, index, n, part)
            ]
        if i.opcode == "copy" and shape == self.module.instructions[i.operand_ids[0]].shape:
            value.copied = operands[0][()]
        self.values.append(value)
        return value

    def _return(self) -> None:
        root, last = self.module.entry.root, max(self.program.end - 1, 0)
        parameters = self.module.entry.parameters
        aliases = {a.output_index: a for a in self.module.input_output_aliases}
        for index, value in self._look_up(root.id, last).items():
            value.read(last)
            size = root.shape.at(index).byte_size
            is_stored = value.transfer is not None and value.transfer.kind == "evict"
            if is_stored or not needs_bytes(root, root.shape.at(index)):
                continue
            self.output_bytes += size
            if value.transfer is None:
                self.apart.add(value)
            alias = aliases.get(index)
            if alias is None:
                continue
            if not value.slots:
                value.needs_slot = False  # It lies in the argument that it replaces.
            if alias.parameter not in self._on_device:
                continue
            self.aliased_bytes += size
            argument = self._held[parameters[alias.parameter].id][alias.parameter_index]
            if not value.slots and value is not argument:
                value.home = argument

    def _evict(self, plan: Plan) -> None:
        """Takes note of what transfers read: an eviction a value, what fetches it again the
        copy in host memory."""
        away: dict[str, Value] = {}
        for t in plan.transfers:
            if t.kind == "evict":
                away[t.buffer] = self.values[t.id]
                self._held[self.program.evicted[t.buffer].id][()].leave(t)
            elif t.buffer in away:
                away[t.buffer].leave(t)
            else:
                source = self.program.moving(t.buffer)
                assert source is not None
                self._held[source.id][()].leave(t)


def _defining_names(module: Module, i: Instruction, index: ShapeIndex) -> Iterator[str]:
    """Yields every name of what `i` defines: those that a callee has for it, then its own."""
    while (view := view_of(i, index)) is not None:
        i, index = module.instructions[i.operand_ids[view.operand]], view.part
    caller, inner = i, index
    if i.opcode in ("async-start", "async-update", "async-done"):
        caller, is_result = begun(module, i), i.opcode == "async-done" or index[0] == 1
        inner = index if i.opcode == "async-done" else index[1:]
    else:
        is_result = i.opcode in ("call", "conditional")
    for callee in caller.called_computation_ids if is_result else ():
        root = module.computations[callee].root
        if any(at == inner for at, _ in root.shape.leaves()):
            yield from _defining_names(module, root, inner)
    yield position_name(i, index)
