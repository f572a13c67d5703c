"""Which instructions may write their output over an operand that dies there.

    a ──► fusion(a, b) ──► c     c may take a's bytes when the fusion reads each element of a
                                 before it writes that element of c, and nobody reads a later

Where `aliasing` states what must share, this states what may: XLA's buffer assignment takes
the offer when the operand's life ends at the instruction. The rules are those of
HloDataflowAnalysis::CanShareOperandBufferWithUser (xla/hlo/analysis/
hlo_dataflow_analysis.cc), and on GPU those of GpuAliasInfo (xla/service/gpu/alias_info.cc).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from hlo_passes.analysis.aliasing import in_place_pairs
from hlo_passes.analysis.dataflow import Dataflow, Position
from hlo_passes.ir import Computation, Instruction, Module, Shape, ShapeIndex
from hlo_passes.memoize import memoized

Target = Literal["cpu", "gpu", "tpu"]

# Opcodes that compute each element of their output from the elements of their operands at
# the same place (xla/hlo/ir/hlo_instruction.cc, HloInstruction::IsElementwiseImpl).
ELEMENTWISE = frozenset(
    """abs round-nearest-afz round-nearest-even ceil clz convert bitcast-convert copy cosine acos
    acosh asin asinh atanh cosh sinh erf exponential exponential-minus-one floor imag
    is-finite log log-plus-one not negate popcnt real reduce-precision rsqrt logistic sign
    sine sqrt cbrt tan tanh add atan2 compare complex divide maximum minimum multiply power
    remainder subtract and or xor shift-left shift-right-arithmetic shift-right-logical
    stochastic-convert clamp select""".split()
)


def can_share(
    dataflow: Dataflow, target: Target, operand: Position, user: Instruction, index: ShapeIndex
) -> bool:
    """Whether output `index` of `user` may lie where `operand`, one of its operands, lies.

    Only the instruction counts here, not who else reads the operand.
    """
    module = dataflow.module
    if operand.instruction.opcode == "constant":
        return False
    equal = operand.shape == user.shape.at(index)
    if equal and any(
        pair.output_index == index
        and pair.operand_index == operand.index
        and user.operand_ids[pair.operand] == operand.instruction.id
        for pair in in_place_pairs(module, user)
    ):
        return True
    if target == "gpu":
        hint = _gpu_hint(module, operand, user, index)
        if hint is not None:
            return hint
    if target == "tpu" and any(
        at == index and user.operand_ids[n] == operand.instruction.id
        for n, at in said_to_share(user)
    ):
        return True
    if not equal:
        return False
    numbers = [n for n, o in enumerate(user.operand_ids) if o == operand.instruction.id]
    match user.opcode:
        case "fusion":
            return _fusion_may_share(module, user, numbers[0], target)
        case "while" | "conditional":
            return True
        case "dynamic-update-slice" | "scatter" | "set-dimension-size":
            return numbers == [0]
        case "triangular-solve":
            return numbers == [1]
        case "sort":
            if len(dataflow.users[operand.instruction.id]) != 1:
                return False
            return len(user.operand_ids) == 1 or numbers == [index[0]]
        case _:
            return _elementwise_on(module, user, numbers[0])


def _fusion_may_share(module: Module, fusion: Instruction, number: int, target: Target) -> bool:
    body = module.computations[fusion.called_computation_ids[0]]
    users = _users(body)
    parameter = body.parameters[number]
    kind = fusion.proto.fusion_kind
    # On TPU the epilogue of a convolution may write over any operand that it reads element by
    # element (seen with libtpu of jax 0.12; XLA's own rule below knows a root addition only).
    # Fusions that XLA:CPU hands to a library (YNNPACK) have no rule but that of single operations:
    # a loop's sum may lie where the one before lay.
    if kind in ("kLoop", "kInput") or (kind, target) in (("kOutput", "tpu"), ("kCustom", "cpu")):
        return all(
            i.opcode == "tuple"
            or _elementwise_on(module, i, n)
            or (target == "tpu" and _reduces(i, n))
            for i, n in _transitive_uses(parameter, users)
        )
    if kind == "kOutput" and body.root.opcode == "add":
        addends = [module.instructions[o] for o in body.root.operand_ids]
        products = [n for n, a in enumerate(addends) if a.opcode in ("convolution", "dot")]
        return bool(products) and users.get(parameter.id) == ((body.root, 1 - products[0]),)
    return False


def _reduces(i: Instruction, operand: int) -> bool:
    """Whether `i` is a reduction of an operand. On TPU it goes along with the elementwise work on
    what it reads, so that a fusion may leave a further result in place (seen with libtpu of jax
    0.12, for reductions of rows, of columns and of everything; XLA's own rule has none of it)::

        new, norm = fusion(old)        new = f(old), where old lay;   norm = reduce(new)

    What is made of the reduction and gets back to the shape of the operand goes through a
    broadcast, which is not elementwise.
    """
    return i.opcode == "reduce" and operand < len(i.operand_ids) // 2


def said_to_share(i: Instruction) -> Iterator[tuple[int, ShapeIndex]]:
    """Yields each operand of which libtpu says that a result lies in its bytes, and the result.

    Its buffer assignment writes that into the final module: lists of operands, and on from there
    results, that are one (dumps of libtpu of jax 0.12). They may be laid out differently.
    """
    if b'"indices"' not in i.proto.backend_config:
        return
    said: Mapping[str, Any] = i.backend_config.get("aliasing_operands", {})
    for together in said.get("lists", ()):
        numbers = [int(n) for n in together["indices"]]
        operands = [n for n in numbers if n < len(i.operand_ids)]
        for n in numbers[len(operands) :]:
            index = (n - len(i.operand_ids),) if i.shape.is_tuple else ()
            yield from ((operand, index) for operand in operands)


def _gpu_hint(
    module: Module, operand: Position, user: Instruction, index: ShapeIndex
) -> bool | None:
    match user.opcode:
        case "all-reduce" | "collective-broadcast":
            # NCCL works in place.
            return len(user.operand_ids) == 1 or (
                len(index) == 1 and user.operand_ids[index[0]] == operand.instruction.id
            )
        case "custom-call":
            return _gpu_custom_call_may_share(operand, user, index)
        case "fusion":
            return _gpu_fusion_may_share(module, operand, user, index)
        case _:
            return None


def _gpu_custom_call_may_share(operand: Position, user: Instruction, index: ShapeIndex) -> bool:
    match user.custom_call_target:
        case "__cublas$lt$matmul":
            # The bias may be overwritten.
            config: Mapping[str, object] = user.backend_config.get("gemm_backend_config", {})
            return (
                bool(config.get("beta"))
                and len(user.operand_ids) > 2
                and user.operand_ids[2] == operand.instruction.id
            )
        case "__cusolver$cholesky":
            return index == (0,)
        case _:
            return False


def _gpu_fusion_may_share(
    module: Module, operand: Position, user: Instruction, index: ShapeIndex
) -> bool:
    """Whether every path from the parameter to the output goes element by element."""
    if not _same_iteration_space(operand.instruction.shape, user.shape.at(index)):
        return False
    body = module.computations[user.called_computation_ids[0]]
    users = _users(body)
    output = body.root
    if output.opcode == "tuple":
        output = module.instructions[output.operand_ids[index[0]]]
    hero = output
    if hero.opcode == "bitcast":
        hero = module.instructions[hero.operand_ids[0]]
    reduction = _reduction_hero(module, user, body)
    parameter = body.parameters[user.operand_ids.index(operand.instruction.id)]
    queue, seen, found = [parameter], {parameter.id}, False
    for i in queue:
        found |= i is output
        if i is reduction:
            continue  # The emitter reduces first: what comes after cannot disturb.
        for u, number in users.get(i.id, ()):
            if u.id not in seen:
                seen.add(u.id)
                queue.append(u)
            if u is hero and u.opcode == "scatter":
                inputs = max(1, len(u.shape.tuple_shapes))
                if number < inputs and u.operand_ids.count(i.id) == 1:
                    continue
            if u is hero and u.opcode == "sort":
                # It sorts in place (seen in assignments of the plugin of jax 0.12).
                if number == index[0] and u.operand_ids.count(i.id) == 1:
                    continue
            if (
                hero.opcode == "dynamic-update-slice"
                and u.opcode == "dynamic-slice"
                and hero.operand_ids[0] == u.operand_ids[0]
                and u.shape == module.instructions[hero.operand_ids[1]].shape
            ):
                # Reading the very slice that is then written disturbs nobody.
                if u.shape.element_count != 1 and u.operand_ids[1:] != hero.operand_ids[2:]:
                    return False
            elif (
                (not _elementwise_on(module, u, number) or u.opcode == "copy")
                and u.opcode not in ("bitcast", "tuple")
                and u is not reduction
            ):
                if u is not hero or u.opcode != "dynamic-update-slice" or number != 1:
                    return False
    if body.root.opcode == "tuple" and hero.opcode not in ELEMENTWISE:
        others = (o for o in body.root.operand_ids if o != output.id)
        if any(o in seen for o in others):
            return False
    return found


def _same_iteration_space(a: Shape, b: Shape) -> bool:
    if a == b:
        return True
    return (
        a.is_array
        and b.is_array
        and a.element_count == b.element_count
        and a.byte_size == b.byte_size
    )


def _reduction_hero(module: Module, fusion: Instruction, body: Computation) -> Instruction | None:
    """The reduction that gives a reduction fusion its name, if it is one: an output, or what
    one is made of alone (xla/service/gpu/reduction_utils.cc)."""
    if fusion.proto.fusion_kind != "kInput":
        return None
    is_tuple = body.root.opcode == "tuple"
    for o in body.root.operand_ids if is_tuple else (body.root.id,):
        i = module.instructions[o]
        while i.opcode != "reduce" and len(i.operand_ids) == 1:
            i = module.instructions[i.operand_ids[0]]
        if i.opcode == "reduce":
            return i
    return None


def _elementwise_on(module: Module, i: Instruction, operand: int) -> bool:
    if i.opcode == "dynamic-update-slice":
        return operand == 0
    if i.opcode == "map":
        return True
    if i.opcode == "fusion":
        body = module.computations[i.called_computation_ids[0]]
        uses = _transitive_uses(body.parameters[operand], _users(body))
        return all(u.opcode == "tuple" or _elementwise_on(module, u, n) for u, n in uses)
    if i.opcode in ("select", "clamp"):
        # A scalar predicate or bound is broadcast.
        return module.instructions[i.operand_ids[operand]].shape.dimensions == i.shape.dimensions
    return i.opcode in ELEMENTWISE


_Users = Mapping[int, tuple[tuple[Instruction, int], ...]]


@memoized
def _users(body: Computation) -> _Users:
    users: dict[int, list[tuple[Instruction, int]]] = {}
    for i in body.instructions:
        for n, operand in enumerate(i.operand_ids):
            users.setdefault(operand, []).append((i, n))
    return {k: tuple(v) for k, v in users.items()}


def _transitive_uses(start: Instruction, users: _Users) -> list[tuple[Instruction, int]]:
    found: list[tuple[Instruction, int]] = []
    queue, seen = [start], {start.id}
    for i in queue:
        for u, n in users.get(i.id, ()):
            found.append((u, n))
            if u.id not in seen:
                seen.add(u.id)
                queue.append(u)
    return found
