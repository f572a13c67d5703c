"""What does a plan do to CUDA's graphs? Launches of a step on an H200, as its compiler dumps it.

    python -m experiments.launches [--workload vit-train] [--budget 75 50]

Every program of `models.corpus` is compiled as XLA has it, and within shares of what that takes.
*Without graphs* is what a step would launch if XLA captured none. *Alone* are kernels outside of
graphs, most of them between copies that come too soon after one another. Nothing is run.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from absl import flags

from experiments.isolated import Failure, isolated
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.analysis.launches import count_launches
from hlo_passes.reading.dump import find_modules
from memplan.api import jit
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS

_TIMEOUT_S = 600

_COLUMNS = (
    Column("program"),
    Column("budget", right=True),
    Column("launches", right=True),
    Column("without graphs", right=True),
    Column("graphs", right=True),
    Column("kernels in them", right=True),
    Column("alone", right=True),
    Column("copies to and from the host", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_enum("workload", list(CORPUS), list(CORPUS), "of `models.corpus`")
    flags.DEFINE_multi_integer("budget", [100, 75, 50], "percent of what XLA takes")


def _rows(rows: Rows) -> Iterator[Row]:
    for workload in FLAGS.workload:
        for percent in FLAGS.budget:
            case = {"workload": workload, "percent": percent}
            yield rows.of(case, functools.partial(_measured, workload, percent))


def _measured(workload: str, percent: int) -> Row:
    found = isolated(_launches, workload, percent, timeout_s=_TIMEOUT_S)
    return {"failure": found.reason} if isinstance(found, Failure) else found


def _launches(workload: str, percent: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}"  # Read when the compiler is loaded.
        jax.config.update("jax_platforms", "cpu")
        fun, args = CORPUS[workload].planning()
        where, donate = topology("h200"), CORPUS[workload].donate
        whole = jit(fun, hbm="1TiB", machine=where, donate_argnames=donate)
        total = device_bytes(whole.lower(*args).compile(), 0)
        if percent < 100:
            budget = total * percent // 100
            jit(fun, hbm=budget, machine=where, donate_argnames=donate).lower(*args).compile()
        dumped = [m for m in find_modules(Path(folder)) if m.thunks[0] is not None]
        module = dumped[-1].read()  # Of several that were compiled, the one that was kept.
    found = count_launches(module, module.thunks)
    of_host = "a copy between the host and the device"
    return {
        "launches": found.count,
        "uncaptured": found.uncaptured,
        "graphs": sum(g.executions for g in found.graphs),
        "captured": sum(g.executions * g.kernels for g in found.graphs),
        "alone": found.lone_kernels,
        "copies": sum(b.executions for b in found.breaks if b.reason == of_host),
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("Launches of a step on an H200", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    named = (row["workload"], "none" if row["percent"] == 100 else f"{row['percent']} %")
    if "failure" in row:
        return (*named, row["failure"], *[""] * (len(_COLUMNS) - 3))
    names = ("launches", "uncaptured", "graphs", "captured", "alone", "copies")
    return (*named, *(f"{row[name]:,}" for name in names))


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
