"""One kernel as several: what a step would be if a kernel ran in parts along its first dimension.

    before   %a = fusion(x)        %b = fusion(%a)
    after    %a.0 = fusion(x) ─ %a.1 = fusion(x) ─ ... ─ %a = concatenate(%a.0, %a.1, ...)
    alike    %a.0 ─ %b.0 ─ %a.1 ─ %b.1 ─ ...           each part of %b reads one of %a's only

Parts read slices of what they read by the element, and all of the rest. They are joined by a
concatenation, which a reader can be fused with (`editing`); where a reader is split alike, its
parts read those of the producer and stand right behind them, so that of what is between the two no
more than a part is live at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.sharing import ELEMENTWISE
from hlo_passes.errors import SplittingError
from hlo_passes.fusions.editing import OPAQUE_KINDS, FusedBody
from hlo_passes.ir import Instruction, Module
from hlo_passes.normalize.post_order import in_post_order
from hlo_passes.proto import hlo_pb2

type _Proto = hlo_pb2.HloInstructionProto

_SAME = ELEMENTWISE | {"convert", "copy", "select", "clamp", "reduce-precision"}


class _NoPartError(Exception):
    """Why an instruction has no part."""


def split(module: Module, name: str, parts: int) -> Module:
    """Returns the module with a kernel of its entry in parts, ``NAME.0`` and so on; what joins them
    is called ``NAME``.

    Args:
      module: scheduled.
      parts: at least two, which divide its first dimension.

    Raises:
      SplittingError: when it cannot be run in parts.

    Time O(instructions · parts).
    """

    def refused(why: str) -> SplittingError:
        return SplittingError(name, parts, why)

    kernel = next((i for i in module.entry.instructions if i.name == name), None)
    if kernel is None:
        raise refused(f"the entry has no %{name}")
    if not kernel.shape.is_array or not kernel.shape.dimensions:
        raise refused("it makes no single array with a first dimension")
    rows = kernel.shape.dimensions[0]
    if parts < 2 or rows % parts:
        raise refused(f"{parts} parts do not divide its first dimension, {rows}")
    if kernel.opcode == "fusion" and kernel.proto.fusion_kind in OPAQUE_KINDS:
        raise refused("it is a kernel of a library or a generator")
    if kernel.output_operand_aliasing or kernel.proto.control_predecessor_ids:
        raise refused("it works in place, or its order is fixed")
    try:
        return _Split(module, kernel, parts).done()
    except _NoPartError as error:
        raise refused(str(error)) from None


class _Split:
    def __init__(self, module: Module, kernel: Instruction, parts: int) -> None:
        self._module, self._kernel, self._parts = module, kernel, parts
        self._proto = module.to_proto()
        self._computations = {c.id: c for c in self._proto.computations}
        self._entry = self._computations[self._proto.entry_computation_id]
        self._by_id = {i.id: i for i in self._entry.instructions}
        self._joined = {
            i.id: i
            for i in module.entry.instructions
            if i.opcode == "concatenate" and list(i.proto.dimensions) == [0]
        }

    def done(self) -> Module:
        kernel, entry, module = self._kernel, self._entry, self._module
        number, next_id = 1 + max(self._computations), 1 + max(self._by_id)
        bodies: list[hlo_pb2.HloComputationProto] = []
        made: list[_Proto] = []
        for k in range(self._parts):
            part = _Part(number + k, self._computations, k, self._parts, self._alike())
            root = part.of(self._by_id[kernel.id], self._by_id)
            part.end_with(root)
            made.append(
                hlo_pb2.HloInstructionProto(
                    name=f"{kernel.name}.{k}",
                    opcode="fusion",
                    fusion_kind=self._by_id[kernel.id].fusion_kind or "kLoop",
                    shape=part.root.shape,
                    metadata=self._by_id[kernel.id].metadata,
                    id=next_id + k,
                    operand_ids=part.operands,
                    called_computation_ids=[number + k],
                )
            )
            bodies.append(part.finished())
        joined = hlo_pb2.HloInstructionProto(
            name=kernel.name,
            opcode="concatenate",
            shape=self._by_id[kernel.id].shape,
            metadata=self._by_id[kernel.id].metadata,
            id=kernel.id,
            operand_ids=[i.id for i in made],
            dimensions=[0],
        )
        sequence = self._sequence(made, joined)
        copies = [hlo_pb2.HloInstructionProto.FromString(i.SerializeToString()) for i in sequence]
        del entry.instructions[:]
        entry.instructions.extend(in_post_order(copies))
        self._proto.schedule.sequences[entry.id].instruction_ids[:] = [i.id for i in copies]
        is_fusion = kernel.opcode == "fusion"
        gone = set(kernel.called_computation_ids) if is_fusion else set[int]()
        left = [c for c in self._proto.computations if c.id not in gone]
        left = [hlo_pb2.HloComputationProto.FromString(c.SerializeToString()) for c in left]
        at = next(n for n, c in enumerate(left) if c.id == entry.id)
        del self._proto.computations[:]
        self._proto.computations.extend([*left[:at], *bodies, *left[at:]])
        return Module(self._proto, module)

    def _alike(self) -> Mapping[int, list[int]]:
        """Of what joins as many parts as are made here, those."""
        return {
            n: list(i.operand_ids)
            for n, i in self._joined.items()
            if len(i.operand_ids) == self._parts
        }

    def _sequence(self, made: list[_Proto], joined: _Proto) -> list[_Proto]:
        """The schedule with each part right behind the last of what it reads, where the kernel read
        parts, else where the kernel was; without what joined parts that nobody reads any more."""
        kernel, module = self._kernel, self._module
        alike = self._alike()
        was = [o for o in kernel.operand_ids if o in alike]
        order = [self._by_id[i.id] for i in module.entry.instructions if i.id != kernel.id]
        users = analyze_dataflow(module).users
        root = module.entry.root.id
        read = {o for i in made for o in i.operand_ids}
        dropped = {
            o
            for o in was
            if o not in read and o != root and {u.id for u in users[o]} <= {kernel.id}
        }
        order = [i for i in order if i.id not in dropped]
        time = {i.id: n for n, i in enumerate(module.entry.instructions)}
        behind: dict[int, list[_Proto]] = {}
        for part in made:
            last = max(part.operand_ids, key=lambda o: time[o], default=-1)
            if was and last in {p for o in was for p in alike[o]}:
                behind.setdefault(last, []).append(part)
        placed = {i.id for of in behind.values() for i in of}
        here = [i for i in made if i.id not in placed]
        sequence: list[_Proto] = []
        is_here = False
        for i in order:
            if not is_here and time[i.id] > time[kernel.id]:
                sequence += [*here, joined]
                is_here = True
            sequence.append(i)
            sequence += behind.get(i.id, [])
        return sequence if is_here else [*sequence, *here, joined]


class _Part(FusedBody):
    """The fused computation of part `k`."""

    def __init__(
        self,
        number: int,
        computations: Mapping[int, hlo_pb2.HloComputationProto],
        k: int,
        parts: int,
        alike: Mapping[int, list[int]],
    ) -> None:
        super().__init__(number, computations)
        self._k, self._parts, self._alike = k, parts, alike
        self._outer: dict[int, int] = {}
        self._slices: dict[tuple[int, int], int] = {}

    def of(self, kernel: _Proto, entry: Mapping[int, _Proto]) -> int:
        """Makes the part of a kernel's result; returns what gives it."""
        if kernel.opcode != "fusion":
            return self._made_of(kernel, 0, entry, lambda o, cut: self._given(entry[o], cut))
        (called,) = kernel.called_computation_ids
        inside = {i.id: i for i in self._computations[called].instructions}
        known: dict[tuple[int, int | None], int] = {}

        def given(n: int, cut: int | None) -> int:
            i = inside[n]
            if i.opcode == "parameter":
                return self._given(entry[kernel.operand_ids[i.parameter_number]], cut)
            if (n, cut) not in known:
                known[n, cut] = self._made_of(i, cut, inside, given)
            return known[n, cut]

        return given(self._computations[called].root_id, 0)

    def end_with(self, root: int) -> None:
        """Has an instruction be the last."""
        at = next(n for n, i in enumerate(self._made) if i.id == root)
        self._made.append(self._made.pop(at))

    def _given(self, outer: _Proto, cut: int | None) -> int:
        """What of the entry a part reads: all of it, or its part along a dimension."""
        if cut == 0 and outer.id in self._alike:
            part = hlo_pb2.HloInstructionProto(shape=_cut(outer.shape, 0, self._parts))
            part.id = self._alike[outer.id][self._k]
            return self._parameter_of(part)
        whole = self._parameter_of(outer)
        if cut is None:
            return whole
        if (whole, cut) not in self._slices:
            self._slices[whole, cut] = self._sliced(whole, outer.shape, cut)
        return self._slices[whole, cut]

    def _parameter_of(self, outer: _Proto) -> int:
        if outer.id not in self._outer:
            self._outer[outer.id] = self.parameter(outer)
        return self._outer[outer.id]

    def _sliced(self, whole: int, shape: hlo_pb2.ShapeProto, cut: int) -> int:
        sizes = list(shape.dimensions)
        length = sizes[cut] // self._parts
        made = hlo_pb2.HloInstructionProto(
            name="slice", opcode="slice", shape=_cut(shape, cut, self._parts), operand_ids=[whole]
        )
        for d, size in enumerate(sizes):
            begin = self._k * length if d == cut else 0
            end = begin + length if d == cut else size
            made.slice_dimensions.add(start=begin, limit=end, stride=1)
        return self._add(made)

    def _made_of(
        self,
        i: _Proto,
        cut: int | None,
        around: Mapping[int, _Proto],
        given: Callable[[int, int | None], int],
    ) -> int:
        """Does what an instruction does, to a part or to all of what it works on."""
        whole: list[int | None] = [None] * len(i.operand_ids)
        cuts = whole if cut is None else _cuts(i, cut, [around[o].shape for o in i.operand_ids])
        made = hlo_pb2.HloInstructionProto.FromString(i.SerializeToString())
        made.operand_ids[:] = [given(o, c) for o, c in zip(i.operand_ids, cuts, strict=True)]
        made.ClearField("control_predecessor_ids")
        if cut is not None:
            made.shape.CopyFrom(_cut(i.shape, cut, self._parts))
        return self._add(made)


def _cut(shape: hlo_pb2.ShapeProto, cut: int, parts: int) -> hlo_pb2.ShapeProto:
    """The shape of a part along a dimension."""
    found = hlo_pb2.ShapeProto.FromString(shape.SerializeToString())
    found.dimensions[cut] //= parts
    return found


def _cuts(i: _Proto, cut: int, operands: list[hlo_pb2.ShapeProto]) -> list[int | None]:
    """Along which dimension each operand is cut where the result is along `cut`; None where all of
    it is needed.

    Raises:
      _NoPartError: when a part of the result needs something else.
    """
    sizes = [list(shape.dimensions) for shape in operands]
    result = list(i.shape.dimensions)
    match i.opcode:
        case opcode if opcode in _SAME:
            return [cut if of == result else None for of in sizes]
        case "broadcast":
            at = list(i.dimensions)
            return [at.index(cut) if cut in at else None]
        case "transpose":
            return [i.dimensions[cut]]
        case "reshape" | "bitcast":
            return [_same_dimension(i, cut, operands[0])]
        case "reduce" if len(operands) == 2:
            kept = [d for d in range(len(sizes[0])) if d not in i.dimensions]
            return [kept[cut], None]
        case "concatenate" if i.dimensions[0] != cut:
            return [cut] * len(operands)
        case "dot":
            return _cuts_of_dot(i, cut, sizes)
        case opcode:
            raise _NoPartError(f"%{i.name} is a {opcode}, of which there is no part by rows")


def _same_dimension(i: _Proto, cut: int, operand: hlo_pb2.ShapeProto) -> int:
    """The dimension of the operand that is `cut` of a reshape, or of a bitcast in rows."""
    before, after = list(operand.dimensions), list(i.shape.dimensions)
    if i.opcode == "bitcast":
        rows = ([*reversed(range(len(of)))] for of in (before, after))
        layouts = (list(s.layout.minor_to_major) for s in (operand, i.shape))
        if operand.element_type != i.shape.element_type or any(
            found != expected for found, expected in zip(layouts, rows, strict=True)
        ):
            raise _NoPartError(f"%{i.name} is a bitcast between layouts")
    for d, size in enumerate(before):
        if size == after[cut] and prod(before[:d]) == prod(after[:cut]):
            return d
    raise _NoPartError(f"%{i.name} joins or parts the dimension that would be cut")


def _cuts_of_dot(i: _Proto, cut: int, sizes: list[list[int]]) -> list[int | None]:
    numbers = i.dot_dimension_numbers
    left, right = list(numbers.lhs_batch_dimensions), list(numbers.rhs_batch_dimensions)
    if cut < len(left):
        return [left[cut], right[cut]]
    taken = {*left, *numbers.lhs_contracting_dimensions}
    free = [d for d in range(len(sizes[0])) if d not in taken]
    if cut - len(left) < len(free):
        return [free[cut - len(left)], None]
    taken = {*right, *numbers.rhs_contracting_dimensions}
    others = [d for d in range(len(sizes[1])) if d not in taken]
    return [None, others[cut - len(left) - len(free)]]
