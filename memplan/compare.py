"""A planned program beside the same program as XLA schedules it by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from hlo_passes.hardware.machine import Machine
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.compiled import Compiled
from memplan.out_of_memory import is_exhausted
from memplan.report.build import view_run
from memplan.report.tables import Column
from memplan.report.view import RunView

COLUMNS = (
    Column("HBM temp", right=True),
    Column("HBM total", right=True),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("link busy", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
    Column("gap", right=True),
)
"""What is compared; `cells` fills them."""


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
        if not is_exhausted(error):
            raise
        return None
    memory = executable.memory_analysis()
    return view_run("XLA alone", read_module(executable), machine, compiled=memory)


def compared(run: RunView) -> dict[str, float | None]:
    """What is compared of a run, in bytes, seconds and shares."""
    assert run.clock is not None  # A machine was named.
    return {
        "temp": run.device.temp,
        "total": run.device.total,
        "moved": run.moved_bytes,
        "overlapped": run.overlapped,
        "link_busy": run.clock.link_s / run.clock.step_time_s,
        "step_s": run.clock.step_time_s,
        "bound_s": run.clock.lower_bound_s,
        "gap": run.clock.gap,
    }


def cells(found: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The `COLUMNS` of what is `compared` of a run; None for one that runs out of memory."""
    if found is None:
        return ("out of memory", *["–"] * (len(COLUMNS) - 1))
    return (
        format_bytes(found["temp"]),
        format_bytes(found["total"]),
        format_bytes(found["moved"]),
        "–" if found["overlapped"] is None else f"{found['overlapped']:.1%}",
        f"{found['link_busy']:.1%}",
        format_seconds(found["step_s"]),
        format_seconds(found["bound_s"]),
        f"{found['gap']:.1%}",
    )
