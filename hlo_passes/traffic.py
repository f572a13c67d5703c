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
from collections.abc import Mapping
from dataclasses import dataclass, field

from hlo_passes.ir import Computation, Instruction, Module, Shape
from hlo_passes.once import once

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

_SLICES = ("dynamic-slice", "gather", "slice")

# In-place updates of operand 0, with the place of the operand that holds the new bytes.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}

# One element of the result needs one element of the operand.
_PER_ELEMENT = frozenset(
    {"abs", "bitcast", "bitcast-convert", "convert", "copy", "exponential", "negate", "reshape"}
    | {"reduce-precision", "tanh", "transpose"}
)


type _Bytes = dict[int, int]  # by memory space


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one execution of an instruction moves, by memory space."""

    read: Mapping[int, int] = field(default_factory=dict[int, int])
    written: Mapping[int, int] = field(default_factory=dict[int, int])


@once
def traffic(module: Module) -> Mapping[int, Traffic]:
    """Returns the traffic of every instruction outside fusions, by instruction id.

    An asynchronous start has the traffic of what it wraps; its done has none. Instructions
    that move nothing are left out. O(instructions).
    """
    fused = _Fusions(module)
    found: dict[int, Traffic] = {}
    for computation in module.computations.values():
        if computation.is_fusion:
            continue
        for instruction in computation.instructions:
            moved = _of(instruction, module, fused)
            if moved is not None and (moved.read or moved.written):
                found[instruction.id] = moved
    return found


def _of(instruction: Instruction, module: Module, fused: _Fusions) -> Traffic | None:
    opcode = instruction.opcode
    if opcode in NO_TRAFFIC_OPCODES or opcode.endswith(("-done", "-update")):
        return None
    if opcode == "copy-start":
        destination, source = instruction.shape.tuple_shapes[:2]
        return Traffic(
            {source.memory_space: source.byte_size},
            {destination.memory_space: destination.byte_size},
        )
    read: _Bytes = {}
    written: _Bytes = {}
    operands = [module.instructions[i] for i in dict.fromkeys(instruction.operand_ids)]
    if opcode == "async-start":
        (wrapped,) = instruction.called_computation_ids
        for i in module.computations[wrapped].instructions:
            if (moved := _of(i, module, fused)) is not None:
                _add_all(read, moved.read)
                _add_all(written, moved.written)
    elif opcode == "fusion":
        (body,) = (module.computations[i] for i in instruction.called_computation_ids)
        for i, parameter in zip(instruction.operand_ids, body.parameters, strict=True):
            _add(read, module.instructions[i].shape, fused.share(parameter))
        fused.add_written(written, body, instruction.shape)
    elif opcode in _SLICES:
        source, *indices = operands
        read[source.shape.memory_space] = instruction.shape.byte_size
        _add(written, instruction.shape)
        for i in indices:
            _add(read, i.shape)
    elif opcode in _UPDATES:
        _, *rest = operands
        update = module.instructions[instruction.operand_ids[_UPDATES[opcode]]]
        written[instruction.shape.memory_space] = update.shape.byte_size
        for i in rest:
            _add(read, i.shape)
    else:
        # A collective's start repeats its operands in front of its result, as aliases.
        result = instruction.shape
        if opcode.endswith("-start") and result.is_tuple and len(result.tuple_shapes) > 1:
            result = result.tuple_shapes[1]
        for i in operands:
            _add(read, i.shape)
        _add(written, result)
    return Traffic(_without_none(read), _without_none(written))


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
        if user.opcode in _SLICES and place == 0:
            return user.shape.element_count / max(1, value.shape.element_count)
        if user.opcode in _UPDATES and place == 0:
            return 0.0
        if user.opcode == "fusion":
            (body,) = user.called_computation_ids
            return self.share(self._module.computations[body].parameters[place])
        return 1.0

    def add_written(self, written: _Bytes, body: Computation, shape: Shape) -> None:
        """Adds the bytes that a fusion with this body writes to its output of this shape."""
        outputs, shapes = [body.root], [shape]
        if body.root.opcode == "tuple":
            outputs = [self._module.instructions[i] for i in body.root.operand_ids]
            shapes = shape.tuple_shapes
        for output, part in zip(outputs, shapes, strict=True):
            # A part with parts of its own (a variadic sort or reduce) is written whole.
            _add(written, part, 1.0 if part.is_tuple else self._updated_share(output))

    def _updated_share(self, output: Instruction) -> float:
        while output.opcode in _PER_ELEMENT or output.opcode == "fusion":
            if output.opcode == "fusion":
                output = self._module.computations[output.called_computation_ids[0]].root
            else:
                output = self._module.instructions[output.operand_ids[0]]
        if output.opcode not in _UPDATES:
            return 1.0
        update = self._module.instructions[output.operand_ids[_UPDATES[output.opcode]]]
        return min(1.0, update.shape.element_count / max(1, output.shape.element_count))


def _add(total: _Bytes, shape: Shape, share: float = 1.0) -> None:
    """Adds the bytes of a shape, or that share of them, to those of its memory space."""
    for _, leaf in shape.leaves() if shape.is_tuple else (((), shape),):
        space = leaf.memory_space
        total[space] = total.get(space, 0) + round(leaf.byte_size * share)


def _add_all(total: _Bytes, more: Mapping[int, int]) -> None:
    for space, size in more.items():
        total[space] = total.get(space, 0) + size


def _without_none(sizes: _Bytes) -> _Bytes:
    return {space: size for space, size in sizes.items() if size}
