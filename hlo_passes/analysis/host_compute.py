"""What a module computes on the host.

    s = fusion(w in host memory)   frontend_attributes={_xla_compute_type="host"}

That is what a program says by ``jax.experimental.compute_on``, and what XLA makes of work on
arrays in host memory that it cannot take to the device first (host_offloader.cc):
of resharding between devices, for example. How long it takes, no machine model says.
"""

from __future__ import annotations

from hlo_passes.ir import Instruction, Module

_COMPUTE_TYPE = "_xla_compute_type"


def host_compute(module: Module) -> tuple[Instruction, ...]:
    """Returns what runs on the host, in the order of the module's computations. O(instructions)."""
    return tuple(
        i
        for computation in module.computations.values()
        for i in computation.instructions
        if i.proto.frontend_attributes.map.get(_COMPUTE_TYPE) == "host"
    )
