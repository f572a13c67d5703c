"""The body of a loop as a program of its own, so that it is planned as the entry is.

    body       s = parameter(0)   x = s[0]   w = s[1]   y = dot(x, copy(w))   root (y, w)
    program    x = parameter(0), donated   w = parameter(1)   y = dot(x, copy(w))   root (y)

What every iteration hands on as it is (a weight) is an argument; what it changes is an argument
that is donated to its successor. So a weight on the host that the body brings to the device is
what such a weight of the entry is, its readers are those of one iteration, and what is on the
device between two iterations is the arguments. Ids and names of all instructions stay, but for the
state's id, where something that was added has that now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.analysis.host_copies import host_copies
from hlo_passes.ir import HOST_MEMORY_SPACE, Computation, Instruction, Module
from hlo_passes.memoize import memoized
from hlo_passes.proto import hlo_pb2


@dataclass(frozen=True, eq=False)
class Body:
    """A body of a loop, which nothing else runs.

    Attributes:
      module: of which it is one.
      caller: the ``while`` that runs it.
    """

    module: Module
    computation: Computation
    caller: Instruction

    @cached_property
    def program(self) -> Module:
        """The module with the body for its entry. The other computations are all there."""
        return _as_program(self.module, self.computation)

    @cached_property
    def arguments(self) -> Mapping[int, int]:
        """Parameter number of `program` to that of the argument of the module's entry which it is,
        for the weights that the body brings from the host and that are one."""
        elements = _read(self.computation)
        numbers = {c.parameter.parameter_number for c in host_copies(self.program)}
        sources = ((n, _argument(self.module, self.caller, elements[n])) for n in sorted(numbers))
        return {n: argument for n, argument in sources if argument is not None}

    @cached_property
    def is_fetching(self) -> bool:
        """Whether it copies what it hands on unchanged from host memory to the device."""
        elements = _elements(self.computation) or ()
        return any(_is_fetched(self.computation, e) for e in elements) and bool(
            host_copies(self.program)
        )


@memoized
def loop_bodies(module: Module) -> tuple[Body, ...]:
    """Returns the bodies of loops, callees first. O(instructions).

    A body whose state is no flat tuple of arrays is left out.
    """
    callers = call_graph(module).callers
    found: list[Body] = []
    for computation in module.computations.values():
        calling = callers.get(computation.id, ())
        if len(calling) != 1 or calling[0].opcode != "while":
            continue
        (caller,) = calling
        is_body = caller.called_computation_ids[0] == computation.id
        if is_body and _elements(computation) is not None:
            found.append(Body(module, computation, caller))
    return tuple(found)


def fetching_bodies(module: Module) -> tuple[Body, ...]:
    """Returns those of `loop_bodies` that bring whole weights from the host."""
    return tuple(body for body in loop_bodies(module) if body.is_fetching)


def copies_of_bodies(module: Module) -> frozenset[int]:
    """Returns the ids of the starts of all copies that `fetching_bodies` are planned for."""
    return frozenset(
        copy.start.id for body in fetching_bodies(module) for copy in host_copies(body.program)
    )


def with_body(module: Module, body: Body, program: Module) -> Module:
    """Returns `module` with the body as `program` has it.

    Args:
      program: `body.program`, whose entry and schedule were edited. Further computations may
        have been added.
    """
    proto = module.to_proto()
    edited = program.to_proto()
    written = next(c for c in edited.computations if c.id == body.computation.id)
    own = next(c for c in proto.computations if c.id == body.computation.id)
    (state,) = body.computation.parameters
    original = {i.id: i for i in own.instructions}
    elements = [original[i.id] for i in written.instructions if i.opcode == "parameter"]
    free = max(i.id for i in written.instructions) + 1
    if state.id in {i.id for i in written.instructions}:
        # The program has no state: its number went to something that was added.
        original[state.id].id = free
        for element in elements:
            element.operand_ids[:] = [free]
    state_id = original[state.id].id
    instructions = [original[state.id], *elements]
    instructions += (i for i in written.instructions if i.opcode != "parameter")
    root = next(i for i in instructions if i.id == written.root_id)
    changed = iter(tuple(root.operand_ids))
    parameters = {
        original[i.id].tuple_index: i.id for i in written.instructions if i.opcode == "parameter"
    }
    steady = _steady(module, body.computation)
    operands = [
        parameters[k] if k in steady else next(changed)
        for k in range(len(state.shape.tuple_shapes))
    ]
    copies = [hlo_pb2.HloInstructionProto.FromString(i.SerializeToString()) for i in instructions]
    restored = next(i for i in copies if i.id == written.root_id)
    restored.operand_ids[:] = operands
    restored.shape.CopyFrom(original[body.computation.root.id].shape)
    known = {c.id for c in proto.computations}
    added = [c for c in edited.computations if c.id not in known]
    computations = []
    for c in proto.computations:
        computations += added if c.id == own.id else []
        computations.append(c)
    computations = [type(c).FromString(c.SerializeToString()) for c in computations]
    del proto.computations[:]
    proto.computations.extend(computations)
    own = next(c for c in proto.computations if c.id == body.computation.id)
    del own.instructions[:]
    own.instructions.extend(copies)
    own.root_id = written.root_id
    sequence = edited.schedule.sequences[own.id].instruction_ids
    proto.schedule.sequences[own.id].instruction_ids[:] = [state_id, *sequence]
    for c in added:
        if c.id in edited.schedule.sequences:
            proto.schedule.sequences[c.id].CopyFrom(edited.schedule.sequences[c.id])
    return Module(proto).with_learned(module.learned)


def _elements(body: Computation) -> list[Instruction] | None:
    """The elements of a body's state, as it reads them; None where it is no flat tuple of arrays
    that is taken apart and put together again."""
    if len(body.parameters) != 1 or body.root.opcode != "tuple":
        return None
    (state,) = body.parameters
    if not all(s.is_array for s in state.shape.tuple_shapes):
        return None
    readers = [i for i in body.instructions if state.id in i.operand_ids]
    if any(i.opcode != "get-tuple-element" for i in readers) or body.root.control_predecessor_ids:
        return None
    return readers


def _read(body: Computation) -> list[int]:
    """The elements of a body's state that it reads: of its program, as it numbers them, the
    parameters."""
    return sorted({i.tuple_index for i in _elements(body) or ()})


def _is_fetched(body: Computation, element: Instruction) -> bool:
    if element.shape.memory_space != HOST_MEMORY_SPACE:
        return False
    return any(i.opcode == "copy-start" and element.id in i.operand_ids for i in body.instructions)


def _steady(module: Module, body: Computation) -> frozenset[int]:
    """The elements of the state that an iteration hands on as they are."""
    (state,) = body.parameters
    given = (module.instructions[o] for o in body.root.operand_ids)
    return frozenset(
        k
        for k, i in enumerate(given)
        if i.opcode == "get-tuple-element" and i.operand_ids == (state.id,) and i.tuple_index == k
    )


def _as_program(module: Module, body: Computation) -> Module:
    proto = module.to_proto()
    own = next(c for c in proto.computations if c.id == body.id)
    (state,) = body.parameters
    steady = _steady(module, body)
    numbers = {k: n for n, k in enumerate(_read(body))}
    first: dict[int, int] = {}
    same: dict[int, int] = {}
    kept: list[hlo_pb2.HloInstructionProto] = []
    for i in (module.instructions[n.id].proto for n in body.instructions):
        if i.id == state.id:
            continue
        made = hlo_pb2.HloInstructionProto.FromString(i.SerializeToString())
        if i.opcode == "get-tuple-element" and i.operand_ids[0] == state.id:
            same[i.id] = first.setdefault(i.tuple_index, i.id)
            if same[i.id] != i.id:
                continue
            made.opcode, made.parameter_number = "parameter", numbers[i.tuple_index]
            del made.operand_ids[:]
            made.tuple_index = 0
        kept.append(made)
    there = {i.id for i in kept}
    for i in kept:
        i.operand_ids[:] = [same.get(o, o) for o in i.operand_ids]
        i.control_predecessor_ids[:] = [c for c in i.control_predecessor_ids if c in there]
    root = next(i for i in kept if i.id == body.root.id)
    changed = [k for k in range(len(state.shape.tuple_shapes)) if k not in steady]
    operands = [root.operand_ids[k] for k in changed]
    shapes = [hlo_pb2.ShapeProto.FromString(s.SerializeToString()) for s in root.shape.tuple_shapes]
    root.operand_ids[:] = operands
    del root.shape.tuple_shapes[:]
    root.shape.tuple_shapes.extend(shapes[k] for k in changed)
    del own.instructions[:]
    own.instructions.extend(kept)
    proto.schedule.sequences[body.id].instruction_ids[:] = [i.id for i in kept]
    proto.entry_computation_id, proto.entry_computation_name = body.id, body.name
    for field in ("host_program_shape", "input_output_alias", "buffer_donor"):
        proto.ClearField(field)
    for n, k in enumerate(changed):
        if k in numbers:
            entry = proto.input_output_alias.entries.add()
            entry.output_shape_index[:] = [n]
            entry.parameter_number = numbers[k]
    return Module(proto).with_learned(module.learned)


def _argument(module: Module, caller: Instruction, element: int) -> int | None:
    """The number of the entry's argument that a loop takes as that element of its state."""
    for state in _states(module, caller):
        if state.opcode != "tuple":
            return None
        given = module.instructions[state.operand_ids[element]]
        if given.opcode == "parameter" and given.computation_id == module.entry.id:
            return given.parameter_number
        if given.opcode != "get-tuple-element":
            return None
        outer = module.computations[given.computation_id]
        if given.operand_ids[0] not in {p.id for p in outer.parameters}:
            return None
        element = given.tuple_index
        if element not in _steady(module, outer):
            return None
    return None


def _states(module: Module, caller: Instruction) -> Iterator[Instruction]:
    """What a loop begins with, then the loop around it, and so on."""
    callers = call_graph(module).callers
    while True:
        yield module.instructions[caller.operand_ids[0]]
        calling = callers.get(caller.computation_id, ())
        if len(calling) != 1 or calling[0].opcode != "while":
            return
        (caller,) = calling
