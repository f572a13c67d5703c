"""Compiles what is not compiled yet for a machine, as XLA alone does it.

module:function ── jax.jit, lower ─► StableHLO ─┐
StableHLO, HLO before optimizations ────────────┴─ XLA ─► scheduled module, XLA's own bytes
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax

from hlo_passes import xla
from hlo_passes.errors import CompilationError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module, Shape
from hlo_passes.plan import Split
from hlo_passes.proto import hlo_pb2
from hlo_passes.replay.plain_hlo import plain_text
from memplan.executable import Executable, TopologyExecutable
from memplan.out_of_memory import explain_oom
from memplan.reference import Reference
from memplan.topologies import Topology, topology

_PARTS = 2, 8


def target_of(name: str) -> Machine | Topology:
    """Returns what ``--machine`` stands for where a program is compiled: devices that need not
    be here; of a CPU, those that are.

    Raises:
      UnknownMachineError, TopologyError, CompilerMissingError: as `topology`.
    """
    found = topology(name)
    return found.machine if found.platform == "cpu" else found


def compile_reference(
    program: Reference, machine_name: str, compiler_options: Mapping[str, str | bool] | None = None
) -> Executable:
    """Compiles ``module:function``, with XLA options beside its own.

    Raises:
      UnknownProgramError: when its options are none of ``jax.jit``.
      CompilationError: when XLA refuses it, for lack of device memory or else.
    """
    step = program.jit(machine=target_of(machine_name))
    lowered = step.lower(*program.args)
    return _compiled(lowered.fun_name, machine_name, partial(lowered.unplanned, compiler_options))


def compile_in_chunks(
    program: Reference, machine_name: str
) -> Iterator[tuple[tuple[Split, ...], Executable]]:
    """Compiles ``module:function`` with parts of it in chunks, so that a half and an eighth of what
    is live is left, as far as there are such parts and XLA takes that."""
    step = program.jit(machine=target_of(machine_name))
    placing = step.lower(*program.args).placing
    for chunked in placing.splitting(placing.live_bytes // part for part in _PARTS):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            yield chunked.splits, chunked.placed(chunked.asked, scheduled=False).compiler(None)()


def compile_module(module: Module, machine_name: str) -> Executable:
    """Compiles a module that XLA has not optimized yet, partitioned over all devices of the
    topology.

    Raises:
      CompilationError: when XLA refuses it, for lack of device memory or else.
    """
    devices = topology(machine_name).devices

    def compile_for_devices() -> Executable:
        stablehlo = xla.hlo_to_mlir(_with_zeros(module).SerializeToString())
        with explain_oom():
            return TopologyExecutable(xla.compile_for_topology(stablehlo, devices, {}))

    return _compiled(module.name, machine_name, compile_for_devices)


def _with_zeros(module: Module) -> hlo_pb2.HloModuleProto:
    """The module with zeros for constants that were read without their numbers, as XLA's parser
    has them: without any, XLA compiles none."""
    proto = module.to_proto()
    for computation in proto.computations:
        new_ids = itertools.count(1 + max(i.id for i in computation.instructions))
        filled: list[hlo_pb2.HloInstructionProto] = []
        for i in computation.instructions:
            if i.opcode == "constant" and not i.HasField("literal"):
                filled += _zeros(i, next(new_ids), module.instructions[i.id].shape)
            else:
                filled.append(i)
        del computation.instructions[:]
        computation.instructions.extend(filled)
    return proto


def _zeros(
    constant: hlo_pb2.HloInstructionProto, scalar_id: int, shape: Shape
) -> Iterator[hlo_pb2.HloInstructionProto]:
    zero = "(0,0)" if shape.dtype.startswith("c") else "0"
    lines = [f"ROOT zero = {shape.dtype}[] constant({zero})"]
    parsed = hlo_pb2.HloModuleProto.FromString(xla.hlo_text_to_proto(plain_text(lines)))
    scalar = parsed.computations[0].instructions[0]
    scalar.id, scalar.name = scalar_id, f"{constant.name}.zero"
    yield scalar
    yield hlo_pb2.HloInstructionProto(
        name=constant.name,
        opcode="broadcast",
        shape=constant.shape,
        metadata=constant.metadata,
        id=constant.id,
        operand_ids=[scalar_id],
        control_predecessor_ids=constant.control_predecessor_ids,
    )


def _compiled(
    name: str, machine_name: str, compile_program: Callable[[], Executable]
) -> Executable:
    try:
        return compile_program()
    except jax.errors.JaxRuntimeError as error:
        refused = CompilationError(name, machine_name, " ".join(str(error).split()))
        for note in getattr(error, "__notes__", ()):
            refused.add_note(note)
        raise refused from error
