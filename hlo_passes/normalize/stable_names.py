"""Names and ids that are the same in each compilation of a program.

    before   x = add(p, constant.2295)   or, the next time,   x = add(p, constant.2301)
    after    x = add(p, constant_7)

XLA merges equal constants, and which of them stays depends on addresses (seen with XLA:TPU and
XLA:GPU, jaxlib 0.12.0.1): of 1,662 instructions four are called otherwise from one compilation
to the next. A plan names instructions, and holds for the module of one fingerprint.
"""

from __future__ import annotations

import itertools

from hlo_passes.ir import Module
from hlo_passes.normalize.post_order import in_post_order

# The lower half of an instruction's id numbers it within its computation (the upper half).
_LOCAL_BITS = 32


def settle_names(module: Module) -> Module:
    """Names constants after their place, and numbers all instructions in the order of their
    schedule, or as they are listed in computations that have none; lists them as XLA will.

    Other names are XLA's, the same in each compilation and in its dumps.

    Time O(n log n) for n instructions.
    """
    proto = module.to_proto()
    new = {
        i.id: c.id << _LOCAL_BITS | place
        for c in module.computations.values()
        for place, i in enumerate(c.instructions)
    }
    taken = {i.name for i in module.instructions.values() if i.opcode != "constant"}
    names = (name for n in itertools.count() if (name := f"constant_{n}") not in taken)
    for computation in proto.computations:
        for i in computation.instructions:
            i.id = new[i.id]
            i.operand_ids[:] = [new[o] for o in i.operand_ids[:]]
            i.control_predecessor_ids[:] = [new[p] for p in i.control_predecessor_ids[:]]
        computation.root_id = new[computation.root_id]
        for i in sorted(computation.instructions, key=lambda i: i.id):
            if i.opcode == "constant":
                i.name = next(names)
        place = {i.id: n for n, i in enumerate(in_post_order(computation.instructions))}
        computation.instructions.sort(key=lambda i: place[i.id])
    for sequence in proto.schedule.sequences.values():
        sequence.instruction_ids[:] = [new[i] for i in sequence.instruction_ids[:]]
    return Module(proto)
