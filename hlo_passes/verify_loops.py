"""Are the transfers in loop bodies where the plan has them, and may they stand there?

    slot     old a: read ─ read │ new a: start ▒▒▒ done ─► next iteration
    state    element 1 ─────────┘             element 1 of the root
                 last read  before  start            a transfer writes from its start on

A body that is ordered anew must hold the same instructions; only transfers, views and
scalar work may have changed places, and whatever is read must have been written. What is
left to prove is that no bytes are overwritten while somebody still reads them. One walk
along the new order follows each array in memory: an update works in place, a loop's state
lies where it lay in the iteration before. Reads by an asynchronous operation last until it
is done.

Nothing here is shared with the planner, and a body in XLA's own order is taken at its word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Computation, Instruction, Module, ShapeIndex
from hlo_passes.plan import LoopSchedule, LoopTransfer
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify_hlo import check_scheduled, describe, view_of

LOOP_TRANSFER_ATTRIBUTE = "memplan.loop_transfer"
"""Frontend attribute of both halves: ``<index in Plan.loops>.<transfer id>``."""

_VIEWS = frozenset({"bitcast", "get-tuple-element", "opt-barrier", "tuple"})

# What may change places when it is small: it has no effect but its value.
_PURE = frozenset(
    """add and clamp compare constant convert copy divide dynamic-slice fusion maximum minimum
    multiply negate or remainder reshape select slice subtract xor""".split()
)
_SMALL_BYTES = 1024


def verify_loops(original: Module, loops: Sequence[LoopSchedule], reordered: Module) -> None:
    """Proves that `reordered` computes what `original` does, with the transfers of `loops`.

    Args:
      original: the scheduled module that the schedules were made for.
      reordered: with the schedules written into it.

    Raises:
      VerificationError: at the first thing that is wrong.

    O(positions of the scheduled computations).
    """
    check_scheduled(reordered)
    if reordered is original and not loops:
        return  # Modules are frozen.
    named = {c.name: c for c in original.computations.values()}
    scheduled: dict[int, tuple[int, LoopSchedule]] = {}
    for n, loop in enumerate(loops):
        if loop.computation not in named or named[loop.computation].id in scheduled:
            raise VerificationError(
                f"loop {n} schedules computation %{loop.computation}",
                f"module {original.name}",
                "Each computation of the module is scheduled at most once.",
            )
        scheduled[named[loop.computation].id] = n, loop
    _check_around(original, reordered, scheduled)
    for computation_id, (n, loop) in scheduled.items():
        body = _Body(original, reordered, computation_id, n, loop)
        body.check_instructions()
        body.check_sequence()
        body.check_transfers()
        if loop.is_resequenced:
            _Memory(reordered, body.new).check()


def _check_around(original: Module, reordered: Module, scheduled: Collection[int]) -> None:
    """Checks that everything but the scheduled computations is as it was."""
    if _without(original, scheduled) != _without(reordered, scheduled):
        raise VerificationError(
            "the module differs outside the scheduled computations",
            f"module {reordered.name}",
            "Layouts, aliases and all other computations must stay.",
        )


def _without(module: Module, scheduled: Collection[int]) -> bytes:
    proto = module.to_proto()
    for c in proto.computations:
        if c.id in scheduled:
            del c.instructions[:]
            proto.schedule.sequences.pop(c.id, None)
    return proto.SerializeToString(deterministic=True)


class _Body:
    """One computation before and after."""

    def __init__(
        self, original: Module, reordered: Module, computation_id: int, n: int, loop: LoopSchedule
    ) -> None:
        self.original, self.module, self.loop = original, reordered, loop
        self.old = original.computations[computation_id]
        self.new = reordered.computations[computation_id]
        self._number = n
        by_name = {i.name: i for i in self.new.instructions}
        self._halves: dict[int, tuple[LoopTransfer, str]] = {}
        for t in loop.transfers:
            for kind, name in (("start", t.start_name), ("done", t.done_name)):
                if name not in by_name:
                    raise VerificationError(
                        f"the {kind} %{name} of transfer {t.id} is missing", self._where()
                    )
                self._halves[by_name[name].id] = t, kind
        if len(self._halves) != 2 * len(loop.transfers):
            raise VerificationError("two transfers share an instruction", self._where())

    def check_instructions(self) -> None:
        """Checks that the instructions are the same ones, but for dropped copies."""
        copies = {
            i.id: i.operand_ids[0]
            for i in self.old.instructions
            if i.name in self.loop.dropped_copies and i.opcode == "copy"
        }
        if len(copies) != len(self.loop.dropped_copies):
            raise VerificationError(
                f"not all of {', '.join(self.loop.dropped_copies)} are copies", self._where()
            )
        new = {i.id: i for i in self.new.instructions}
        old = {i.id: i for i in self.old.instructions if i.id not in copies}
        for i in (*old.values(), *new.values()):
            if (i.id in old) != (i.id in new):
                found = "lost" if i.id in old else "new"
                raise VerificationError(f"%{i.name} is {found}", self._where())
        for i in old.values():
            expected = hlo_pb2.HloInstructionProto()
            expected.CopyFrom(i.proto)
            expected.operand_ids[:] = [copies.get(o, o) for o in i.operand_ids]
            if i.id in self._halves:
                t, _ = self._halves[i.id]
                tag = f"{self._number}.{t.id}"
                expected.frontend_attributes.map[LOOP_TRANSFER_ATTRIBUTE] = tag
            if _serialized(expected) != _serialized(new[i.id].proto):
                raise VerificationError(
                    f"%{i.name} is not the instruction that it was", describe(self.module, i)
                )
        if self.old.root.id != self.new.root.id:
            raise VerificationError(f"%{self.new.root.name} is the root", self._where())

    def check_sequence(self) -> None:
        """Checks that the order is one, and that of all work that matters the old one."""
        ran: set[int] = set()
        for i in self.new.instructions:
            for needed in (*i.operand_ids, *i.control_predecessor_ids):
                if needed not in ran:
                    raise VerificationError(
                        f"%{i.name} is scheduled before what it needs, "
                        f"%{self.module.instructions[needed].name}",
                        describe(self.module, i),
                    )
            ran.add(i.id)
        if not self.loop.is_resequenced:
            if [i.id for i in self.old.instructions] != [i.id for i in self.new.instructions]:
                raise VerificationError("XLA's order should have stayed", self._where())
            return
        orders = [
            [i for i in side.instructions if not self._may_move(module, i) and i.id in ran]
            for module, side in ((self.original, self.old), (self.module, self.new))
        ]
        for expected, found in zip(*orders, strict=True):
            if expected.id != found.id:
                raise VerificationError(
                    f"%{found.name} stands where %{expected.name} was expected",
                    describe(self.module, found),
                    "Only transfers, views and scalar work may change places.",
                )

    def _may_move(self, module: Module, i: Instruction) -> bool:
        if i.id in self._halves or i.opcode in _VIEWS:
            return i.id != self.old.root.id
        shapes = [i.shape, *(module.instructions[o].shape for o in i.operand_ids)]
        return i.opcode in _PURE and all(
            leaf.byte_size <= _SMALL_BYTES for shape in shapes for _, leaf in shape.leaves()
        )

    def check_transfers(self) -> None:
        """Checks that the transfers are what the schedule says, and where it says."""
        ticks: dict[int, int] = {}
        tick = 0
        for i in self.new.instructions:
            ticks[i.id] = tick
            tick += i.id not in self._halves
        if tick != self.loop.ticks:
            raise VerificationError(
                f"it has {tick} ticks, the plan {self.loop.ticks}", self._where()
            )
        start_of: dict[int, Instruction] = {}
        done_of: dict[int, Instruction] = {}
        for i in self.new.instructions:
            if i.id not in self._halves:
                continue
            t, kind = self._halves[i.id]
            (start_of if kind == "start" else done_of)[t.id] = i
            opcodes = (
                ("copy-start", "async-start") if kind == "start" else ("copy-done", "async-done")
            )
            if i.opcode not in opcodes:
                raise VerificationError(
                    f"the {kind} of transfer {t.id}: found {i.opcode}", describe(self.module, i)
                )
            planned = t.start if kind == "start" else t.done
            if ticks[i.id] != planned:
                raise VerificationError(
                    f"the {kind} of transfer {t.id} stands at tick {ticks[i.id]}, expected tick "
                    f"{planned}",
                    describe(self.module, i),
                )
        issued = [start_of[t.id] for t in self.loop.transfers]
        place = {i.id: n for n, i in enumerate(self.new.instructions)}
        if any(a != n for n, a in enumerate(t.id for t in self.loop.transfers)) or (
            [place[i.id] for i in issued] != sorted(place[i.id] for i in issued)
        ):
            raise VerificationError("the transfers are not in issue order", self._where())
        for t in self.loop.transfers:
            start, done = start_of[t.id], done_of[t.id]
            users = [i.name for i in self.new.instructions if start.id in i.operand_ids]
            if users != [done.name]:
                raise VerificationError(
                    f"%{start.name} of transfer {t.id} is read by {', '.join(users) or 'nothing'}, "
                    f"expected %{done.name}",
                    describe(self.module, start),
                )
            sizes = {done.shape.byte_size}
            if t.kind == "evict":
                sizes = {self.module.instructions[o].shape.byte_size for o in start.operand_ids}
            if t.size not in sizes or not t.done <= t.end <= self.loop.ticks:
                raise VerificationError(
                    f"transfer {t.id} moves {t.size} bytes until tick {t.end}, which "
                    f"%{done.name} does not",
                    describe(self.module, done),
                )

    def _where(self) -> str:
        return f"computation %{self.loop.computation}"


def _serialized(message: hlo_pb2.HloInstructionProto) -> bytes:
    return message.SerializeToString(deterministic=True)


@dataclass(slots=True, eq=False)
class _Array:
    """What one write leaves in memory.

    Attributes:
      place: that of the writer in the schedule.
      writer: its id.
      reads: (reader's id, place of its end).
      after: the array in the same bytes that this one is written over.
    """

    name: str
    place: int
    writer: int
    reads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    after: _Array | None = None

    @property
    def history(self) -> Iterator[_Array]:
        """This array and all that lay in its bytes before, latest first."""
        array: _Array | None = self
        while array is not None:
            yield array
            array = array.after


class _Memory:
    """One walk along a computation that follows the arrays in memory."""

    def __init__(self, module: Module, computation: Computation) -> None:
        self._module = module
        self._computation = computation
        self._place = {i.id: n for n, i in enumerate(computation.instructions)}
        self._end: dict[int, int] = dict(self._place)
        for i in reversed(computation.instructions):
            if i.opcode.endswith(("-done", "-update")):
                self._end[i.operand_ids[0]] = self._end[i.id]
        self._arrays: list[_Array] = []
        self._held: dict[int, Mapping[ShapeIndex, _Array]] = {}

    def check(self) -> None:
        for i in self._computation.instructions:
            self._step(i)
        self._carry()
        for array in self._arrays:
            if array.after is not None:
                self._check_overwrite(array.after, array)

    def _step(self, i: Instruction) -> None:
        place = self._place[i.id]
        operands = [self._held[o] for o in i.operand_ids]
        if i.opcode not in _VIEWS and not i.opcode.endswith(("-done", "-update")):
            for operand in operands:
                for array in operand.values():
                    array.reads.append((i.id, self._end[i.id]))
        held: dict[ShapeIndex, _Array] = {}
        for index, _ in i.shape.leaves():
            view = view_of(i, index)
            array = None if view is None else operands[view.operand].get(view.part)
            over = self._overwritten(i, index)
            if over is not None:
                array = self._write(i, place, operands[over].get(self._part(i, index)))
            elif array is None:
                array = self._write(i, place, None)
            held[index] = array
        self._held[i.id] = held

    def _write(self, i: Instruction, place: int, over: _Array | None) -> _Array:
        array = _Array(i.name, place, i.id, after=over)
        self._arrays.append(array)
        return array

    def _part(self, i: Instruction, index: ShapeIndex) -> ShapeIndex:
        return index if i.opcode == "while" else ()

    def _overwritten(self, i: Instruction, index: ShapeIndex) -> int | None:
        """Which operand the output at `index` is written over, if it must be one."""
        if i.opcode == "while":
            # What the body does not hand through it writes.
            body = self._module.computations[i.called_computation_ids[0]]
            return None if _hands_through(self._module, body, index) else 0
        if i.opcode == "async-start" and index[:1] == (1,):
            (callee, *_) = (self._module.computations[c] for c in i.called_computation_ids)
            return _updated_parameter(self._module, callee.root)
        if i.opcode == "fusion":
            body = self._module.computations[i.called_computation_ids[0]]
            root = body.root
            if root.opcode == "tuple" and index:
                root = self._module.instructions[root.operand_ids[index[0]]]
            return _updated_parameter(self._module, root)
        if i.opcode in ("dynamic-update-slice", "scatter") and not i.shape.is_tuple:
            return 0
        return None

    def _carry(self) -> None:
        """A loop's state lies where it lay in the iteration before, a donated argument's
        successor where that lies."""
        root = self._computation.root
        results = self._held[root.id]
        pairs: list[tuple[_Array, _Array]] = []
        if self._computation.id == self._module.entry.id:
            for alias in self._module.input_output_aliases:
                parameter = self._computation.parameters[alias.parameter]
                given = self._held[parameter.id][alias.parameter_index]
                pairs.append((given, results[alias.output_index]))
        elif self._is_loop_body():
            (state,) = self._computation.parameters
            pairs = [(self._held[state.id][index], results[index]) for index in results]
        counted = Counter(id(new) for old, new in pairs if old not in new.history)
        for old, new in pairs:
            first = [*new.history][-1]
            opcode = self._module.instructions[first.writer].opcode
            if old in new.history or opcode in ("constant", "parameter"):
                continue  # Nothing is written.
            if counted[id(new)] > 1 and first.name != new.name:
                raise VerificationError(
                    f"%{new.name} is handed on twice, in the same bytes",
                    describe(self._module, self._module.instructions[new.writer]),
                    "Each element of a loop's state has bytes of its own.",
                )
            for array in self._arrays:
                if old in array.history:
                    self._check_overwrite(array, first)

    def _is_loop_body(self) -> bool:
        return any(
            i.opcode == "while" and i.called_computation_ids[0] == self._computation.id
            for i in self._module.instructions.values()
        )

    def _check_overwrite(self, old: _Array, new: _Array) -> None:
        for reader, end in old.reads:
            if reader != new.writer and end >= new.place:
                i = self._module.instructions[reader]
                raise VerificationError(
                    f"%{new.name} overwrites the bytes of %{old.name} while %{i.name} reads them",
                    describe(self._module, i),
                    "A transfer writes from its start on, and reads until it is done.",
                )


def _hands_through(module: Module, body: Computation, index: ShapeIndex) -> bool:
    """Whether a loop's body gives back what it got at `index`."""
    i = body.root
    for part in index:
        while i.opcode == "bitcast":
            i = module.instructions[i.operand_ids[0]]
        if i.opcode != "tuple":
            return False
        i = module.instructions[i.operand_ids[part]]
    parts: list[int] = []
    while i.opcode in ("bitcast", "get-tuple-element"):
        if i.opcode == "get-tuple-element":
            parts.insert(0, i.tuple_index)
        i = module.instructions[i.operand_ids[0]]
    return i.opcode == "parameter" and tuple(parts) == index


def _updated_parameter(module: Module, i: Instruction) -> int | None:
    """The parameter that a called computation updates in place, if `i`, its result, is one."""
    while i.opcode == "bitcast":
        i = module.instructions[i.operand_ids[0]]
    if i.opcode == "fusion":
        inner = _updated_parameter(module, module.computations[i.called_computation_ids[0]].root)
        if inner is None:
            return None
        i = module.instructions[i.operand_ids[inner]]
    elif i.opcode in ("dynamic-update-slice", "scatter"):
        i = module.instructions[i.operand_ids[0]]
    else:
        return None
    while i.opcode == "bitcast":
        i = module.instructions[i.operand_ids[0]]
    return i.parameter_number if i.opcode == "parameter" else None
