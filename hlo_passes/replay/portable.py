"""Makes a module that was compiled for one device run on any: a TPU's or GPU's on CPU.

A module after scheduling is ordinary HLO, wrapped in what only its target knows. Each
wrapper has a plain meaning, and takes it on here:

    layouts, tiles, memory spaces          dropped: values do not depend on them
    copy, copy-start, copy-done            the operand itself; memplan's own calls likewise
    async-start ... async-done, fusion     a call of the wrapped computation
    bitcast                                the same bytes, by transposes and reshapes
    float types mixed in one operation     the widest of them, then rounded
    custom-call "AllocateBuffer"           NaN everywhere: nothing may read it
    custom-call "ConcatBitcast"            concatenate, each slice in its place
    custom-call "__cublas$lt$matmul"       dot
    schedule, control edges, donation      dropped: the values follow from dataflow alone

What has no such meaning on one CPU (collectives, infeed, other custom calls) is refused
by name. Plain meanings are written as HLO text, and XLA's own parser reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from custom_calls import targets
from hlo_passes import xla
from hlo_passes.analysis.async_chains import ASYNC_LINKS, AsyncChain, async_chains, wrapped_by
from hlo_passes.errors import ReplayError
from hlo_passes.ir import Instruction, Module, Shape
from hlo_passes.proto import hlo_pb2
from hlo_passes.replay.plain_hlo import bitcast, braces, plain_text, text, undefined

_STARTS = frozenset({"async-start", "async-update", "copy-start"})
_DONES = frozenset({"async-done", "async-update", "copy-done"})

# Opcodes, and targets of custom calls, that have the value of their first operand.
_IDENTITIES = frozenset({"add-dependency", "copy-start"}) | _DONES
_IDENTITY_TARGETS = frozenset(
    {
        "AssumeGatherIndicesInBound",
        "GatherScatterIndicesBitpacked",
        targets.COPY_START,
        targets.COPY_DONE,
    }
)

_GEMM_TARGETS = frozenset({"__cublas$gemm", "__cublas$lt$matmul"})

# Custom calls that XLA:CPU implements itself (jaxlib 0.12.0.1).
_CPU_TARGETS = frozenset({"TopK"})

# Prefixes of the opcodes that talk to other devices or to the host.
_COMMUNICATION = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-",
    "infeed",
    "outfeed",
    "partition-id",
    "ragged-all-to-all",
    "recv",
    "reduce-scatter",
    "replica-id",
    "send",
)

# XLA's numbers of f16, bf16, f32 and f64 (xla/xla_data.proto), from narrow to wide.
_FLOATS = (10, 16, 11, 12)

# Between operands and result of these, different float types are no accident.
_TYPED_FREELY = frozenset(
    {"bitcast-convert", "call", "conditional", "convert", "custom-call", "stochastic-convert"}
)

_LOCAL_ID = 2**32 - 1  # XLA numbers instructions (computation id << 32) | local id


def portable(module: Module) -> Module:
    """Rewrites `module` into HLO that needs no particular device.

    Args:
      module: the program of one device, at any stage after scheduling; left as it is.

    Returns:
      An unscheduled module with the same parameters, outputs and values, its arrays
      row-major. The instructions that remain keep their ids.

    Raises:
      ReplayError: when an instruction has no meaning on a single CPU.
    """
    return _Rewriter(module).run()


class _Rewriter:
    """One run of `portable`: the module that is read and the one that grows."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._plain: dict[str, hlo_pb2.HloComputationProto] = {}  # by HLO text
        self._first_plain_id = max(module.computations) + 1
        self._local_ids = itertools.count(1 + max(i & _LOCAL_ID for i in module.instructions))

    def run(self) -> Module:
        source = self._module.to_proto()
        computations = [self._computation(c) for c in source.computations]
        _make_row_major([*source.host_program_shape.parameters, source.host_program_shape.result])
        # Built anew rather than edited: the fields that memplan does not declare (buffer
        # donors, prefetches, sharding) speak about the target.
        return Module(
            hlo_pb2.HloModuleProto(
                name=source.name,
                entry_computation_name=source.entry_computation_name,
                computations=[*self._plain.values(), *computations],  # callees first
                host_program_shape=source.host_program_shape,
                id=source.id,
                entry_computation_id=source.entry_computation_id,
                stack_frame_index=source.stack_frame_index,
            )
        )

    def _computation(self, source: hlo_pb2.HloComputationProto) -> hlo_pb2.HloComputationProto:
        result = hlo_pb2.HloComputationProto(
            name=source.name, program_shape=source.program_shape, id=source.id
        )
        _make_row_major([*result.program_shape.parameters, result.program_shape.result])
        value: dict[int, int] = {}  # id of an instruction -> of the one with its value now
        for proto in source.instructions:
            instruction = self._module.instructions[proto.id]
            self._refuse_the_impossible(instruction)
            if instruction.opcode in ASYNC_LINKS:
                chain = self._chain(instruction)
                wrapped = wrapped_by(self._module, instruction)
                if wrapped is not None:
                    operands = [value[o] for o in chain.operands]
                    result.instructions.append(_call(instruction, operands, wrapped.id))
                    value[instruction.id] = instruction.id
                elif chain.runs_at is not None and chain.runs_at.id in value:
                    value[instruction.id] = value[chain.runs_at.id]
                continue
            operands = [value[i] for i in instruction.operand_ids]
            if self._is_identity(instruction):
                value[instruction.id] = operands[0]
                continue
            result.instructions.extend(self._instructions(instruction, operands))
            value[instruction.id] = instruction.id
        result.root_id = value[source.root_id]
        return result

    def _is_identity(self, instruction: Instruction) -> bool:
        if instruction.opcode == "copy":
            # On a TPU a copy may round as well.
            return self._operand_shapes(instruction)[0].dtype == instruction.shape.dtype
        return (
            instruction.opcode in _IDENTITIES or instruction.custom_call_target in _IDENTITY_TARGETS
        )

    def _instructions(
        self, instruction: Instruction, operands: Iterable[int]
    ) -> Iterator[hlo_pb2.HloInstructionProto]:
        """Yields what stands for `instruction`; the last has its id."""
        if instruction.opcode == "fusion":
            yield _call(instruction, operands, instruction.called_computation_ids[0])
            return
        meaning = self._plain_meaning(instruction)
        if meaning is not None:
            yield _call(instruction, operands, self._plain_computation_id(meaning))
            return
        kept = _kept(instruction, operands)
        declared = hlo_pb2.ShapeProto.FromString(kept.shape.SerializeToString())
        if instruction.opcode not in _TYPED_FREELY:
            yield from self._widen(instruction, kept)
        if kept.shape == declared:
            yield kept
            return
        kept.id = self._new_id(instruction)
        kept.name = f"{kept.name}.unrounded"
        yield kept
        yield from self._rounded(instruction, kept, declared)

    def _widen(
        self, instruction: Instruction, kept: hlo_pb2.HloInstructionProto
    ) -> Iterator[hlo_pb2.HloInstructionProto]:
        """Makes `kept` work in the widest of the float types that it mixes, if it does.

        TPU modules round in passing (``bf16 pad(bf16, f32)``) and GPU modules multiply bf16
        into f32. StableHLO knows no such pad, XLA:CPU not every such dot. Yields the
        conversions of operands, and gives `kept` the shape that it then computes.
        """
        sources = [self._module.instructions[i].proto.shape for i in instruction.operand_ids]
        if instruction.shape.is_tuple:
            if instruction.opcode == "reduce":  # results and inputs correspond
                for result, source in zip(kept.shape.tuple_shapes, sources, strict=False):
                    result.element_type = source.element_type
            return
        mixed = {s.element_type for s in (*sources, kept.shape)} & set(_FLOATS)
        if len(mixed) < 2:
            return
        widest = max(mixed, key=_FLOATS.index)
        for position, source in enumerate(sources):
            if source.element_type in mixed - {widest}:
                operand = kept.operand_ids[position]
                shape = hlo_pb2.ShapeProto(element_type=widest, dimensions=source.dimensions)
                conversion = self._new("convert", instruction, shape, [operand])
                kept.operand_ids[position] = conversion.id
                yield conversion
        if kept.shape.element_type in mixed:
            kept.shape.element_type = widest

    def _rounded(
        self,
        instruction: Instruction,
        computed: hlo_pb2.HloInstructionProto,
        declared: hlo_pb2.ShapeProto,
    ) -> Iterator[hlo_pb2.HloInstructionProto]:
        """Yields the conversion of `computed` to the shape that `instruction` declares."""
        if not declared.tuple_shapes:
            last = self._new("convert", instruction, declared, [computed.id])
        else:
            elements: list[int] = []
            for i, (source, result) in enumerate(
                zip(computed.shape.tuple_shapes, declared.tuple_shapes, strict=True)
            ):
                element = self._new("get-tuple-element", instruction, source, [computed.id])
                element.tuple_index = i
                conversion = self._new("convert", instruction, result, [element.id])
                elements.append(conversion.id)
                yield from (element, conversion)
            last = self._new("tuple", instruction, declared, elements)
        last.id, last.name = instruction.id, instruction.name
        yield last

    def _new(
        self,
        opcode: str,
        origin: Instruction,
        shape: hlo_pb2.ShapeProto,
        operands: Iterable[int],
    ) -> hlo_pb2.HloInstructionProto:
        local_id = next(self._local_ids)
        return hlo_pb2.HloInstructionProto(
            name=f"{opcode}.{local_id}.for.{origin.name}",
            opcode=opcode,
            shape=shape,
            metadata=origin.proto.metadata,
            id=origin.computation_id << 32 | local_id,
            operand_ids=operands,
        )

    def _plain_meaning(self, instruction: Instruction) -> str | None:
        """The value of `instruction` as HLO text, or None where XLA:CPU computes it itself.

        The text has one computation, whose parameters are the instruction's operands.
        """
        operands = self._operand_shapes(instruction)
        if instruction.opcode == "bitcast":
            return bitcast(operands[0], instruction.shape)
        target = instruction.custom_call_target
        if not target or target in _CPU_TARGETS:
            return None
        if target == "AllocateBuffer":
            return plain_text(undefined("content", instruction.shape))
        if target == "ConcatBitcast":
            return self._concatenate(instruction)
        if target in _GEMM_TARGETS:
            return self._gemm(instruction)
        raise self._error(
            instruction,
            f'no CPU implements its target "{target}"',
            "Replay the program without that operation, or as compiled for another target.",
        )

    def _concatenate(self, instruction: Instruction) -> str:
        """What a TPU fetches in slices (``slice-start``), whole again.

        The operands stand in the order in which their transfers were issued; only where each
        slice starts in what it was cut from says where it goes.
        """
        operands, result = self._operand_shapes(instruction), instruction.shape
        sizes = zip(*(shape.dimensions for shape in operands), strict=True)
        sliced = [d for d, n in enumerate(sizes) if set(n) != {result.dimensions[d]}] or [0]
        if sum(shape.dimensions[sliced[0]] for shape in operands) != result.dimensions[sliced[0]]:
            raise self._error(
                instruction,
                f"its operands {', '.join(map(str, operands))} are no slices of the result",
                "XLA is not known to make such a call: please report the module.",
            )
        return plain_text(
            [
                *(
                    f"slice.{i} = {text(shape.dtype, shape.dimensions)} parameter({i})"
                    for i, shape in enumerate(operands)
                ),
                f"ROOT whole = {text(result.dtype, result.dimensions)} concatenate("
                f"{', '.join(f'slice.{i}' for i in self._in_order(instruction, sliced[0]))}), "
                f"dimensions={{{sliced[0]}}}",
            ]
        )

    def _in_order(self, instruction: Instruction, dimension: int) -> list[int]:
        """The operands of `instruction`, as slices of one array, by place in `dimension`."""
        if len(instruction.operand_ids) == 1:
            return [0]
        cuts: list[hlo_pb2.SliceDimensions] = []
        for i in instruction.operand_ids:
            cut = self._slice_behind(self._module.instructions[i])
            if cut is None:
                raise self._error(
                    instruction,
                    f"nothing says where its operand {self._module.instructions[i]} goes",
                    "XLA is only known to put slices together: please report the module.",
                )
            cuts.append(cut.proto.slice_dimensions[dimension])
        order = sorted(range(len(cuts)), key=lambda i: cuts[i].start)
        if any(cut.stride != 1 for cut in cuts) or any(
            cuts[i].limit != cuts[j].start for i, j in itertools.pairwise(order)
        ):
            bounds = ", ".join(f"[{c.start}:{c.limit}:{c.stride}]" for c in cuts)
            raise self._error(
                instruction,
                f"its operands are the slices {bounds}, with gaps or overlaps between them",
                "XLA is not known to make such a call: please report the module.",
            )
        return order

    def _slice_behind(self, instruction: Instruction) -> Instruction | None:
        """The slice that `instruction` hands on unchanged, if it does."""
        while instruction.opcode != "slice":
            if (wrapped := wrapped_by(self._module, instruction)) is not None:
                instruction = wrapped.root
                continue
            if instruction.opcode == "fusion":
                (callee, *_) = instruction.called_computation_ids
                instruction = self._module.computations[callee].root
                continue
            if not instruction.operand_ids:
                return None
            operand = self._module.instructions[instruction.operand_ids[0]]
            is_same = self._is_identity(instruction) or (
                instruction.opcode == "bitcast"
                and instruction.shape.dimensions == operand.shape.dimensions
                and instruction.shape.layout.minor_to_major == operand.shape.layout.minor_to_major
            )
            if not is_same:
                return None
            instruction = operand
        return instruction

    def _gemm(self, instruction: Instruction) -> str:
        """``alpha * dot(lhs, rhs) + beta * addend``, as XLA folds it into a cuBLAS call.

        See xla/service/gpu/transforms/gemm_rewriter.cc. cuBLAS accumulates in f32, f64 in
        f64, and rounds once.
        """
        config = instruction.backend_config.get("gemm_backend_config", {})
        (_, result), *workspace = instruction.shape.leaves()
        epilogue = config.get("epilogue", "unknown")
        if epilogue != "DEFAULT" or result.dtype not in ("bf16", "f16", "f32", "f64"):
            raise self._error(
                instruction,
                f"a cuBLAS call with epilogue {epilogue} on {result} is not known here",
                "Compile with xla_gpu_enable_cublaslt=false and replay that.",
            )
        lhs, rhs, *addend = self._operand_shapes(instruction)
        numbers = config["dot_dimension_numbers"]
        dimensions = ", ".join(
            f"{side}_{kind}_dims={braces(numbers[f'{side}_{kind}_dimensions'])}"
            for side in ("lhs", "rhs")
            for kind in ("batch", "contracting")
        )
        accumulator = "f64" if result.dtype == "f64" else "f32"
        wide = text(accumulator, result.dimensions)
        lines = [
            f"lhs = {text(lhs.dtype, lhs.dimensions)} parameter(0)",
            f"rhs = {text(rhs.dtype, rhs.dimensions)} parameter(1)",
            f"lhs.wide = {text(accumulator, lhs.dimensions)} convert(lhs)",
            f"rhs.wide = {text(accumulator, rhs.dimensions)} convert(rhs)",
            f"dot = {wide} dot(lhs.wide, rhs.wide), {dimensions}",
            f"alpha = {accumulator}[] constant({config['alpha_real']!r})",
            f"alphas = {wide} broadcast(alpha), dimensions={{}}",
            f"product = {wide} multiply(dot, alphas)",
        ]
        if addend:
            lines += [
                f"addend = {text(addend[0].dtype, addend[0].dimensions)} parameter(2)",
                f"addend.wide = {wide} convert(addend)",
                f"beta = {accumulator}[] constant({config['beta']!r})",
                f"betas = {wide} broadcast(beta), dimensions={{}}",
                f"scaled = {wide} multiply(addend.wide, betas)",
                f"sum = {wide} add(product, scaled)",
            ]
        total = "sum" if addend else "product"
        rounded = f"{text(result.dtype, result.dimensions)} convert({total})"
        if not instruction.shape.is_tuple:
            return plain_text([*lines, f"ROOT result = {rounded}"])
        scratch = [undefined(f"scratch.{i}", shape) for i, (_, shape) in enumerate(workspace)]
        outputs = ["result", *(f"scratch.{i}" for i in range(len(scratch)))]
        shapes = ", ".join(text(s.dtype, s.dimensions) for _, s in instruction.shape.leaves())
        lines += [f"result = {rounded}", *itertools.chain(*scratch)]
        return plain_text([*lines, f"ROOT outputs = ({shapes}) tuple({', '.join(outputs)})"])

    def _plain_computation_id(self, text: str) -> int:
        """Adds the computation that `text` describes, once, and returns its id."""
        if text not in self._plain:
            parsed = hlo_pb2.HloModuleProto.FromString(xla.hlo_text_to_proto(text))
            (computation,) = parsed.computations
            computation.id = self._first_plain_id + len(self._plain)
            computation.name = f"plain.{computation.id}"
            new_ids: dict[int, int] = {}
            for proto in computation.instructions:
                local_id = next(self._local_ids)
                new_ids[proto.id] = computation.id << 32 | local_id
                proto.id = new_ids[proto.id]
                proto.name = f"{proto.name}.{local_id}"  # unique in the module
                proto.operand_ids[:] = [new_ids[i] for i in proto.operand_ids]
            computation.root_id = new_ids[computation.root_id]
            self._plain[text] = computation
        return self._plain[text].id

    def _refuse_the_impossible(self, instruction: Instruction) -> None:
        if instruction.opcode.startswith(_COMMUNICATION):
            raise self._error(
                instruction,
                f"{instruction.opcode} needs other devices or the host",
                "Compile the program for one device and replay that.",
            )
        if instruction.opcode == "constant" and not instruction.proto.HasField("literal"):
            raise self._error(
                instruction,
                "the text that it was read from leaves out its numbers: constant({...})",
                "Dump with --xla_dump_hlo_as_proto, or --xla_dump_large_constants.",
            )
        for i in instruction.operand_ids:
            start = self._module.instructions[i]
            if start.opcode in _STARTS and instruction.opcode not in _DONES:
                raise self._error(
                    instruction,
                    f"it reads {start}, which is in flight",
                    "Only the matching done may; read its result.",
                )

    def _chain(self, link: Instruction) -> AsyncChain:
        chain = async_chains(self._module).get(link.id)
        if chain is None or chain.runs_at is None:
            raise self._error(
                link,
                "it belongs to an operation that never has all of its operands",
                "A loop may carry what its next iteration waits for: compile without that.",
            )
        return chain

    def _operand_shapes(self, instruction: Instruction) -> list[Shape]:
        return [self._module.instructions[i].shape for i in instruction.operand_ids]

    def _new_id(self, origin: Instruction) -> int:
        return origin.computation_id << 32 | next(self._local_ids)

    def _error(self, instruction: Instruction, problem: str, hint: str) -> ReplayError:
        line = self._module.source_line(instruction)
        where = f"{instruction} ({line})" if line else str(instruction)
        return ReplayError(where, problem, hint)


def _call(
    instruction: Instruction, operands: Iterable[int], computation_id: int
) -> hlo_pb2.HloInstructionProto:
    proto = instruction.proto
    # Before it is done it has the shape (operands, result, context ...); the call only computes.
    is_in_flight = instruction.opcode in ("async-start", "async-update")
    shape = proto.shape.tuple_shapes[1] if is_in_flight else proto.shape
    call = hlo_pb2.HloInstructionProto(
        name=instruction.name,
        opcode="call",
        shape=shape,
        metadata=proto.metadata,
        id=instruction.id,
        operand_ids=operands,
        called_computation_ids=[computation_id],
    )
    _make_row_major([call.shape])
    return call


def _kept(instruction: Instruction, operands: Iterable[int]) -> hlo_pb2.HloInstructionProto:
    kept = hlo_pb2.HloInstructionProto()
    kept.CopyFrom(instruction.proto)
    kept.operand_ids[:] = operands
    for target_specific in ("backend_config", "control_predecessor_ids", "frontend_attributes"):
        kept.ClearField(target_specific)
    order = list(kept.shape.layout.minor_to_major)
    _make_row_major([kept.shape])
    if instruction.opcode == "constant":
        kept.shape.layout.minor_to_major[:] = order  # the literal's numbers stand in it
    elif instruction.opcode == "copy":
        kept.opcode = "convert"  # other copies are identities
    return kept


def _make_row_major(shapes: Iterable[hlo_pb2.ShapeProto]) -> None:
    """Gives every array the default layout, in place: no tiles, no memory space."""
    for shape in shapes:
        _make_row_major(shape.tuple_shapes)
        if shape.HasField("layout"):
            order = range(len(shape.dimensions) - 1, -1, -1)
            shape.layout.CopyFrom(hlo_pb2.LayoutProto(minor_to_major=order))
