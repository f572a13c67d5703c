"""Which kernels hand each other an array through HBM, and why they are not one kernel.

    %p = fusion(...) ─ write ─► HBM ─ read ─► %c = fusion(%p, ...)       saved: the write, the read

Facts of the module are who writes, who reads, how many bytes, and whether one of the two only
brings bytes into another order. Whether the two could be one kernel is a rule of thumb, in
this order:

    layout      one of them does nothing but convert or transpose: were the array made, or read,
                in the other order, it would not be there
    opaque      a library call, a kernel of one's own, a collective: XLA does not look inside
    sums        the producer's elements are sums, and the consumer sums over them or reads them
                several times: a loop over the consumer's result would do each sum again, or
                has to wait for all of them
    shared      others read the array as well, or it leaves the program or a loop: it is written
                whatever happens
    open        none of these: XLA did not

Where the rules come from:

- ``layout``: XLA:GPU does not fuse what physically transposes into a reduction, or with several
  outputs (IsPhysicallyTransposing in xla/service/gpu/gpu_fusible.cc and its callers); layout
  assignment puts copies where layouts conflict, before fusion (docs/gpu_architecture.md).
- ``sums``: XLA calls dots, convolutions, reductions and the like expensive (IsExpensive in
  xla/service/instruction_fusion.cc), and fuses what is expensive neither into what reuses its
  elements (cpu_instruction_fusion.cc, ShouldFuse; gpu_fusible.cc, CreatesHeavyComputation) nor,
  at the cost of doing it twice, into one reader of several. Behind a reduction XLA:GPU fuses
  element-wise work at most (IsProducerConsumerFusible). What is expensive for each element alone
  (exponentials, divisions) does not count here.
- Kernels written for a pattern do fuse pairs of sums (attention); that is no fusion of loops.

``open`` is no promise: what a fused kernel needs of registers and on-chip memory is not known
here, nor whether the sum of both is faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hlo_passes.analysis.dataflow import Dataflow, Value, analyze_dataflow
from hlo_passes.analysis.traffic import Part, accesses
from hlo_passes.fusions.traffic import in_hbm
from hlo_passes.ir import Instruction, Module, Shape
from hlo_passes.layouts.relayouts import Relayout, relayouts
from hlo_passes.loops.host_transfers import nests

PairReason = Literal["layout", "opaque", "sums", "shared", "open"]

# Each element of the result is made of many of an operand.
_SUMS = frozenset(
    {"cholesky", "convolution", "dot", "fft", "ragged-dot", "reduce", "reduce-window", "scatter"}
    | {"select-and-scatter", "sort", "topk", "triangular-solve"}
)
# These read an element of an operand several times, if they give more than there are.
_REPEATS = frozenset({"broadcast", "gather"})

_OPAQUE = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"}
    | {"custom-call", "fft", "infeed", "outfeed", "ragged-all-to-all", "recv", "reduce-scatter"}
    | {"rng-bit-generator", "send", "sort", "topk"}
)


@dataclass(frozen=True, slots=True)
class FusionPair:
    """Two kernels, the one of which reads what the other wrote.

    Attributes:
      producer, consumer: outside fusions, in the same computation.
      shape: of what goes from one to the other.
      read: bytes that the consumer reads of it, in a step.
      written: bytes that the producer writes of it in a step, if nobody else needs them; else 0.
      reason: why they are two.
      why: the same in words.
      conversion: the one of the two that only brings bytes into another order, if one does.
    """

    producer: Instruction
    consumer: Instruction
    shape: Shape
    read: int
    written: int
    reason: PairReason
    why: str
    conversion: Instruction | None = None

    @property
    def saved(self) -> int:
        """Bytes that one kernel for both would not move, in a step."""
        return self.read + self.written


class _Access(NamedTuple):
    instruction: Instruction
    part: Part
    size: int


def fusion_pairs(module: Module) -> tuple[FusionPair, ...]:
    """Returns the pairs of a compiled module, those that would save most first.

    What a loop carries from one iteration to the next, or brings in and out, makes no pair:
    its two kernels run in different computations.

    O(instructions · operands).
    """
    found = _Pairs(module).all()
    return tuple(sorted(found, key=lambda p: (-p.saved, p.producer.id, p.consumer.id)))


class _Pairs:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._flow: Dataflow = analyze_dataflow(module)
        self._nests = nests(module)
        self._moving: Mapping[int, Relayout] = {
            r.instruction.id: r for r in relayouts(module) if r.kind != "copy"
        }
        self._writers: dict[int, _Access] = {}
        self._readers: defaultdict[int, list[_Access]] = defaultdict(list)
        found = accesses(module)
        for computation_id, nest in self._nests.items():
            for i in module.computations[computation_id].instructions:
                if i.id not in found:
                    continue
                for part, size in in_hbm(module, found[i.id].written).items():
                    self._writers[self._value(part).id] = _Access(i, part, size * nest.executions)
                for part, size in found[i.id].read.items():
                    access = _Access(i, part, size * nest.executions)
                    self._readers[self._value(part).id].append(access)

    def all(self) -> Iterator[FusionPair]:
        for value_id, writer in self._writers.items():
            value = self._flow.values[value_id]
            if value.instruction is not writer.instruction or _is_transfer(writer.instruction):
                continue
            readers = self._computing(value)
            is_kept = self._is_kept(value)
            here = writer.instruction.computation_id
            for reader in readers:
                if reader.size and reader.instruction.computation_id == here:
                    others = len({r.instruction.id for r in readers}) - 1
                    yield self._pair(writer, reader, value, others, is_kept)

    def _value(self, part: Part) -> Value:
        return self._flow.value_at(self._module.instructions[part[0]], part[1])

    def _computing(self, value: Value) -> list[_Access]:
        """Who reads a value. Behind a transfer to other memory, its readers: the first of them
        with the bytes that are read for all."""
        readers: list[_Access] = []
        for reader in self._readers[value.id]:
            if not _is_transfer(reader.instruction):
                readers.append(reader)
                continue
            start, size = reader.instruction, reader.size
            for index, shape in start.shape.leaves():
                if index[:1] == ((0,) if start.opcode == "copy-start" else (1,)) and shape.is_array:
                    for behind in self._computing(self._flow.value_at(start, index)):
                        readers.append(behind._replace(size=size))
                        size = 0
        return readers

    def _is_kept(self, value: Value) -> bool:
        """Whether it is written for somebody else than the kernels that read it."""
        buffer = self._flow.buffer_of(value)
        return buffer.live_out or any(v.is_phi for v in buffer.values)

    def _pair(
        self, writer: _Access, reader: _Access, value: Value, others: int, is_kept: bool
    ) -> FusionPair:
        producer, consumer = writer.instruction, reader.instruction
        written = 0 if others or is_kept else writer.size
        moving = self._moving.get(consumer.id) or self._moving.get(producer.id)
        if moving is not None:
            reason, why = "layout", _conversion(moving)
        else:
            reason, why = self._why(writer, reader, value, others, is_kept)
        return FusionPair(
            producer,
            consumer,
            value.shape,
            reader.size,
            written,
            reason,
            why,
            None if moving is None else moving.instruction,
        )

    def _why(
        self, writer: _Access, reader: _Access, value: Value, others: int, is_kept: bool
    ) -> tuple[PairReason, str]:
        producer, consumer = writer.instruction, reader.instruction
        for i in (producer, consumer):
            if i.opcode.removesuffix("-start") in _OPAQUE:
                what = f" of {i.custom_call_target}" if i.opcode == "custom-call" else ""
                return "opaque", f"%{i.name} is a {i.opcode}{what}"
        if (made := self._summed(producer, value)) and (wanted := self._wanted(consumer, reader)):
            verb = "repeats its elements" if wanted in _REPEATS else "needs many of its elements"
            return "sums", f"a {made} makes it, and a {wanted} {verb}"
        if others:
            return "shared", f"{others + 1} kernels read it"
        if is_kept:
            return "shared", "it leaves the program or the loop besides"
        return "open", "XLA did not"

    # --- what is in a fusion ------------------------------------------------------------------

    def _summed(self, producer: Instruction, value: Value) -> str:
        """What makes the elements of a value out of many others, if anything does."""
        if producer.opcode != "fusion":
            return producer.opcode if producer.opcode in _SUMS else ""
        (body,) = (self._module.computations[c] for c in producer.called_computation_ids)
        output = body.root
        if output.opcode == "tuple" and value.index:
            output = self._module.instructions[output.operand_ids[value.index[0]]]
        seen, pending = {output.id}, [output]
        while pending:
            i = pending.pop()
            if found := self._sums(i):
                return found
            for o in i.operand_ids:
                if o not in seen:
                    seen.add(o)
                    pending.append(self._module.instructions[o])
        return ""

    def _wanted(self, consumer: Instruction, reader: _Access) -> str:
        """What needs the elements of an operand several times, or many for each of its own."""
        value = self._value(reader.part)
        if consumer.opcode != "fusion":
            return consumer.opcode if consumer.opcode in _SUMS or self._repeats(consumer) else ""
        places = [
            n
            for n, o in enumerate(consumer.operand_ids)
            if self._flow.value_at(self._module.instructions[o]) is value
        ]
        (body,) = (self._module.computations[c] for c in consumer.called_computation_ids)
        reached = {body.parameters[n].id for n in places}
        for i in body.instructions:
            if reached.isdisjoint(i.operand_ids):
                continue
            reached.add(i.id)
            if found := self._sums(i):
                return found
            if self._repeats(i):
                return i.opcode
        return ""

    def _repeats(self, i: Instruction) -> bool:
        if i.opcode not in _REPEATS:
            return False
        operand = self._module.instructions[i.operand_ids[0]]
        return i.shape.element_count > operand.shape.element_count

    def _sums(self, i: Instruction) -> str:
        if i.opcode != "fusion":
            return i.opcode if i.opcode in _SUMS else ""
        (body,) = (self._module.computations[c] for c in i.called_computation_ids)
        return next((found for b in body.instructions if (found := self._sums(b))), "")


def _is_transfer(i: Instruction) -> bool:
    return i.opcode in ("async-start", "copy-start")


def _conversion(moving: Relayout) -> str:
    name = f"%{moving.instruction.name}"
    if moving.kind == "transpose":
        return f"{name} only transposes"
    before, after = (
        "{" + ",".join(map(str, layout.minor_to_major)) + "}"
        for layout in (moving.before, moving.after)
    )
    return f"{name} only brings {before} into {after}"
