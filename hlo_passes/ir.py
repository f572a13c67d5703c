"""The IR: a frozen view of an ``HloModuleProto``.

    Module ── computations ──► Computation ── instructions ──► Instruction ── shape ──► Shape
       └── schedule: computation id → instruction ids in execution order

A `Module` never changes. A pass that rewrites takes ``module.to_proto()`` (a copy),
edits it and builds a new `Module`. Fields of the proto that are not declared in
``proto/hlo.proto`` ride along as unknown fields, so nothing is lost on the way.

Terms are XLA's: an instruction's *operands* are instructions of the same computation;
*called computations* are the bodies of fusions, loops, calls and async wrappers; a
*schedule* is a total order of a computation's instructions.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hlo_passes.content import digest
from hlo_passes.errors import MalformedModuleError, UnboundedShapeError
from hlo_passes.proto import hlo_pb2

ShapeIndex = tuple[int, ...]
"""Path into a tuple shape: ``()`` is the whole, ``(1, 0)`` element 0 of element 1."""

DEVICE_MEMORY_SPACE = 0

ON_CHIP_MEMORY_SPACE = 1
"""XLA's memory space number of a TPU's memory on the chip, VMEM."""

HOST_MEMORY_SPACE = 5
"""XLA's memory space number of pinned host memory (xla/layout.h, Layout::kHostMemorySpace)."""

_PRED, _TUPLE, _OPAQUE, _TOKEN = 1, 13, 14, 17

# PrimitiveType numbers and bits per element (xla/xla_data.proto, xla/primitive_util.h).
# ``b(f32[8])``, which custom calls "Pin" and "Unpin", is the array that lies in it.
_BUFFER = 34

_PRIMITIVES: dict[int, tuple[str, int]] = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    13: ("tuple", 0),
    14: ("opaque", 0),
    15: ("c64", 64),
    16: ("bf16", 16),
    17: ("token", 0),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}

# A tile dimension of this value merges the dimension with the next more minor one
# (xla/layout.h, Tile::kCombineDimension).
_COMBINE_DIMENSION = -(2**63)

# The size of a dimension that has no bound, ``f32[?]`` (xla/shape.h, Shape::kUnboundedSize).
_UNBOUNDED = -(2**63)


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in memory: dimension order, tiles, memory space."""

    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    element_size_in_bits: int = 0
    memory_space: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """An array shape with its layout, or a tuple of shapes.

    Attributes:
      dtype: XLA's name of the element type (``"bf16"``, ``"tuple"``, ``"token"``, ...).
      dimensions: sizes, in logical order; for a dynamic dimension its upper bound.
      tuple_shapes: the elements, when ``dtype == "tuple"``.
      byte_size: bytes the array occupies with its tiling's padding; for a tuple, 0 (the
        elements have buffers of their own; see `leaves`).
    """

    dtype: str
    dimensions: tuple[int, ...]
    tuple_shapes: tuple[Shape, ...]
    layout: Layout
    byte_size: int

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    @property
    def is_array(self) -> bool:
        return self.dtype not in ("tuple", "token", "opaque")

    @property
    def memory_space(self) -> int:
        return self.layout.memory_space

    @property
    def element_count(self) -> int:
        return math.prod(self.dimensions)

    @property
    def padding_bytes(self) -> int:
        """How many of `byte_size` are there for the tiles' sake only."""
        elements = tiled_element_count(self.dimensions, self.layout)
        if not self.layout.tiles or not elements:
            return 0
        return self.byte_size - self.byte_size * self.element_count // elements

    def leaves(self, prefix: ShapeIndex = ()) -> Iterator[tuple[ShapeIndex, Shape]]:
        """Yields every non-tuple element with its index, in order."""
        if not self.is_tuple:
            yield prefix, self
            return
        for i, element in enumerate(self.tuple_shapes):
            yield from element.leaves((*prefix, i))

    def at(self, index: ShapeIndex) -> Shape:
        """Returns the sub-shape at `index`."""
        shape = self
        for i in index:
            shape = shape.tuple_shapes[i]
        return shape

    def has(self, index: ShapeIndex) -> bool:
        """Whether there is a sub-shape at `index`."""
        return not index or (
            index[0] < len(self.tuple_shapes) and self.tuple_shapes[index[0]].has(index[1:])
        )

    def __str__(self) -> str:
        if self.is_tuple:
            return "(" + ", ".join(map(str, self.tuple_shapes)) + ")"
        dims = ",".join(map(str, self.dimensions))
        space = f"S({self.memory_space})" if self.memory_space else ""
        return f"{self.dtype}[{dims}]{space}"


def tiled_element_count(dimensions: tuple[int, ...], layout: Layout) -> int:
    """Returns how many elements an array occupies, its tiles' padding included.

    Each tile is applied to the most minor dimensions in turn, as XLA does it
    (xla/shape_util.cc, ShapeUtil::ArraySize; the tiling rules stand in XLA's
    "Tiled layout" page): a dimension of size d under a tile of size t becomes
    ceil(d / t) tiles of t.
    """
    order = layout.minor_to_major or tuple(range(len(dimensions) - 1, -1, -1))
    physical = [dimensions[d] for d in reversed(order)]
    for tile in layout.tiles:
        outer, inner = physical[: -len(tile)], physical[-len(tile) :]
        if len(inner) < len(tile):
            inner = [1] * (len(tile) - len(inner)) + inner
        merged: list[int] = []
        sizes: list[int] = []
        carry = 1
        for size, t in zip(inner, tile, strict=True):
            if t == _COMBINE_DIMENSION:
                carry *= size
                continue
            merged.append(size * carry)
            sizes.append(t)
            carry = 1
        physical = [*outer, *(-(-d // t) for d, t in zip(merged, sizes, strict=True)), *sizes]
    return math.prod(physical)


class _UnboundedError(Exception):
    """A shape without a size."""


_shape_cache: dict[bytes, Shape] = {}


def _shape(proto: hlo_pb2.ShapeProto) -> Shape:
    # Large modules repeat a few hundred distinct shapes tens of thousands of times.
    key = proto.SerializeToString()
    cached = _shape_cache.get(key)
    if cached is not None:
        return cached
    if proto.element_type == _BUFFER and proto.tuple_shapes:
        return _shape(proto.tuple_shapes[0])
    dtype, bits = _PRIMITIVES.get(proto.element_type, (f"type{proto.element_type}", 0))
    layout = Layout(
        tuple(proto.layout.minor_to_major),
        tuple(tuple(t.dimensions) for t in proto.layout.tiles),
        proto.layout.element_size_in_bits,
        proto.layout.memory_space,
    )
    dimensions = tuple(proto.dimensions)
    if _UNBOUNDED in dimensions:
        sizes = ",".join("?" if d == _UNBOUNDED else str(d) for d in dimensions)
        raise _UnboundedError(f"{dtype}[{sizes}]")
    if layout.minor_to_major and sorted(layout.minor_to_major) != list(range(len(dimensions))):
        raise MalformedModuleError(
            f"an array of {len(dimensions)} dimensions",
            f"its layout orders the dimensions {list(layout.minor_to_major)}",
            "A layout names each dimension once: is the file whole?",
        )
    # Sub-byte types take a whole byte unless their layout says that they are packed.
    bits = layout.element_size_in_bits or (max(bits, 8) if bits else 0)
    size = -(-tiled_element_count(dimensions, layout) * bits // 8) if bits else 0
    shape = Shape(dtype, dimensions, tuple(map(_shape, proto.tuple_shapes)), layout, size)
    if len(_shape_cache) > 100_000:
        _shape_cache.clear()
    _shape_cache[key] = shape
    return shape


@dataclass(frozen=True, slots=True)
class OutputOperandAliasing:
    """An instruction's output at `output_index` shares the buffer of an operand's part."""

    output_index: ShapeIndex
    operand: int
    operand_index: ShapeIndex


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One HLO instruction; equality is identity.

    Attributes:
      id: unique in the module. XLA numbers ``(computation id << 32) | local id``.
      computation_id: the computation that holds it.
      proto: the message it views; read it for attributes not lifted here, never write it.
    """

    id: int
    name: str
    opcode: str
    shape: Shape
    operand_ids: tuple[int, ...]
    called_computation_ids: tuple[int, ...]
    control_predecessor_ids: tuple[int, ...]
    computation_id: int
    proto: hlo_pb2.HloInstructionProto = field(repr=False)

    @property
    def parameter_number(self) -> int:
        return self.proto.parameter_number

    @property
    def tuple_index(self) -> int:
        return self.proto.tuple_index

    @property
    def custom_call_target(self) -> str:
        return self.proto.custom_call_target

    @property
    def op_name(self) -> str:
        """The framework's name of the operation, e.g. ``jit(step)/layer_3/dot_general``."""
        return self.proto.metadata.op_name

    @property
    def output_operand_aliasing(self) -> tuple[OutputOperandAliasing, ...]:
        return tuple(
            OutputOperandAliasing(
                tuple(a.output_shape_index), a.operand_index, tuple(a.operand_shape_index)
            )
            for a in self.proto.output_operand_aliasing
        )

    @property
    def backend_config(self) -> Mapping[str, Any]:
        """The backend's JSON attributes; empty where there are none or not JSON."""
        raw = self.proto.backend_config
        if not raw.startswith(b"{"):
            return {}
        try:
            return json.loads(raw)
        except ValueError:
            return {}

    def __str__(self) -> str:
        return f"%{self.name} = {self.shape} {self.opcode}"


@dataclass(frozen=True, eq=False)
class Computation:
    """A computation; `instructions` stand in execution order when it is scheduled, else in
    an order where operands come first."""

    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction
    is_fusion: bool

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        found = (i for i in self.instructions if i.opcode == "parameter")
        return tuple(sorted(found, key=lambda i: i.parameter_number))


@dataclass(frozen=True, slots=True)
class InputOutputAlias:
    """Output `output_index` of the entry takes the buffer of parameter `parameter`
    (a donated argument)."""

    output_index: ShapeIndex
    parameter: int
    parameter_index: ShapeIndex


@dataclass(frozen=True)
class Learned:
    """What executables of the same program say of a module's instructions, by their names.

    Attributes:
      cycles: clock cycles that one takes.
      on_chip: the parts of results that XLA holds in memory of the chip and nowhere else; None
        where that is not known.
      table_bytes: of the tables that XLA:TPU keeps in HBM for tuples; None where not known.
      seconds: that one was measured to take.
      factors: what those that were not measured take, relative to the machine's model, by kind of
        kernel (`hardware.corrections.nearest`), going by those that were.
    """

    cycles: Mapping[str, int] = field(default_factory=dict[str, int])
    on_chip: frozenset[tuple[str, ShapeIndex]] | None = None
    table_bytes: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    factors: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Thunk:
    """One thing that an executable of XLA:GPU does.

    Attributes:
      kind: XLA's name for it, without its ``k``: ``CustomKernel``, ``CommandBuffer``.
      name: of the instruction that it is for; ``""`` where that is not known.
      stream: of an asynchronous one, where it runs: ``memcpy_h2d_stream``.
      inside: what is captured, what a loop or a branch runs, what is asynchronous.
    """

    kind: str
    name: str
    stream: str
    inside: tuple[Thunk, ...]


class Module:
    """A frozen view of a serialized ``HloModuleProto``.

    Args:
      proto: the message. The module takes it over: do not write to it afterwards.
      original: a module from which this one differs in the entry computation, its schedule
        and further computations only: its views of the others are taken over, and what was
        learned of it.
      assigned: XLA's buffer assignment of this very module, where it came with one.

    Attributes:
      thunks: what XLA:GPU's executable of this very module does, where it came with that.
      learned: what executables of the same program say of it (`with_learned`); nothing of a module
        as it was read.

    Raises:
      MalformedModuleError: when ids, operands, the schedule or the root do not fit
        together.
      UnboundedShapeError: when a dimension may have any size.
    """

    def __init__(
        self,
        proto: hlo_pb2.HloModuleProto,
        original: Module | None = None,
        assigned: hlo_pb2.BufferAssignmentProto | None = None,
    ) -> None:
        self._proto = proto
        self.assigned = assigned
        self.thunks: tuple[Thunk, ...] = ()
        self.learned = original.learned if original is not None else Learned()
        self._sequences = {
            cid: tuple(seq.instruction_ids)
            for cid, seq in proto.schedule.sequences.items()
            if seq.instruction_ids  # XLA gives fusion bodies an empty sequence
        }
        self.instructions: dict[int, Instruction] = {}
        self.computations: dict[int, Computation] = {}
        for computation in proto.computations:
            is_entry = computation.id == proto.entry_computation_id
            if original is None or is_entry or computation.id not in original.computations:
                self.computations[computation.id] = self._computation(computation)
                continue
            self.computations[computation.id] = original.computations[computation.id]
            for i in computation.instructions:
                self.instructions[i.id] = original.instructions[i.id]
        if proto.entry_computation_id not in self.computations:
            raise MalformedModuleError(
                proto.name,
                f"the entry computation id {proto.entry_computation_id} names no computation",
                "Is this an HloModuleProto? Dump one with --xla_dump_hlo_as_proto.",
            )

    def _computation(self, proto: hlo_pb2.HloComputationProto) -> Computation:
        where = f"{self._proto.name}, computation %{proto.name}"
        computation_id = proto.id
        local: dict[int, Instruction] = {}
        for i in proto.instructions:
            id_ = i.id
            # A slice is one call into protobuf; an iteration would be one an element.
            operand_ids = tuple(i.operand_ids[:])
            for operand in operand_ids:
                if operand not in local:
                    raise MalformedModuleError(
                        where,
                        f"%{i.name} uses operand id {operand}, which does not come before it",
                        "Instructions must stand in an order where operands come first.",
                    )
            if id_ in local or id_ in self.instructions:
                raise MalformedModuleError(
                    where, f"%{i.name} has id {id_}, which is taken already", "Ids must be unique."
                )
            try:
                shape = _shape(i.shape)
            except _UnboundedError as error:
                raise UnboundedShapeError(where, i.name, str(error)) from None
            called_ids = tuple(i.called_computation_ids[:])
            for called in called_ids:
                if called not in self.computations:
                    raise MalformedModuleError(
                        where,
                        f"%{i.name} calls computation id {called}, which does not come before it",
                        "Computations must stand in an order where the called ones come first.",
                    )
            local[id_] = Instruction(
                id_,
                i.name,
                i.opcode,
                shape,
                operand_ids,
                called_ids,
                tuple(i.control_predecessor_ids[:]),
                computation_id,
                i,
            )
            if not self._fits(local[id_], local):
                raise MalformedModuleError(
                    where,
                    f"{local[id_]} does not fit what it is given, "
                    + ", ".join(str(local[o].shape) for o in operand_ids),
                    "XLA compiles no such module (hlo_verifier.cc).",
                )
        for i in local.values():
            if i.control_predecessor_ids and not local.keys() >= set(i.control_predecessor_ids):
                raise MalformedModuleError(
                    where,
                    f"%{i.name} has control predecessors {list(i.control_predecessor_ids)}",
                    "They must be instructions of the same computation.",
                )
        if proto.root_id not in local:
            raise MalformedModuleError(
                where, f"the root id {proto.root_id} names no instruction", "Is the file whole?"
            )
        sequence = self._sequences.get(proto.id)
        if sequence is not None and set(sequence) != set(local):
            wrong = sorted(set(sequence) ^ set(local))[:3]
            raise MalformedModuleError(
                where,
                f"the schedule and the computation differ in instruction ids {wrong}",
                "Every instruction of a scheduled computation stands in its sequence once.",
            )
        self.instructions.update(local)
        ordered = tuple(local[i] for i in sequence) if sequence else tuple(local.values())
        return Computation(
            proto.id, proto.name, ordered, local[proto.root_id], proto.is_fusion_computation
        )

    def _fits(self, i: Instruction, local: Mapping[int, Instruction]) -> bool:
        """Whether an instruction has the parts that all who look at it rely on."""
        match i.opcode:
            case "get-tuple-element":
                return i.tuple_index < len(local[i.operand_ids[0]].shape.tuple_shapes)
            case "copy-start":
                return len(i.shape.tuple_shapes) > 1
            case "fusion":
                (called,) = i.called_computation_ids
                return len(self.computations[called].parameters) == len(i.operand_ids)
            case _:
                return True

    @property
    def name(self) -> str:
        return self._proto.name

    @property
    def entry(self) -> Computation:
        return self.computations[self._proto.entry_computation_id]

    @property
    def is_scheduled(self) -> bool:
        return self._proto.entry_computation_id in self._sequences

    @property
    def attributes(self) -> Mapping[str, str]:
        """The module's frontend attributes."""
        return dict(self._proto.frontend_attributes.map)

    @cached_property
    def input_output_aliases(self) -> tuple[InputOutputAlias, ...]:
        found = tuple(
            InputOutputAlias(
                tuple(e.output_shape_index), e.parameter_number, tuple(e.parameter_shape_index)
            )
            for e in self._proto.input_output_alias.entries
        )
        parameters = {p.parameter_number: p for p in self.entry.parameters}
        for a in found:
            given = parameters[a.parameter].shape.at(a.parameter_index).byte_size
            taking = self.entry.root.shape.at(a.output_index).byte_size
            if given != taking:
                raise MalformedModuleError(
                    self.name,
                    f"output {list(a.output_index)} of {taking} bytes takes the place of "
                    f"%{parameters[a.parameter].name}, which has {given}",
                    "XLA compiles no such module (HloInputOutputAliasConfig::Verify).",
                )
        return found

    @cached_property
    def buffer_donors(self) -> tuple[tuple[int, ShapeIndex], ...]:
        """Donated arguments that no output takes the place of: parameter and index."""
        return tuple(
            (e.parameter_number, tuple(e.parameter_shape_index))
            for e in self._proto.buffer_donor.entries
        )

    @cached_property
    def entry_parameter_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the arguments as the caller lays them out.

        On CPU only these still name the host memory space: the parameter instructions
        have lost it (seen with jaxlib 0.12.0.1).
        """
        return tuple(map(_shape, self._proto.host_program_shape.parameters))

    @cached_property
    def entry_result_shape(self) -> Shape:
        """Shape of the result as the caller lays it out; see `entry_parameter_shapes`."""
        return _shape(self._proto.host_program_shape.result)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the module's content: equal for equal programs, whatever the module
        and what is in its fusions is called, whichever token the frontend put on it and
        whichever lines of Python it was written and compiled from."""
        return digest(self.to_proto())

    def with_learned(self, learned: Learned) -> Module:
        """Returns the same module with other `learned`; that is no part of its content."""
        module = copy.copy(self)
        # What was found of this one (`memoized`) may rest on its own.
        vars(module).pop("_found", None)
        module.learned = learned
        return module

    def source_line(self, instruction: Instruction) -> str:
        """Returns ``file:line`` of the Python call that made `instruction`, or ``""``.

        The innermost frame is given: JAX drops its own frames before it records them.
        """
        metadata = instruction.proto.metadata
        if metadata.source_file:
            return f"{metadata.source_file}:{metadata.source_line}"
        index, frame_id = self._proto.stack_frame_index, metadata.stack_frame_id
        if not 0 < frame_id <= len(index.stack_frames):
            return ""
        location_id = index.stack_frames[frame_id - 1].file_location_id
        if not 0 < location_id <= len(index.file_locations):
            return ""
        location = index.file_locations[location_id - 1]
        if not 0 < location.file_name_id <= len(index.file_names):
            return ""
        return f"{index.file_names[location.file_name_id - 1]}:{location.line}"

    def to_proto(self) -> hlo_pb2.HloModuleProto:
        """Returns a copy of the underlying message, for a rewriter to edit."""
        proto = hlo_pb2.HloModuleProto()
        proto.CopyFrom(self._proto)
        return proto

    def to_bytes(self) -> bytes:
        """Returns the serialized ``HloModuleProto``: equal bytes for equal modules."""
        return self._proto.SerializeToString(deterministic=True)

    def __repr__(self) -> str:
        n = len(self.instructions)
        return f"<Module {self.name}: {len(self.computations)} computations, {n} instructions>"
