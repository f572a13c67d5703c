"""What a kernel declares that it takes.

XLA sees of a kernel its operands only. A kernel for a TPU can state its FLOPs and bytes to XLA
(``pallas_call(cost_estimate=...)``); of one for a GPU, Mosaic leaves that out. So an operation says
it in an attribute, that all compilers leave where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from hlo_passes.ir import Instruction

KERNEL_COST_ATTRIBUTE = "memplan_kernel_cost"


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Of one run of a kernel.

    Attributes:
      flops: of its products, of the type of its first operand that a machine multiplies.
      bytes_accessed: in the device's memory.
    """

    flops: int
    bytes_accessed: int

    def to_attribute(self) -> str:
        return f"flops={self.flops} bytes_accessed={self.bytes_accessed}"

    @classmethod
    def of(cls, i: Instruction) -> KernelCost | None:
        """What the author of a kernel declared, in either way; None where nothing was."""
        if i.opcode != "custom-call" or not i.operand_ids:
            return None
        if said := i.proto.frontend_attributes.map.get(KERNEL_COST_ATTRIBUTE):
            numbers = dict(part.split("=") for part in said.split())
            return cls(int(numbers["flops"]), int(numbers["bytes_accessed"]))
        config = i.backend_config
        estimate = config.get("custom_call_config", config).get("cost_estimate")
        if estimate is None:
            return None
        return cls(int(estimate.get("flops", 0)), int(estimate.get("bytes_accessed", 0)))
