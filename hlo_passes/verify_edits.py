"""Does the edited entry compute what the original does? See `verify`.

    original   a = f(p)   b = g(a)   c = h(b)   d = k(a, c)
    edited     a   b   a.evict  c   a.refetch   d(a.refetch, c)        stands for d(a, c)
               a   b            c   a' = f(p)   d(a', c)               so does this

Value numbering (Cocke and Schwartz 1970): along the new schedule each instruction *stands
for* one of the original. One of the same name stands for that; a clone, which names its
original in an attribute, for that; a copy that comes back from the host for what was copied.
All must have operands that stand for the original's.

Then the order. Nothing is read after its bytes were written over (`verify_overwrites`). What
others can observe keeps its order: side effects, collectives, asynchronous operations other
than copies. And what takes time stays inside, or outside, the asynchronous collectives that
it stood inside of, for XLA chose what hides them. Clones are free in that: they stand at
their readers, which are not, and more work inside hides no less.
"""

from __future__ import annotations

from itertools import zip_longest

from hlo_passes.errors import VerificationError
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE, Instruction, Module
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify_around import check_around_entry, check_sequence, serialized
from hlo_passes.verify_effects import Effects
from hlo_passes.verify_hlo import check_scheduled, describe
from hlo_passes.verify_overwrites import EntryMemory

RECOMPUTE_ATTRIBUTE = "memplan.recompute"
"""Frontend attribute of a clone: the name of its original."""


def verify_edits(original: Module, edited: Module) -> None:
    """Proves that `edited` computes what `original` does, in an order that is as safe.

    Every instruction of the entry is there once, unchanged, with operands that stand for the
    old ones. What is new is a clone, of what is free of effects and gives the same result
    twice, or a copy of an array between device and host memory. Nothing around the entry
    changed, but that a clone may call copies of the computations that its original calls.

    Args:
      original: scheduled, before its entry is edited.
      edited: with instructions in another order, clones and copies.

    Raises:
      VerificationError: at the first thing that is wrong.

    Time O(positions of the module).
    """
    if edited is original:
        return
    check_scheduled(edited)
    added = edited.computations.keys() - original.computations.keys()
    check_around_entry(original, edited, added)
    check_sequence(original, edited)
    effects = Effects(original)
    proof = _Proof(original, edited, effects)
    for i in edited.entry.instructions:
        proof.step(i)
    proof.finish()
    for computation_id in added - proof.copied:
        raise VerificationError(
            f"computation %{edited.computations[computation_id].name} is new",
            f"module {edited.name}",
            "Only what a clone calls is copied.",
        )
    _check_observable(original, edited, effects)
    EntryMemory(edited).check()


class _Proof:
    """The walk that finds what each instruction stands for.

    Attributes:
      copied: ids of the computations that are copies of those that an original calls.
    """

    def __init__(self, original: Module, edited: Module, effects: Effects) -> None:
        self.copied: set[int] = set()
        self._original, self._edited = original, edited
        self._named = {i.name: i for i in original.entry.instructions}
        self._effects = effects
        self._seen: dict[str, int] = {}
        self._stands_for: dict[int, Instruction] = {}
        # Copies in host memory, which only copies back may read, and copies on their way.
        self._on_host: dict[int, Instruction] = {}
        self._moving: dict[int, tuple[Instruction, Instruction]] = {}

    def step(self, i: Instruction) -> None:
        if i.name in self._seen:
            raise self._error(f"two instructions are called %{i.name}", i)
        self._seen[i.name] = i.id
        attributes = i.proto.frontend_attributes.map
        if i.name in self._named:
            self._check_kept(i, self._named[i.name])
        elif RECOMPUTE_ATTRIBUTE in attributes:
            self._check_clone(i, attributes[RECOMPUTE_ATTRIBUTE])
        elif i.opcode == "copy-start":
            self._check_start(i)
        elif i.opcode == "copy-done":
            self._check_done(i)
        else:
            raise self._error(
                f"%{i.name} is new", i, "Only clones and copies to and from the host are added."
            )

    def finish(self) -> None:
        """Checks that nothing is lost and that the result is what it was."""
        for name, i in self._named.items():
            if name not in self._seen:
                raise VerificationError(
                    f"%{name} is lost", describe(self._original, i), "Edits keep all that there is."
                )
        for start, _ in self._moving.values():
            raise self._error(f"nothing waits for %{start.name}", start)
        root = self._edited.entry.root
        expected = self._original.entry.root
        if self._stands_for.get(root.id) is not expected:
            raise self._error(f"expected the result %{expected.name}, found %{root.name}", root)

    def _check_kept(self, i: Instruction, original: Instruction) -> None:
        expected = hlo_pb2.HloInstructionProto()
        expected.CopyFrom(original.proto)
        self._check_same(i, original, expected)
        by_id = self._original.instructions
        needed = {self._seen.get(by_id[c].name) for c in original.control_predecessor_ids}
        if not needed <= set(i.control_predecessor_ids):
            raise self._error(f"%{i.name} lost a control predecessor", i)

    def _check_clone(self, i: Instruction, name: str) -> None:
        original = self._named.get(name)
        if original is None:
            raise self._error(f"%{i.name} is said to be a clone of %{name}, which is not there", i)
        obstacle = self._effects.obstacle(original)
        if obstacle:
            raise self._error(
                f"%{i.name} runs %{name} again, which {obstacle}",
                i,
                "Only what has no effect and gives the same result twice may be cloned.",
            )
        expected = hlo_pb2.HloInstructionProto()
        expected.CopyFrom(original.proto)
        expected.name = i.name
        expected.frontend_attributes.map[RECOMPUTE_ATTRIBUTE] = name
        if self._calls_the_same(original.proto, i.proto):
            expected.called_computation_ids[:] = i.called_computation_ids
        self._check_same(i, original, expected)

    def _check_same(
        self, i: Instruction, original: Instruction, expected: hlo_pb2.HloInstructionProto
    ) -> None:
        """Checks that `i` is `expected` up to its numbers, and computes what `original` does."""
        expected.id = i.id
        expected.operand_ids[:] = i.operand_ids
        expected.control_predecessor_ids[:] = i.control_predecessor_ids
        if serialized(expected) != serialized(i.proto):
            raise self._error(
                f"%{i.name} is not the instruction that %{original.name} was",
                i,
                "Edits keep shapes, attributes and metadata.",
            )
        wanted = [self._original.instructions[o].name for o in original.operand_ids]
        found = [self._named_value(o) for o in i.operand_ids]
        if wanted != found:
            raise self._error(
                f"%{i.name}: expected operands that stand for {_names(wanted)}, "
                f"found {_names(found)}",
                i,
            )
        self._stands_for[i.id] = original

    def _named_value(self, operand: int) -> str:
        value = self._stands_for.get(operand)
        # What stands for nothing on the device is called by its own name.
        return self._edited.instructions[operand].name if value is None else value.name

    def _check_start(self, i: Instruction) -> None:
        (operand,) = i.operand_ids
        source = self._edited.instructions[operand]
        value, destination = self._stands_for.get(operand), HOST_MEMORY_SPACE
        if value is None:
            value, destination = self._on_host.get(operand), DEVICE_MEMORY_SPACE
        arrives = hlo_pb2.ShapeProto()
        arrives.CopyFrom(source.proto.shape)
        arrives.layout.memory_space = destination
        parts = [serialized(part) for part in i.proto.shape.tuple_shapes]
        if (
            value is None
            or not source.shape.is_array
            or source.shape.memory_space not in (DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE)
            or source.shape.memory_space == destination
            or parts[:2] != [serialized(arrives), serialized(source.proto.shape)]
            or [str(part) for part in i.shape.tuple_shapes[2:]] != ["u32[]"]
        ):
            raise self._error(
                f"%{i.name} does not copy an array between device and host memory",
                i,
                "A value is taken from memory space 0 to 5, in its layout, and back.",
            )
        self._check_nothing_more(i)
        self._moving[i.id] = i, value

    def _check_done(self, i: Instruction) -> None:
        start, value = self._moving.pop(i.operand_ids[0], (None, None))
        if start is None or value is None:
            raise self._error(f"%{i.name} waits for no copy that was begun", i)
        if serialized(i.proto.shape) != serialized(start.proto.shape.tuple_shapes[0]):
            raise self._error(f"%{i.name} has not the shape of what %{start.name} copies", i)
        self._check_nothing_more(i)
        returned = i.shape.memory_space == DEVICE_MEMORY_SPACE
        (self._stands_for if returned else self._on_host)[i.id] = value

    def _check_nothing_more(self, i: Instruction) -> None:
        expected = hlo_pb2.HloInstructionProto(name=i.name, opcode=i.opcode, id=i.id)
        expected.shape.CopyFrom(i.proto.shape)
        if i.proto.HasField("metadata"):
            expected.metadata.CopyFrom(i.proto.metadata)
        expected.operand_ids[:] = i.operand_ids
        expected.control_predecessor_ids[:] = i.control_predecessor_ids
        expected.frontend_attributes.CopyFrom(i.proto.frontend_attributes)
        if serialized(expected) != serialized(i.proto):
            raise self._error(f"%{i.name} is more than a copy", i)

    def _calls_the_same(
        self, original: hlo_pb2.HloInstructionProto, clone: hlo_pb2.HloInstructionProto
    ) -> bool:
        """Whether two instructions call the same computations, or copies of them."""
        called = [*zip_longest(original.called_computation_ids, clone.called_computation_ids)]
        return all(a == b or self._is_copy(a, b) for a, b in called)

    def _is_copy(self, computation_id: int | None, copy_id: int | None) -> bool:
        """Whether one computation is another up to names and numbers."""
        if computation_id not in self._original.computations or copy_id is None:
            return False
        computation = self._original.computations[computation_id]
        copy = self._edited.computations.get(copy_id)
        if copy is None or len(copy.instructions) != len(computation.instructions):
            return False
        image = {
            a.id: b.id for a, b in zip(computation.instructions, copy.instructions, strict=True)
        }
        for a, b in zip(computation.instructions, copy.instructions, strict=True):
            expected = hlo_pb2.HloInstructionProto()
            expected.CopyFrom(a.proto)
            expected.name, expected.id = b.name, b.id
            expected.operand_ids[:] = [image[o] for o in a.operand_ids]
            expected.control_predecessor_ids[:] = [image[o] for o in a.control_predecessor_ids]
            if not self._calls_the_same(a.proto, b.proto):
                return False
            expected.called_computation_ids[:] = b.called_computation_ids
            if serialized(expected) != serialized(b.proto):
                return False
        is_same = image[computation.root.id] == copy.root.id
        is_same &= computation.is_fusion == copy.is_fusion
        if is_same:
            self.copied.add(copy_id)
        return is_same

    def _error(self, problem: str, i: Instruction, hint: str = "") -> VerificationError:
        return VerificationError(problem, describe(self._edited, i), hint)


def _names(names: list[str]) -> str:
    return ", ".join(f"%{name}" for name in names) or "none"


def _check_observable(original: Module, edited: Module, before: Effects) -> None:
    """Checks the order of what others can observe, and what hides collectives."""
    after = Effects(edited)
    expected = [i for i in original.entry.instructions if before.is_ordered(i)]
    found = [i for i in edited.entry.instructions if after.is_ordered(i)]
    for a, b in zip(expected, found, strict=True):
        if a.name != b.name:
            raise VerificationError(
                f"%{b.name} stands where %{a.name} was expected",
                describe(edited, b),
                "Side effects, collectives and asynchronous operations keep their order.",
            )
    hidden_by = after.open_collectives(edited.entry)
    for name, collectives in before.open_collectives(original.entry).items():
        moved = collectives ^ hidden_by[name]
        for collective in sorted(moved):
            side = "out of" if collective in collectives else "into"
            raise VerificationError(
                f"%{name} moved {side} the span of the asynchronous %{collective}",
                f"module {edited.name}",
                "What takes time stays inside or outside of what XLA had it hide.",
            )
