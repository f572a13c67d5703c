"""What fusions save of a program's HBM traffic, and what they cannot: three totals.

    unfused      x ─► HBM ─► multiply ─► HBM ─► tanh ─► HBM ─► dot ─► HBM
    as compiled  x ─► HBM ─► fusion(multiply, tanh) ──► HBM ─► dot ─► HBM
    bound        x ─► HBM ─► ........................................ HBM

*Unfused*, what a fusion does is done by kernels, each of which reads its operands from HBM and
writes its result there. What is there only as its reader's view of another array is no kernel: a
bitcast, a reshape, a broadcast (read with a stride of zero) and a convert (done as it is read),
which XLA:TPU puts into fusions by itself. Constants within fusions are in their code. All else
is counted as it stands in the module, in the types that XLA computes in. What XLA put into
on-chip memory between kernels is no HBM traffic here either.

The *bound* is what no fusion can save: each argument is read once, as much of it as is read at
all, and each result written once, as much of it as is not there already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hlo_passes.analysis.dataflow import Dataflow, analyze_dataflow
from hlo_passes.analysis.traffic import NO_TRAFFIC_OPCODES, SLICES, UPDATES, Part, accesses
from hlo_passes.ir import (
    DEVICE_MEMORY_SPACE,
    Computation,
    Instruction,
    Module,
    Shape,
)
from hlo_passes.loops.host_transfers import nests
from hlo_passes.memoize import memoized

# What a reader sees through.
_SEEN_THROUGH = frozenset({"bitcast", "broadcast", "convert", "opt-barrier", "reshape"})
# What a reader makes by itself.
_MADE_THERE = frozenset({"constant", "iota", "partition-id", "replica-id"})
_NO_BYTES = NO_TRAFFIC_OPCODES | _SEEN_THROUGH | _MADE_THERE


class HbmBytes(NamedTuple):
    """Bytes to and from HBM in a step."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class FusionTraffic:
    """HBM traffic of a step: see the module's docstring. A loop of unknown count runs once."""

    unfused: HbmBytes
    compiled: HbmBytes
    bound: HbmBytes


@memoized
def fusion_traffic(module: Module) -> FusionTraffic:
    """Returns the totals of a compiled module.

    Args:
      module: scheduled or not; what XLA has not fused yet is counted as it is.

    O(instructions).
    """
    flow = analyze_dataflow(module)
    compiled, unfused = [0, 0], [0, 0]
    read: defaultdict[int, int] = defaultdict(int)
    written: defaultdict[int, int] = defaultdict(int)
    found = accesses(module)
    for computation_id, nest in nests(module).items():
        for i in module.computations[computation_id].instructions:
            if i.id not in found:
                continue
            ways = found[i.id].read, found[i.id].written
            for n, (way, by_buffer) in enumerate(zip(ways, (read, written), strict=True)):
                for part, size in in_hbm(module, way).items():
                    compiled[n] += size * nest.executions
                    by_buffer[_buffer(module, flow, part)] += size * nest.executions
            pieces = _unfused(module, i) if i.opcode == "fusion" else None
            for n, way in enumerate(ways):
                size = sum(in_hbm(module, way).values()) if pieces is None else pieces[n]
                unfused[n] += size * nest.executions
    bound = _bound(module, flow, read, written)
    return FusionTraffic(HbmBytes(*unfused), HbmBytes(*compiled), bound)


def in_hbm(module: Module, parts: Mapping[Part, int]) -> Mapping[Part, int]:
    """Those parts of what instructions read or write that are in the device's main memory."""
    return {
        (id_, index): size
        for (id_, index), size in parts.items()
        if size and module.instructions[id_].shape.at(index).memory_space == DEVICE_MEMORY_SPACE
    }


def _buffer(module: Module, flow: Dataflow, part: Part) -> int:
    return flow.buffer_at(module.instructions[part[0]], part[1]).id


def _bound(
    module: Module, flow: Dataflow, read: Mapping[int, int], written: Mapping[int, int]
) -> HbmBytes:
    """At most the bytes of each buffer, though it be read or written many times."""

    def once_each(instructions: Sequence[Instruction], moved: Mapping[int, int]) -> int:
        buffers = {
            flow.buffer_at(i, index).id: shape.byte_size
            for i in instructions
            for index, shape in i.shape.leaves()
            if shape.memory_space == DEVICE_MEMORY_SPACE
        }
        return sum(min(size, moved.get(buffer, 0)) for buffer, size in buffers.items())

    entry = module.entry
    return HbmBytes(once_each(entry.parameters, read), once_each([entry.root], written))


# --- one kernel an instruction -------------------------------------------------------------------


def _unfused(module: Module, fusion: Instruction) -> tuple[int, int]:
    operands = [module.instructions[o].shape for o in fusion.operand_ids]
    (body,) = (module.computations[c] for c in fusion.called_computation_ids)
    return _Pieces(module, body, operands, fusion.shape).read_and_written()


class _Pieces:
    """The instructions of a fusion's body, as kernels.

    Args:
      operands: what the body's parameters are: their shapes outside, with their memory; None of
        what is not in memory.
      result: likewise.
    """

    def __init__(
        self, module: Module, body: Computation, operands: Sequence[Shape | None], result: Shape
    ) -> None:
        self._module = module
        self._body = body
        self._operands = operands
        self._outputs = dict(_outputs(body, result))

    def read_and_written(self) -> tuple[int, int]:
        read, written = 0, 0
        for i in self._body.instructions:
            if i.opcode == "fusion":
                (inner,) = (self._module.computations[c] for c in i.called_computation_ids)
                operands = [self._seen(o) for o in i.operand_ids]
                result = self._outputs.get(i.id, i.shape)
                more = _Pieces(self._module, inner, operands, result).read_and_written()
                read, written = read + more[0], written + more[1]
            elif i.opcode not in _NO_BYTES:
                read += self._read(i)
                written += self._written(i)
        # An output that is but a view of something is still to be written.
        for id_, shape in self._outputs.items():
            output = self._module.instructions[id_]
            if output.opcode in _NO_BYTES - {"get-tuple-element"}:
                maker = self._maker(output)
                if maker.opcode in UPDATES:
                    continue  # In place: what is converted around it is in the same bytes.
                read += _hbm(self._seen(id_))
                written += _hbm(shape)
        return read, written

    def _read(self, i: Instruction) -> int:
        first = i.operand_ids[0] if i.operand_ids else None
        read = 0
        for o in dict.fromkeys(i.operand_ids):
            if o == first and i.opcode in UPDATES:
                continue
            size = _hbm(self._seen(o))
            read += min(size, i.shape.byte_size) if o == first and i.opcode in SLICES else size
        return read

    def _written(self, i: Instruction) -> int:
        shape = self._outputs.get(i.id, i.shape)
        if i.opcode in UPDATES:
            update = self._module.instructions[i.operand_ids[UPDATES[i.opcode]]]
            return min(_hbm(shape), update.shape.byte_size)
        return _hbm(shape)

    def _maker(self, i: Instruction) -> Instruction:
        """What gives the bytes that an instruction is a view of."""
        while i.opcode in _SEEN_THROUGH:
            i = self._module.instructions[i.operand_ids[0]]
        return i

    def _seen(self, id_: int) -> Shape | None:
        """What is read where this is an operand; None of what is not in memory."""
        maker, path = self._maker(self._module.instructions[id_]), list[int]()
        while maker.opcode == "get-tuple-element":
            path.insert(0, maker.tuple_index)
            maker = self._maker(self._module.instructions[maker.operand_ids[0]])
        if maker.opcode in _MADE_THERE:
            return None
        if maker.opcode == "parameter":
            given = self._operands[maker.parameter_number]
            return None if given is None else given.at(tuple(path))
        return self._outputs.get(maker.id, maker.shape).at(tuple(path))


def _outputs(body: Computation, result: Shape) -> Iterator[tuple[int, Shape]]:
    if body.root.opcode != "tuple":
        yield body.root.id, result
        return
    for n, id_ in enumerate(body.root.operand_ids):
        yield id_, result.tuple_shapes[n]


def _hbm(shape: Shape | None) -> int:
    leaves = () if shape is None else shape.leaves()
    return sum(leaf.byte_size for _, leaf in leaves if leaf.memory_space == DEVICE_MEMORY_SPACE)
