"""What is gained by plans that are chosen by what 99 of 100 steps take, where seconds vary?

    python -m experiments.steady_plans [--target v5e h200] [--workload llama-decode]
        [--budget 75 50 35] [--jitter 0.1] [--json steady_plans.jsonl [--resume | --show]]

Programs of `models.corpus` in their middle size, compiled by the target's own compiler within
shares of the bytes that a plan has in which nothing moves, with ``jitter=`` and without. Steps of
both executables are drawn by the machine model with another seed than the planner's, so that what
it had chosen by is not what judges it. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.fitting.steady import percentile_99
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.timeline import UNDISTURBED, Jitter, drawn_step_times, schedule_events
from hlo_passes.simulator.work import instruction_work
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS

TARGETS = ("v5e", "h200")
PERCENTS = (75, 50, 35)
WORKLOADS = ("adam", "llama-train", "llama-decode")

# Of the planner's 1,000 draws by seed 0 none is among these.
_JUDGE_STEPS, _JUDGE_SEED = 4000, 1

_COLUMNS = (
    Column("workload"),
    Column("target"),
    Column("budget", right=True),
    Column("step", right=True),
    Column("p99", right=True),
    Column("step, with jitter=", right=True),
    Column("p99, with it", right=True),
    Column("p99 beside it", right=True),
    Column("bytes, of the budget", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_enum("target", list(TARGETS), list(TARGETS), "whose compiler")
    flags.DEFINE_multi_enum("workload", list(WORKLOADS), list(CORPUS), "of `models.corpus`")
    flags.DEFINE_multi_integer("budget", list(PERCENTS), "percent of what all on the device takes")
    flags.DEFINE_float("jitter", 0.1, "standard deviation over mean of a kernel's seconds")
    flags.DEFINE_float("timeout", 600.0, "seconds for each program within a budget")


def _rows(rows: Rows) -> Iterator[Row]:
    for workload in FLAGS.workload:
        for target in FLAGS.target:
            for percent in FLAGS.budget:
                case = {
                    "workload": workload,
                    "target": target,
                    "percent": percent,
                    "jitter": FLAGS.jitter,
                }
                yield rows.of(
                    case,
                    lambda c=case: found_apart(measure, *c.values(), timeout_s=FLAGS.timeout),
                )


def measure(workload: str, target: str, percent: int, jitter: float) -> Row:
    """Compiles a program within a budget with and without `jitter`, and draws steps of both."""
    jax.config.update("jax_platforms", "cpu")
    entry, where = CORPUS[workload], topology(target)
    fun, args = entry.middle()
    free = jit(fun, machine=where, donate_argnames=entry.donate).lower(*args)
    budget = free.resident().prediction.total_bytes * percent // 100
    found: Row = {"budget": budget}
    for name, asked in (("without", None), ("with", jitter)):
        step = jit(fun, hbm=budget, machine=where, donate_argnames=entry.donate, jitter=asked)
        try:
            compiled = step.lower(*args).compile()
        except MemoryBudgetError as error:
            return {"budget": budget, "least": error.least}
        found[name] = {
            **_drawn(compiled.module, where.machine, jitter),
            "total": compiled.device_bytes,
        }
    return found


def _drawn(module: Module, machine: Machine, variation: float) -> Row:
    costs = instruction_costs(module, machine)
    work = instruction_work(module, machine, costs)
    events = [*schedule_events(module, costs, machine, work=work)]
    still = Jitter(0.0, steps=1)
    jitter = Jitter(variation, _JUDGE_STEPS, _JUDGE_SEED)
    steps, drawn = (drawn_step_times(events, machine, UNDISTURBED, j) for j in (still, jitter))
    return {"step_s": float(steps[0]), "p99_s": percentile_99(drawn)}


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("Plans for steps that vary", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    named = row["workload"], row["target"], f"{row['percent']} %"
    rest = ("–",) * (len(_COLUMNS) - 4)
    if "failure" in row:
        return *named, row["failure"], *rest
    if "least" in row:
        return *named, f"no plan: {format_bytes(row['least'])} would do", *rest
    without, steady = row["without"], row["with"]
    return (
        *named,
        format_seconds(without["step_s"]),
        format_seconds(without["p99_s"]),
        format_seconds(steady["step_s"]),
        format_seconds(steady["p99_s"]),
        f"{steady['p99_s'] / without['p99_s'] - 1:+.2%}",
        f"{steady['total'] / row['budget']:.1%}",
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
