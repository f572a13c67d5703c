"""What a kernel is, whatever it is called: two with one digest do the same on arrays of the same
shapes, and take as long.

    fusion.7 = f32[8,128] fusion(f32[8,128] p), calls: tanh ∘ add      one digest,
    fusion.9 = f32[8,128] fusion(f32[8,128] q), calls: tanh ∘ add      so one time

So what was measured of one executable is known of others: those of another schedule of the same
program, and of the other layers of this one. Memories are no part of it, nor what a backend
writes down for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hlo_passes.analysis.async_chains import wrapped_by
from hlo_passes.analysis.traffic import NO_TRAFFIC_OPCODES
from hlo_passes.ir import Instruction, Module, Shape
from hlo_passes.memoize import memoized
from hlo_passes.proto import hlo_pb2

_NOT_PART = (
    *("name", "id", "shape", "metadata", "frontend_attributes", "output_operand_aliasing"),
    *("operand_ids", "called_computation_ids", "control_predecessor_ids", "parameter_number"),
)


@memoized
def kernel_digests(module: Module) -> Mapping[int, str]:
    """Returns the digests of all kernels of a module, by instruction id: of what computes or moves
    something itself, outside fusions. O(instructions)."""
    digests = _Digests(module)
    return {
        i.id: digests.of(i)
        for computation in module.computations.values()
        if not computation.is_fusion
        for i in computation.instructions
        if _is_kernel(module, i)
    }


def _is_kernel(module: Module, i: Instruction) -> bool:
    if i.opcode in NO_TRAFFIC_OPCODES or wrapped_by(module, i) is not None:
        return False
    return not i.opcode.endswith(("-start", "-update", "-done"))


class _Digests:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._bodies: dict[int, bytes] = {}

    def of(self, i: Instruction) -> str:
        # In which order a fusion takes its operands is another one in each compilation.
        operands = sorted(_shape_text(self._module.instructions[o].shape) for o in i.operand_ids)
        return hashlib.sha256(b"".join([self._instruction(i), *operands])).hexdigest()[:16]

    def _instruction(self, i: Instruction) -> bytes:
        attributes = hlo_pb2.HloInstructionProto()
        attributes.CopyFrom(i.proto)
        for name in _NOT_PART:
            attributes.ClearField(name)
        if i.opcode != "custom-call":  # Of which it is all that says what it does.
            attributes.ClearField("backend_config")
        # Shardings and channels; what else there may be, shapes say as well.
        attributes.DiscardUnknownFields()
        bodies = b"".join(map(self._body, i.called_computation_ids))
        return attributes.SerializeToString(deterministic=True) + _shape_text(i.shape) + bodies

    def _body(self, id_: int) -> bytes:
        """What a computation computes: its root, by what that is computed from."""
        if id_ not in self._bodies:
            found: dict[int, bytes] = {}
            for i in self._module.computations[id_].instructions:
                operands = b"".join(found[o] for o in i.operand_ids)
                found[i.id] = hashlib.sha256(self._instruction(i) + operands).digest()
            self._bodies[id_] = found[self._module.computations[id_].root.id]
        return self._bodies[id_]


def _shape_text(shape: Shape) -> bytes:
    leaves = ((s.dtype, s.dimensions, s.layout.minor_to_major) for _, s in shape.leaves())
    return repr([*leaves]).encode()
