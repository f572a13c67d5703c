"""What does a plan make of memory over a step? The first program of the demo, before and after.

    python -m experiments.over_time [--target h200] [--plot over_time.svg]

Device bytes at each instruction, by the final schedules: of XLA alone with the same weights on the
host, and of memplan's plan. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.units import format_bytes
from memplan.compare import view_planned, view_unscheduled
from memplan.demo import WORKLOADS
from memplan.report.tables import Column, Table
from memplan.report.view import RunView
from memplan.topologies import topology
from models import workloads

_WORKLOAD = WORKLOADS[0]

# A picture has no room for more: of so many stretches the most in each.
_STRETCHES = 400


def _define() -> None:
    flags.DEFINE_string("target", "h200", "a topology")


def _rows(rows: Rows) -> Iterator[Row]:
    case = {"workload": _WORKLOAD.title, "target": FLAGS.target}
    yield rows.of(case, lambda: {"runs": list(_runs(case["target"]))})


def _runs(target: str) -> Iterator[Row]:
    where = topology(target)
    compiled = _WORKLOAD.compile(workloads, where)
    for run in (view_unscheduled(compiled, where.machine), view_planned(compiled, where.machine)):
        if run is not None:  # XLA's own may run out of memory.
            yield measure(run)


def measure(run: RunView) -> Row:
    """Device bytes over a run's instructions: the most in each of equal stretches of these.

    Returns:
      ``name``, ``instructions``, ``bytes`` of each stretch, the first one's at the start.
    """
    device = run.tiers[0]
    changes = dict(zip(device.times, device.totals, strict=True))
    held, most = 0, [0] * min(_STRETCHES, device.end)
    for n in range(device.end):
        held = changes.get(n, held)
        at = n * len(most) // device.end
        most[at] = max(most[at], held)
    return {"name": run.name, "instructions": device.end, "bytes": most}


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    columns = (Column("run"), *(Column(c, right=True) for c in ("instructions", "peak", "mean")))
    for row in rows:
        cells = tuple(map(_cells, row["runs"]))
        yield Table(f"{row['workload']}, {row['target']}", columns, cells)


def _cells(run: Row) -> tuple[str, ...]:
    held = run["bytes"]
    mean = format_bytes(sum(held) / len(held))
    return (run["name"], f"{run['instructions']:,}", format_bytes(max(held)), mean)


def _plot(rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4 * len(rows)), layout="constrained")
    for axes, row in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for run in row["runs"]:
            held = run["bytes"]
            share = [100 * n / len(held) for n in range(len(held))]
            gib = [n / 2**30 for n in held]
            axes.step(share, gib, where="post", label=run["name"])
        axes.set(xlabel="instructions of the step, %", ylabel="device memory, GiB", ylim=(0, None))
        axes.set_title(f"{row['workload']}, {row['target']}", fontsize=9)
        axes.legend()
    return figure


EXPERIMENT = Experiment(_rows, _tables, _define, _plot)

if __name__ == "__main__":
    EXPERIMENT.main()
