"""The entry with its instructions in another order."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_passes.ir import Module


def in_order(module: Module, sequence: Sequence[int]) -> Module:
    """Returns `module` with the entry's schedule as in `sequence`, ids of all its instructions."""
    proto = module.to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    position = {id_: n for n, id_ in enumerate(sequence)}
    entry.instructions.sort(key=lambda i: position[i.id])
    proto.schedule.sequences[entry.id].instruction_ids[:] = sequence
    return Module(proto, module)
