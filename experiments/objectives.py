"""What do plans for the fewest bytes, or joules, save, and what do they take for it?

    python -m experiments.objectives [--target v5e h200] [--workload vit-train] [--budget 75 50 35]
        [--json objectives.jsonl [--resume | --show]]

Programs of `models.corpus` in their middle size, within shares of the bytes that a plan has in
which nothing moves, planned for each objective on the module that the target's own compiler
schedules. Nothing is compiled further, or run: seconds and joules are predictions of the machine
models, bytes are those of the plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_joules, format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS

TARGETS = ("v5e", "h200")
PERCENTS = (75, 50, 35)
WORKLOADS = ("llama-decode", "llama-train", "vit-train", "unet-train", "adam")
OBJECTIVES = ("latency", "energy", "traffic")

_COLUMNS = (
    Column("workload"),
    Column("target"),
    Column("budget", right=True),
    Column("for"),
    Column("step", right=True),
    Column("moved", right=True),
    Column("energy", right=True),
    Column("step beside the fastest", right=True),
    Column("moved beside it", right=True),
    Column("energy beside it", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_enum("target", list(TARGETS), list(TARGETS), "whose compiler")
    flags.DEFINE_multi_enum("workload", list(WORKLOADS), list(CORPUS), "of `models.corpus`")
    flags.DEFINE_multi_integer("budget", list(PERCENTS), "percent of what all on the device takes")
    flags.DEFINE_float("timeout", 600.0, "seconds for each program within a budget")


def _rows(rows: Rows) -> Iterator[Row]:
    for workload in FLAGS.workload:
        for target in FLAGS.target:
            for percent in FLAGS.budget:
                case = {"workload": workload, "target": target, "percent": percent}
                yield rows.of(
                    case,
                    lambda c=case: found_apart(measure, *c.values(), timeout_s=FLAGS.timeout),
                )


def measure(workload: str, target: str, percent: int) -> Row:
    """Plans a program within a budget for each objective: seconds, bytes and joules of a step."""
    jax.config.update("jax_platforms", "cpu")
    entry = CORPUS[workload]
    fun, args = entry.middle()
    step = jit(fun, machine=topology(target), donate_argnames=entry.donate)
    budget = step.lower(*args).resident().prediction.total_bytes * percent // 100
    found: Row = {"budget": budget}
    for objective in OBJECTIVES:
        step.objective = objective
        try:
            plan = step.lower(*args).within(budget)
        except MemoryBudgetError as error:
            return {"budget": budget, "least": error.least}
        found[objective] = {
            "step_s": plan.prediction.step_time_s,
            "moved": plan.moved_bytes,
            "joules": plan.prediction.joules,
            "total": plan.prediction.total_bytes,
        }
    return found


def _tables(rows: Sequence[Row]) -> list[Table]:
    cells = [c for row in rows for c in _cells(row)]
    return [Table("Plans for each objective", _COLUMNS, tuple(cells))]


def _cells(row: Row) -> Iterator[tuple[str, ...]]:
    named = row["workload"], row["target"], f"{row['percent']} %"
    rest = ("–",) * (len(_COLUMNS) - 4)
    if "failure" in row:
        yield *named, row["failure"], *rest
    elif "least" in row:
        yield *named, f"no plan: {format_bytes(row['least'])} would do", *rest
    else:
        fastest = row["latency"]
        for objective in OBJECTIVES:
            of = row[objective]
            yield (
                *named,
                objective,
                format_seconds(of["step_s"]),
                format_bytes(of["moved"]),
                format_joules(of["joules"]),
                *(_beside(of[k], fastest[k]) for k in ("step_s", "moved", "joules")),
            )


def _beside(found: Any, fastest: Any) -> str:
    return f"{found / fastest - 1:+.1%}" if fastest else "–"


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
