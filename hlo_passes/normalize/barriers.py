"""Optimization barriers are gone: values lie where they were made.

    before   b = opt-barrier(tuple(x, w))   y = dot(get-tuple-element(b, 0), ...)
    after                                   y = dot(x, ...)

`jax.checkpoint` puts what a layer keeps for the backward pass behind a barrier, or XLA would
find that it computes the same twice, and not do it. XLA:GPU takes the barriers away after its
scheduler (XLA:TPU and XLA:CPU before), when there is no more to be merged. A residual that
goes through one would look as if it were handed on, with all that is in the tuple, and nothing
could be done about it.

Only in the entry: in loop bodies barriers are what keeps a ring's fetches in order.
"""

from __future__ import annotations

from hlo_passes.ir import Instruction, Module
from hlo_passes.memoize import memoized


@memoized
def remove_barriers(module: Module) -> Module:
    """Has the entry read what stands before its barriers.

    Args:
      module: scheduled. A barrier with control edges stays.

    Returns:
      `module` itself when there is no barrier.

    Time O(instructions).
    """
    order = module.entry.instructions
    if all(i.opcode != "opt-barrier" for i in order):
        return module
    stays = {p for i in order for p in i.control_predecessor_ids}
    stays.update(i.id for i in order if i.control_predecessor_ids)
    stays.add(module.entry.root.id)
    origin: dict[int, Instruction] = {}  # Of what stands for something that was there before.
    tuples: set[int] = set()
    for i in order:
        if i.id in stays or not i.operand_ids:
            continue
        operand = i.operand_ids[0]
        before = origin.get(operand, module.instructions[operand])
        if i.opcode == "opt-barrier":
            origin[i.id] = before
            if before.opcode == "tuple":
                tuples.add(before.id)
        elif i.opcode == "get-tuple-element" and operand in origin and before.opcode == "tuple":
            element = before.operand_ids[i.tuple_index]
            origin[i.id] = origin.get(element, module.instructions[element])
    return _reading_origins(module, origin, tuples - stays)


def _reading_origins(module: Module, origin: dict[int, Instruction], tuples: set[int]) -> Module:
    """Has all read the origins, and leaves out those of `tuples` that nobody reads then."""
    proto = module.to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    kept = [i for i in entry.instructions if i.id not in origin]
    for i in kept:
        i.operand_ids[:] = [origin[o].id if o in origin else o for o in i.operand_ids]
    unread = tuples
    while unread:  # One may be an element of another.
        read = {o for i in kept for o in i.operand_ids}
        unread = tuples - read
        tuples = tuples & read
        kept = [i for i in kept if i.id not in unread]
    copies = [type(i).FromString(i.SerializeToString()) for i in kept]
    del entry.instructions[:]
    entry.instructions.extend(copies)
    left = {i.id for i in copies}
    ids = proto.schedule.sequences[entry.id].instruction_ids
    ids[:] = [n for n in ids if n in left]
    return Module(proto, module)
