"""What a module computes, whichever fusions compute it, and in whichever form it is kept.

    f = fusion(x, w) ─► { p0  p1   c = convert(p0)   d = dot(c, p1)   n = negate(d) }
    t = transpose(f)
    a = add(t, x)
                            x ──► dot ──► negate ──► add
                            w ──┘                    x ┘

A *computed value* is what a module's instructions come down to without those that only pass
on: fusions, calls and asynchronous pairs are looked through, and so are tuples, copies, and
other forms of the same elements (bitcast, reshape, transpose, convert). What is computed twice
from the same (XLA clones cheap work into each fusion that reads it) is one value: the value
numbering of Alpern, Wegman and Zadeck ("Detecting equality of variables in programs", POPL
1988), in its pessimistic form. What a loop carries is a value with two operands, what it
starts from and what an iteration makes of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from hlo_passes.ir import Computation, Instruction, Module, Shape
from hlo_passes.proto import hlo_pb2

type Flow = int | tuple[Flow, ...]
"""The number of a value, or of a tuple's elements."""

type Edges = list[tuple[int, int]]
"""(number of an operand, slot); operands in equal slots are interchangeable."""

# Another form of the same elements.
_FORMS = frozenset(
    {"bitcast", "bitcast-convert", "convert", "copy", "reshape", "transpose"}
    | {"opt-barrier", "domain", "add-dependency", "async-update"}
    | {"all-gather-done", "all-reduce-done", "collective-permute-done"}
)
_COMMUTATIVE = frozenset({"add", "multiply", "maximum", "minimum", "and", "or", "xor"})
_CALLS = frozenset({"call", "fusion", "async-start"})

# The channels of collectives are numbered through the module.
_NUMBERED = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
    | {"all-gather-start", "all-reduce-start", "collective-permute-start"}
    | {"send", "send-done", "recv", "recv-done"}
)

# What says what an instruction is called, where it stands and how it is carried out, but not
# what it computes.
_INCIDENTAL = (
    *("name", "opcode", "shape", "metadata", "id", "operand_ids", "control_predecessor_ids"),
    *("called_computation_ids", "backend_config", "parameter_number", "frontend_attributes"),
    *("fusion_kind", "output_operand_aliasing", "async_execution_thread"),
)

# Slots of roots of called computations come after those of operands.
_ROOT_SLOT = 1 << 20
_PARAMETER_SLOT = 1 << 40


class Numbering:
    """Numbers for whatever can be a key, equal for equal keys, from 1."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._shapes: dict[int, tuple[Shape, int]] = {}

    def of(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def of_shape(self, shape: Shape) -> int:
        """A number for element type and dimensions."""
        # Shapes are shared; their own hash takes long.
        found = self._shapes.get(id(shape))
        if found is None:
            parts = tuple(map(self.of_shape, shape.tuple_shapes))
            found = shape, self.of((shape.dtype, shape.dimensions, parts))
            self._shapes[id(shape)] = found
        return found[1]


def attributes(instruction: Instruction) -> bytes:
    """What an instruction computes, apart from its opcode, shape and operands: dimensions,
    limits, literals, targets, ...; not its name, metadata, place or backend configuration."""
    proto = hlo_pb2.HloInstructionProto()
    proto.CopyFrom(instruction.proto)
    for name in _INCIDENTAL:
        proto.ClearField(name)
    if instruction.opcode in _NUMBERED:
        proto.DiscardUnknownFields()
    return proto.SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True)
class ComputedValue:
    """One value of a module.

    Attributes:
      label: equal for equal computations, in all modules of one `Numbering`.
      kind: the same for the opcode alone, whether it is asynchronous or not.
      operands: what it is computed from.
      members: the instructions that compute it; none for a loop's carried values.
      place: of an argument or result of the program, its number from 1; else 0.
      is_constant: it depends on no argument.
    """

    label: int
    kind: int
    operands: Edges
    members: list[Instruction]
    place: int
    is_constant: bool


@dataclass(frozen=True, eq=False)
class ValueGraph:
    """The computed values of a module, and how its instructions hang together.

    Attributes:
      values: operands come first, but for what loops carry.
      flow: of each instruction, by id, which value it computes or passes on.
      order: all instructions, those of called computations before their callers.
      links: of each of those, the instructions that it draws on, as places in `order`: operands;
        of a caller also the roots that it calls; of a parameter the caller's operands, or where
        it stands for none of those the caller draws on it.
      kernel: id of an instruction in a fusion to the outermost fusion; of others to themselves.
    """

    module: Module
    values: list[ComputedValue] = field(default_factory=list)
    flow: dict[int, Flow] = field(default_factory=dict)
    order: list[Instruction] = field(default_factory=list)
    links: list[Edges] = field(default_factory=list)
    kernel: dict[int, Instruction] = field(default_factory=dict)


def value_graph(module: Module, numbering: Numbering) -> ValueGraph:
    """Finds what a module computes.

    Args:
      numbering: shared by the modules that are to be compared.

    A computation that several instructions call is looked through from the first of them.

    Time O(instructions and operands).
    """
    walk = _Walk(module, numbering)
    walk.visit(module.entry, None)
    for n, value in enumerate(flat(walk.graph.flow[module.entry.root.id])):
        walk.new(walk.numbering.of("output"), "output", [(value, 0)], n + 1)
    for computation in module.computations.values():
        if computation.id not in walk.visited:
            walk.visit(computation, None)
    return walk.graph


def flat(flow: Flow) -> Iterator[int]:
    """The values of a flow, tuples' elements in order."""
    if isinstance(flow, int):
        yield flow
    else:
        for part in flow:
            yield from flat(part)


class _Walk:
    """One pass over the module, callees when their caller is met."""

    def __init__(self, module: Module, numbering: Numbering) -> None:
        self.module = module
        self.numbering = numbering
        self.graph = ValueGraph(module)
        self.visited: set[int] = set()
        self._place: dict[int, int] = {}
        self._known: dict[Hashable, int] = {}

    def new(
        self, label: int, kind: str, operands: Edges, place: int = 0, is_constant: bool = False
    ) -> int:
        values = self.graph.values
        number = self.numbering.of(kind.removesuffix("-start"))
        values.append(ComputedValue(label, number, operands, [], place, is_constant))
        return len(values) - 1

    def computed(self, label: int, kind: str, operands: Edges) -> int:
        """The value with this label and these operands: one for all that compute it."""
        if kind in _COMMUTATIVE:
            operands = sorted((value, 0) for value, _ in operands)
        key = (label, *operands)
        found = self._known.get(key)
        if found is None:
            values = self.graph.values
            is_constant = all([values[o].is_constant for o, _ in operands])
            found = self._known[key] = self.new(label, kind, operands, 0, is_constant)
        return found

    def visit(
        self,
        computation: Computation,
        arguments: Sequence[tuple[Flow | None, Edges]] | None,
        kernel: Instruction | None = None,
    ) -> Flow:
        """Follows a computation.

        Args:
          arguments: of each parameter its flow, None for a value of its own that stands for
            whatever it may be; and the instructions that it comes from.
          kernel: the fusion that it is part of.

        Returns:
          The flow of its root.
        """
        self.visited.add(computation.id)
        graph = self.graph
        for i in computation.instructions:
            graph.kernel[i.id] = kernel or i
            if i.opcode == "parameter":
                flow, links = self._parameter(i, arguments)
            else:
                flow, links = self._follow(i, kernel)
            graph.flow[i.id] = flow
            self._place[i.id] = len(graph.order)
            graph.order.append(i)
            graph.links.append(links)
        return graph.flow[computation.root.id]

    def _parameter(
        self, i: Instruction, arguments: Sequence[tuple[Flow | None, Edges]] | None
    ) -> tuple[Flow, Edges]:
        number = i.parameter_number
        if arguments is not None and number < len(arguments):
            flow, links = arguments[number]
            if flow is not None:
                return flow, links
            label = self.numbering.of(("inner", number, self.numbering.of_shape(i.shape)))
            value = self.computed(label, "inner", [])
            self.graph.values[value].members.append(i)
            return value, links
        return self._argument(i, i.shape, [number]), []

    def _argument(self, i: Instruction, shape: Shape, path: list[int]) -> Flow:
        if shape.is_tuple:
            return tuple(self._argument(i, s, [*path, n]) for n, s in enumerate(shape.tuple_shapes))
        label = self.numbering.of(("argument", self.numbering.of_shape(shape)))
        place = self.numbering.of(("place", i.computation_id == self.module.entry.id, *path))
        value = self.new(label, "argument", [], place)
        self.graph.values[value].members.append(i)
        return value

    def _follow(self, i: Instruction, kernel: Instruction | None) -> tuple[Flow, Edges]:
        graph = self.graph
        flows = [graph.flow[o] for o in i.operand_ids]
        slots = 0 if i.opcode in _COMMUTATIVE or i is self.module.entry.root else 1
        links = [(self._place[o], n * slots) for n, o in enumerate(i.operand_ids)]
        called = [self.module.computations[c] for c in i.called_computation_ids]
        is_new = bool(called) and not any(c.id in self.visited for c in called)
        opcode = i.opcode
        if opcode in _FORMS and flows:
            return flows[0], links
        match opcode:
            case "tuple":
                return tuple(flows), links
            case "get-tuple-element":
                return self._element(flows[0], i.tuple_index), links
            case "copy-start":
                return (flows[0],) * 3, links
            case "copy-done":
                return self._element(flows[0], 0), links
            case "async-done":
                return self._element(flows[0], 1), links
            case "while" if is_new:
                return self._while(i, flows[0], links)
            case _ if opcode in _CALLS and is_new and len(called[0].parameters) == len(flows):
                arguments = [(f, [link]) for f, link in zip(flows, links, strict=True)]
                inside = kernel or (i if opcode == "fusion" else None)
                root = self.visit(called[0], arguments, inside)
                links.append((self._place[called[0].root.id], _ROOT_SLOT))
                return (tuple(flows), root) if opcode == "async-start" else root, links
            case "conditional" if is_new:
                for n, branch in enumerate(called):
                    self.visit(branch, [(flows[n + 1], [links[n + 1]])], kernel)
            case _:
                for computation in called:
                    if computation.id not in self.visited:
                        unknown = [(None, [])] * len(computation.parameters)
                        self.visit(computation, unknown, kernel)
                    # Some comparators do not read all of theirs.
                    links += [
                        (self._place[p.id], _PARAMETER_SLOT + p.parameter_number)
                        for p in computation.parameters
                    ]
        operands = [(v, n) for n, v in enumerate(v for f in flows for v in flat(f))]
        for n, computation in enumerate(called):
            links.append((self._place[computation.root.id], _ROOT_SLOT + n))
            roots = flat(graph.flow[computation.root.id])
            operands += ((v, _ROOT_SLOT * (n + 1) + k) for k, v in enumerate(roots))
        number = self.numbering.of_shape(i.shape)
        label = self.numbering.of((opcode, number, attributes(i)))
        value = self.computed(label, opcode, operands)
        graph.values[value].members.append(i)
        return value, links

    def _element(self, flow: Flow, index: int) -> Flow:
        if isinstance(flow, tuple):
            return flow[index]
        label = self.numbering.of(("element", index))
        return self.computed(label, "element", [(flow, 0)])

    def _while(self, i: Instruction, start: Flow, links: Edges) -> tuple[Flow, Edges]:
        body, condition = (self.module.computations[c] for c in i.called_computation_ids)
        carried: list[int] = []
        shapes = [shape for _, shape in i.shape.leaves()]
        steady = _handed_on(body)
        starts = [*flat(start)]
        state: list[int] = []
        for n, (value, shape) in enumerate(zip(starts, shapes, strict=True)):
            if n in steady:
                state.append(value)
                continue
            label = self.numbering.of(("carried", self.numbering.of_shape(shape)))
            carried.append(n)
            state.append(self.new(label, "carried", [(value, 0)]))
        flow, _ = _shaped(i.shape, state)
        decided = self.visit(condition, [(flow, links[:1])])
        made = [*flat(self.visit(body, [(flow, links[:1])]))]
        for n in carried:
            self.graph.values[state[n]].operands.append((made[n], 1))
        value = self.computed(self.numbering.of("while"), "while", [(v, 0) for v in flat(decided)])
        self.graph.values[value].members.append(i)
        roots = enumerate((condition.root, body.root))
        return flow, [*links, *((self._place[r.id], _ROOT_SLOT + n) for n, r in roots)]


def _shaped(shape: Shape, values: Sequence[int]) -> tuple[Flow, Sequence[int]]:
    """The first of `values` as a flow of that shape, and those that are left."""
    if not shape.is_tuple:
        return values[0], values[1:]
    parts: list[Flow] = []
    for element in shape.tuple_shapes:
        part, values = _shaped(element, values)
        parts.append(part)
    return tuple(parts), values


def _handed_on(body: Computation) -> set[int]:
    """Which elements of a flat loop state an iteration gives on as they came."""
    root = body.root
    if root.opcode != "tuple" or any(s.is_tuple for s in root.shape.tuple_shapes):
        return set()
    by_id = {i.id: i for i in body.instructions}
    operands = [by_id[o] for o in root.operand_ids]
    return {
        n
        for n, o in enumerate(operands)
        if o.opcode == "get-tuple-element"
        and o.tuple_index == n
        and by_id[o.operand_ids[0]].opcode == "parameter"
    }
