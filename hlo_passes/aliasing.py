"""Which outputs are written over an operand: XLA's in-place operations.

    x ──► dynamic-update-slice ──► y        y must lie where x lay: they are one buffer

An instruction's *in-place pairs* name the outputs whose bytes are an operand's bytes. The
pair is a duty, not an option: XLA inserts a copy before where it cannot hold
(xla/hlo/analysis/alias_info.cc, AliasInfo::GetInPlaceInputOutputPairs).
"""

from __future__ import annotations

from typing import NamedTuple

from hlo_passes.ir import Instruction, Module, ShapeIndex


class InPlacePair(NamedTuple):
    """Output `output_index` has the bytes of part `operand_index` of operand `operand`."""

    operand: int
    operand_index: ShapeIndex
    output_index: ShapeIndex


def in_place_pairs(module: Module, instruction: Instruction) -> tuple[InPlacePair, ...]:
    """Returns the outputs of `instruction` that must share an operand's buffer.

    They are updates (dynamic-update-slice, scatter, set-dimension-size), all-reduce-start,
    collective-permute(-start) given its destination, ragged-all-to-all, what a custom call,
    asynchronous start or fusion declares (``output_operand_aliasing``), and a fusion whose
    output is an update of one of its parameters.
    """
    match instruction.opcode:
        case "dynamic-update-slice" | "set-dimension-size":
            return (InPlacePair(0, (), ()),)
        case "scatter":
            return _one_output_each(instruction, len(instruction.shape.tuple_shapes))
        case "all-reduce-start":
            n = len(instruction.operand_ids)
            return _one_output_each(instruction, n if n > 1 else 0)
        case "collective-permute" if len(instruction.operand_ids) == 4:
            return (InPlacePair(1, (), ()),)
        case "collective-permute-start" if len(instruction.operand_ids) == 4:
            return (InPlacePair(1, (), (1,)),)
        case "ragged-all-to-all":
            return (InPlacePair(1, (), ()),)
        case "custom-call" | "async-start":
            return _annotated(instruction)
        case "fusion":
            found = (
                *_annotated(instruction),
                *(
                    pair
                    for index, _ in instruction.shape.leaves()
                    if (pair := _updated_parameter(module, instruction, index)) is not None
                ),
            )
            return tuple(dict.fromkeys(found))
        case _:
            return ()


def _annotated(instruction: Instruction) -> tuple[InPlacePair, ...]:
    return tuple(
        InPlacePair(a.operand, a.operand_index, a.output_index)
        for a in instruction.output_operand_aliasing
    )


def _one_output_each(instruction: Instruction, n: int) -> tuple[InPlacePair, ...]:
    if n == 0:
        return (InPlacePair(0, (), ()),)
    return tuple(InPlacePair(i, (), (i,)) for i in range(n))


def _updated_parameter(
    module: Module, fusion: Instruction, index: ShapeIndex
) -> InPlacePair | None:
    """The fusion parameter that the output at `index` updates in place, if there is one."""
    root = module.computations[fusion.called_computation_ids[0]].root
    source, at = through_tuples(module, root, index)
    for pair in in_place_pairs(module, source):
        if pair.output_index != at:
            continue
        operand = module.instructions[source.operand_ids[pair.operand]]
        updated, part = through_tuples(module, operand, pair.operand_index)
        if updated.opcode == "fusion":
            # A nested fusion that updates its own parameter is transparent.
            for inner in in_place_pairs(module, updated):
                if inner.output_index == part:
                    operand = module.instructions[updated.operand_ids[inner.operand]]
                    updated, part = through_tuples(module, operand, inner.operand_index)
                    break
        if updated.opcode == "bitcast":
            updated = module.instructions[updated.operand_ids[0]]
        if updated.opcode == "parameter":
            return InPlacePair(updated.parameter_number, part, index)
    return None


def through_tuples(
    module: Module, instruction: Instruction, index: ShapeIndex
) -> tuple[Instruction, ShapeIndex]:
    """Follows tuples and get-tuple-elements back to where the part at `index` comes from."""
    while instruction.opcode == "tuple" and index:
        instruction, index = module.instructions[instruction.operand_ids[index[0]]], index[1:]
    while instruction.opcode == "get-tuple-element":
        index = (instruction.tuple_index, *index)
        instruction = module.instructions[instruction.operand_ids[0]]
    return instruction, index
