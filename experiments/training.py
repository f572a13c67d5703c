"""How much HBM does a training step of an 8B model need when memplan streams it?

    python -m experiments.training

One TPU v5e of 16 GiB; plain descent on bf16 weights, batch 4 × 2048 tokens, each layer computed
again in the backward pass. Weights and what the forward pass leaves are on the host, and each
layer is updated in the backward pass.

Beside it stands what XLA does alone: with everything in HBM, and with the same arrays on the
host. Bytes are XLA's report; seconds and overlap are predictions of the machine model for the
executables' schedules.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from experiments.running import Experiment, Row, Rows
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import COLUMNS, cells, compared, view_planned, view_unscheduled
from memplan.out_of_memory import is_exhausted
from memplan.report.build import view_run
from memplan.report.tables import Column, Table
from memplan.report.view import RunView
from memplan.topologies import Topology, topology
from models.training import TrainOptions
from models.workloads import train

MODEL = "llama3-8b"
_STEP = f"{MODEL}, plain descent, 4 × 2048 tokens, one v5e, hbm=15.5GiB"

_COLUMNS = (
    Column("run"),
    Column("HBM arguments", right=True),
    *COLUMNS,
    Column("compute", right=True),
    Column("compiled in", right=True),
)


def _rows(rows: Rows) -> Iterator[Row]:
    yield rows.of({"step": _STEP}, lambda: {"runs": list(_runs())})


def _runs() -> Iterator[Row]:
    options = TrainOptions(algorithm="sgd", clip_norm=None)
    fun, args = train(MODEL, batch=4, tokens=2048, options=options)
    target = topology("v5e")
    begin = time.monotonic()
    step = jit(fun, hbm="15.5GiB", machine=target, donate_argnames="state").lower(*args)
    compiled = step.compile()
    seconds = time.monotonic() - begin
    yield _in_hbm(step, target)
    alone = view_unscheduled(compiled, target.machine)
    yield _run("XLA alone, the same on the host", alone, None)
    yield _run("memplan", view_planned(compiled, target.machine), seconds)
    print(compiled.followed, compiled.rounds, file=sys.stderr)


def _in_hbm(step: Any, target: Topology) -> Row:
    """XLA alone with everything on the device."""
    name = "XLA alone, all in HBM"
    begin = time.monotonic()
    try:
        executable = step.unplanned()
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        print(error, file=sys.stderr)
        return _run(name, None, None)
    memory = executable.memory_analysis()
    view = view_run(name, read_module(executable), target.machine, compiled=memory)
    return _run(name, view, time.monotonic() - begin)


def _run(name: str, run: RunView | None, compile_s: float | None) -> Row:
    if run is None:
        return {"name": name, "figures": None}
    assert run.clock is not None
    return {
        "name": name,
        "arguments": run.device.arguments,
        "figures": compared(run),
        "compute_s": run.clock.compute_s,
        "compile_s": compile_s,
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table(row["step"], _COLUMNS, tuple(map(_cells, row["runs"]))) for row in rows]


def _cells(run: Row) -> tuple[str, ...]:
    if run["figures"] is None:
        return (run["name"], "–", *cells(None), "–", "–")
    return (
        run["name"],
        format_bytes(run["arguments"]),
        *cells(run["figures"]),
        format_seconds(run["compute_s"]),
        "–" if run["compile_s"] is None else format_seconds(run["compile_s"]),
    )


EXPERIMENT = Experiment(_rows, _tables)

if __name__ == "__main__":
    EXPERIMENT.main()
