"""What the checker knows of a program: ticks, values, reads. See `verify`.

    entry        p   start  a   done  b = fusion(done, a)   bitcast(b)   c
    tick                    c0        c1                    c2           c3
    values       argument   a         copy of p ─► transfer i
                            └ read at 1                 b ─────────────── read at 3

One walk along the schedule carries a table from every position (an instruction, or an
element of its tuple) to the value whose bytes lie there. Instructions that only show bytes
under another name hand the entry on; whatever else has a result starts a value. A fetched
argument is no one value: each user meets the copy that serves its tick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hlo_passes.errors import VerificationError
from hlo_passes.ir import (
    DEVICE_MEMORY_SPACE,
    HOST_MEMORY_SPACE,
    Instruction,
    Module,
    Shape,
    ShapeIndex,
)
from hlo_passes.plan import Event, LogicalTime, Plan, Slot, Transfer

# Show an operand's bytes under another name and touch none of them.
_VIEWS = frozenset(
    ("add-dependency", "bitcast", "domain", "get-tuple-element", "opt-barrier", "tuple")
)

# Read operand elements after writing others, so that they cannot write over an operand that
# dies there. Whatever else can is taken at the plan's word (xla/hlo/analysis/
# hlo_dataflow_analysis.cc, CanShareOperandBufferWithUser, is finer).
_OUT_OF_PLACE = frozenset(
    """all-gather all-to-all broadcast cholesky concatenate convolution copy copy-start dot
    dynamic-slice fft gather iota pad reduce reduce-scatter reduce-window reverse rng slice
    transpose""".split()
)


@dataclass(frozen=True, eq=False)
class Program:
    """The entry in ticks, and the values that transfers bring to it.

    Attributes:
      compute: c0, c1, ...
      fetched: id of the instruction that users read, to the parameter it is a copy of: of
        XLA's `copy-done`; on CPU, where there is none, of the parameter itself.
    """

    module: Module
    compute: tuple[Instruction, ...]
    fetched: Mapping[int, Instruction]

    @classmethod
    def of(cls, module: Module, plan: Plan) -> Program:
        moved = {t.buffer for t in plan.transfers}
        # A donated argument may be overwritten before the program ends: no transfer's copy of
        # it stands for it, and the program's own copies are compute.
        donated = {a.parameter for a in module.input_output_aliases}
        steady = [p for p in module.entry.parameters if p.parameter_number not in donated]
        fetched = {p.id: p for p in steady if p.name in moved and _on_device(p.shape)}
        copies: set[int] = set()
        for done in module.entry.instructions:
            if done.opcode != "copy-done":
                continue
            start = module.instructions[done.operand_ids[0]]
            source = module.instructions[start.operand_ids[0]]
            if (
                source in steady
                and source.shape.memory_space == HOST_MEMORY_SPACE
                and _on_device(done.shape)
            ):
                fetched[done.id] = source
                copies |= {start.id, done.id}
        compute = tuple(
            i for i in module.entry.instructions if i.opcode != "parameter" and i.id not in copies
        )
        return cls(module, compute, fetched)

    @property
    def end(self) -> LogicalTime:
        return len(self.compute)

    def at(self, tick: LogicalTime) -> str:
        """Names a tick's instruction, for an error."""
        return f"tick {tick}, {describe(self.module, self.compute[tick])}"


@dataclass(slots=True, eq=False)
class Value:
    """Bytes that one instruction or one transfer writes.

    Attributes:
      name: what its slot is called.
      writer: the instruction that defines it; of a transfer the parameter it copies.
      written: the tick from which its bytes change.
      last_read: tick of the last instruction that needs them; the writer's, if none does.
      first_use: of a transfer: tick of the first instruction that names it.
      needs_slot: it lies in device memory and nothing gives it a place there but a slot.
      over: the values that it may have been written over, if it has no slot of its own.
      is_taken: nothing may be written over it.
      home: the donated argument in whose bytes it lies until the program returns them.
      slots: those called by its name, or by another name of the same bytes.
    """

    name: str
    writer: Instruction
    size: int
    written: LogicalTime
    last_read: LogicalTime
    transfer: Transfer | None = None
    first_use: LogicalTime | None = None
    needs_slot: bool = True
    is_taken: bool = False
    home: Value | None = None
    over: Sequence[Value] = ()
    slots: list[Slot] = field(default_factory=list[Slot])
    _reads: dict[int | None, LogicalTime] = field(default_factory=dict[int | None, LogicalTime])

    def read(self, tick: LogicalTime, start: int | None = None) -> None:
        """Takes note that the bytes are needed at `tick`; by the operation in flight that
        began with instruction `start`, if one is named."""
        self.last_read = max(self.last_read, tick)
        self._reads[start] = max(self._reads.get(start, tick), tick)

    def last_read_beside(self, writer: Instruction) -> LogicalTime:
        """When all have read the bytes but `writer`, if it reads them while it writes."""
        if writer.opcode != "async-start":
            return self.last_read
        return max((t for start, t in self._reads.items() if start != writer.id), default=0)

    def is_read_at(self, tick: LogicalTime) -> bool:
        return tick in self._reads.values()


class Replay:
    """One walk along the schedule that knows at every position whose bytes lie there.

    Attributes:
      values: in the order in which they are written, the transfers' first.
      apart: those of them that have memory beside the arena: arguments, outputs, constants.
      argument_bytes, output_bytes, aliased_bytes: of the device, as in ``memory_analysis()``.
    """

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.module = program, program.module
        self.values: list[Value] = []
        self.apart: set[Value] = set()
        self.argument_bytes = self.output_bytes = self.aliased_bytes = 0
        self._on_device = {p.parameter for p in plan.placements if p.tier == plan.device_tier}
        self._donated = {(a.parameter, a.parameter_index) for a in self.module.input_output_aliases}
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)
        for slot in plan.slots:
            self._slots[slot.buffer].append(slot)
        self._copies: defaultdict[str, list[Value]] = defaultdict(list)
        parameters = {p.name: p for p in self.module.entry.parameters}
        for t in plan.transfers:
            name = f"{t.buffer}#{t.id}"
            copy = Value(name, parameters[t.buffer], t.size, t.start, t.start, transfer=t)
            copy.slots += self._slots[name]
            self._copies[t.buffer].append(copy)
            self.values.append(copy)
        self._held: dict[int, Mapping[ShapeIndex, Value]] = {}
        finish, self._began = _asynchronous_ends(program), _asynchronous_starts(program)
        for p in self.module.entry.parameters:
            self._step(p, 0, 0)
        for tick, i in enumerate(program.compute):
            self._step(i, tick, finish.get(i.id, tick))
        self._return()
        for copy in self.values:
            if copy.transfer is not None and copy.first_use is None:
                raise VerificationError(
                    f"transfer {copy.transfer.id} serves no use of %{copy.transfer.buffer}",
                    describe(self.module, copy.writer),
                    "Leave it out: nothing says when its bytes are free again.",
                )

    def _step(self, i: Instruction, tick: LogicalTime, finish: LogicalTime) -> None:
        operands = [self._look_up(operand, i, tick) for operand in i.operand_ids]
        if i.opcode not in _VIEWS:
            for operand in operands:
                for value in operand.values():
                    value.read(finish, self._began.get(i.id))
        held: dict[ShapeIndex, Value] = {}
        for index, shape in i.shape.leaves():
            view = view_of(i, index)
            if view is not None:
                value = operands[view.operand][view.part]
                value.slots += self._slots.get(position_name(i, index), ())
            elif i.opcode == "parameter":
                value = self._argument(i, index, shape)
            else:
                value = self._result(i, index, shape, tick, operands)
            held[index] = value
        self._held[i.id] = held

    def _look_up(
        self, operand: int, user: Instruction, tick: LogicalTime
    ) -> Mapping[ShapeIndex, Value]:
        parameter = self.program.fetched.get(operand)
        if parameter is None:
            return self._held[operand]
        transfers = [c.transfer for c in self._copies[parameter.name] if c.transfer is not None]
        serving = serving_transfer(transfers, tick)
        if serving is None:
            raise unserved(self.program, parameter, transfers, tick)
        copy = self.values[serving.id]
        copy.first_use = tick if copy.first_use is None else copy.first_use
        copy.read(tick, self._began.get(user.id))
        return {(): copy}

    def _argument(self, p: Instruction, index: ShapeIndex, shape: Shape) -> Value:
        # The caller may look at an argument again, unless it gave it away.
        is_donated = (p.parameter_number, index) in self._donated
        last = 0 if is_donated else self.program.end - 1
        value = Value(position_name(p, index), p, shape.byte_size, 0, last)
        value.needs_slot = p.parameter_number in self._on_device and _needs_bytes(p, shape)
        value.is_taken = not is_donated
        self.argument_bytes += value.size if value.needs_slot else 0
        value.slots += self._slots.get(p.name, ())
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
        value = Value(position_name(i, index), i, shape.byte_size, tick, tick)
        value.needs_slot = _needs_bytes(i, shape)
        for name in _defining_names(self.module, i, index):
            value.slots += self._slots.get(name, ())
        if i.opcode == "constant":
            value.last_read, value.needs_slot, value.is_taken = self.program.end, False, True
            self.apart.add(value)
        if value.needs_slot and _may_work_in_place(self.module, i):
            # A sort leaves each result in the operand that it sorts, and in no other.
            own = operands[index[0] : index[0] + 1] if i.opcode == "sort" and index else operands
            value.over = [v for o in own for v in o.values() if v.size == value.size]
        self.values.append(value)
        return value

    def _return(self) -> None:
        root, last = self.module.entry.root, max(self.program.end - 1, 0)
        parameters = self.module.entry.parameters
        aliases = {a.output_index: a for a in self.module.input_output_aliases}
        for index, value in self._look_up(root.id, root, last).items():
            value.read(last)
            size = root.shape.at(index).byte_size
            if not _needs_bytes(root, root.shape.at(index)):
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


def _asynchronous_ends(program: Program) -> dict[int, LogicalTime]:
    """Maps the start of an asynchronous operation to the tick of its done.

    Until then it reads its operands, whether or not its result names them.
    """
    finish: dict[int, LogicalTime] = {}
    for tick in reversed(range(program.end)):
        i = program.compute[tick]
        if i.opcode.endswith(("-done", "-update")):
            finish[i.operand_ids[0]] = finish.get(i.id, tick)
    return finish


def _asynchronous_starts(program: Program) -> dict[int, int]:
    """Maps all parts of an asynchronous operation, from start to done, to its start."""
    began: dict[int, int] = {}
    for i in program.compute:
        if i.opcode.endswith("-start"):
            began[i.id] = i.id
        elif i.opcode.endswith(("-done", "-update")):
            began[i.id] = began.get(i.operand_ids[0], i.operand_ids[0])
    return began


def _may_work_in_place(module: Module, i: Instruction) -> bool:
    """Whether a result of `i` may lie in the bytes of an operand that it is the last to read."""
    if i.opcode != "async-start":
        return i.opcode not in _OUT_OF_PLACE
    (callee, *_) = i.called_computation_ids
    work = [w for w in module.computations[callee].instructions if w.opcode != "parameter"]
    return len(work) == 1 and work[0].opcode not in _OUT_OF_PLACE | {"sort"}


class View(NamedTuple):
    operand: int
    part: ShapeIndex


def view_of(i: Instruction, index: ShapeIndex) -> View | None:
    """The part of an operand whose bytes lie at `index` of `i`; None where `i` defines them.

    Only what XLA guarantees (xla/hlo/analysis/hlo_dataflow_analysis.cc, the Update...
    functions): a loop's carry is in place, an asynchronous pair hands its operands on.
    """
    match i.opcode, index:
        case (("add-dependency" | "bitcast" | "domain" | "opt-barrier" | "while"), _):
            return View(0, index)
        case (("async-update" | "all-reduce-done"), _):
            return View(0, index)
        case "all-reduce-start", _:  # XLA runs it in place.
            return View(index[0] if index else 0, ())
        case "collective-permute-start", (1,) if len(i.operand_ids) == 4:
            return View(1, ())  # Its destination is an operand.
        case "tuple", _:
            return View(index[0], index[1:])
        case "get-tuple-element", _:
            return View(0, (i.tuple_index, *index))
        case "copy-start", (1,):
            return View(0, ())
        case (("send" | "all-gather-start" | "collective-permute-start"), (0,)):
            return View(0, ())
        case (("async-start" | "all-gather-start" | "collective-permute-start"), (0, k, *rest)):
            return View(k, tuple(rest))
        case (("copy-done" | "recv-done"), () | (0,)):
            return View(0, (0,))
        case (("async-done" | "all-gather-done" | "collective-permute-done"), _):
            return View(0, (1, *index))
        case (("async-start" | "custom-call" | "fusion"), _):
            aliases = {a.output_index: a for a in i.output_operand_aliasing}
            alias = aliases.get(index)
            return None if alias is None else View(alias.operand, alias.operand_index)
        case _:
            return None


def _defining_names(module: Module, i: Instruction, index: ShapeIndex) -> Iterator[str]:
    """Yields every name of what `i` defines: its own, then those that a callee has for it."""
    while (view := view_of(i, index)) is not None:
        i, index = module.instructions[i.operand_ids[view.operand]], view.part
    yield position_name(i, index)
    is_async_result = i.opcode == "async-start" and index[0] == 1
    if is_async_result or i.opcode in ("call", "conditional"):
        inner = index[1:] if is_async_result else index
        for callee in i.called_computation_ids:
            yield from _defining_names(module, module.computations[callee].root, inner)


def _needs_bytes(i: Instruction, shape: Shape) -> bool:
    """Whether a result takes up device memory that XLA's buffer assignment gives out."""
    if not _on_device(shape) or shape.byte_size == 0:
        return False
    # The last elements of a start's tuple are semaphores, not data.
    is_start = i.opcode.endswith("-start") or i.opcode in ("send", "recv")
    return not (is_start and i.shape.is_tuple and str(shape) in ("u32[]", "s32[]"))


def _on_device(shape: Shape) -> bool:
    return shape.memory_space == DEVICE_MEMORY_SPACE


def position_name(i: Instruction, index: ShapeIndex) -> str:
    return f"{i.name}{{{','.join(map(str, index))}}}" if index else i.name


def describe(module: Module, i: Instruction) -> str:
    line = module.source_line(i)
    return f"{i}, {line}" if line else str(i)


def serving_transfer(transfers: Sequence[Transfer], tick: LogicalTime) -> Transfer | None:
    """The transfer whose copy a use at `tick` reads: the latest that is there."""
    there = [t for t in transfers if t.done <= tick < t.end]
    return max(there, key=lambda t: (t.done, t.id), default=None)


def unserved(
    program: Program, parameter: Instruction, transfers: Sequence[Transfer], tick: LogicalTime
) -> VerificationError:
    where = program.at(tick) if tick < program.end else describe(program.module, parameter)
    late = [t for t in transfers if t.done > tick]
    gone = [t for t in transfers if t.end <= tick]
    if late and not gone:
        first = min(late, key=lambda t: t.done)
        return VerificationError(
            f"%{parameter.name} is read at tick {tick}, before its data: "
            f"transfer {first.id} is done at tick {first.done}",
            where,
            f"Wait for it at tick {tick} or before.",
        )
    if gone:
        last = max(gone, key=lambda t: t.end)
        return VerificationError(
            f"%{parameter.name} is read at tick {tick}, but no copy is there: that of "
            f"transfer {last.id} ended at tick {last.end}",
            where,
            "Fetch it again before this use, or hold the copy until after it.",
        )
    return VerificationError(
        f"%{parameter.name} lives off the device and is read at tick {tick}, but no transfer "
        "brings it",
        where,
        "Add a transfer that is done by then.",
    )


def issue_rank(plan: Plan, event: Event) -> tuple[LogicalTime, int, int]:
    """Sorts events as the plan issues them: of one tick starts, dones, then compute."""
    match event.kind:
        case "start":
            return plan.transfers[event.index].start, 0, event.index
        case "done":
            return plan.transfers[event.index].done, 1, event.index
        case "compute":
            return event.index, 2, 0


def check_scheduled(module: Module) -> None:
    if not module.is_scheduled:
        raise VerificationError(
            "the module has no schedule, so there is no order to check against",
            f"module {module.name}",
            "Give the module as it is after XLA's scheduler.",
        )
