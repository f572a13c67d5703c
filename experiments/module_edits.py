"""A module written otherwise: the same program, and the truth about which instruction is which."""

from __future__ import annotations

import random
from typing import NamedTuple

from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2

_ID_BITS = 32


class Edited(NamedTuple):
    """A module and, by id, which instruction of the original each of its own is."""

    module: Module
    original: dict[int, int]


def rewritten(module: Module, seed: int, *, permute: bool) -> Edited:
    """Gives all instructions and computations other names and numbers.

    Args:
      permute: also put each computation's instructions into a random order in which operands
        and control predecessors come first, and take that for its schedule.

    Time O(instructions and operands).
    """
    draw = random.Random(seed)
    proto = module.to_proto()
    numbers = draw.sample(range(1, 1 << 20), len(proto.computations))
    computations = {c.id: n for c, n in zip(proto.computations, numbers, strict=True)}
    new: dict[int, int] = {}
    for c in proto.computations:
        if permute:
            order = _random_order(c, draw)
            at = {i.id: i.SerializeToString() for i in c.instructions}
            del c.instructions[:]
            c.instructions.extend(hlo_pb2.HloInstructionProto.FromString(at[i]) for i in order)
            if c.id in proto.schedule.sequences:
                proto.schedule.sequences[c.id].instruction_ids[:] = order
        places = draw.sample(range(10 * len(c.instructions)), len(c.instructions))
        for i, place in zip(c.instructions, places, strict=True):
            new[i.id] = computations[c.id] << _ID_BITS | place
    for c in proto.computations:
        for i in c.instructions:
            i.id = new[i.id]
            i.name = f"i{i.id:x}"
            i.operand_ids[:] = [new[o] for o in i.operand_ids]
            i.control_predecessor_ids[:] = [new[p] for p in i.control_predecessor_ids]
            i.called_computation_ids[:] = [computations[n] for n in i.called_computation_ids]
        c.id, c.root_id = computations[c.id], new[c.root_id]
        c.name = f"c{c.id:x}"
    sequences = {n: list(s.instruction_ids) for n, s in proto.schedule.sequences.items()}
    proto.schedule.sequences.clear()
    for n, sequence in sequences.items():
        ids = proto.schedule.sequences[computations[n]].instruction_ids
        ids.extend(new[i] for i in sequence)
    proto.entry_computation_id = computations[proto.entry_computation_id]
    return Edited(Module(proto), {n: o for o, n in new.items()})


def _random_order(computation: hlo_pb2.HloComputationProto, draw: random.Random) -> list[int]:
    users: dict[int, list[int]] = {i.id: [] for i in computation.instructions}
    waiting: dict[int, int] = {}
    for i in computation.instructions:
        needed = {*i.operand_ids, *i.control_predecessor_ids}
        waiting[i.id] = len(needed)
        for n in needed:
            users[n].append(i.id)
    ready = [i for i, n in waiting.items() if not n]
    order: list[int] = []
    while ready:
        chosen = draw.randrange(len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        order.append(ready.pop())
        for user in users[order[-1]]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return order


def without_metadata(module: Module) -> Module:
    """The module as a frontend that records nothing would have it."""
    proto = module.to_proto()
    proto.stack_frame_index.Clear()
    for c in proto.computations:
        for i in c.instructions:
            i.ClearField("metadata")
    return Module(proto)
