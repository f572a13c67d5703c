"""What collectives send between devices, and how long the interconnect is busy with it.

A group of n devices is taken as a ring: each device has the next one as its only receiver,
and a collective is a number of steps in which all of them send at once.

                        a device sends            in steps
    all-gather          (n − 1) · operand         n − 1
    reduce-scatter      (n − 1) / n · operand     n − 1
    all-reduce          both, one after the other
    all-to-all          (n − 1) / n · operand     n − 1
    collective-permute  operand                   1

    seconds = steps · step latency + bytes / bandwidth

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (International Journal of High Performance Computing Applications 19, 2005), sections
4.1 to 4.5, without the cost of the additions, which is the compute engine's. NCCL and the
TPU runtime use rings of this kind for large operands; for small ones they know faster ways.
An all-to-all is priced as if each pair of devices had wires of its own (NVSwitch does): on a
large torus it takes longer.

Where a collective starts and ends differs by compiler:

    start                                             done                        where
    all-gather-start, collective-permute-start, ...   all-gather-done, ...        TPU
    async-start of a computation with a collective    async-done                  GPU
    fusion that ends in AsyncCollectiveStart          in AsyncCollectiveDone      TPU v5e
    all-gather, all-reduce, ...                       at once                     all
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hlo_passes.analysis.aliasing import is_in_place
from hlo_passes.analysis.async_chains import async_chains
from hlo_passes.hardware.machine import Interconnect
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.memoize import memoized

_KINDS = (
    *("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all"),
    "reduce-scatter",
)

_FUSED_START, _FUSED_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"

_CHAIN = "chain_id"
"""Frontend attribute by which XLA:TPU tells the parts of one fused collective."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a scheduled computation.

    Attributes:
      kind: ``"all-gather"``, ...
      sent_bytes: what one device sends.
      steps: of the ring.
      done: id of the instruction that waits for it; None where the start itself does.
    """

    kind: str
    sent_bytes: int
    steps: int
    done: int | None

    def seconds(self, interconnect: Interconnect) -> float:
        """For how long it occupies the interconnect."""
        steps_s = self.steps * interconnect.step_latency_s
        return steps_s + self.sent_bytes / interconnect.bytes_per_s


@memoized
def collectives(module: Module) -> Mapping[int, Collective]:
    """Returns the collectives of every computation that runs on its own, by the id of the
    instruction that starts them. Those in groups of one device are left out. O(instructions).
    """
    return _Finder(module).all()


def is_fused_start(module: Module, i: Instruction) -> bool:
    """Whether `i` is a fusion in which XLA:TPU starts a collective: it hands its operand on, as
    its first element, to the fusion that ends it."""
    return i.opcode == "fusion" and _fused_target(module, i) == _FUSED_START


def has_collective(module: Module, i: Instruction) -> bool:
    """Whether `i` is or calls a collective, or a part of an asynchronous one."""
    return (
        i.opcode.removesuffix("-start").removesuffix("-done") in _KINDS
        or i.custom_call_target in (_FUSED_START, _FUSED_DONE)
        or any(_has_collective_inside(module.computations[c]) for c in i.called_computation_ids)
    )


@memoized
def _has_collective_inside(computation: Computation) -> bool:
    return any(
        i.opcode in _KINDS or i.custom_call_target in (_FUSED_START, _FUSED_DONE)
        for i in computation.instructions
    )


def _fused_target(module: Module, fusion: Instruction) -> str:
    (body,) = (module.computations[c] for c in fusion.called_computation_ids)
    return body.root.custom_call_target


class _Finder:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._chains = async_chains(module)
        self._wrapped = {c.computation.id for c in self._chains.values() if c.computation}

    def all(self) -> Mapping[int, Collective]:
        found: dict[int, Collective] = {}
        for computation in self._module.computations.values():
            if not computation.is_fusion and computation.id not in self._wrapped:
                found.update(self._of(computation))
        return found

    def _of(self, computation: Computation) -> Iterator[tuple[int, Collective]]:
        waits = self._waits(computation)
        for i in computation.instructions:
            inner = self._inner(i)
            if inner is None:
                continue
            n = self._group_size(inner)
            if n > 1:
                kind = inner.opcode.removesuffix("-start")
                sent, steps = _ring(kind, n, self._operand_bytes(inner))
                yield i.id, Collective(kind, sent, steps, waits.get(i.id))

    def _inner(self, i: Instruction) -> Instruction | None:
        """The collective that `i` starts or is."""
        if i.opcode.removesuffix("-start") in _KINDS:
            return i
        if i.opcode == "async-start" or is_fused_start(self._module, i):
            return self._collective_in(i)
        return None

    def _collective_in(self, caller: Instruction) -> Instruction | None:
        called = (self._module.computations[c] for c in caller.called_computation_ids)
        return next((i for body in called for i in body.instructions if i.opcode in _KINDS), None)

    def _waits(self, computation: Computation) -> Mapping[int, int]:
        """The id of what waits for each asynchronous start, by the start's id."""
        found: dict[int, int] = {}
        chains: dict[str, int] = {}
        for i in computation.instructions:
            if i.opcode == "fusion":
                target = _fused_target(self._module, i)
                if target == _FUSED_START:
                    chains[self._chain(i)] = i.id
                elif target == _FUSED_DONE and self._chain(i) in chains:
                    found[chains[self._chain(i)]] = i.id
            elif i.opcode.endswith("-done") and i.id in self._chains:
                found[self._chains[i.id].start.id] = i.id
        return found

    def _chain(self, fusion: Instruction) -> str:
        inner = self._collective_in(fusion)
        return "" if inner is None else inner.proto.frontend_attributes.map.get(_CHAIN, "")

    def _operand_bytes(self, inner: Instruction) -> int:
        # Further operands are the place of its result, and what goes where.
        is_first = is_in_place(self._module, inner) or inner.opcode.startswith("ragged")
        ids = inner.operand_ids[:1] if is_first else inner.operand_ids
        shapes = (self._module.instructions[operand].shape for operand in ids)
        return sum(leaf.byte_size for shape in shapes for _, leaf in shape.leaves())

    def _group_size(self, inner: Instruction) -> int:
        """How many devices a group has; without groups all of them are one."""
        proto = inner.proto
        if "permute" in inner.opcode:
            return 2
        if proto.iota_collective_device_list.num_devices_per_group:
            return proto.iota_collective_device_list.num_devices_per_group
        if axes := proto.mesh_axes_replica_group_list.axes:
            sizes = [axis.size for axis in proto.mesh_axes_replica_group_list.mesh.axes]
            return math.prod(a.sub_axis.size or sizes[a.mesh_axis_index] for a in axes)
        listed = proto.collective_device_list.replica_groups or proto.replica_groups
        return max((len(g.replica_ids) for g in listed), default=0) or self._devices

    @cached_property
    def _devices(self) -> int:
        assigned = self._module.to_proto().device_assignment
        return max(1, assigned.replica_count * assigned.computation_count)


def _ring(kind: str, n: int, operand_bytes: int) -> tuple[int, int]:
    """Bytes that a device sends, and steps."""
    match kind:
        case "all-gather":
            return (n - 1) * operand_bytes, n - 1
        case "all-reduce":
            return round(2 * (n - 1) / n * operand_bytes), 2 * (n - 1)
        case "collective-permute":
            return operand_bytes, 1
        case _:
            return round((n - 1) / n * operand_bytes), n - 1
