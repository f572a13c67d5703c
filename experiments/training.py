"""How much HBM does a training step of an 8B model need when memplan streams it?

    python -m experiments.training [--chip] [--pod]

chip: one TPU v5e of 16 GiB; plain descent on bf16 weights, batch 4 × 2048 tokens, each layer
computed again in the backward pass. Weights and what the forward pass leaves are on the
host, and each layer is updated in the backward pass.

pod: 256 chips of v5e (16x16), fully sharded over 32 and tensor parallel over 8; AdamW with
float32 moments and clipping by the global norm, 256 × 2048 tokens. The budget leaves no room
for the optimizer's state, so that it lives on the hosts.

Beside each stands what XLA does alone: with everything in HBM, and with the same arrays on
the host. Bytes per chip are XLA's report; seconds and overlap are predictions of the machine
model for the executables' schedules. The pod takes ten minutes or more to compile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.running import FLAGS, Experiment, Row, Rows
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
from models.workloads import Workload, train

MODEL = "llama3-8b"

_COLUMNS = (
    Column("run"),
    Column("HBM arguments", right=True),
    *COLUMNS,
    Column("compute", right=True),
    Column("compiled in", right=True),
)


def _define() -> None:
    flags.DEFINE_bool("chip", False, "this one only")
    flags.DEFINE_bool("pod", False, "this one only")


def _rows(rows: Rows) -> Iterator[Row]:
    for name, (title, make) in _STEPS.items():
        # Both, where none is asked for.
        if FLAGS[name].value or not (FLAGS.chip or FLAGS.pod):
            yield rows.of({"step": title}, lambda make=make: {"runs": list(_runs(*make()))})


def _chip() -> tuple[Workload, Topology, str]:
    options = TrainOptions(algorithm="sgd", clip_norm=None)
    return train(MODEL, batch=4, tokens=2048, options=options), topology("v5e"), "15.5GiB"


def _pod() -> tuple[Workload, Topology, str]:
    target = topology("v5e:16x16")
    mesh = Mesh(np.array(target.devices).reshape(32, 8), ("fsdp", "model"))
    return train(MODEL, batch=256, tokens=2048, mesh=mesh), target, "3.75GiB"


_STEPS = {
    "chip": (f"{MODEL}, plain descent, 4 × 2048 tokens, one v5e, hbm=15.5GiB", _chip),
    "pod": (f"{MODEL}, AdamW, 256 × 2048 tokens, v5e:16x16 as 32 × 8, hbm=3.75GiB", _pod),
}


def _runs(workload: Workload, target: Topology, hbm: str) -> Iterator[Row]:
    fun, args = workload
    begin = time.monotonic()
    step = jit(fun, hbm=hbm, machine=target, donate_argnames="state").lower(*args)
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


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
