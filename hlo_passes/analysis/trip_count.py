"""How often a `while` runs, where that can be known before it does.

A counted loop, as JAX's ``scan`` and ``fori_loop`` make them::

    init ── tuple(0, x, ...) ──► while ──► condition: compare(get-tuple-element(state, 0), 6), LT
                                   └─────► body: tuple(add(get-tuple-element(state, 0), 1), ...)

XLA writes the count it finds into the backend_config as ``known_trip_count``
(xla/service/while_loop_trip_count_annotator.cc). XLA:TPU's scheduled modules lack it, so the
pattern above is matched again, the simple part of xla/service/while_loop_analysis.cc.
"""

from __future__ import annotations

from hlo_passes.ir import Computation, Instruction, Module

# What hands its operand on; XLA puts copies of the counter around its uses.
_COPIES = ("bitcast", "copy", "convert", "reshape")


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Returns how often the body of the `while` instruction `loop` runs, or None.

    Matches an integer counter that grows or shrinks by a constant and is compared with one.
    """
    known = loop.backend_config.get("known_trip_count")
    if known is not None:
        return int(known["n"])
    body, condition = _body_and_condition(module, loop)
    test = condition.root
    if test.opcode != "compare":
        return None
    counter, bound = (_source(module, i) for i in test.operand_ids)
    direction = test.proto.comparison_direction
    if _state_index(condition, counter) is None:
        counter, bound = bound, counter
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    index = _state_index(condition, counter)
    limit = _invariant(module, loop, condition, bound)
    if index is None or limit is None:
        return None
    start = _initial(module, loop, index)
    step = _step(module, loop, body, index)
    if start is None or step is None or step == 0:
        return None
    return _count(start, step, limit, direction)


def _count(start: int, step: int, limit: int, direction: str) -> int | None:
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    elif direction == "NE":
        if (limit - start) % step:
            return None
    elif direction not in ("LT", "GT"):
        return None
    grows = direction in ("LT", "LE") or (direction == "NE" and limit >= start)
    if grows != (step > 0):
        return None
    return max(0, -(-(limit - start) // step))


def _body_and_condition(module: Module, loop: Instruction) -> tuple[Computation, Computation]:
    # HloInstruction::while_body() is called computation 0, while_condition() is 1.
    body, condition = loop.called_computation_ids
    return module.computations[body], module.computations[condition]


def _source(module: Module, instruction_id: int) -> Instruction:
    instruction = module.instructions[instruction_id]
    while instruction.opcode in _COPIES:
        instruction = module.instructions[instruction.operand_ids[0]]
    return instruction


def _state_index(computation: Computation, value: Instruction) -> int | None:
    """Which element of the loop's state `value` is, if it is one."""
    if value.opcode != "get-tuple-element":
        return None
    (state,) = computation.parameters
    return value.tuple_index if value.operand_ids[0] == state.id else None


def _constant(value: Instruction) -> int | None:
    if value.opcode != "constant" or value.shape.dimensions:
        return None
    literal = value.proto.literal
    found = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
    return found[0] if found else None


def _initial(module: Module, loop: Instruction, index: int) -> int | None:
    state = _source(module, loop.operand_ids[0])
    if state.opcode != "tuple":
        return None
    return _constant(_source(module, state.operand_ids[index]))


def _invariant(
    module: Module, loop: Instruction, computation: Computation, value: Instruction
) -> int | None:
    """The value of a constant, or of an element of the state that the body hands through."""
    index = _state_index(computation, value)
    if index is None:
        return _constant(value)
    body, _ = _body_and_condition(module, loop)
    if body.root.opcode != "tuple":
        return None
    handed_on = _source(module, body.root.operand_ids[index])
    if _state_index(body, handed_on) != index:
        return None
    return _initial(module, loop, index)


def _step(module: Module, loop: Instruction, body: Computation, index: int) -> int | None:
    if body.root.opcode != "tuple":
        return None
    update = _source(module, body.root.operand_ids[index])
    if update.opcode not in ("add", "subtract"):
        return None
    first, second = (_source(module, i) for i in update.operand_ids)
    if update.opcode == "add" and _state_index(body, first) != index:
        first, second = second, first
    if _state_index(body, first) != index:
        return None
    step = _invariant(module, loop, body, second)
    return -step if step is not None and update.opcode == "subtract" else step
