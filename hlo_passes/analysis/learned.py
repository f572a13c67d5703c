"""What executables of a program say of the modules that the hook is shown of it.

    the hook's module    f = fusion(...) S(0)     XLA:TPU decides later what it holds in VMEM,
    an executable        f = fusion(...) S(1)     and how long a kernel takes

What was held in VMEM, and never copied from there to HBM, takes no bytes of HBM in another
schedule of the same program either. XLA:TPU packs in the order of starts, so that what is there and
is not changes the offsets of all that follows: with it left out, a module packs as XLA packs it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from hlo_passes.analysis.kernel_digest import kernel_digests
from hlo_passes.ir import (
    DEVICE_MEMORY_SPACE,
    ON_CHIP_MEMORY_SPACE,
    Instruction,
    Module,
    ShapeIndex,
)


def known_by(instruction: Instruction) -> Hashable:
    """Name, opcode, types and dimensions: one of another shape is another one."""
    shapes = tuple((s.dtype, s.dimensions) for _, s in instruction.shape.leaves())
    return instruction.name, instruction.opcode, shapes


def held_on_chip(executable: Module) -> Mapping[Hashable, frozenset[ShapeIndex]]:
    """Returns of each instruction outside fusions, as it is `known_by`, which parts of its result
    are in VMEM and never copied to HBM. O(instructions)."""
    outside = (c for c in executable.computations.values() if not c.is_fusion)
    instructions = [i for c in outside for i in c.instructions]
    copied = {*_copied_out(executable, instructions)}
    return {
        known_by(i): frozenset(
            index
            for index, shape in i.shape.leaves()
            if shape.memory_space == ON_CHIP_MEMORY_SPACE and (i.id, index) not in copied
        )
        for i in instructions
    }


def _copied_out(
    executable: Module, instructions: Iterable[Instruction]
) -> Iterator[tuple[int, ShapeIndex]]:
    for i in instructions:
        if i.opcode != "copy-start":
            continue
        copy, source = i.shape.tuple_shapes[:2]
        if (copy.memory_space, source.memory_space) != (DEVICE_MEMORY_SPACE, ON_CHIP_MEMORY_SPACE):
            continue
        held = executable.instructions[i.operand_ids[0]]
        while held.opcode == "bitcast":
            held = executable.instructions[held.operand_ids[0]]
        if held.opcode == "get-tuple-element":
            yield held.operand_ids[0], (held.tuple_index,)
        else:
            yield held.id, ()


def with_learned(
    module: Module,
    cycles: Mapping[Hashable, int],
    on_chip: Mapping[Hashable, frozenset[ShapeIndex]],
    table_bytes: int | None = None,
) -> Module:
    """Returns `module` with what is known of its instructions; itself if it has that.

    Args:
      module: as the hook sees it.
      cycles: of `simulator.cost.estimates`, of executables of the same program, arguments perhaps
        in other memory.
      on_chip: of `held_on_chip`; of none there is nothing known.
      table_bytes: of the executables' tables, if known.

    O(instructions).
    """
    taken = {i.name: cycles.get(known_by(i), 0) for i in module.instructions.values()}
    held = frozenset(
        (i.name, index)
        for i in module.instructions.values()
        for index in on_chip.get(known_by(i), ())
    )
    learned = replace(
        module.learned,
        cycles={name: n for name, n in taken.items() if n},
        on_chip=held if on_chip else None,
        table_bytes=table_bytes,
    )
    return module if learned == module.learned else module.with_learned(learned)


def with_measured(
    module: Module, seconds: Mapping[str, float], factors: Mapping[str, float]
) -> Module:
    """Returns `module` with what its kernels were measured to take; itself if it has that.

    Args:
      seconds: of kernels, by their `kernel_digests`.
      factors: of the others, see `Learned`.

    O(instructions).
    """
    if not seconds:
        return module
    found = {
        module.instructions[id_].name: seconds[digest]
        for id_, digest in kernel_digests(module).items()
        if digest in seconds
    }
    learned = replace(module.learned, seconds=found, factors=factors)
    return module if learned == module.learned else module.with_learned(learned)
