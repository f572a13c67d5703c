"""What a step takes in joules, where the machine's file says it.

    joules = static watts · seconds                        whatever the device does meanwhile
           + FLOPs of products · joules of one             by type (`flop_j`)
           + bytes of device memory · joules of one        read or written by kernels
           + bytes that move · joules of one               both memories and the wires between them
           + bytes sent to other devices · joules of one

Operations and bytes are those of `cost`'s roofline; element-wise work counts by its bytes. The form
is that of Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014: to move
a byte takes far more than to compute on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hlo_passes.analysis.collectives import collectives
from hlo_passes.analysis.flops import MatrixWork, matrix_work
from hlo_passes.analysis.kernel_cost import KernelCost
from hlo_passes.analysis.moves import moves
from hlo_passes.analysis.traffic import traffic
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Instruction, Module
from hlo_passes.simulator.cost import Costs, peak_flops, product_seconds
from hlo_passes.simulator.timeline import Timeline


def instruction_joules(module: Module, machine: Machine) -> Mapping[int, float]:
    """Returns the joules of every instruction outside fusions beside static watts and what moves
    between tiers, by its id; 0 each where the machine's file says nothing of energy.

    Loops, branches and asynchronous computations count as in `cost.instruction_costs`.
    """
    if not machine.has_energy:
        return dict.fromkeys(module.instructions, 0.0)
    moved = traffic(module)
    return _Joules(module, machine, moved, moves(module, machine, moved)).all()


def compute_joules(module: Module, machine: Machine) -> float:
    """Returns those of all instructions of a step, in joules."""
    joules = instruction_joules(module, machine)
    return sum(joules[i.id] for i in module.entry.instructions)


def step_joules(module: Module, machine: Machine, step: Timeline) -> float | None:
    """Returns what a step takes, in joules; None where the machine's file does not say it.

    Args:
      step: of this module on this machine.
    """
    if machine.static_w is None or not machine.has_energy:
        return None
    moved = moved_joules(((t.size, t.source, t.destination) for t in step.transfers), machine)
    if moved is None:
        return None
    return machine.static_w * step.step_time_s + compute_joules(module, machine) + moved


def moved_joules(moved: Iterable[tuple[int, str, str]], machine: Machine) -> float | None:
    """Returns what transfers take, each of so many bytes from one tier to another; None where that
    is not known of one."""
    found = 0.0
    for size, source, destination in moved:
        joules = machine.transfer_joules(size, source, destination)
        if joules is None:
            return None
        found += joules
    return found


class _Joules(Costs):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._flop_j = dict(self.machine.flop_j)
        self._byte_j = self.machine.device_memory.j_per_byte or 0.0
        wires = self.machine.interconnect
        self._sent_j = 0.0 if wires is None else wires.j_per_byte or 0.0
        self._sent = collectives(self.module)

    def once(self, instruction: Instruction) -> float:
        sent = self._sent.get(instruction.id)
        sent_j = 0.0 if sent is None else self._sent_j * sent.sent_bytes
        return sent_j + super().once(instruction)

    def kernel(self, instruction: Instruction) -> float:
        declared = KernelCost.of(instruction)
        if declared is not None:
            # Of which type its products are, it does not say: those of what it reads most of.
            operands = (self.module.instructions[n].shape for n in instruction.operand_ids)
            dtypes = [shape.dtype for shape in operands if shape.dtype in self._flop_j]
            flop_j = self._flop(dtypes[0] if dtypes else "")
            return declared.flops * flop_j + declared.bytes_accessed * self._byte_j
        products = sum(map(self._product, matrix_work(self.module, instruction)))
        return products + self.device_bytes(instruction) * self._byte_j

    def _product(self, work: MatrixWork) -> float:
        """Of two types it runs on the slower unit; in several passes it takes as many times more,
        as it does in seconds."""
        dtype = min(work.dtypes, key=lambda dtype: peak_flops(self.machine, dtype))
        watts = self._flop(dtype) * peak_flops(self.machine, dtype)
        return product_seconds(self.machine, work) * watts

    def _flop(self, dtype: str) -> float:
        """Of a type that the machine file leaves out, those of its dearest."""
        return self._flop_j.get(dtype, max(self._flop_j.values()))
