"""Compiles what is not compiled yet for a machine, as XLA alone does it.

module:function ── jax.jit, lower ─► StableHLO ─┐
StableHLO, HLO before optimizations ────────────┴─ XLA ─► scheduled module, XLA's own bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax

from hlo_passes import xla
from hlo_passes.errors import CompilationError
from hlo_passes.ir import Module
from hlo_passes.machine import Machine
from memplan.executable import Executable, TopologyExecutable
from memplan.out_of_memory import explain_oom
from memplan.reference import Reference
from memplan.topologies import Topology, topology


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


def compile_module(module: Module, machine_name: str) -> Executable:
    """Compiles a module that XLA has not optimized yet, partitioned over all devices of the
    topology.

    Raises:
      CompilationError: when XLA refuses it, for lack of device memory or else.
    """
    devices = topology(machine_name).devices

    def compile_for_devices() -> Executable:
        stablehlo = xla.hlo_to_mlir(module.to_bytes())
        with explain_oom():
            return TopologyExecutable(xla.compile_for_topology(stablehlo, devices, {}))

    return _compiled(module.name, machine_name, compile_for_devices)


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
