"""Each reader of a weight that is fetched sees it through a view of its own.

    before   w = copy-done   v = bitcast(w)   a = dot(x, v)   ...   b = dot(y, v)
    after    w = copy-done   v = bitcast(w)   a = dot(x, v)   ...   u = bitcast(w)   b = dot(y, u)

A bitcast names the bytes of one copy: while somebody is to read it, the copy stays. XLA makes one
for all readers; so a weight that the forward and the backward pass read would be there from one to
the other, and could not be fetched again.
"""

from __future__ import annotations

from collections.abc import Iterator

from hlo_passes.analysis.marks import RECOMPUTE_ATTRIBUTE
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE, Computation, Instruction, Module
from hlo_passes.memoize import memoized
from hlo_passes.proto import hlo_pb2


@memoized
def divide_views(module: Module) -> Module:
    """Gives each reader but the first of a bitcast, or of a chain of them, of what is brought from
    the host one of its own, right before the reader; also in the bodies of loops.

    Args:
      module: scheduled.

    Returns:
      `module` itself when nothing is read twice.

    Time O(instructions).
    """
    again = {
        c.id: found
        for c in module.computations.values()
        if not c.is_fusion and (found := list(_read_again(module, c)))
    }
    if not again:
        return module
    proto = module.to_proto()
    names = {i.name for i in module.instructions.values()}
    for computation in proto.computations:
        if computation.id in again:
            _divide(proto, computation, again[computation.id], names)
    return Module(proto).with_learned(module.learned)


def _read_again(
    module: Module, computation: Computation
) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """Yields readers, and the views through which others have seen what they read before: from that
    of what is fetched to the one that is read, as often as there are such operands."""
    chains: dict[int, list[Instruction]] = {}
    seen: set[int] = set()
    for i in computation.instructions:
        is_view = i.opcode == "bitcast" and not i.control_predecessor_ids
        if is_view and (i.operand_ids[0] in chains or _is_fetched(module, i.operand_ids[0])):
            chains[i.id] = [*chains.get(i.operand_ids[0], ()), i]
            continue
        for operand in dict.fromkeys(i.operand_ids):
            if operand not in chains:
                continue
            if operand in seen:
                yield i, chains[operand]
            seen.add(operand)


def _is_fetched(module: Module, number: int) -> bool:
    """Whether that is what a copy from the host's memory brings whole."""
    done = module.instructions[number]
    if done.opcode != "copy-done" or done.shape.memory_space != DEVICE_MEMORY_SPACE:
        return False
    source = module.instructions[module.instructions[done.operand_ids[0]].operand_ids[0]]
    whole = source.opcode in ("parameter", "get-tuple-element")
    return whole and source.shape.memory_space == HOST_MEMORY_SPACE


def _divide(
    proto: hlo_pb2.HloModuleProto,
    computation: hlo_pb2.HloComputationProto,
    again: list[tuple[Instruction, list[Instruction]]],
    names: set[str],
) -> None:
    by_id = {i.id: i for i in computation.instructions}
    sequence = proto.schedule.sequences[computation.id].instruction_ids
    next_id, before = max(by_id) + 1, dict[int, list[int]]()
    for reader, chain in again:
        operand = chain[0].operand_ids[0]
        for view in chain:
            clone = hlo_pb2.HloInstructionProto.FromString(by_id[view.id].SerializeToString())
            clone.id, clone.operand_ids[:] = next_id, [operand]
            clone.frontend_attributes.map[RECOMPUTE_ATTRIBUTE] = clone.name
            while clone.name in names:
                clone.name += ".again"
            names.add(clone.name)
            by_id[next_id] = clone
            before.setdefault(reader.id, []).append(next_id)
            operand, next_id = next_id, next_id + 1
        read = by_id[reader.id].operand_ids
        read[:] = [operand if o == chain[-1].id else o for o in read]
    order = [n for i in sequence for n in (*before.get(i, ()), i)]
    copies = [hlo_pb2.HloInstructionProto.FromString(by_id[n].SerializeToString()) for n in order]
    del computation.instructions[:]
    computation.instructions.extend(copies)
    sequence[:] = order
