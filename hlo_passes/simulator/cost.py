"""How long each instruction occupies the compute engine: XLA's estimate, else a roofline.

    seconds = estimated_cycles / clock                              where XLA wrote them
            = max(FLOPs / peak FLOP/s, HBM bytes / HBM bytes/s)     elsewhere

XLA:TPU writes ``estimated_cycles`` into the backend_config of the kernels of its final
modules; they hold memory time too. A module that a POST_SCHEDULER hook sees has none, nor
has one for GPU or CPU. But XLA:TPU keeps the names of instructions from there on (of the
estimated cycles of the programs below, 91 to 100% stand at a name that the hook sees), so
an executable of the same program says of them, too (`analysis.learned`; a clone has those
of what it is a clone of). By then some operands have moved to on-chip memory, and the time to bring
them there is not in the estimate: the larger of it and the roofline counts.

Estimate over roofline, kernel by kernel (libtpu of jax 0.12):

                                         v5e          v5p          v6e
    matmul, 256 rows and more, bf16      1.03–1.14    1.04–1.40    1.15–1.71
    element-wise, f32                    1.12         1.20         1.24
    element-wise, bf16                   2.2–3.7      2.3          2.5–5.8
    reduction, bf16                      6.4          8.4          10.5
    two Llama layers, forward            1.16         1.33         1.27

The estimate charges a bf16 element like an f32 one, which is most of the third row. No
kernel's estimate was below its roofline: an estimate is taken as it stands, and where there
is none, compute is underpriced rather than overpriced.

The roofline (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009) counts the FLOPs
of dots and convolutions (`analysis.flops`) and the bytes that go to or come from device
memory (`analysis.traffic`); operands that live in on-chip memory are free. Memory runs at
the bandwidth that one long stream reaches, where the machine has a link for it (TPU), else
at the nominal one. Transcendentals and other element-wise work are ignored. Of a machine that was
measured (`memplan calibrate`) its rates say more (`hardware.rates`), and either is corrected by
what steps and profiles were seen to take (`hardware.corrections`).

Nothing here is charged for moving bytes between tiers: a transfer occupies its link
(`simulator.timeline`), not the compute engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hlo_passes.analysis.async_chains import wrapped_by
from hlo_passes.analysis.collectives import collectives
from hlo_passes.analysis.flops import MatrixWork, matrix_work
from hlo_passes.analysis.fresh import fresh_bytes
from hlo_passes.analysis.handoffs import handoffs
from hlo_passes.analysis.kernel_cost import KernelCost
from hlo_passes.analysis.kernel_work import KernelWork, kernel_works
from hlo_passes.analysis.learned import known_by
from hlo_passes.analysis.marks import RECOMPUTE_ATTRIBUTE
from hlo_passes.analysis.moves import Move, moves
from hlo_passes.analysis.traffic import NO_TRAFFIC_OPCODES, Traffic, traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.hardware.corrections import AT_PEAK, nearest
from hlo_passes.hardware.machine import Machine
from hlo_passes.hardware.rates import KernelRate, Rates, amounts
from hlo_passes.ir import Computation, Instruction, Module

_HIGH, _HIGHEST = 1, 2  # PrecisionConfig.Precision (xla/xla_data.proto)

# jax.lax.Precision on TPU: an f32 product as a sum of that many bf16 ones.
_BF16_PASSES = {_HIGH: 3, _HIGHEST: 6}

# XLA:TPU writes the largest integer where it could not estimate a kernel.
_UNKNOWN_CYCLES = 1 << 62


def instruction_costs(module: Module, machine: Machine) -> Mapping[int, float]:
    """Returns the seconds of compute of every instruction outside fusions, by its id.

    A `while` costs its trip count times its body and condition (once, where the count is
    not known), a `conditional` its dearest branch, an asynchronous computation all of it at
    its start: what XLA overlaps there is not modelled. A synchronous collective takes no less
    than it occupies the interconnect, where the machine has one; an asynchronous one costs what
    it reads and writes in device memory, and the rest is the timeline's.

    Args:
      module: any module; unscheduled ones too.

    Raises:
      NotOnMachineError: when the machine knows no peak FLOP/s at all.
    """
    moved = traffic(module)
    return Costs(module, machine, moved, moves(module, machine, moved)).all()


def kinds_of_kernels(module: Module, machine: Machine) -> Mapping[int, str]:
    """Returns by which kind each kernel outside fusions is corrected: what it does, and whether
    arithmetic holds it back (`hardware.corrections.AT_PEAK`)."""
    return Costs(module, machine, traffic(module), {}).kinds


def call_seconds(module: Module, machine: Machine) -> float:
    """Returns the seconds that a call takes besides its kernels, where that was measured."""
    results = sum(1 for _ in module.entry_result_shape.leaves())
    arrays = len(module.entry_parameter_shapes) + results
    handed = handoffs(module) if machine.handoff_s else 0
    return machine.call_s + machine.array_s * arrays + machine.handoff_s * handed


def step_seconds(module: Module, machine: Machine) -> float:
    """Returns the seconds that all instructions of a step take, one after another."""
    costs = instruction_costs(module, machine)
    return sum(costs[i.id] for i in module.entry.instructions)


def estimates(executable: Module) -> Mapping[Hashable, int]:
    """Returns the cycles of the instructions for which XLA wrote them, by what they can be
    known by in another module of the same program. O(instructions)."""
    found = {
        known_by(i): _estimated_cycles(i)
        for computation in executable.computations.values()
        if not computation.is_fusion
        for i in computation.instructions
    }
    return {known_by: cycles for known_by, cycles in found.items() if cycles}


@dataclass
class Costs:
    """Walks all computations: what each instruction costs, loops and branches with what they run.
    What a kernel costs by itself, `kernel` says."""

    module: Module
    machine: Machine
    traffic: Mapping[int, Traffic]
    moves: Mapping[int, Move]

    def __post_init__(self) -> None:
        self._found: dict[int, float] = {}
        self._bytes_per_s = stream_bytes_per_s(self.machine)
        self._rates = Rates(self.machine.kernels)
        of_machine = {of.kind: of.factor for of in self.machine.corrections}
        self._factors = [of for of in (of_machine, self.module.learned.factors) if of]
        self._works = kernel_works(self.module) if self._rates else {}
        is_known = self.machine.fresh_byte_s or self.machine.fresh_copy_byte_s
        self._fresh = fresh_bytes(self.module) if is_known else {}
        self._exchange_s: dict[int, float] = {}
        if self.machine.interconnect is not None:
            for id_, collective in collectives(self.module).items():
                if collective.done is None:
                    self._exchange_s[id_] = collective.seconds(self.machine.interconnect)
        self._elsewhere = {
            tier.memory_space
            for tier in self.machine.tiers
            if tier is not self.machine.device_memory and tier.memory_space is not None
        }

    def all(self) -> Mapping[int, float]:
        for computation in self.module.computations.values():
            if not computation.is_fusion:
                self._computation(computation)
        return self._found

    def _computation(self, computation: Computation) -> float:
        return sum(self._seconds(i) for i in computation.instructions)

    def _seconds(self, instruction: Instruction) -> float:
        if instruction.id not in self._found:
            self._found[instruction.id] = self.once(instruction) + self._touching(instruction)
        return self._found[instruction.id]

    def _touching(self, instruction: Instruction) -> float:
        """What new memory takes besides; of a kernel that was measured that is in its seconds."""
        size = self._fresh.get(instruction.id, 0)
        if not size or _original_name(instruction) in self.module.learned.seconds:
            return 0.0
        is_copied = instruction.id in self.moves
        return size * (self.machine.fresh_copy_byte_s if is_copied else self.machine.fresh_byte_s)

    def once(self, instruction: Instruction) -> float:
        opcode = instruction.opcode
        if instruction.id in self.moves or opcode == "copy-start":
            return 0.0
        if (wrapped := wrapped_by(self.module, instruction)) is not None:
            return self._computation(wrapped)
        if opcode == "async-start" or opcode.endswith(("-done", "-update")):
            return 0.0
        if opcode == "while":
            count = trip_count(self.module, instruction)
            return (1 if count is None else count) * sum(self._called(instruction))
        if opcode == "conditional":
            return max(self._called(instruction))
        if opcode == "call":
            return sum(self._called(instruction))
        if opcode in NO_TRAFFIC_OPCODES:
            return 0.0
        return self.kernel(instruction)

    def kernel(self, instruction: Instruction) -> float:
        learned, name = self.module.learned, _original_name(instruction)
        if name in learned.seconds:
            return learned.seconds[name]
        seconds = self._modelled(instruction, learned.cycles.get(name, 0))
        factor = self._factor(instruction)
        # However few were seen to take less, nothing multiplies faster than the machine.
        floor_s = matrix_seconds(self.module, self.machine, instruction) if factor < 1 else 0.0
        return max(factor * seconds, floor_s)

    def _factor(self, instruction: Instruction) -> float:
        """What was learned of such kernels, relative to the model."""
        kind = self.kinds.get(instruction.id) if self._factors else None
        if kind is None:
            return 1.0
        return math.prod(nearest(factors, kind) or 1.0 for factors in self._factors)

    @cached_property
    def kinds(self) -> Mapping[int, str]:
        """See `kinds_of_kernels`."""
        kinds: dict[int, str] = {}
        for id_, work in kernel_works(self.module).items():
            instruction = self.module.instructions[id_]
            arithmetic_s = matrix_seconds(self.module, self.machine, instruction)
            fed_s = self.device_bytes(instruction) / self._bytes_per_s
            kinds[id_] = work.kind + (AT_PEAK if arithmetic_s > fed_s else "")
        return kinds

    def _modelled(self, instruction: Instruction, known_cycles: int) -> float:
        cycles = _estimated_cycles(instruction)
        if cycles:
            # Whoever writes an estimate may be wrong: nothing multiplies faster than the machine.
            # XLA's own of what it fuses were never below that, and are not looked at.
            at_peak_s = 0.0
            if instruction.opcode == "custom-call":
                at_peak_s = matrix_seconds(self.module, self.machine, instruction)
            return max(self.machine.cycles_seconds(cycles), at_peak_s)
        known_s = self.machine.cycles_seconds(known_cycles)
        exchange_s = self._exchange_s.get(instruction.id, 0.0)
        return max(known_s, exchange_s, self._roofline(instruction))

    def _called(self, instruction: Instruction) -> Iterable[float]:
        called = (self.module.computations[i] for i in instruction.called_computation_ids)
        return (self._computation(computation) for computation in called)

    def _roofline(self, instruction: Instruction) -> float:
        declared = KernelCost.of(instruction)
        work = self._works.get(instruction.id)
        if declared is None and work is not None and (rate := self._rates.get(work.kind)):
            return self._rated(work, rate)
        size = self.device_bytes(instruction) if declared is None else declared.bytes_accessed
        arithmetic_s = matrix_seconds(self.module, self.machine, instruction)
        return max(arithmetic_s, size / self._bytes_per_s)

    def _rated(self, work: KernelWork, rate: KernelRate) -> float:
        """What a kernel takes on a machine of which kernels were measured."""
        there_is = amounts(work.flops, work.bytes, work.slow, work.plain, self.machine.cache_bytes)
        return sum(a * s for a, s in zip(there_is, rate.coefficients, strict=True))

    def device_bytes(self, instruction: Instruction) -> int:
        """Those of device memory that it reads or writes."""
        moved = self.traffic.get(instruction.id)
        if moved is None:
            return 0
        # A memory space without a tier (GPU collectives, TPU scalars) is device memory.
        return sum(
            size
            for direction in (moved.read, moved.written)
            for space, size in direction.items()
            if space not in self._elsewhere
        )


def _original_name(instruction: Instruction) -> str:
    """Of a clone, what it is a clone of."""
    original = instruction.proto.frontend_attributes.map.get(RECOMPUTE_ATTRIBUTE)
    return original or instruction.name


def _estimated_cycles(instruction: Instruction) -> int:
    # What a kernel of ours is expected to take: `pallas_call(metadata=...)`.
    metadata = instruction.proto.frontend_attributes.map.get("kernel_metadata", "")
    if "estimated_cycles" in metadata:
        return int(json.loads(metadata)["estimated_cycles"])
    # Most instructions have a configuration without it, not worth parsing.
    if b"estimated_cycles" not in instruction.proto.backend_config:
        return 0
    window: Mapping[str, Any] = instruction.backend_config.get("window_config", {})
    cycles = int(window.get("estimated_cycles", 0))
    return cycles if cycles < _UNKNOWN_CYCLES else 0


def product_seconds(machine: Machine, work: MatrixWork) -> float:
    """Returns what a product takes at the peak of its type, as often as it is passed through."""
    flops_per_s = min(peak_flops(machine, dtype) for dtype in work.dtypes)
    if work.dtypes == ("f32", "f32"):
        if machine.platform == "tpu":
            flops_per_s /= _BF16_PASSES.get(work.precision, 1)
        elif machine.gpu is not None and work.precision == _HIGHEST:
            # Off the tensor cores: a multiply-add a lane and clock.
            lanes = machine.gpu.core_count * machine.gpu.fpus_per_core
            flops_per_s = 2 * lanes * machine.clock_hz
    return work.flops / flops_per_s


def peak_flops(machine: Machine, dtype: str) -> float:
    """Returns the FLOP/s of a dot; of a type that the machine file leaves out, of its slowest."""
    known = dict(machine.peak_flops)
    return known[dtype] if dtype in known else min(known.values())


def stream_bytes_per_s(machine: Machine) -> float:
    """Returns how fast a kernel reads or writes device memory."""
    device = machine.device_memory.name
    for link in machine.links:
        on_chip = machine.tier(link.destination).memory_space == 1
        if link.source == device and on_chip:
            return link.bytes_per_s
    return machine.hbm_bytes_per_s


def matrix_seconds(module: Module, machine: Machine, instruction: Instruction) -> float:
    """Returns what the products of an instruction take at the peak of their type, each time that it
    runs: what its arithmetic holds it back for, at least."""
    declared = KernelCost.of(instruction)
    if declared is None:
        return sum(product_seconds(machine, part) for part in matrix_work(module, instruction))
    # Those that come before what it multiplies (lengths, tables) are of other types.
    known = dict(machine.peak_flops)
    operands = (module.instructions[i].shape for i in instruction.operand_ids)
    dtypes = [shape.dtype for shape in operands if shape.dtype in known]
    return declared.flops / peak_flops(machine, dtypes[0] if dtypes else "")
