"""What instructions ask of a machine beside time: bytes of device memory, launches.

    seconds     of `cost`             what the kernel takes, alone
    bytes       of `analysis.traffic` what it asks device memory for meanwhile
    launches    of `analysis.launches` where the executable of XLA:GPU is known, some of them in
                graphs; else one for each kernel

A kernel is held back by device memory where its bytes take at least as long as its products do at
their peak; all others by arithmetic, or by what XLA estimates beside both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hlo_passes.analysis.async_chains import wrapped_by
from hlo_passes.analysis.kernel_cost import KernelCost
from hlo_passes.analysis.launches import Launched, launched
from hlo_passes.analysis.traffic import NO_TRAFFIC_OPCODES, traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.simulator.cost import matrix_seconds, stream_bytes_per_s
from hlo_passes.simulator.events import NO_WORK, Work

_CONTROL = ("while", "call", "conditional")

_NOT_LAUNCHED = Launched(0, 0, 0)
_ONE_LAUNCH = Launched(1, 0, 0)


def instruction_work(
    module: Module, machine: Machine, costs: Mapping[int, float]
) -> Mapping[int, Work]:
    """Returns the work of every instruction outside fusions that takes time, by its id.

    What runs other computations has that of all of them: a loop as often as it runs, a branch that
    of the dearest.

    Args:
      costs: of `cost.instruction_costs`, for the same module and machine.

    O(instructions).
    """
    return _Works(module, machine, costs).all()


class _Works:
    def __init__(self, module: Module, machine: Machine, costs: Mapping[int, float]) -> None:
        self._module, self._machine, self._costs = module, machine, costs
        self._traffic = traffic(module)
        self._bytes_per_s = stream_bytes_per_s(machine)
        self._elsewhere = {
            tier.memory_space
            for tier in machine.tiers
            if tier is not machine.device_memory and tier.memory_space is not None
        }
        self._launched = launched(module.thunks)
        self._found: dict[int, Work] = {}

    def all(self) -> Mapping[int, Work]:
        for computation in self._module.computations.values():
            if not computation.is_fusion:
                for i in computation.instructions:
                    if self._costs[i.id]:
                        self._work(i)
        return self._found

    def _work(self, i: Instruction) -> Work:
        if i.id not in self._found:
            self._found[i.id] = self._once(i)
        return self._found[i.id]

    def _once(self, i: Instruction) -> Work:
        if (wrapped := wrapped_by(self._module, i)) is not None:
            return self._of(wrapped)
        if i.opcode not in _CONTROL:
            return NO_WORK if i.opcode in NO_TRAFFIC_OPCODES else self._kernel(i)
        called = [self._module.computations[c] for c in i.called_computation_ids]
        if i.opcode == "conditional":
            return self._of(max(called, key=self._seconds))
        times = trip_count(self._module, i) if i.opcode == "while" else 1
        return self._sum(called, 1 if times is None else times)

    def _seconds(self, computation: Computation) -> float:
        return sum(self._costs[i.id] for i in computation.instructions)

    def _of(self, computation: Computation) -> Work:
        return self._sum([computation], 1)

    def _sum(self, computations: Iterable[Computation], times: int) -> Work:
        parts = [
            (self._work(i), self._costs[i.id])
            for computation in computations
            for i in computation.instructions
            if self._costs[i.id]
        ]
        seconds = sum(s for _, s in parts)
        squares = sum(s**2 / work.kernels for work, s in parts)
        return Work(
            times * sum(work.device_bytes for work, _ in parts),
            times * sum(work.memory_s for work, _ in parts),
            times * sum(work.launches for work, _ in parts),
            times * sum(work.graphs for work, _ in parts),
            times * sum(work.captured for work, _ in parts),
            times * seconds**2 / squares if squares else 1.0,
        )

    def _device_bytes(self, i: Instruction) -> int:
        """As a roofline counts them: a memory space without a tier is device memory."""
        moved = self._traffic.get(i.id)
        ways = () if moved is None else (moved.read, moved.written)
        return sum(
            size for way in ways for space, size in way.items() if space not in self._elsewhere
        )

    def _kernel(self, i: Instruction) -> Work:
        declared = KernelCost.of(i)
        device_bytes = self._device_bytes(i) if declared is None else declared.bytes_accessed
        needed_s = device_bytes / self._bytes_per_s
        is_bound = needed_s > 0 and needed_s >= matrix_seconds(self._module, self._machine, i)
        launches = _ONE_LAUNCH
        if self._module.thunks:
            launches = self._launched.get(i.name, _NOT_LAUNCHED)
        return Work(
            device_bytes,
            self._costs[i.id] if is_bound else 0.0,
            launches.alone,
            launches.graphs,
            launches.captured,
        )
