"""A planned program beside the same program as XLA schedules it by itself."""

from __future__ import annotations

import jax

from hlo_passes.machine import Machine
from hlo_passes.reader import read_module
from memplan.report.build import view_run
from memplan.report.view import RunView
from memplan.stages import Compiled


def view_planned(compiled: Compiled, machine: Machine) -> RunView:
    """Reads the final executable: XLA's bytes, and the machine model's seconds for its
    schedule."""
    name = "XLA alone" if compiled.plan is None else "memplan"
    memory = compiled.memory_analysis()
    return view_run(name, compiled.module, machine, plan=compiled.plan, compiled=memory)


def view_unscheduled(compiled: Compiled, machine: Machine) -> RunView | None:
    """Compiles and reads the program with the same weights on the host and XLA's own
    schedule; None where that runs out of memory."""
    try:
        executable = compiled.unscheduled()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    memory = executable.memory_analysis()
    return view_run("XLA alone", read_module(executable), machine, compiled=memory)
