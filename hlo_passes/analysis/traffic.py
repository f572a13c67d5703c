"""Which bytes an instruction reads and writes, and in which memory.

    %f = fusion(%cache S(0), %i)             reads   S(0): 1 row of %cache
           └ dynamic-slice(%cache, %i) ─►    writes  S(1): 1 row
    %f S(1)

An operand is read whole and an output written whole, with three exceptions, which hold at
the top level and inside fusions alike:

- of what is sliced or gathered, only the slice is read;
- a `dynamic-update-slice` or `scatter` works in place: it touches the update's bytes only;
- what has no bytes of its own (``bitcast``, ``tuple``, a parameter) moves none.

This is the rule of xla/service/hlo_cost_analysis.cc (FusionParameterReadBytes,
FusionCalculateUtilizations), but by memory space, and an element-wise instruction or a
reshape between the fusion's parameter and the slice is looked through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hlo_passes.analysis.async_chains import wrapped_by
from hlo_passes.ir import Computation, Instruction, Module, Shape, ShapeIndex
from hlo_passes.memoize import memoized

NO_TRAFFIC_OPCODES = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "call",
        "conditional",
        "constant",
        "domain",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
        "while",
    }
)
"""Instructions that move no bytes themselves; what control flow calls moves its own."""

SLICES = frozenset({"dynamic-slice", "gather", "slice"})
"""Of operand 0 these read as many bytes as they give."""

UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""In-place updates of operand 0, with the place of the operand that holds the new bytes."""

# One element of the result needs one element of the operand.
_PER_ELEMENT = frozenset(
    {"abs", "bitcast", "bitcast-convert", "convert", "copy", "exponential", "negate", "reshape"}
    | {"reduce-precision", "tanh", "transpose"}
)


type Part = tuple[int, ShapeIndex]
"""Part of what an instruction gives: its id, and which part."""


@dataclass(frozen=True, slots=True)
class Accesses:
    """Bytes that one execution of an instruction moves, by what is read and written.

    What an asynchronous start wraps reads and writes its own computation's parts.
    """

    read: Mapping[Part, int]
    written: Mapping[Part, int]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one execution of an instruction moves, by memory space."""

    read: Mapping[int, int] = field(default_factory=dict[int, int])
    written: Mapping[int, int] = field(default_factory=dict[int, int])


@memoized
def traffic(module: Module) -> Mapping[int, Traffic]:
    """Returns the traffic of every instruction outside fusions, by instruction id.

    Of an asynchronous operation the link that runs what it wraps has the traffic of that (the
    start, unless its operands are bound late), and its done none. Instructions
    that move nothing are left out. O(instructions).
    """
    found = {
        id_: Traffic(_by_space(module, moved.read), _by_space(module, moved.written))
        for id_, moved in accesses(module).items()
    }
    return {id_: moved for id_, moved in found.items() if moved.read or moved.written}


@memoized
def accesses(module: Module) -> Mapping[int, Accesses]:
    """Returns what every instruction outside fusions reads and writes, by instruction id: as
    `traffic`, by the array. O(instructions)."""
    fused = _Fusions(module)
    found: dict[int, Accesses] = {}
    for computation in module.computations.values():
        if computation.is_fusion:
            continue
        for instruction in computation.instructions:
            moved = _of(instruction, module, fused)
            if moved is not None:
                found[instruction.id] = moved
    return found


def _by_space(module: Module, parts: Mapping[Part, int]) -> Mapping[int, int]:
    sizes: dict[int, int] = {}
    for (id_, index), size in parts.items():
        if size:
            space = module.instructions[id_].shape.at(index).memory_space
            sizes[space] = sizes.get(space, 0) + size
    return sizes


type _Sizes = dict[Part, int]


def _of(instruction: Instruction, module: Module, fused: _Fusions) -> Accesses | None:
    opcode = instruction.opcode
    if opcode in NO_TRAFFIC_OPCODES:
        return None
    wrapped = wrapped_by(module, instruction)
    if wrapped is None and (opcode == "async-start" or opcode.endswith(("-done", "-update"))):
        return None
    read: _Sizes = {}
    written: _Sizes = {}
    operands = [module.instructions[i] for i in dict.fromkeys(instruction.operand_ids)]
    if opcode == "copy-start":
        _add(read, instruction, (1,))
        _add(written, instruction, (0,))
    elif wrapped is not None:
        for i in wrapped.instructions:
            if (moved := _of(i, module, fused)) is not None:
                _add_all(read, moved.read)
                _add_all(written, moved.written)
    elif opcode == "fusion":
        (body,) = (module.computations[i] for i in instruction.called_computation_ids)
        for i, parameter in zip(instruction.operand_ids, body.parameters, strict=True):
            _add(read, module.instructions[i], (), fused.share(parameter))
        for index, share in fused.written(body, instruction.shape):
            _add(written, instruction, index, share)
    elif opcode in SLICES:
        source, *indices = operands
        read[source.id, ()] = instruction.shape.byte_size
        _add(written, instruction)
        for i in indices:
            _add(read, i)
    elif opcode in UPDATES:
        _, *rest = operands
        update = module.instructions[instruction.operand_ids[UPDATES[opcode]]]
        written[instruction.id, ()] = update.shape.byte_size
        for i in rest:
            _add(read, i)
    else:
        # A collective's start repeats its operands in front of its result, as aliases.
        result = instruction.shape
        repeats = opcode.endswith("-start") and result.is_tuple and len(result.tuple_shapes) > 1
        for i in operands:
            _add(read, i)
        _add(written, instruction, (1,) if repeats else ())
    return Accesses(read, written)


class _Fusions:
    """What the bodies of fusions touch of their parameters and outputs; memoized."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._users: dict[int, list[tuple[Instruction, int]]] = defaultdict(list)
        # The root of a fusion, and the fused fusion that hands it on, if one does.
        self._outputs: dict[int, Instruction | None] = {}
        for computation in module.computations.values():
            if not computation.is_fusion:
                continue
            self._outputs.setdefault(computation.root.id, None)
            for user in computation.instructions:
                for place, operand in enumerate(user.operand_ids):
                    self._users[operand].append((user, place))
                if user.opcode == "fusion":
                    (body,) = user.called_computation_ids
                    self._outputs[module.computations[body].root.id] = user
        self._shares: dict[int, float] = {}

    def share(self, value: Instruction) -> float:
        """The fraction of a fused value's elements that the fusion needs, at most 1."""
        if value.id not in self._shares:
            needed = sum(self._share_for(value, *use) for use in self._users[value.id])
            if value.id in self._outputs:
                caller = self._outputs[value.id]
                needed += 1.0 if caller is None else self.share(caller)
            self._shares[value.id] = min(1.0, needed)
        return self._shares[value.id]

    def _share_for(self, value: Instruction, user: Instruction, place: int) -> float:
        if user.opcode in _PER_ELEMENT:
            return self.share(user)
        if user.opcode in SLICES and place == 0:
            return user.shape.element_count / max(1, value.shape.element_count)
        if user.opcode in UPDATES and place == 0:
            return 0.0
        if user.opcode == "fusion":
            (body,) = user.called_computation_ids
            return self.share(self._module.computations[body].parameters[place])
        return 1.0

    def written(self, body: Computation, shape: Shape) -> Iterator[tuple[ShapeIndex, float]]:
        """Yields each output of a fusion with this body and of this shape, and the fraction of it
        that is written."""
        if body.root.opcode != "tuple":
            yield (), self._share_written(body.root, shape)
            return
        for n, id_ in enumerate(body.root.operand_ids):
            output = self._module.instructions[id_]
            yield (n,), self._share_written(output, shape.tuple_shapes[n])

    def _share_written(self, output: Instruction, shape: Shape) -> float:
        # What has parts of its own (a variadic sort or reduce) is written whole.
        return 1.0 if shape.is_tuple else self._updated_share(output)

    def _updated_share(self, output: Instruction) -> float:
        while output.opcode in _PER_ELEMENT or output.opcode == "fusion":
            if output.opcode == "fusion":
                output = self._module.computations[output.called_computation_ids[0]].root
            else:
                output = self._module.instructions[output.operand_ids[0]]
        if output.opcode not in UPDATES:
            return 1.0
        update = self._module.instructions[output.operand_ids[UPDATES[output.opcode]]]
        return min(1.0, update.shape.element_count / max(1, output.shape.element_count))


def _add(total: _Sizes, i: Instruction, index: ShapeIndex = (), share: float = 1.0) -> None:
    """Adds the bytes of a part of what an instruction gives, or that share of them."""
    for rest, leaf in i.shape.at(index).leaves():
        part = i.id, (*index, *rest)
        total[part] = total.get(part, 0) + round(leaf.byte_size * share)


def _add_all(total: _Sizes, more: Mapping[Part, int]) -> None:
    for part, size in more.items():
        total[part] = total.get(part, 0) + size
