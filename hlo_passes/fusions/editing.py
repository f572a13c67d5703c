"""One kernel of two: what a step would be if XLA had fused them.

    before   %a = fusion(x)    %b = fusion(%a, y)             written, and read again
    after    %fused = fusion(x, y)                            nothing in between
             %fused = (b, a) fusion(x, y), ...                where others read %a as well

Nothing says that XLA would do it, nor that its kernel would be as fast as the bytes allow: what a
fused kernel needs of registers is not known here. Where an element of the producer would be made
several times, or its sums would have to be finished first (`pairs`), it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.errors import FusionError
from hlo_passes.fusions.pairs import fusion_pairs
from hlo_passes.ir import Instruction, Module
from hlo_passes.normalize.post_order import in_post_order
from hlo_passes.proto import hlo_pb2

_TUPLE = 13  # PrimitiveType (xla/xla_data.proto)

type _Proto = hlo_pb2.HloInstructionProto

# What a loop fusion of XLA's is made of; anything else runs by itself.
_FUSIBLE = frozenset(
    """abs add and atan2 bitcast-convert broadcast cbrt ceil clamp compare complex concatenate
    convert copy cosine count-leading-zeros divide dynamic-slice erf exponential
    exponential-minus-one floor fusion gather imag iota is-finite log log-plus-one logistic map
    maximum minimum multiply negate not or pad popcnt power real reduce reduce-precision
    reduce-window remainder reshape reverse round-nearest-afz round-nearest-even rsqrt select
    shift-left shift-right-arithmetic shift-right-logical sign sine slice sqrt subtract tan tanh
    transpose xor""".split()
)

OPAQUE_KINDS = frozenset({"kCustom"})
"""Kinds of fusions that are kernels of a library, or of a generator of their own."""


def fuse(module: Module, producer: str, consumer: str) -> Module:
    """Returns the module with two kernels of its entry as one, called ``PRODUCER.CONSUMER``.

    Args:
      module: scheduled. The one kernel stands where the consumer was, or, where others read what
        the producer makes before that, in front of the first of them.

    Raises:
      FusionError: when they cannot be one kernel.

    Time O(instructions).
    """
    return _Fusing(module, producer, consumer).fused()


def refusal(module: Module, producer: str, consumer: str) -> str:
    """Returns why two kernels cannot be one; ``""`` where they can."""
    try:
        _Fusing(module, producer, consumer)
    except FusionError as error:
        return error.kind
    return ""


class _Fusing:
    def __init__(self, module: Module, producer: str, consumer: str) -> None:
        self._module, self._names = module, (producer, consumer)
        self._by_name = {i.name: i for i in module.entry.instructions}
        self._a, self._b = (self._kernel(name) for name in self._names)
        self._users = analyze_dataflow(module).users
        self._time = {i.id: n for n, i in enumerate(module.entry.instructions)}
        # The producer and the bitcasts that show what it makes.
        self._shown = self._bitcasts_of(self._a)
        self._check_pair()
        self._others = [
            u
            for i in (self._a, *self._shown.values())
            for u in self._users.get(i.id, ())
            if u.id not in self._shown and u.id != self._b.id
        ]
        root = module.entry.root.id
        self._is_kept = bool(self._others) or root in (self._a.id, *self._shown)
        self._check_shapes()
        self._at = self._place()

    def fused(self) -> Module:
        a, b, module = self._a, self._b, self._module
        proto = module.to_proto()
        entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
        by_id = {i.id: i for i in entry.instructions}
        number = 1 + max(c.id for c in proto.computations)
        body = FusedBody(number, {c.id: c for c in proto.computations})
        inside: dict[int, int] = {}

        def given(operand: int) -> int:
            """What an operand of the entry is in the body."""
            if operand not in inside:
                i = by_id[operand]
                if operand == a.id or operand in self._shown:
                    inside[operand] = body.inlined(i, [given(o) for o in i.operand_ids])
                else:
                    inside[operand] = body.parameter(i)
            return inside[operand]

        made = body.inlined(by_id[b.id], [given(o) for o in b.operand_ids])
        fusion = hlo_pb2.HloInstructionProto(
            name=f"{a.name}.{b.name}",
            opcode="fusion",
            fusion_kind=by_id[b.id].fusion_kind or by_id[a.id].fusion_kind or "kLoop",
            metadata=by_id[b.id].metadata,
            id=1 + max(by_id),
            operand_ids=body.operands,
            called_computation_ids=[number],
        )
        behind: list[_Proto] = [fusion]
        reads: dict[int, int] = {b.id: fusion.id}
        if self._is_kept:
            is_one = b.shape.is_array
            root = body.tuple([made] if is_one else body.elements(made), inside[a.id])
            element = root.shape.tuple_shapes
            last = len(element) - 1
            behind.append(_element(fusion, fusion.id + 1, last, element[last]))
            reads[a.id] = behind[-1].id
            if is_one:
                behind.append(_element(fusion, fusion.id + 2, 0, element[0]))
                reads[b.id] = behind[-1].id
            behind += [by_id[n] for n in self._shown]
        fusion.shape.CopyFrom(body.root.shape)
        gone = {a.id, b.id, *self._shown}
        fusion.control_predecessor_ids.extend(
            sorted({*a.control_predecessor_ids, *b.control_predecessor_ids} - gone)
        )
        kept = [i for i in module.entry.instructions if i.id not in gone]
        sequence = [by_id[i.id] for i in kept]
        sequence[self._at : self._at] = behind
        for i in sequence:
            if i is not fusion:
                i.operand_ids[:] = [reads.get(o, o) for o in i.operand_ids]
                i.control_predecessor_ids[:] = [
                    fusion.id if c in (a.id, b.id) else c for c in i.control_predecessor_ids
                ]
        copies = [hlo_pb2.HloInstructionProto.FromString(i.SerializeToString()) for i in sequence]
        del entry.instructions[:]
        entry.instructions.extend(in_post_order(copies))
        entry.root_id = reads.get(entry.root_id, entry.root_id)
        proto.schedule.sequences[entry.id].instruction_ids[:] = [i.id for i in copies]
        left = [c for c in proto.computations if c.id not in body.inlined_computations]
        left = [hlo_pb2.HloComputationProto.FromString(c.SerializeToString()) for c in left]
        del proto.computations[:]
        at = next(n for n, c in enumerate(left) if c.id == proto.entry_computation_id)
        proto.computations.extend([*left[:at], body.finished(), *left[at:]])
        return Module(proto, module)

    def _refused(self, kind: str, why: str) -> FusionError:
        return FusionError(*self._names, kind, why)

    def _kernel(self, name: str) -> Instruction:
        i = self._by_name.get(name)
        if i is None:
            raise self._refused("unknown", f"the entry has no %{name}")
        what = f"%{name} is a {i.opcode}"
        if i.opcode == "custom-call":
            what += f" of {i.custom_call_target}"
        if i.opcode not in _FUSIBLE:
            raise self._refused("opaque", f"{what}, which runs by itself")
        if i.opcode == "fusion" and i.proto.fusion_kind in OPAQUE_KINDS:
            raise self._refused("opaque", f"%{name} is a kernel of a library or a generator")
        if i.output_operand_aliasing:
            raise self._refused("in place", f"%{name} works in place")
        return i

    def _bitcasts_of(self, a: Instruction) -> Mapping[int, Instruction]:
        found: dict[int, Instruction] = {}
        pending = [a.id]
        while pending:
            for user in self._users.get(pending.pop(), ()):
                if user.opcode == "bitcast" and user.id not in found:
                    found[user.id] = user
                    pending.append(user.id)
        return dict(sorted(found.items(), key=lambda item: self._time[item[0]]))

    def _check_pair(self) -> None:
        a, b = self._a, self._b
        if not a.shape.is_array:
            raise self._refused("several results", f"%{a.name} makes several arrays")
        if a.id == b.id or not any(o == a.id or o in self._shown for o in b.operand_ids):
            raise self._refused("unrelated", f"%{b.name} does not read what %{a.name} makes")
        for pair in fusion_pairs(self._module):
            if (pair.producer.id, pair.consumer.id) != (a.id, b.id):
                continue
            if pair.reason in ("sums", "opaque"):
                raise self._refused(pair.reason, pair.why)
        behind, reached = [u for u in self._uses() if u.id != b.id], set[int]()
        while behind:
            i = behind.pop()
            if i.id == b.id:
                raise self._refused("cycle", f"%{b.name} also needs what others make of %{a.name}")
            if i.id not in reached:
                reached.add(i.id)
                behind += self._users.get(i.id, ())

    def _uses(self) -> Iterator[Instruction]:
        for i in (self._a, *self._shown.values()):
            yield from (u for u in self._users.get(i.id, ()) if u.id not in self._shown)

    def _check_shapes(self) -> None:
        b = self._b
        if self._is_kept and not b.shape.is_array:
            users = self._users.get(b.id, ())
            is_whole = any(u.opcode != "get-tuple-element" for u in users)
            if is_whole or b.id == self._module.entry.root.id:
                raise self._refused(
                    "several results", f"others read all that %{b.name} makes as one"
                )

    def _place(self) -> int:
        """Where in the schedule without the two, and the bitcasts between them, the one stands."""
        a, b, time = self._a, self._b, self._time
        gone = {a.id, b.id, *self._shown}
        order = [i for i in self._module.entry.instructions if i.id not in gone]
        first = min((time[u.id] for u in self._others), default=time[b.id])
        needed = {*a.operand_ids, *b.operand_ids, *a.control_predecessor_ids}
        needed = (needed | {*b.control_predecessor_ids}) - gone
        if first < time[b.id]:
            late = next((i for i in order if i.id in needed and time[i.id] >= first), None)
            if late is not None:
                reader = next(u for u in self._others if time[u.id] == first)
                raise self._refused(
                    "order",
                    f"%{reader.name} reads it before %{late.name}, which %{b.name} needs, has run",
                )
        at = min(first, time[b.id])
        return sum(time[i.id] < at for i in order)


def _element(fusion: _Proto, number: int, index: int, shape: hlo_pb2.ShapeProto) -> _Proto:
    return hlo_pb2.HloInstructionProto(
        name=f"{fusion.name}.{index}",
        opcode="get-tuple-element",
        shape=shape,
        id=number,
        operand_ids=[fusion.id],
        tuple_index=index,
    )


class FusedBody:
    """The fused computation, as it grows.

    Attributes:
      operands: of the fusion, an id each of the entry.
      inlined_computations: those that are in it now.
    """

    def __init__(
        self, number: int, computations: Mapping[int, hlo_pb2.HloComputationProto]
    ) -> None:
        self._number, self._computations = number, computations
        self._made: list[_Proto] = []
        self.operands: list[int] = []
        self.inlined_computations: set[int] = set()

    @property
    def root(self) -> _Proto:
        return self._made[-1]

    def parameter(self, outer: _Proto) -> int:
        """Has the fusion take something of the entry."""
        made = hlo_pb2.HloInstructionProto(
            name=f"param_{len(self.operands)}",
            opcode="parameter",
            shape=outer.shape,
            parameter_number=len(self.operands),
        )
        self.operands.append(outer.id)
        return self._add(made)

    def inlined(self, outer: _Proto, operands: list[int]) -> int:
        """Does what an instruction of the entry does; returns what gives its result."""
        if outer.opcode != "fusion":
            return self._cloned(outer, operands)
        (called,) = outer.called_computation_ids
        self.inlined_computations.add(called)
        computation = self._computations[called]
        new: dict[int, int] = {}
        for i in in_post_order(computation.instructions):
            if i.opcode == "parameter":
                new[i.id] = operands[i.parameter_number]
            else:
                new[i.id] = self._cloned(i, [new[o] for o in i.operand_ids])
        return new[computation.root_id]

    def elements(self, made: int) -> list[int]:
        """The elements of a tuple that it has made."""
        whole = next(i for i in self._made if i.id == made)
        if whole.opcode == "tuple":
            return list(whole.operand_ids)
        count = len(whole.shape.tuple_shapes)
        return [self._add(_element(whole, 0, n, whole.shape.tuple_shapes[n])) for n in range(count)]

    def tuple(self, elements: list[int], last: int) -> _Proto:
        """Gives several arrays."""
        by_id = {i.id: i for i in self._made}
        all_of_them = [*elements, last]
        shape = hlo_pb2.ShapeProto(
            element_type=_TUPLE, tuple_shapes=[by_id[n].shape for n in all_of_them]
        )
        self._add(
            hlo_pb2.HloInstructionProto(
                name="results",
                opcode="tuple",
                shape=shape,
                operand_ids=all_of_them,
            )
        )
        return self.root

    def finished(self) -> hlo_pb2.HloComputationProto:
        used = {o for i in self._made for o in i.operand_ids} | {self.root.id}
        instructions = [i for i in self._made if i.id in used or i.opcode == "parameter"]
        parameters = [i for i in self._made if i.opcode == "parameter"]
        program = hlo_pb2.ProgramShapeProto(
            parameters=[i.shape for i in parameters], result=self.root.shape
        )
        return hlo_pb2.HloComputationProto(
            name=f"fused_computation.{self._number}",
            instructions=instructions,
            program_shape=program,
            id=self._number,
            root_id=self.root.id,
            is_fusion_computation=True,
        )

    def _cloned(self, outer: _Proto, operands: list[int]) -> int:
        made = hlo_pb2.HloInstructionProto.FromString(outer.SerializeToString())
        made.operand_ids[:] = operands
        made.ClearField("control_predecessor_ids")
        return self._add(made)

    def _add(self, made: _Proto) -> int:
        made.id = (self._number << 32) | len(self._made)
        # A module has each name once.
        made.name = f"{made.name}.in{self._number}.{len(self._made)}"
        self._made.append(made)
        return made.id
