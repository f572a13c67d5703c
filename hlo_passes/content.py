"""What of a module is its content, whatever it, and what nobody refers to, is called.

    fusion.7 ─ calls ─► fused_computation.322:  param_0.1142, add.70, …     or, the next time,
    fusion.7 ─ calls ─► fused_computation.318:  param_0.1137, add.70, …

XLA fuses in threads, so that computations of fusions and what is in them are called and numbered
otherwise in each compilation (seen with XLA:GPU, jaxlib 0.12.0.1).
"""

from __future__ import annotations

import hashlib

from hlo_passes.proto import hlo_pb2


def digest(proto: hlo_pb2.HloModuleProto) -> str:
    """Returns a digest of a module's content, and changes the message for that: it has no longer
    its name, metadata, or names inside of fusions; computations are numbered in the order in which
    they are called, instructions as they are listed.

    Time O(n) for n instructions.
    """
    proto.name = ""
    proto.id = 0
    proto.frontend_attributes.Clear()
    proto.stack_frame_index.Clear()
    new = {old: n for n, old in enumerate(_as_called(proto))}
    places: dict[int, dict[int, int]] = {}
    for computation in proto.computations:
        place = {i.id: n for n, i in enumerate(computation.instructions)}
        places[computation.id] = place
        computation.id = new[computation.id]
        computation.root_id = place[computation.root_id]
        if computation.is_fusion_computation:
            computation.name = ""
        for i in computation.instructions:
            i.ClearField("metadata")
            i.id = place[i.id]
            i.operand_ids[:] = [place[o] for o in i.operand_ids]
            i.control_predecessor_ids[:] = [place[p] for p in i.control_predecessor_ids]
            i.called_computation_ids[:] = [new[c] for c in i.called_computation_ids]
            if computation.is_fusion_computation:
                i.name = ""
    proto.computations.sort(key=lambda c: c.id)
    proto.entry_computation_id = new[proto.entry_computation_id]
    orders = {
        new[c]: [places[c][i] for i in sequence.instruction_ids]
        for c, sequence in proto.schedule.sequences.items()
    }
    proto.schedule.Clear()
    for c, order in orders.items():
        proto.schedule.sequences[c].instruction_ids[:] = order
    data = proto.SerializeToString(deterministic=True)
    return hashlib.sha256(data).hexdigest()[:16]


def _as_called(proto: hlo_pb2.HloModuleProto) -> list[int]:
    """The computations, by their ids, in the order in which they are called from the entry; what is
    never called comes last."""
    computations = {c.id: c for c in proto.computations}
    found = dict[int, None]()
    pending = [*reversed(computations), proto.entry_computation_id]
    while pending:
        n = pending.pop()
        if n not in found:
            found[n] = None
            called = (c for i in computations[n].instructions for c in i.called_computation_ids)
            pending += reversed([*called])
    return [*found]
