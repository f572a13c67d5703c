"""Budgets in small steps: kept or refused, how far from the bound, how long planned for?

    python -m experiments.ladder [--target v5e h200 cpu] [--workload llama-train] [--step 5]
        [--json FILE [--resume]]

Every program of `models.corpus` is compiled as XLA has it, and planned within shares of what that
takes, from all of it downwards, until three in a row are refused. Plans are for the module that
XLA schedules; none is compiled further. Bytes, seconds of a step and the bound are the plans';
seconds of planning are processor seconds without what XLA does up to its scheduler, those of
XLA the whole compilation's.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import jax
from absl import flags

from experiments.corpus import TARGETS, planning
from experiments.isolated import Failure, Worker
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.plan import Plan
from hlo_passes.simulator import cost
from hlo_passes.units import format_bytes
from memplan.api import Lowered, jit
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS

_UNLIMITED = "1TiB"
_REFUSALS = 3

# A plan for more bytes that is slower than one for less by more than this is no better use of them.
_SLOWER = 1.01


def _define() -> None:
    flags.DEFINE_multi_string("target", list(TARGETS), "topologies")
    flags.DEFINE_multi_enum("workload", list(CORPUS), list(CORPUS), "of `models.corpus`")
    flags.DEFINE_integer("step", 1, "percent of what XLA takes, between two budgets")
    flags.DEFINE_bool("small", False, "the small size of each program")
    flags.DEFINE_integer("jobs", 1, "programs at once")
    flags.DEFINE_float("timeout", 1800.0, "seconds for each budget")


def _rows(rows: Rows) -> Iterator[Row]:
    pairs = [(w, t) for t in FLAGS.target for w in FLAGS.workload]
    settings = FLAGS.small, FLAGS.step, FLAGS.timeout
    with ThreadPoolExecutor(FLAGS.jobs) as pool:
        for found in [pool.submit(_descent, rows, *pair, *settings) for pair in pairs]:
            yield from found.result()


def _descent(
    rows: Rows, workload: str, target: str, small: bool, step: int, timeout_s: float
) -> list[Row]:
    # What XLA has shown of a program stays there for the next budget.
    with Worker(timeout_s) as worker:

        def of(percent: int, budget: int) -> Row:
            case = {"workload": workload, "target": target, "percent": percent}
            return rows.of(case, lambda: _found(worker, (workload, target, small), budget))

        found = [of(100, 0)]
        refused = 0
        for percent in range(100 - step, 0, -step):
            if refused == _REFUSALS or "total" not in found[0]:
                break
            found.append(of(percent, found[0]["total"] * percent // 100))
            refused = refused + 1 if "step_s" not in found[-1] else 0
        return found


def _found(worker: Worker, program: tuple[str, str, bool], budget: int) -> Row:
    found = worker.call(measure, *program, budget)
    return {"failure": found.reason} if isinstance(found, Failure) else found


def measure(workload: str, target: str, small: bool, budget: int) -> Row:
    """Figures of a plan within `budget` bytes, or of XLA's own program for a budget of 0."""
    lowered = _lowered(workload, target, small)
    if not budget:
        begin = time.process_time()
        compiled = lowered.compile()
        xla_s = time.process_time() - begin
        step_s = cost.step_seconds(compiled.module, lowered.machine)
        return {"total": compiled.device_bytes, "step_s": step_s, "xla_s": xla_s}
    with planning() as seconds:
        try:
            found = _of_plan(lowered.within(budget))
        except MemoryBudgetError as error:
            found = {"least": error.least}
    return {**found, "planning_s": sum(seconds)}


def _of_plan(plan: Plan) -> Row:
    return {
        "used": plan.prediction.total_bytes,
        "moved": plan.moved_bytes,
        "step_s": plan.prediction.step_time_s,
        "bound_s": plan.prediction.lower_bound_s,
    }


@functools.cache
def _lowered(workload: str, target: str, small: bool) -> Lowered:
    # An accelerator of this machine is neither needed nor taken.
    jax.config.update("jax_platforms", "cpu")
    entry = CORPUS[workload]
    fun, args = entry.small() if small else entry.planning()
    step = jit(fun, hbm=_UNLIMITED, machine=topology(target), donate_argnames=entry.donate)
    return step.lower(*args)


def _tables(rows: Sequence[Row]) -> list[Table]:
    headings = ("XLA's own", "steps kept", "refused above", "lowest kept", "least named")
    of_plans = (
        "gap, median",
        "gap, worst",
        "at",
        "slower than for less",
        "planning / XLA",
        "worst",
    )
    columns = (
        Column("workload"),
        Column("target"),
        *(Column(h, right=True) for h in (*headings, *of_plans)),
    )
    programs = dict.fromkeys((row["workload"], row["target"]) for row in rows)
    cells = (
        _cells([row for row in rows if (row["workload"], row["target"]) == program])
        for program in sorted(programs, key=lambda p: TARGETS.index(p[1]))
    )
    return [Table("Budgets in small steps", columns, tuple(cells))]


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    own, *steps = sorted(rows, key=lambda row: -row["percent"])
    named = own["workload"], own["target"]
    if "total" not in own:
        return (*named, own["failure"], *["–"] * 10)
    kept = [row for row in steps if "step_s" in row]
    if not kept:
        return (*named, format_bytes(own["total"]), "0", *["–"] * 9)
    lowest = kept[-1]["percent"]
    refused = [row for row in steps if "step_s" not in row]
    above = [row["percent"] for row in refused if row["percent"] > lowest]
    least = [row["least"] for row in refused if row["percent"] < lowest and "least" in row]
    gaps = {row["percent"]: row["step_s"] / row["bound_s"] - 1 for row in kept}
    worst = max(gaps, key=lambda percent: gaps[percent])
    slower = sum(a["step_s"] > _SLOWER * b["step_s"] for a, b in pairwise(kept))
    planning = [row["planning_s"] / own["xla_s"] for row in kept]
    return (
        *named,
        format_bytes(own["total"]),
        str(len(kept)),
        ", ".join(f"{percent} %" for percent in above) or "none",
        f"{lowest} %",
        f"{least[0] / own['total']:.1%}" if least else "–",
        f"{statistics.median(gaps.values()):.1%}",
        f"{gaps[worst]:.1%}",
        f"{worst} %",
        str(slower),
        f"{statistics.median(planning):.0%}",
        f"{max(planning):.0%}",
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
