"""Which positions hold the same value, and which values must lie in the same bytes.

    p0 ──► copy-start ─(0,)─► copy-done ──► fusion        one value, at three positions
    init ──► while ◄─► body parameter … body root          four values, one buffer

A *position* is a part of an instruction's output. A *value* is defined at one position and
flows unchanged to others: through tuples, bitcasts, asynchronous pairs, calls and loops
that hand it on. A *buffer* is a set of values that must lie in the same bytes: what a loop
carries, the branches of a conditional, an in-place update and its operand, a donated
argument and its output.

The terms are XLA's HloPosition, HloUse, HloValue and HloBuffer, and the rules those of
xla/hlo/analysis/hlo_dataflow_analysis.cc (in its SSA form) and hlo_alias_analysis.cc. We
deviate in the order of work: one walk in execution order instead of a worklist. The walk
takes loops to hand on what they were given and is repeated with a merge at every place
where that proves wrong, which is once or twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hlo_passes.analysis.aliasing import in_place_pairs, is_in_place
from hlo_passes.analysis.async_chains import ASYNC_LINKS, AsyncChain, async_chains
from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.errors import MalformedModuleError
from hlo_passes.ir import (
    ON_CHIP_MEMORY_SPACE,
    Computation,
    Instruction,
    Module,
    Shape,
    ShapeIndex,
)
from hlo_passes.memoize import memoized

BufferKind = Literal["parameter", "constant", "output", "temp", "tuple"]

_POINTER_BYTES = 8

# What gives parts of its operands as they are: see `source_of`.
_HANDS_ON = ASYNC_LINKS | frozenset(
    {"add-dependency", "all-gather-done", "all-gather-start", "all-reduce-done", "bitcast", "copy"}
    | {"collective-permute-done", "collective-permute-start", "copy-done", "copy-start", "domain"}
    | {"get-tuple-element", "opt-barrier", "recv-done", "send", "tuple"}
)


@dataclass(frozen=True, slots=True)
class Position:
    """Part `index` of what `instruction` gives."""

    instruction: Instruction
    index: ShapeIndex = ()

    @property
    def shape(self) -> Shape:
        return self.instruction.shape.at(self.index)

    def __str__(self) -> str:
        part = ",".join(map(str, self.index))
        return f"{self.instruction.name}{{{part}}}" if part else self.instruction.name


@dataclass(frozen=True, slots=True)
class Use:
    """`instruction` reads part `index` of its operand number `operand`."""

    instruction: Instruction
    operand: int
    index: ShapeIndex


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What one position defines.

    Attributes:
      id: XLA's order: by computation, callees first, and by the instruction's place in the
        proto; the merges of loops and conditionals come last.
      positions: where it is found, its definition first.
      uses: who reads it. Passing on (tuple, get-tuple-element) is no use.
      is_phi: it merges a loop's initial and carried value, or a conditional's branches.
    """

    id: int
    positions: tuple[Position, ...]
    uses: tuple[Use, ...]
    is_phi: bool

    @property
    def instruction(self) -> Instruction:
        return self.positions[0].instruction

    @property
    def index(self) -> ShapeIndex:
        return self.positions[0].index

    @property
    def shape(self) -> Shape:
        return self.positions[0].shape

    def __str__(self) -> str:
        return str(self.positions[0])


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Values that must lie in the same bytes.

    Attributes:
      id: in the order of the first value's.
      values: by id.
      kind: ``"parameter"`` of the entry (donated or not), ``"constant"``, ``"output"`` of
        the entry, ``"temp"``, or ``"tuple"``: a table of pointers to a tuple's elements.
      size: bytes, tiling included; of a tuple its pointers.
      memory_space: XLA's number; 0 is the device's main memory.
      live_out: the entry computation returns it.
    """

    id: int
    values: tuple[Value, ...]
    kind: BufferKind
    size: int
    memory_space: int
    live_out: bool

    @property
    def first(self) -> Value:
        """What names it: the argument, whose id in a loop's bytes is not the least; else the value
        of the least."""
        if self.kind != "parameter":
            return self.values[0]
        return next(v for v in self.values if not v.is_phi and v.instruction.opcode == "parameter")

    @property
    def instruction(self) -> Instruction:
        """The instruction that defines `first`."""
        return self.first.instruction

    @property
    def index(self) -> ShapeIndex:
        return self.first.index

    @property
    def positions(self) -> tuple[Position, ...]:
        return tuple(p for v in self.values for p in v.positions)

    @property
    def uses(self) -> tuple[Use, ...]:
        return tuple(u for v in self.values for u in v.uses)

    def __str__(self) -> str:
        return str(self.first)


@dataclass(frozen=True, eq=False)
class Dataflow:
    """The values and buffers of a module.

    Attributes:
      values: indexed by `Value.id`.
      buffers: indexed by `Buffer.id`.
    """

    module: Module
    values: tuple[Value, ...]
    buffers: tuple[Buffer, ...]
    _value_at: Mapping[tuple[int, ShapeIndex], int]
    _buffer_of: Sequence[int]

    def value_at(self, instruction: Instruction, index: ShapeIndex = ()) -> Value:
        """Returns the value at a position.

        Raises:
          KeyError: when the position does not exist, or its computation runs inside one
            instruction (a fusion's body) and has no buffers.
        """
        return self.values[self._value_at[instruction.id, index]]

    def buffer_at(self, instruction: Instruction, index: ShapeIndex = ()) -> Buffer:
        """Returns the buffer that holds the value at a position; raises as `value_at`."""
        return self.buffer_of(self.value_at(instruction, index))

    def buffer_of(self, value: Value) -> Buffer:
        return self.buffers[self._buffer_of[value.id]]

    @cached_property
    def users(self) -> Mapping[int, tuple[Instruction, ...]]:
        """Instruction id to the instructions that have it as an operand, in order."""
        users: dict[int, dict[int, Instruction]] = {}
        for i in self.module.instructions.values():
            for operand in i.operand_ids:
                users.setdefault(operand, {})[i.id] = i
        return {k: tuple(v.values()) for k, v in users.items()}


@memoized
def analyze_dataflow(module: Module) -> Dataflow:
    """Finds the values and buffers of all computations that run on their own.

    Computations inside one instruction (of a fusion, reduce, sort, ...) have none; see
    `call_graph` for those that several instructions call.

    Raises:
      MalformedModuleError: when what flows into a computation, or out of it, is of another shape.

    Complexity: linear in the positions of the module, times the walks (see above).
    """
    merges: set[tuple[int, ShapeIndex]] = set()
    while True:
        walk = _Walk(module, merges)
        walk.visit(module.entry)
        if walk.merges_missing <= merges:
            return _collect(module, walk)
        merges |= walk.merges_missing


def subshapes(shape: Shape, prefix: ShapeIndex = ()) -> Iterator[tuple[ShapeIndex, Shape]]:
    """Yields the shape and every part of it, tuples before their elements."""
    yield prefix, shape
    for i, element in enumerate(shape.tuple_shapes):
        yield from subshapes(element, (*prefix, i))


class _Walk:
    """One pass over the module in execution order.

    Args:
      merges: the (loop, index) at which the body gives back another value than it got.
    """

    def __init__(self, module: Module, merges: set[tuple[int, ShapeIndex]]) -> None:
        self.module = module
        self.merges = merges
        self.merges_missing: set[tuple[int, ShapeIndex]] = set()
        self.value_at: dict[tuple[int, ShapeIndex], int] = {}
        self.definitions: list[tuple[Position, bool]] = []
        self.same_buffer: list[tuple[int, int]] = []
        self.visited: dict[int, Computation] = {}
        self._runs = call_graph(module).runs
        self._chains = async_chains(module)
        self._indices: dict[int, tuple[ShapeIndex, ...]] = {}

    def indices(self, shape: Shape) -> tuple[ShapeIndex, ...]:
        if not shape.is_tuple:
            return ((),)
        found = self._indices.get(id(shape))
        if found is None:
            found = self._indices[id(shape)] = tuple(index for index, _ in subshapes(shape))
        return found

    def visit(self, computation: Computation) -> None:
        self.visited[computation.id] = computation
        for i in computation.instructions:
            self._place(i)
            for pair in in_place_pairs(self.module, i):
                operand = i.operand_ids[pair.operand]
                self._alias(self.value_at[operand, pair.operand_index], self._at(i, pair[2]))

    def _at(self, instruction: Instruction, index: ShapeIndex) -> int:
        return self.value_at[instruction.id, index]

    def _define(self, i: Instruction, index: ShapeIndex, is_phi: bool = False) -> int:
        value = len(self.definitions)
        self.definitions.append((Position(i, index), is_phi))
        self.value_at[i.id, index] = value
        return value

    def _alias(self, a: int, b: int) -> None:
        if a != b:
            self.same_buffer.append((a, b))

    def _place(self, i: Instruction) -> None:
        match i.opcode:
            case "while":
                self._while(i)
            case "conditional":
                self._conditional(i)
            case "call" if i.id in self._runs:
                (called,) = self._runs[i.id]
                self._call(called, i.operand_ids)
                self._hand_over(called.root, i)
            case opcode if opcode in ASYNC_LINKS and i.id in self._chains:
                self._async(i, self._chains[i.id])
            case "parameter" if (i.id, ()) in self.value_at:
                pass  # Its caller has placed it.
            case _:
                for index in self.indices(i.shape):
                    self._forward(i, index)

    def _forward(self, i: Instruction, index: ShapeIndex) -> None:
        source = source_of(self.module, i, index)
        value = None if source is None else self.value_at.get(source)
        if value is None:
            self._define(i, index)
        else:
            self.value_at[i.id, index] = value

    def _hand_over(self, source: Instruction, to: Instruction) -> None:
        self._same_shape(source, to)
        for index in self.indices(to.shape):
            self.value_at[to.id, index] = self.value_at[source.id, index]

    def _same_shape(self, source: Instruction, to: Instruction) -> None:
        if self.indices(source.shape) != self.indices(to.shape):
            raise MalformedModuleError(
                f"{self.module.name}, computation "
                f"%{self.module.computations[to.computation_id].name}",
                f"%{to.name} is of shape {to.shape}, and what flows into it, %{source.name}, of "
                f"shape {source.shape}",
                "A computation takes what its callers give, and they give what it returns.",
            )

    def _call(self, computation: Computation, operands: Sequence[int]) -> None:
        for p in computation.parameters:
            if p.parameter_number >= len(operands):
                raise MalformedModuleError(
                    f"{self.module.name}, computation %{computation.name}",
                    f"its caller gives {len(operands)} operands, and %{p.name} is parameter "
                    f"{p.parameter_number}",
                    "A computation takes what its callers give.",
                )
            self._hand_over(self.module.instructions[operands[p.parameter_number]], p)
        self.visit(computation)

    def _async(self, i: Instruction, chain: AsyncChain) -> None:
        root = None
        if chain.runs_at is not None and chain.computation is not None:
            if i is chain.runs_at and i.id in self._runs:
                self._call(chain.computation, chain.operands)
                for link in chain.links[: chain.links.index(i)]:
                    self._take_result(link, chain.computation.root)
            if chain.runs_at.id in self._runs:
                root = chain.computation.root
        for index in self.indices(i.shape):
            is_result = i is chain.done or index[:1] == (1,)
            if root is None or not is_result or i.shape.at(index).is_tuple:
                self._forward(i, index)
        # Where there is room for the result before it is made, its place is left open.
        if root is not None and root.computation_id in self.visited:
            self._take_result(i, root)

    def _take_result(self, link: Instruction, root: Instruction) -> None:
        """Places the arrays that `root` gives in what `link` has of the result."""
        within = () if link.opcode == "async-done" else (1,)
        for index in self.indices(link.shape):
            if index[: len(within)] == within and not link.shape.at(index).is_tuple:
                value = self.value_at.get((root.id, index[len(within) :]))
                self.value_at[link.id, index] = (
                    self._define(link, index) if value is None else value
                )

    def _while(self, i: Instruction) -> None:
        init = self.module.instructions[i.operand_ids[0]]
        body = self.module.computations[i.called_computation_ids[0]]
        runs = self._runs.get(i.id, ())
        indices = self.indices(i.shape)
        for carried in (init, body.root, *(c.parameters[0] for c in runs)):
            self._same_shape(carried, i)
        # What the body of another loop does in this one is not followed.
        merges = indices if body not in runs else ()
        merged = {index for index in indices if (i.id, index) in self.merges}.union(merges)
        for computation in runs:
            for index in indices:
                given = self._at(init, index)
                if index in merged:
                    self._alias(given, self._define(computation.parameters[0], index, is_phi=True))
                else:
                    self.value_at[computation.parameters[0].id, index] = given
        for computation in runs:
            self.visit(computation)
        for index in indices:
            given = self._at(init, index)
            if index in merged:
                self._alias(given, self._define(i, index, is_phi=True))
            else:
                self.value_at[i.id, index] = given
            if body in runs:
                carried = self._at(body.root, index)
                if index in merged:
                    self._alias(given, carried)
                elif given != carried:
                    self.merges_missing.add((i.id, index))

    def _conditional(self, i: Instruction) -> None:
        called, runs = i.called_computation_ids, self._runs.get(i.id, ())
        for branch in runs:
            self._hand_over(
                self.module.instructions[i.operand_ids[1 + called.index(branch.id)]],
                branch.parameters[0],
            )
            self.visit(branch)
            self._same_shape(branch.root, i)
        for index in self.indices(i.shape):
            results = {self._at(branch.root, index) for branch in runs}
            if len(results) == 1 and len(runs) == len(called):
                self.value_at[i.id, index] = results.pop()
                continue
            merged = self._define(i, index, is_phi=True)
            for result in results:
                self._alias(merged, result)


def source_of(module: Module, i: Instruction, index: ShapeIndex) -> tuple[int, ShapeIndex] | None:
    """Where the value at `index` of `i` comes from; None when `i` defines it there. What is not
    there (the result of an operation that has not got it yet) `i` defines as well."""
    if i.opcode not in _HANDS_ON:
        return None
    operands, head, rest = i.operand_ids, index[:1], index[1:]
    match i.opcode:
        case "bitcast" | "add-dependency" | "domain" | "opt-barrier" | "all-reduce-done":
            return operands[0], index
        case "get-tuple-element":
            return operands[0], (i.tuple_index, *index)
        case "tuple" if index:
            return operands[index[0]], rest
        case "copy" if index:
            return operands[0], index
        case "copy-start" if head == (1,):
            return operands[0], rest
        case "copy-done":
            return operands[0], (0, *index)
        case "send" if head == (0,):
            return operands[0], rest
        case "recv-done" if head == (0,):
            return operands[0], index
        case "collective-permute-start" if head == (0,) and is_in_place(module, i):
            return operands[0], rest
        case "all-gather-start" | "collective-permute-start" if head == (0,):
            if not i.shape.at((0,)).is_tuple:
                return operands[0], ()
            return (operands[rest[0]], rest[1:]) if rest else None
        case _ if i.shape.at(index).is_tuple:
            return None
        case "async-start" if head == (0,):
            return (operands[rest[0]], rest[1:]) if rest[0] < len(operands) else None
        case "async-update" if head == (0,):
            bound = len(module.instructions[operands[0]].shape.at((0,)).tuple_shapes)
            if rest[0] < bound:
                return operands[0], index
            own = 1 + rest[0] - bound
            return (operands[own], rest[1:]) if own < len(operands) else None
        case "async-update" if head == (1,):
            return operands[0], index
        case "async-done" | "all-gather-done" | "collective-permute-done":
            return operands[0], (1, *index)
        case _:
            return None


def _parts_used(i: Instruction, indices: tuple[ShapeIndex, ...]) -> tuple[ShapeIndex, ...]:
    """Which parts of an operand `i` reads, rather than passing them on
    (xla/service/hlo_value.cc, MayUseOperandValue)."""
    if i.opcode in ("tuple", "domain"):
        return ()
    return indices[:1] if i.opcode in ("get-tuple-element", "copy") else indices


def _collect(module: Module, walk: _Walk) -> Dataflow:
    _renumber(module, walk)
    values = _values(module, walk)
    root = module.entry.root
    for alias in module.input_output_aliases:
        parameter = module.entry.parameters[alias.parameter]
        walk.same_buffer.append(
            (
                walk.value_at[root.id, alias.output_index],
                walk.value_at[parameter.id, alias.parameter_index],
            )
        )
    returned = {walk.value_at[root.id, index] for index in walk.indices(root.shape)}
    buffers: list[Buffer] = []
    buffer_of = [0] * len(values)
    for members in _components(len(values), walk.same_buffer):
        for v in members:
            buffer_of[v] = len(buffers)
        group = tuple([values[v] for v in members])
        shapes = [v.shape for v in group]
        live_out = not returned.isdisjoint(members)
        buffers.append(
            Buffer(
                len(buffers),
                group,
                _kind(module, group, shapes, live_out),
                max(map(_size, shapes)),
                _space(module, group, shapes[0]),
                live_out,
            )
        )
    return Dataflow(module, values, tuple(buffers), walk.value_at, buffer_of)


def _values(module: Module, walk: _Walk) -> tuple[Value, ...]:
    value_at, instructions = walk.value_at, module.instructions
    positions: list[list[Position]] = [[p] for p, _ in walk.definitions]
    uses: list[list[Use]] = [[] for _ in walk.definitions]
    for computation in walk.visited.values():
        for i in computation.instructions:
            for index in walk.indices(i.shape):
                found = positions[value_at[i.id, index]]
                if found[0].instruction is not i or found[0].index != index:
                    found.append(Position(i, index))
            for number, operand in enumerate(i.operand_ids):
                for index in _parts_used(i, walk.indices(instructions[operand].shape)):
                    uses[value_at[operand, index]].append(Use(i, number, index))
    return tuple(
        [
            Value(v, tuple(positions[v]), tuple(uses[v]), is_phi)
            for v, (_, is_phi) in enumerate(walk.definitions)
        ]
    )


def _renumber(module: Module, walk: _Walk) -> None:
    """Gives the values XLA's order. The walk's is that of execution; where XLA breaks ties
    between equal buffers by their ids, another order would end in another packing."""
    place = {i: n for n, i in enumerate(module.instructions)}
    order = sorted(
        range(len(walk.definitions)),
        key=lambda v: (walk.definitions[v][1], place[walk.definitions[v][0].instruction.id], v),
    )
    new = {old: v for v, old in enumerate(order)}
    walk.definitions = [walk.definitions[old] for old in order]
    walk.value_at = {where: new[v] for where, v in walk.value_at.items()}
    walk.same_buffer = [(new[a], new[b]) for a, b in walk.same_buffer]


def _components(n: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The connected components of `n` nodes, each sorted, in the order of their least."""
    leader = list(range(n))

    def find(a: int) -> int:
        while leader[a] != a:
            leader[a] = a = leader[leader[a]]
        return a

    for a, b in pairs:
        a, b = find(a), find(b)
        leader[max(a, b)] = min(a, b)
    components: dict[int, list[int]] = {}
    for a in range(n):
        components.setdefault(find(a), []).append(a)
    return list(components.values())


def _kind(
    module: Module, values: Sequence[Value], shapes: Sequence[Shape], live_out: bool
) -> BufferKind:
    if any([shape.is_tuple for shape in shapes]):
        return "tuple"
    definers = [v.instruction for v in values]
    if any([i.opcode == "parameter" and i.computation_id == module.entry.id for i in definers]):
        return "parameter"
    if any([i.opcode == "constant" for i in definers]):
        return "constant"
    return "output" if live_out else "temp"


def _space(module: Module, values: Sequence[Value], shape: Shape) -> int:
    """What is worked on in place, or handed from a loop to the next, is where its shape says."""
    i = values[0].instruction
    if len(values) == 1 and i.computation_id == module.entry.id:
        if (i.name, values[0].index) in (module.learned.on_chip or ()):
            return ON_CHIP_MEMORY_SPACE
    return shape.memory_space


def _size(shape: Shape) -> int:
    return len(shape.tuple_shapes) * _POINTER_BYTES if shape.is_tuple else shape.byte_size
