"""What every rewritten module keeps: all but its entry, and an order that can run. See `verify`.

module    name, aliases, layouts, frame index      as it was
computations  body, fused, ...                     as they were; copies of some, if allowed
entry     i0  i1  i2                               what the other checks are about
          ids of the computation, each once, operands first
"""

from __future__ import annotations

from collections.abc import Collection

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify_hlo import describe


def check_around_entry(original: Module, rewritten: Module, added: Collection[int] = ()) -> None:
    """Checks that everything but the entry's instructions is as it was.

    Args:
      added: ids of computations that `rewritten` may have besides.

    Raises:
      VerificationError: when a computation or the module itself differs.
    """
    before, after = _without_entry(original), _without_entry(rewritten)
    _remove(after, added)
    old = {c.name: serialized(c) for c in before.computations}
    new = {c.name: serialized(c) for c in after.computations}
    for name in (*old, *new):
        if old.get(name) != new.get(name):
            raise VerificationError(
                f"computation %{name} differs from the original's",
                f"module {rewritten.name}",
                "Only the entry computation may be rewritten.",
            )
    del before.computations[:], after.computations[:]
    if serialized(before) != serialized(after):
        raise VerificationError(
            "the module differs outside its computations",
            f"module {rewritten.name}",
            "Layouts, aliases and the schedules of other computations must stay.",
        )


def check_sequence(original: Module, rewritten: Module) -> None:
    """Checks that the schedule is an order in which the instructions can run.

    Raises:
      VerificationError: when an instruction has an id of another computation, stands twice,
        or before what it needs.
    """
    entry = rewritten.entry
    # XLA numbers (computation id << 32) | local id; older modules number as they like.
    is_numbered = all(i.id >> 32 == entry.id for i in original.entry.instructions)
    ran: set[int] = set()
    for i in entry.instructions:
        if is_numbered and i.id >> 32 != entry.id:
            raise VerificationError(
                f"%{i.name} has id {i.id}, which is not of computation {entry.id}",
                describe(rewritten, i),
                "Ids are (computation id << 32) | local id.",
            )
        if i.id in ran:
            raise VerificationError(f"%{i.name} is scheduled twice", describe(rewritten, i))
        for needed in (*i.operand_ids, *i.control_predecessor_ids):
            if needed not in ran:
                raise VerificationError(
                    f"%{i.name} is scheduled before what it needs, "
                    f"%{rewritten.instructions[needed].name}",
                    describe(rewritten, i),
                )
        ran.add(i.id)


def serialized(
    message: (
        hlo_pb2.HloModuleProto
        | hlo_pb2.HloComputationProto
        | hlo_pb2.HloInstructionProto
        | hlo_pb2.ShapeProto
    ),
) -> bytes:
    """The message as bytes that are equal for equal messages."""
    # Not ==: that leaves out fields which hlo.proto does not declare.
    return message.SerializeToString(deterministic=True)


def _without_entry(module: Module) -> hlo_pb2.HloModuleProto:
    proto = module.to_proto()
    proto.name, proto.id = "", 0
    proto.ClearField("frontend_attributes")
    proto.schedule.sequences.pop(proto.entry_computation_id, None)
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    del entry.instructions[:]
    entry.ClearField("root_id")
    return proto


def _remove(proto: hlo_pb2.HloModuleProto, computation_ids: Collection[int]) -> None:
    for n in reversed(range(len(proto.computations))):
        if proto.computations[n].id in computation_ids:
            del proto.computations[n]
    for computation_id in computation_ids:
        proto.schedule.sequences.pop(computation_id, None)
