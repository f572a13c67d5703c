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

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hlo_passes.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import COLUMNS, cells, view_planned, view_unscheduled
from memplan.out_of_memory import is_exhausted
from memplan.report.build import view_run
from memplan.report.tables import Column, Table, write_tables
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", action="store_true")
    parser.add_argument("--pod", action="store_true")
    options = parser.parse_args()
    tables: list[Table] = []
    if options.chip or not options.pod:
        step = train(
            MODEL, batch=4, tokens=2048, options=TrainOptions(algorithm="sgd", clip_norm=None)
        )
        title = f"{MODEL}, plain descent, 4 × 2048 tokens, one v5e, hbm=15.5GiB"
        tables.append(_table(title, step, topology("v5e"), "15.5GiB"))
    if options.pod or not options.chip:
        target = topology("v5e:16x16")
        mesh = Mesh(np.array(target.devices).reshape(32, 8), ("fsdp", "model"))
        step = train(MODEL, batch=256, tokens=2048, mesh=mesh)
        title = f"{MODEL}, AdamW, 256 × 2048 tokens, v5e:16x16 as 32 × 8, hbm=3.75GiB"
        tables.append(_table(title, step, target, "3.75GiB"))
    write_tables(tables, sys.stdout)


def _table(title: str, workload: Workload, target: Topology, hbm: str) -> Table:
    return Table(title, _COLUMNS, tuple(_rows(workload, target, hbm)))


def _rows(workload: Workload, target: Topology, hbm: str) -> Iterator[tuple[str, ...]]:
    fun, args = workload
    begin = time.monotonic()
    step = jit(fun, hbm=hbm, machine=target, donate_argnames="state").lower(*args)
    compiled = step.compile()
    seconds = time.monotonic() - begin
    yield _in_hbm(step, target)
    alone = view_unscheduled(compiled, target.machine)
    yield _row("XLA alone, the same on the host", alone, 0.0)
    yield _row("memplan", view_planned(compiled, target.machine), seconds)
    print(compiled.followed, compiled.rounds, file=sys.stderr)


def _in_hbm(step: Any, target: Topology) -> tuple[str, ...]:
    """XLA alone with everything on the device."""
    name = "XLA alone, all in HBM"
    begin = time.monotonic()
    try:
        executable = step.unplanned()
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        print(error, file=sys.stderr)
        return _row(name, None, 0.0)
    memory = executable.memory_analysis()
    view = view_run(name, read_module(executable), target.machine, compiled=memory)
    return _row(name, view, time.monotonic() - begin)


def _row(name: str, run: RunView | None, seconds: float) -> tuple[str, ...]:
    if run is None:
        return (name, "–", *cells(None), "–", "–")
    assert run.clock is not None
    return (
        name,
        format_bytes(run.device.arguments),
        *cells(run),
        format_seconds(run.clock.compute_s),
        format_seconds(seconds) if seconds else "–",
    )


if __name__ == "__main__":
    main()
