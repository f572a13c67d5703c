"""A scheduled module with arguments of the host's memory on the device after all.

    before   s = copy-start(w)   d = copy-done(s)   y = dot(x, d)      w in S(5)
    after                                           y = dot(x, w)      w in S(0)

XLA would be told so before it schedules, and may schedule in another way then; for what is asked of
many choices its schedule for all of them on the host stands in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hlo_passes.analysis.host_copies import HostCopy, host_copies
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Module
from hlo_passes.proto import hlo_pb2


def with_residents(module: Module, parameters: Collection[int]) -> Module:
    """Returns the module with some of its parameters, by number, on the device.

    Args:
      module: scheduled. What of a parameter is not read through copies of the entry stays as it is.

    Time O(instructions).
    """
    copies = [c for c in host_copies(module) if c.parameter.parameter_number in parameters]
    if not copies:
        return module
    proto = module.to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    gone = {i.id for copy in copies for i in (copy.start, copy.done)}
    read = {copy.done.id: copy.parameter.id for copy in copies}
    kept: list[hlo_pb2.HloInstructionProto] = []
    for i in entry.instructions:
        if i.id not in gone:
            i.operand_ids[:] = [read.get(o, o) for o in i.operand_ids]
            i.control_predecessor_ids[:] = [c for c in i.control_predecessor_ids if c not in gone]
            kept.append(hlo_pb2.HloInstructionProto.FromString(i.SerializeToString()))
    del entry.instructions[:]
    entry.instructions.extend(kept)
    entry.root_id = read.get(entry.root_id, entry.root_id)
    for shape in _shapes(proto, entry, copies):
        shape.layout.memory_space = DEVICE_MEMORY_SPACE
    ids = proto.schedule.sequences[entry.id].instruction_ids
    ids[:] = [n for n in ids if n not in gone]
    return Module(proto, module)


def _shapes(
    proto: hlo_pb2.HloModuleProto,
    entry: hlo_pb2.HloComputationProto,
    copies: Collection[HostCopy],
) -> Iterator[hlo_pb2.ShapeProto]:
    """Where the message has the shapes of what is copied."""
    numbers = {copy.parameter.parameter_number for copy in copies}
    for i in entry.instructions:
        if i.opcode == "parameter" and i.parameter_number in numbers:
            yield i.shape
    for program in (entry.program_shape, proto.host_program_shape):
        for number in numbers:
            if number < len(program.parameters):
                yield program.parameters[number]
