"""Does a rewritten module compute what the original does, as safely? See `verify`.

    original    a = f(p)   b = g(a)   c = h(b)   d = k(a, c)
    rewritten   a   b   a.evict  c   a.refetch   d(a.refetch, c)     reads what d(a, c) reads
                a   b            c   a' = f(p)   d(a', c)            so does this

Value numbering (Cocke and Schwartz 1970), computation by computation: along the new schedule
each instruction holds some *contents*, named after the instruction of the original that makes
them. One of the same name makes those; so does a clone, which names its original in an
attribute; tuples, barriers and copies hold what they are given, wherever it lies. Every
instruction must be what it was and read the contents, in the shapes and layouts, that it read
in the original. What holds nothing new may come and go: barriers, copies, transfers.

Contents are right when they are written; three things keep them so, whatever the order:
nothing is read after its bytes were written over (`memory`); what others can observe keeps its
order (`effects`), but for gathers, which all devices have in the same one; and what takes time
stays inside, or outside, the other asynchronous collectives that it stood inside of, for XLA chose
what hides them. Clones are free in that: they stand at their
readers, which are not, and more work inside hides no less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

from custom_calls import targets
from hlo_passes.errors import VerificationError
from hlo_passes.ir import (
    DEVICE_MEMORY_SPACE,
    HOST_MEMORY_SPACE,
    Computation,
    Instruction,
    Module,
    Shape,
)
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify.effects import Effects
from hlo_passes.verify.hlo import RUNNING, check_scheduled, describe, serialized
from hlo_passes.verify.memory import Memory

RECOMPUTE_ATTRIBUTE = "memplan.recompute"
"""Frontend attribute of a clone: the name of its original."""

MARKS = ("memplan.evict", "memplan.loop_transfer", RECOMPUTE_ATTRIBUTE, "memplan.transfer")
"""Frontend attributes that passes may add."""

# Fields of a module, and of a computation, that may change, or that are looked at apart.
_Module, _Computation = hlo_pb2.HloModuleProto, hlo_pb2.HloComputationProto
_COMPUTATIONS, _SCHEDULE = _Module.COMPUTATIONS_FIELD_NUMBER, _Module.SCHEDULE_FIELD_NUMBER
_FREE = (
    _Module.NAME_FIELD_NUMBER,
    _Module.ID_FIELD_NUMBER,
    _Module.FRONTEND_ATTRIBUTES_FIELD_NUMBER,
    _COMPUTATIONS,
    _SCHEDULE,
)
_INSIDE = (_Computation.INSTRUCTIONS_FIELD_NUMBER, _Computation.ROOT_ID_FIELD_NUMBER)

# Hold what they are given.
_HOLDING = frozenset(
    ("copy", "copy-done", "copy-start", "get-tuple-element", "opt-barrier", "tuple")
)
_CALLS = (targets.COPY_START, targets.COPY_DONE, *targets.GATES)

type Contents = str | tuple[Contents, ...]
"""What an array holds, by the name of the position that made it; of a tuple what its parts do."""


def verify_equivalent(original: Module, rewritten: Module) -> None:
    """Proves that `rewritten` computes what `original` does, in an order that is as safe.

    Args:
      original: scheduled.
      rewritten: after any number of passes, with instructions in another order, clones,
        copies, transfers and marks, in any computation that runs on its own.

    Raises:
      VerificationError: at the first thing that is wrong.

    Time O(positions of the module).
    """
    if rewritten is original:
        return
    check_scheduled(rewritten)
    before, after = _Written.of(original), _Written.of(rewritten)
    _check_around(original, rewritten, before, after)
    running = _running(original)
    proof = _Proof(original, rewritten)
    for computation in original.computations.values():
        if before.of_computations[computation.id] == after.of_computations[computation.id]:
            continue
        new = rewritten.computations[computation.id]
        if computation.id not in running or new is computation:
            raise VerificationError(
                f"computation %{computation.name} differs from the original's",
                f"module {rewritten.name}",
                "What runs inside one instruction stays as it is.",
            )
        proof.check(computation, new)
    proof.check_added()


class _Written(NamedTuple):
    """What XLA will read, whatever a module's views of it say.

    Attributes:
      around: of the module all that may not change but its computations.
      of_computations: of each the bytes and the order, by id.
    """

    around: list[tuple[int, object]]
    of_computations: Mapping[int, tuple[bytes, Sequence[int]]]

    @classmethod
    def of(cls, module: Module) -> _Written:
        fields = _fields(module.to_bytes())
        schedule = hlo_pb2.HloScheduleProto.FromString(
            b"".join(data for n, data in fields if n == _SCHEDULE)
        )
        computations = (data for n, data in fields if n == _COMPUTATIONS)
        return cls(
            [f for f in fields if f[0] not in _FREE],
            {
                c: (data, schedule.sequences[c].instruction_ids[:])
                for c, data in zip(module.computations, computations, strict=True)
            },
        )


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """Numbers and values of a message's fields, also of those that hlo.proto does not declare."""
    found = UnknownFieldSet(empty_pb2.Empty.FromString(message))
    return [(f.field_number, f.data) for f in found]


def _check_around(original: Module, rewritten: Module, before: _Written, after: _Written) -> None:
    """Checks that all but the computations' instructions is as it was."""
    lost = [c for i, c in original.computations.items() if i not in rewritten.computations]
    if lost:
        raise VerificationError(
            f"computation %{lost[0].name} is lost",
            f"module {rewritten.name}",
            "Layouts and aliases must stay.",
        )

    def around(data: bytes) -> list[tuple[int, Any]]:
        return [f for f in _fields(data) if f[0] not in _INSIDE]

    changed = (
        (data, after.of_computations[c][0])
        for c, (data, _) in before.of_computations.items()
        if data != after.of_computations[c][0]
    )
    if before.around != after.around or any(around(a) != around(b) for a, b in changed):
        raise VerificationError(
            "the module differs outside its computations",
            f"module {rewritten.name}",
            "Layouts and aliases must stay.",
        )


def _running(module: Module) -> set[int]:
    """Ids of the computations that have an order of their own."""
    found, pending = {module.entry.id}, [module.entry]
    while pending:
        for i in pending.pop().instructions:
            if i.opcode in RUNNING:
                new = set(i.called_computation_ids) - found
                found |= new
                pending += [module.computations[c] for c in new]
    return found


class _Proof:
    """The walks that find what each instruction holds."""

    def __init__(self, original: Module, rewritten: Module) -> None:
        self._original, self._rewritten = original, rewritten
        self._before, self._after = Effects(original), Effects(rewritten)
        self._memory_before, self._memory = Memory(original), Memory(rewritten)
        self._copied: set[int] = set()
        self._readers: dict[int, dict[int, list[Instruction]]] = {}  # by computation

    def check(self, old: Computation, new: Computation) -> None:
        """Checks one computation."""
        self._check_sequence(old, new)
        self._check_contents(old, new)
        self._check_observable(old, new)
        self._check_memory(old, new)

    def check_added(self) -> None:
        """Checks that what is new besides is what clones call."""
        added = self._rewritten.computations.keys() - self._original.computations.keys()
        for computation_id in added - self._copied:
            raise VerificationError(
                f"computation %{self._rewritten.computations[computation_id].name} is new",
                f"module {self._rewritten.name}",
                "Only what a clone calls is copied.",
            )

    def _check_sequence(self, old: Computation, new: Computation) -> None:
        """Checks that each instruction runs once, and is numbered as XLA does."""
        # XLA numbers (computation id << 32) | local id; older modules number as they like.
        is_numbered = all(i.id >> 32 == old.id for i in old.instructions)
        ran: set[int] = set()
        for i in new.instructions:
            if is_numbered and i.id >> 32 != new.id:
                raise self._error(
                    f"%{i.name} has id {i.id}, which is not of computation {new.id}",
                    i,
                    "Ids are (computation id << 32) | local id.",
                )
            if i.id in ran:
                raise self._error(f"%{i.name} is scheduled twice", i)
            ran.add(i.id)

    def _check_contents(self, old: Computation, new: Computation) -> None:
        named = {i.name: i for i in old.instructions}
        ids = {i.name: i.id for i in new.instructions}
        expected = _contents_of(self._original, old)
        found: dict[int, Contents] = {}
        seen: set[str] = set()
        for i in new.instructions:
            if i.name in seen:
                raise self._error(f"two instructions are called %{i.name}", i)
            seen.add(i.name)
            operands = [found[o] for o in i.operand_ids]
            clone_of = i.proto.frontend_attributes.map.get(RECOMPUTE_ATTRIBUTE, "")
            model = named.get(i.name) or named.get(clone_of)
            if _holds(self._rewritten, i):
                self._check_holding(i, model)
                if i.name in named and not _is_transfer(i):
                    self._check_control(i, named[i.name], ids)
                found[i.id] = _held(i, operands)
                continue
            if model is None:
                raise self._error(
                    f"%{i.name} is said to be a clone of %{clone_of}, which is not there"
                    if clone_of
                    else f"%{i.name} is new",
                    i,
                    "Only clones, copies and transfers are added.",
                )
            self._check_instruction(i, model, is_clone=i.name not in named)
            self._check_operands(i, operands, model, expected)
            found[i.id] = expected[model.id]
            if i.name in named:
                self._check_control(i, model, ids)
        for i in old.instructions:
            if i.name not in seen and (not _holds(self._original, i) or i.control_predecessor_ids):
                raise VerificationError(
                    f"%{i.name} is lost",
                    describe(self._original, i),
                    "Only barriers, tuples and copies are left out.",
                )
        if found[new.root.id] != expected[old.root.id] or new.root.shape != old.root.shape:
            raise self._error(
                f"expected the result %{old.root.name}, found %{new.root.name}", new.root
            )

    def _check_instruction(self, i: Instruction, model: Instruction, *, is_clone: bool) -> None:
        """Checks that `i` is `model` up to its numbers, operands and marks."""
        if i.proto is model.proto or serialized(i.proto) == serialized(model.proto):
            return
        expected = hlo_pb2.HloInstructionProto()
        expected.CopyFrom(model.proto)
        expected.id = i.id
        expected.operand_ids[:] = i.operand_ids
        expected.control_predecessor_ids[:] = i.control_predecessor_ids
        for mark in MARKS:
            if mark in i.proto.frontend_attributes.map:
                expected.frontend_attributes.map[mark] = i.proto.frontend_attributes.map[mark]
        if is_clone:
            obstacle = self._before.obstacle(model)
            if obstacle:
                raise self._error(
                    f"%{i.name} runs %{model.name} again, which {obstacle}",
                    i,
                    "Only what has no effect and gives the same result twice may be cloned.",
                )
            expected.name = i.name
            if self._calls_copies(model.proto, i.proto):
                expected.called_computation_ids[:] = i.called_computation_ids
            elif list(model.called_computation_ids) == list(i.called_computation_ids):
                raise self._error(
                    f"%{i.name} calls the computations of %{model.name}",
                    i,
                    "A clone has copies of its own: a computation is called once.",
                )
        if serialized(expected) != serialized(i.proto):
            raise self._error(
                f"%{i.name} is not the instruction that %{model.name} was",
                i,
                "Shapes, attributes and metadata stay.",
            )

    def _check_control(self, i: Instruction, model: Instruction, ids: Mapping[str, int]) -> None:
        """Checks that `i` still waits for what `model` waits for. The order against a transfer is
        the plan's to decide.

        Args:
          ids: of the instructions, by name.
        """
        before = (self._original.instructions[c] for c in model.control_predecessor_ids)
        needed = {ids.get(b.name) for b in before if not _is_transfer(b)}
        if not needed <= {None, *i.control_predecessor_ids}:
            raise self._error(f"%{i.name} lost a control predecessor", i)

    def _check_operands(
        self,
        i: Instruction,
        operands: Sequence[Contents],
        model: Instruction,
        expected: Mapping[int, Contents],
    ) -> None:
        """Checks that `i` reads what `model` reads, in the same shapes and layouts."""
        pairs = zip_longest(i.operand_ids, operands, model.operand_ids)
        for n, (operand, contents, of_model) in enumerate(pairs):
            wanted = None if of_model is None else self._original.instructions[of_model]
            given = None if operand is None else self._rewritten.instructions[operand]
            if wanted is None or given is None:
                raise self._error(
                    f"%{i.name} has {len(operands)} operands, expected {len(model.operand_ids)}", i
                )
            if contents != expected[wanted.id]:
                raise self._error(
                    f"%{i.name}, operand {n}: expected {_named(expected[wanted.id], wanted)}, "
                    f"found {_named(contents, given)}",
                    i,
                    "An instruction reads what it read in the original.",
                )
            if given.shape != wanted.shape:
                raise self._error(
                    f"%{i.name}, operand {n}: expected the shape and layout of %{wanted.name}, "
                    f"{wanted.shape}, found {given.shape}",
                    i,
                )

    def _check_holding(self, i: Instruction, model: Instruction | None) -> None:
        """Checks that what hands contents on has the shape for it, and is no more than that."""
        operands = [self._rewritten.instructions[o].shape for o in i.operand_ids]
        match i.opcode:
            case "tuple":
                is_right = i.shape.tuple_shapes == tuple(operands)
            case "get-tuple-element":
                is_right = i.shape == operands[0].at((i.tuple_index,))
            case "copy-start":
                moved, source, *_ = i.shape.tuple_shapes
                is_right = source == operands[0] and _logical(moved) == _logical(source)
                if model is None and not _crosses(moved, source):
                    raise self._error(
                        f"%{i.name} does not copy an array between device and host memory",
                        i,
                        "A value is taken from memory space 0 to 5, in its layout, and back.",
                    )
            case "copy-done":
                is_right = i.shape == operands[0].at((0,))
            case "copy":
                is_right = True
            case _:
                is_right = i.shape == operands[0]
        if not is_right:
            raise self._error(f"%{i.name} has not the shape of what it holds", i)
        if model is None:
            self._check_nothing_more(i)
        else:
            self._check_instruction(i, model, is_clone=model.name != i.name)
        if i.opcode == "copy-start" or i.custom_call_target == targets.COPY_START:
            self._check_awaited(i)
        if RECOMPUTE_ATTRIBUTE in i.proto.frontend_attributes.map and "copy-" in i.opcode:
            raise self._error(f"%{i.name} is a clone of what is asynchronous", i)

    def _check_nothing_more(self, i: Instruction) -> None:
        if i.opcode == "custom-call":
            return  # What it declares, `schedule` looks at.
        bare = hlo_pb2.HloInstructionProto()
        bare.CopyFrom(i.proto)
        for field in ("name", "opcode", "id", "shape", "operand_ids", "metadata", "tuple_index"):
            bare.ClearField(field)
        bare.ClearField("control_predecessor_ids")
        bare.ClearField("frontend_attributes")
        # XLA's parser of text writes some fields that are empty.
        unknown = any(field.data for field in UnknownFieldSet(bare))
        bare.DiscardUnknownFields()
        if unknown or bare.ByteSize():
            raise self._error(f"%{i.name} is more than a {i.opcode}", i)

    def _check_awaited(self, start: Instruction) -> None:
        computation = self._rewritten.computations[start.computation_id]
        if computation.id not in self._readers:
            readers: dict[int, list[Instruction]] = {}
            for i in computation.instructions:
                for o in set(i.operand_ids):
                    readers.setdefault(o, []).append(i)
            self._readers[computation.id] = readers
        found = self._readers[computation.id].get(start.id, [])
        if len(found) != 1 or not (
            found[0].opcode == "copy-done" or found[0].custom_call_target == targets.COPY_DONE
        ):
            names = ", ".join(f"%{i.name}" for i in found) or "nothing"
            raise self._error(f"%{start.name} is waited for by {names}, expected one done", start)

    def _check_observable(self, old: Computation, new: Computation) -> None:
        """Checks the order of what others can observe, and what hides collectives."""
        # Calls of memplan's are observed by nobody: who reads what they give, is proven above.
        expected, found = (
            [
                i
                for i in computation.instructions
                if i.custom_call_target not in _CALLS and effects.is_ordered(i)
            ]
            for computation, effects in ((old, self._before), (new, self._after))
        )
        for a, b in zip(expected, found, strict=True):
            if a.name != b.name:
                raise self._error(
                    f"%{b.name} stands where %{a.name} was expected",
                    b,
                    "Side effects and collectives keep their order.",
                )
        hidden_by = self._after.open_collectives(new)
        hiding = self._before.open_collectives(old)
        for name, collectives in hiding.items():
            for collective in sorted(collectives ^ hidden_by.get(name, collectives)):
                side = "out of" if collective in collectives else "into"
                raise VerificationError(
                    f"%{name} moved {side} the span of the asynchronous %{collective}",
                    f"module {self._rewritten.name}",
                    "What takes time stays inside or outside of what XLA had it hide.",
                )

    def _check_memory(self, old: Computation, new: Computation) -> None:
        allowed: set[tuple[str, ...]] | None = None
        for conflict in self._memory.conflicts(new):
            if allowed is None:
                # XLA's own order is taken at its word.
                before = self._memory_before.conflicts(old)
                allowed = {tuple(i.name for i in c) for c in before}
            if tuple(i.name for i in conflict) not in allowed:
                writer, written, reader = conflict
                raise self._error(
                    f"%{writer.name} writes over what %{written.name} left, which "
                    + ("it also reads" if reader is writer else f"%{reader.name} reads later"),
                    reader,
                    "All readers come before what works in place; an asynchronous one is done.",
                )
        shared = self._memory.together(new)
        for together in shared - self._memory_before.together(old) if shared else ():
            parts = " and ".join(str(list(index)) for index in sorted(together))
            raise self._error(
                f"%{new.root.name} hands on the same bytes as {parts}",
                new.root,
                "Each element of a loop's state, and each donated argument, has bytes of its own.",
            )

    def _calls_copies(
        self, model: hlo_pb2.HloInstructionProto, clone: hlo_pb2.HloInstructionProto
    ) -> bool:
        """Whether a clone calls copies of what its model calls. What runs for each element
        (`to_apply` of a reduce) may be shared."""
        is_owner = model.opcode == "fusion" or model.opcode in RUNNING
        called = [*zip_longest(model.called_computation_ids, clone.called_computation_ids)]
        return all((a == b and not is_owner) or self._is_copy(a, b) for a, b in called)

    def _is_copy(self, computation_id: int | None, copy_id: int | None) -> bool:
        """Whether one computation is another up to names and numbers, and nobody else's copy."""
        if computation_id not in self._original.computations or copy_id is None:
            return False
        computation = self._original.computations[computation_id]
        copy = self._rewritten.computations.get(copy_id)
        if (
            copy is None
            or copy_id in self._original.computations
            or copy_id in self._copied
            or len(copy.instructions) != len(computation.instructions)
        ):
            return False
        pairs = [*zip(computation.instructions, copy.instructions, strict=True)]
        image = {a.id: b.id for a, b in pairs}
        for a, b in pairs:
            expected = hlo_pb2.HloInstructionProto()
            expected.CopyFrom(a.proto)
            expected.name, expected.id = b.name, b.id
            expected.operand_ids[:] = [image[o] for o in a.operand_ids]
            expected.control_predecessor_ids[:] = [image[o] for o in a.control_predecessor_ids]
            if not self._calls_copies(a.proto, b.proto):
                return False
            expected.called_computation_ids[:] = b.called_computation_ids
            if serialized(expected) != serialized(b.proto):
                return False
        if image[computation.root.id] != copy.root.id or computation.is_fusion != copy.is_fusion:
            return False
        self._copied.add(copy_id)
        return True

    def _error(self, problem: str, i: Instruction, hint: str = "") -> VerificationError:
        return VerificationError(problem, describe(self._rewritten, i), hint)


def _contents_of(module: Module, computation: Computation) -> Mapping[int, Contents]:
    """What each instruction holds, by id."""
    found: dict[int, Contents] = {}
    for i in computation.instructions:
        if _holds(module, i):
            found[i.id] = _held(i, [found[o] for o in i.operand_ids])
        else:
            found[i.id] = _made(i.name, i.shape)
    return found


def _holds(module: Module, i: Instruction) -> bool:
    if i.opcode == "copy":  # XLA:TPU also has copies that reshape.
        return _logical(i.shape) == _logical(module.instructions[i.operand_ids[0]].shape)
    return i.opcode in _HOLDING or (i.opcode == "custom-call" and i.custom_call_target in _CALLS)


def _is_transfer(i: Instruction) -> bool:
    return i.opcode in ("copy-start", "copy-done") or i.custom_call_target in _CALLS


def _held(i: Instruction, operands: Sequence[Contents]) -> Contents:
    first = operands[0] if operands else ""
    match i.opcode:
        case "tuple":
            return tuple(operands)
        case "get-tuple-element":
            return first[i.tuple_index]
        case "copy-start":
            return first, first, ""
        case "copy-done":
            return first[0]
        case _:
            return first


def _made(name: str, shape: Shape) -> Contents:
    if not shape.is_tuple:
        return name
    return tuple(_made(f"{name}.{n}", part) for n, part in enumerate(shape.tuple_shapes))


def _named(contents: Contents, holder: Instruction) -> str:
    if not isinstance(contents, str) or contents == holder.name:
        return f"what %{holder.name} holds"
    return f"%{contents}, as %{holder.name} holds it"


def _logical(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    return [(leaf.dtype, leaf.dimensions) for _, leaf in shape.leaves()]


def _crosses(moved: Shape, source: Shape) -> bool:
    """Whether a copy is of an array as it lies between the device's memory and the host's."""
    spaces = {moved.memory_space, source.memory_space}
    return spaces == {DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE} and (
        replace(moved.layout, memory_space=0) == replace(source.layout, memory_space=0)
    )
