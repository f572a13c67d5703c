"""Which outputs are written over an operand: XLA's in-place operations.

    x ──► dynamic-update-slice ──► y        y must lie where x lay: they are one buffer

An instruction's *in-place pairs* name the outputs whose bytes are an operand's bytes. The
pair is a duty, not an option: XLA inserts a copy before where it cannot hold
(xla/hlo/analysis/alias_info.cc, AliasInfo::GetInPlaceInputOutputPairs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hlo_passes.analysis.async_chains import async_chains
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
    asynchronous operation or fusion declares (``output_operand_aliasing``), and a fusion whose
    output is an update of one of its parameters. What an asynchronous start declares of the
    result holds at the link at which operands and result are bound.
    """
    match instruction.opcode:
        case "dynamic-update-slice" | "set-dimension-size":
            return (InPlacePair(0, (), ()),)
        case "scatter":
            return _one_output_each(len(instruction.shape.tuple_shapes))
        case "all-reduce-start":
            n = len(instruction.operand_ids)
            return _one_output_each(n if n > 1 else 0)
        case "collective-permute" | "collective-permute-start" if is_in_place(module, instruction):
            place = (1,) if instruction.opcode == "collective-permute-start" else ()
            parts = range(len(instruction.shape.at(place).tuple_shapes))
            return (
                InPlacePair(1, (), place),
                *(InPlacePair(1, (part,), (*place, part)) for part in parts),
            )
        case "ragged-all-to-all":
            return (InPlacePair(1, (), ()),)
        case "custom-call":
            return tuple(_annotated(module, instruction))
        case "async-start" | "async-update" | "async-done":
            return tuple(_bound(module, instruction))
        case "fusion":
            found = (
                *_annotated(module, instruction),
                *(
                    pair
                    for index, _ in instruction.shape.leaves()
                    if (pair := _updated_parameter(module, instruction, index)) is not None
                ),
            )
            return tuple(dict.fromkeys(found))
        case _:
            return ()


def is_in_place(module: Module, permute: Instruction) -> bool:
    """Whether `permute` is a collective-permute(-start) with the place of its result, and both
    starting indices, as operands (HloCollectivePermuteInstruction::inplace)."""
    if not permute.opcode.startswith("collective-permute") or len(permute.operand_ids) != 4:
        return False
    # Of four arrays that it permutes the result would be a tuple.
    result = permute.shape.at((1,)) if permute.opcode.endswith("-start") else permute.shape
    return result.is_tuple == module.instructions[permute.operand_ids[1]].shape.is_tuple


def _annotated(module: Module, i: Instruction) -> Iterator[InPlacePair]:
    """What `i` declares, where both parts are there."""
    for a in i.output_operand_aliasing:
        if a.operand < len(i.operand_ids):
            operand = module.instructions[i.operand_ids[a.operand]]
            if operand.shape.has(a.operand_index) and i.shape.has(a.output_index):
                yield InPlacePair(a.operand, a.operand_index, a.output_index)


def _bound(module: Module, link: Instruction) -> Iterator[InPlacePair]:
    """What an asynchronous operation declares that holds at `link`."""
    chain = async_chains(module).get(link.id)
    if link.opcode != "async-start" or chain is None or chain.runs_at is None:
        yield from _annotated(module, link)
    if chain is None or chain.runs_at is not link:
        return
    before = len(chain.operands_before(link))
    for a in chain.start.output_operand_aliasing:
        if a.output_index[:1] == (1,) and a.operand < len(chain.operands):
            output = a.output_index[link.opcode == "async-done" :]
            if a.operand < before:
                operand, part = 0, (0, a.operand, *a.operand_index)
            else:
                operand, part = a.operand - before + (link is not chain.start), a.operand_index
            bound = module.instructions[link.operand_ids[operand]]
            if bound.shape.has(part) and link.shape.has(output):
                yield InPlacePair(operand, part, output)


def _one_output_each(n: int) -> tuple[InPlacePair, ...]:
    if n == 0:
        return (InPlacePair(0, (), ()),)
    return tuple(InPlacePair(i, (), (i,)) for i in range(n))


def _updated_parameter(
    module: Module, fusion: Instruction, index: ShapeIndex
) -> InPlacePair | None:
    """The fusion parameter that the output at `index` updates in place, if there is one."""
    root = module.computations[fusion.called_computation_ids[0]].root
    source, at = _origin(module, root, index)
    for pair in in_place_pairs(module, source):
        if pair.output_index != at:
            continue
        operand = module.instructions[source.operand_ids[pair.operand]]
        updated, part = _origin(module, operand, pair.operand_index)
        if updated.opcode == "fusion":
            # A nested fusion that updates its own parameter is transparent.
            for inner in in_place_pairs(module, updated):
                if inner.output_index == part:
                    operand = module.instructions[updated.operand_ids[inner.operand]]
                    updated, part = _origin(module, operand, inner.operand_index)
                    break
        if updated.opcode == "parameter":
            return InPlacePair(updated.parameter_number, part, index)
    return None


def _origin(
    module: Module, instruction: Instruction, index: ShapeIndex
) -> tuple[Instruction, ShapeIndex]:
    """Follows tuples and their elements, then bitcasts, back to where the part comes from."""
    while instruction.opcode == "tuple" and index:
        instruction, index = module.instructions[instruction.operand_ids[index[0]]], index[1:]
    while instruction.opcode == "get-tuple-element":
        index = (instruction.tuple_index, *index)
        instruction = module.instructions[instruction.operand_ids[0]]
    while instruction.opcode == "bitcast" and not index:
        instruction = module.instructions[instruction.operand_ids[0]]
    return instruction, index
