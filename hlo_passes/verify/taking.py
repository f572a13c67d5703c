"""Where may a result lie in the bytes of an operand that dies there? See `verify`.

    c = fusion(a, b)     c may take a's bytes when each element of a has been read before that
                         element of c is written

HloDataflowAnalysis::CanShareOperandBufferWithUser (xla/hlo/analysis/hlo_dataflow_analysis.cc),
and for GPUs FusionCanShareBufferHint (xla/service/gpu/alias_info.cc), put as one question: of
what a fusion does with a parameter, does anything but element by element work on it? What lies
in an operand's bytes *by duty* is in `memory`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hlo_passes.ir import Computation, Instruction, Module, Shape, ShapeIndex
from hlo_passes.verify.memory import Memory

# What the specification of operations calls element-wise (HloInstruction::IsElementwise).
_UNARY = frozenset(
    """abs acos acosh asin asinh atanh bitcast-convert cbrt ceil clz convert copy cos cosine cosh
    erf exponential exponential-minus-one floor imag is-finite log log-plus-one logistic negate
    not popcnt real reduce-precision round-nearest-afz round-nearest-even rsqrt sign sine sinh
    sqrt tan tanh""".split()
)
_BINARY = frozenset(
    """add and atan2 compare complex divide maximum minimum multiply or power remainder
    shift-left shift-right-arithmetic shift-right-logical stochastic-convert subtract
    xor""".split()
)
_SELECTING = frozenset(("clamp", "select"))
_ELEMENTWISE = _UNARY | _BINARY | _SELECTING | {"map"}

type _Users = Mapping[int, list[tuple[Instruction, int]]]


class Taking:
    """Which results of a module may take an operand's bytes.

    Args:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``, whose compiler has rules of its own; ``""``
        where it is not known, and what any of them does is allowed.
    """

    def __init__(self, module: Module, memory: Memory, platform: str = "") -> None:
        self._module, self._memory = module, memory
        self._platform = platform
        self._gpu = platform in ("gpu", "")
        self._tpu = platform in ("tpu", "")
        self._users: dict[int, _Users] = {}

    def is_allowed(self, i: Instruction, index: ShapeIndex, operand: int, part: ShapeIndex) -> bool:
        """Whether result `index` of `i` may lie where part `part` of operand number `operand`
        does, if nobody reads that later."""
        given = self._module.instructions[i.operand_ids[operand]]
        if given.opcode == "constant":
            return False
        shape, result = given.shape.at(part), i.shape.at(index)
        if self._gpu and i.opcode == "fusion":
            is_allowed = self._in_gpu_fusion(i, index, operand, shape)
            if is_allowed or self._platform:
                return is_allowed
        if shape != result:
            is_alike = self._tpu and i.opcode == "fusion" and _is_as_large(shape, result)
            return is_alike and self._stays_in_tpu_fusion(i, operand)
        once = i.operand_ids.count(given.id) == 1
        match i.opcode:
            case "fusion":
                return self._in_fusion(i, operand)
            case "conditional" | "while":
                return True
            case "dynamic-update-slice" | "scatter" | "set-dimension-size":
                return operand == 0 and once
            case "triangular-solve":
                return operand == 1 and once
            case "sort":
                return once and (not index or operand == index[0])
            case "all-reduce" | "collective-broadcast" if self._gpu:
                return not index or operand == index[0]
            case "custom-call" if self._gpu:
                return self._in_gpu_call(i, index, operand)
            case "call":
                return self._in_call(i, index, operand, part)
            case _:
                return self._is_elementwise(i, operand)

    def _in_call(
        self, call: Instruction, index: ShapeIndex, operand: int, part: ShapeIndex
    ) -> bool:
        """Whether all have read the operand when the result is written, what writes it element
        by element."""
        body = self._body(call)
        held = self._memory.walk(body).held
        given, result = held[body.parameters[operand].id][part], held[body.root.id][index]
        maker = result.writer
        return all(end < result.place or i is maker for i, end in given.reads) and all(
            self._is_elementwise(maker, n)
            for n, o in enumerate(maker.operand_ids)
            if given in held[o].values()
        )

    def _is_elementwise(self, i: Instruction, operand: int) -> bool:
        """Whether `i` reads each element of an operand for that element of its result only."""
        if i.opcode == "dynamic-update-slice":
            return operand == 0
        if i.opcode == "fusion":
            return self._in_fusion(i, operand)
        of_operand = self._module.instructions[i.operand_ids[operand]].shape
        return i.opcode in _ELEMENTWISE and of_operand.dimensions == i.shape.dimensions

    def _in_fusion(self, fusion: Instruction, operand: int) -> bool:
        body = self._body(fusion)
        users = self._users_in(body)
        parameter = body.parameters[operand]
        kind = fusion.proto.fusion_kind
        # What XLA:TPU fuses to a convolution or product reads its other operands so, too, and what
        # XLA:CPU hands to a library.
        if (
            kind in ("kInput", "kLoop")
            or (kind == "kOutput" and self._tpu)
            or (kind == "kCustom" and self._platform in ("cpu", ""))
        ):
            # In fusions of XLA:TPU bitcasts pass elements on, too: it gives such a fusion's result
            # the place of a loop's state that the fusion reads.
            # It takes each element once, for a sum and for what it leaves there. What is made of
            # the sum and read beside the operand needs two rounds: it comes by a broadcast.
            passing = ("tuple", "bitcast") if self._tpu else ("tuple",)
            return all(
                u.opcode in passing
                or (self._tpu and u.opcode == "reduce" and n < len(u.operand_ids) // 2)
                or self._is_elementwise(u, n)
                for u, n in _reached(parameter, users)
            )
        root = body.root
        if kind == "kOutput" and root.opcode == "add":
            products = [
                n
                for n, o in enumerate(root.operand_ids)
                if self._module.instructions[o].opcode in ("convolution", "dot")
            ]
            return bool(products) and users.get(parameter.id) == [(root, 1 - products[0])]
        return False

    def _stays_in_tpu_fusion(self, fusion: Instruction, operand: int) -> bool:
        """Whether each element lies where it lay, though the shape is another: bitcasts move
        nothing, and what works element by element keeps to one layout (libtpu of jax 0.12 says in
        its final modules that such a result has its operand's place)."""
        body = self._body(fusion)
        reached = _reached(body.parameters[operand], self._users_in(body))
        return self._in_fusion(fusion, operand) and all(
            u.shape.layout == self._module.instructions[u.operand_ids[n]].shape.layout
            for u, n in reached
            if u.opcode not in ("bitcast", "reduce", "tuple")
        )

    def _in_gpu_fusion(
        self, fusion: Instruction, index: ShapeIndex, operand: int, given: Shape
    ) -> bool:
        """Whether an emitter that goes through the result in one pass reads, of the parameter,
        what it is about to write and nothing else."""
        if not _is_as_large(given, fusion.shape.at(index)):
            return False
        body = self._body(fusion)
        output = body.root
        if output.opcode == "tuple":
            output = self._module.instructions[output.operand_ids[index[0]]]
        hero = output
        if hero.opcode == "bitcast":
            hero = self._module.instructions[hero.operand_ids[0]]
        # The emitter of reductions reads all before it writes.
        is_end = self._reductions(body) if fusion.proto.fusion_kind == "kInput" else set[int]()
        parameter = body.parameters[operand]
        reached = _reached(parameter, self._users_in(body), is_end)
        found = {parameter.id, *(u.id for u, _ in reached)}
        if output.id not in found:
            return False
        for u, n in reached:
            if u.id in is_end or u.opcode in ("bitcast", "tuple"):
                continue
            if u is hero and self._updates_itself(u, index, n):
                continue
            if u.opcode == "dynamic-slice" and self._is_slice_updated(u, hero):
                continue
            if u.opcode == "copy" or not self._is_elementwise(u, n):
                return False
        if body.root.opcode == "tuple" and hero.opcode not in _ELEMENTWISE:
            return not any(o in found for o in body.root.operand_ids if o != output.id)
        return True

    def _reductions(self, body: Computation) -> set[int]:
        """The reductions that are results, or what results are made of alone."""
        found: set[int] = set()
        pending = [body.root]
        while pending:
            i = pending.pop()
            if i.opcode == "reduce":
                found.add(i.id)
            elif i.opcode == "tuple" or len(i.operand_ids) == 1:
                pending += [self._module.instructions[o] for o in i.operand_ids]
        return found

    def _updates_itself(self, hero: Instruction, index: ShapeIndex, operand: int) -> bool:
        """Whether what gives the result reads an operand in place, or only what it writes."""
        once = hero.operand_ids.count(hero.operand_ids[operand]) == 1
        match hero.opcode:
            case "scatter":
                return once and operand < max(1, len(hero.shape.tuple_shapes))
            case "sort":
                return once and operand == (index[0] if index else 0)
            case "dynamic-update-slice":
                return operand in (0, 1)
            case _:
                return False

    def _is_slice_updated(self, sliced: Instruction, hero: Instruction) -> bool:
        """Whether what is read of a stack is the slice that is then written."""
        if hero.opcode != "dynamic-update-slice" or hero.operand_ids[0] != sliced.operand_ids[0]:
            return False
        update = self._module.instructions[hero.operand_ids[1]]
        return sliced.shape == update.shape and (
            sliced.shape.element_count == 1 or sliced.operand_ids[1:] == hero.operand_ids[2:]
        )

    def _in_gpu_call(self, call: Instruction, index: ShapeIndex, operand: int) -> bool:
        match call.custom_call_target:
            case "__cublas$lt$matmul":  # The bias may be overwritten.
                config = call.backend_config.get("gemm_backend_config", {})
                return index != (1,) and operand == 2 and bool(config.get("beta"))
            case "__cusolver$cholesky":
                return index == (0,)
            case _:
                return False

    def _body(self, i: Instruction) -> Computation:
        return self._module.computations[i.called_computation_ids[0]]

    def _users_in(self, body: Computation) -> _Users:
        if body.id not in self._users:
            users: dict[int, list[tuple[Instruction, int]]] = {}
            for i in body.instructions:
                for n, operand in enumerate(i.operand_ids):
                    users.setdefault(operand, []).append((i, n))
            self._users[body.id] = users
        return self._users[body.id]


def _is_as_large(a: Shape, b: Shape) -> bool:
    """Whether two arrays have as many elements of as many bytes."""
    return a.element_count == b.element_count and a.byte_size == b.byte_size


def _reached(
    start: Instruction, users: _Users, is_end: frozenset[int] | set[int] = frozenset()
) -> list[tuple[Instruction, int]]:
    """Who uses a value, or what is made of it; not what is made of an end."""
    found: list[tuple[Instruction, int]] = []
    queue, seen = [start], {start.id}
    for i in queue:
        if i.id in is_end:
            continue
        for u, n in users.get(i.id, ()):
            found.append((u, n))
            if u.id not in seen:
                seen.add(u.id)
                queue.append(u)
    return found
