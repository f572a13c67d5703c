"""Does an entry without its barriers compute what it did? See `verify`.

    original   t = tuple(x, w)   b = opt-barrier(t)   g = get-tuple-element(b, 0)   y = f(g)
    without                                                                         y = f(x)

What is left out only hands on; what is left is the same instructions in the same order, each
of whose operands has the same parts, made by the same instructions.
"""

from __future__ import annotations

from itertools import zip_longest

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Instruction, Module, ShapeIndex
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify_around import check_around_entry, check_sequence, serialized
from hlo_passes.verify_hlo import check_scheduled, describe, view_of

_HANDS_ON = frozenset({"get-tuple-element", "opt-barrier", "tuple"})


def verify_barriers(original: Module, without: Module) -> None:
    """Proves that `without` differs from `original` in what hands values on only.

    Raises:
      VerificationError: at the first other difference.

    Time O(positions of the module).
    """
    if without is original:
        return
    check_scheduled(without)
    check_around_entry(original, without)
    check_sequence(original, without)
    kept = {i.id for i in without.entry.instructions}
    for i in original.entry.instructions:
        if i.id not in kept and (i.opcode not in _HANDS_ON or i.control_predecessor_ids):
            raise VerificationError(
                f"%{i.name} is lost",
                describe(original, i),
                "Only barriers, and tuples around them, are left out.",
            )
    expected = [i for i in original.entry.instructions if i.id in kept]
    for a, b in zip_longest(expected, without.entry.instructions):
        if a is None or b is None or serialized(_bare(a)) != serialized(_bare(b)):
            names = [f"%{i.name}" if i else "no more" for i in (a, b)]
            raise VerificationError(
                f"expected {names[0]}, found {names[1]}",
                describe(without, b) if b else f"module {without.name}",
                "Taking barriers away changes operands only.",
            )
        wanted = [_parts(original, o) for o in a.operand_ids]
        found = [_parts(without, o) for o in b.operand_ids]
        if wanted != found:
            raise VerificationError(
                f"%{b.name} does not read what it did",
                describe(without, b),
                "An operand is what went into the barrier.",
            )
    if original.entry.root.id != without.entry.root.id:
        raise VerificationError(
            f"expected the result %{original.entry.root.name}, found %{without.entry.root.name}",
            f"module {without.name}",
        )


def _bare(i: Instruction) -> hlo_pb2.HloInstructionProto:
    """The instruction without its operands."""
    bare = hlo_pb2.HloInstructionProto()
    bare.CopyFrom(i.proto)
    del bare.operand_ids[:]
    return bare


def _parts(module: Module, operand: int) -> tuple[bytes, list[tuple[int, ShapeIndex]]]:
    """The shape of an operand, and for each part of it who made it."""
    i = module.instructions[operand]
    made: list[tuple[int, ShapeIndex]] = []
    for index, _ in i.shape.leaves():
        maker, at = i, index
        while maker.opcode in _HANDS_ON and (view := view_of(maker, at)) is not None:
            maker, at = module.instructions[maker.operand_ids[view.operand]], view.part
        made.append((maker.id, at))
    return serialized(i.proto.shape), made
