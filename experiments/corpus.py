"""Which programs can be planned for which budget, and at what price?

    python -m experiments.corpus [--target v5e --target h200 --target cpu] [--workload vit-train]
        [--budget 75 50] [--least] [--json corpus.jsonl [--resume | --show]] [--plot corpus.svg]

Every program of `models.corpus` is compiled as XLA has it, then within shares of the device
bytes of that, by the target's own compiler; nothing is run. With ``--budget`` and no number it
stays at the first. Bytes are XLA's report of the executables. Step times are predictions of
the machine model for the executables' schedules, XLA's own and the planned one alike; the gap
is that of the plan to its own lower bound, and what the bound is beside XLA's own step says how
much of a slowdown no plan avoids. Seconds of planning and of XLA are processor time
over all threads, so that a busy machine makes no difference; planning is without what XLA
does for it up to its scheduler.

A budget that cannot be kept shows the least one that the planner names, and with ``--least``
whether a program compiled for that keeps to it. Each compilation has a process and a time
limit of its own: one that fails is a row that says so. ``--plot`` draws steps and their bounds
against budgets.
"""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import jax
from absl import flags

from experiments.isolated import Failure, isolated
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.ir import Module
from hlo_passes.plan import Plan
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from hlo_passes.simulator.timeline import scheduled_step
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import Lowered, jit
from memplan.candidates import Candidate
from memplan.planner import Planner
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS

TARGETS = ("v5e", "h200", "cpu")
PERCENTS = (75, 50, 35, 25)

# No program of the corpus needs a plan for this.
_UNLIMITED = "1TiB"


@dataclass(frozen=True, slots=True)
class Own:
    """A program as XLA has it.

    Attributes:
      workload, target: which.
      failure: why there is none; then all numbers are 0.
      arguments, outputs, aliased, temp: device bytes, by the names of ``memory_analysis()``.
      instructions: of the entry computation.
      step_time_s: predicted.
      xla_s: processor seconds of the compilation.
    """

    workload: str
    target: str
    failure: str = ""
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temp: int = 0
    instructions: int = 0
    step_time_s: float = 0.0
    xla_s: float = 0.0

    @property
    def total(self) -> int:
        """What a budget is a share of."""
        return self.arguments + self.outputs + self.temp - self.aliased

    @property
    def staying(self) -> int:
        """Device bytes of arguments and outputs."""
        return self.total - self.temp


@dataclass(frozen=True, slots=True)
class Point:
    """A program within a budget.

    Attributes:
      workload, target, percent: which; `budget` in bytes is `percent` of XLA's own total.
      failure: why there is none, other than the budget.
      least: the least budget that was found to work, where this one cannot be kept; else 0.
      least_works: what came of that: the bytes that XLA reports for it, and ``""`` or what is
        wrong with it; None where it was not tried.
      total: device bytes as XLA reports them.
      moved: bytes that a step moves between tiers.
      evictions, recomputes, loops: how many; the last, over chunks.
      recompute_s, compute_s, step_time_s: predicted seconds, the last of the executable.
      gap: `Prediction.gap`; None without a plan.
      planning_s, compile_s: processor seconds: of the first planning, and of the whole
        compilation.
    """

    workload: str
    target: str
    percent: int
    budget: int = 0
    failure: str = ""
    least: int = 0
    least_works: tuple[int, str] | None = None
    total: int = 0
    moved: int = 0
    evictions: int = 0
    recomputes: int = 0
    loops: int = 0
    recompute_s: float = 0.0
    compute_s: float = 0.0
    step_time_s: float = 0.0
    gap: float | None = None
    planning_s: float = 0.0
    compile_s: float = 0.0

    @property
    def is_kept(self) -> bool:
        return 0 < self.total <= self.budget

    @property
    def bound_s(self) -> float:
        """Seconds that no plan within the budget undercuts."""
        return self.step_time_s / (1 + (self.gap or 0.0))


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
      small: take the programs in their small size.
      try_least: compile for the least budget that an impossible one names.
      timeout_s: for one compilation, in seconds of the wall clock.
    """

    small: bool
    try_least: bool
    timeout_s: float


def _define() -> None:
    flags.DEFINE_multi_string("target", list(TARGETS), "topologies")
    flags.DEFINE_multi_enum("workload", list(CORPUS), list(CORPUS), "of `models.corpus`")
    flags.DEFINE_multi_integer("budget", list(PERCENTS), "percent of what XLA takes; may be none")
    flags.DEFINE_bool("small", False, "the small size of each program")
    flags.DEFINE_bool("least", False, "try the least budgets named")
    flags.DEFINE_integer("jobs", 1, "compilations at once")
    flags.DEFINE_float("timeout", 900.0, "seconds for each")


def _rows(rows: Rows) -> Iterator[Row]:
    settings = Settings(FLAGS.small, FLAGS.least, FLAGS.timeout)
    pairs = [(w, t) for t in FLAGS.target for w in FLAGS.workload]
    with ThreadPoolExecutor(FLAGS.jobs) as pool:
        found = [pool.submit(_sweep, rows, *pair, FLAGS.budget, settings) for pair in pairs]
        for sweep in found:
            yield from sweep.result()


def _sweep(
    rows: Rows, workload: str, target: str, percents: Sequence[int], settings: Settings
) -> list[Row]:
    """A program as XLA has it, then within each share of that."""
    case: Row = {"workload": workload, "target": target}
    found = [rows.of(case, lambda: _found(measure_own, Own(**case), case, settings))]
    own = Own(**found[0])
    for percent in () if own.failure else percents:
        point = Point(workload, target, percent, budget=own.total * percent // 100)
        of = {**case, "percent": percent}
        found.append(rows.of(of, lambda p=point, of=of: _found(measure_point, p, of, settings)))
    return found


def _found[Result: (Own, Point)](
    measure: Callable[[Result, Settings], Result], wanted: Result, case: Row, settings: Settings
) -> Row:
    """`wanted` measured in a process of its own, or with the reason why that failed."""
    result = isolated(measure, wanted, settings, timeout_s=settings.timeout_s)
    if isinstance(result, Failure):
        result = replace(wanted, failure=result.reason)
    return {name: value for name, value in asdict(result).items() if name not in case}


def measure_own(wanted: Own, settings: Settings) -> Own:
    """Compiles a program as ``jax.jit`` does."""
    lowered = _lower(wanted, _UNLIMITED, settings)
    begin = time.process_time()
    executable = lowered.unplanned()
    xla_s = time.process_time() - begin
    module, memory = read_module(executable), executable.memory_analysis()
    return replace(
        wanted,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        instructions=len(module.entry.instructions),
        step_time_s=scheduled_step(module, topology(wanted.target).machine).step_time_s,
        xla_s=xla_s,
    )


def measure_point(wanted: Point, settings: Settings) -> Point:
    """Compiles a program within its budget."""
    lowered = _lower(wanted, wanted.budget, settings)
    begin = time.process_time()
    try:
        with planning() as planned:
            compiled = lowered.compile()
    except MemoryBudgetError as error:
        least = error.least_budget()
        tried = _try_least(wanted, least, settings) if settings.try_least else None
        return replace(wanted, least=least, least_works=tried)
    compile_s = time.process_time() - begin
    machine = topology(wanted.target).machine
    return replace(
        wanted,
        total=compiled.device_bytes,
        step_time_s=scheduled_step(compiled.module, machine).step_time_s,
        planning_s=planned[0] if planned else 0.0,
        compile_s=compile_s,
        **_of_plan(compiled.plan),
    )


def _of_plan(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    return {
        "moved": plan.moved_bytes,
        "evictions": len(plan.edits.evictions),
        "recomputes": len(plan.edits.recomputes),
        "loops": len(plan.splits),
        "recompute_s": plan.prediction.recompute_s,
        "compute_s": plan.prediction.compute_s,
        "gap": plan.prediction.gap,
    }


def _lower(wanted: Own | Point, hbm: str | int, settings: Settings) -> Lowered:
    # An accelerator of this machine is neither needed nor taken.
    jax.config.update("jax_platforms", "cpu")
    entry = CORPUS[wanted.workload]
    fun, args = entry.small() if settings.small else entry.planning()
    step = jit(fun, hbm=hbm, machine=topology(wanted.target), donate_argnames=entry.donate)
    return step.lower(*args)


@contextmanager
def planning() -> Generator[list[float]]:
    """Yields the processor seconds of every planning meanwhile, without XLA's."""
    found: list[float] = []
    xla_s, plan, capture = 0.0, Planner.plan, inject.capture

    def capturing(*args: Any) -> Module:
        nonlocal xla_s
        begin = time.process_time()
        try:
            return capture(*args)
        finally:
            xla_s += time.process_time() - begin

    def counting(*args: Any, **options: Any) -> Candidate:
        begin = time.process_time() - xla_s
        try:
            return plan(*args, **options)
        finally:
            found.append(time.process_time() - xla_s - begin)

    with (
        mock.patch.object(inject, "capture", capturing),
        mock.patch.object(Planner, "plan", counting),
    ):
        yield found


def _try_least(wanted: Point, least: int, settings: Settings) -> tuple[int, str]:
    """See `Point.least_works`."""
    try:
        total = _lower(wanted, least, settings).compile().device_bytes
    except MemoryBudgetError as error:
        return 0, f"{format_bytes(error.least)} would do"
    return total, "" if total <= least else "exceeded"


def _tables(rows: Sequence[Row]) -> list[Table]:
    points = _points(rows)
    compared = [_point_table(points), _training_table(points), _summary(points)] if points else []
    return [_own_table(_owns(rows)), *compared]


def _owns(rows: Iterable[Row]) -> list[Own]:
    return sorted((Own(**row) for row in rows if "percent" not in row), key=_place)


def _points(rows: Sequence[Row]) -> list[tuple[Own, Point]]:
    """Of each program, the largest budget first."""
    owns = {(own.workload, own.target): own for own in _owns(rows)}
    points = sorted((Point(**row) for row in rows if "percent" in row), key=_place)
    return [(owns[point.workload, point.target], point) for point in points]


def _place(result: Own | Point) -> tuple[int, ...]:
    """Where it stands among all, in whichever order they were measured."""
    percent = -result.percent if isinstance(result, Point) else 0
    return TARGETS.index(result.target), [*CORPUS].index(result.workload), percent


def _own_table(owns: Iterable[Own]) -> Table:
    headings = ("XLA total", "stays", "arguments", "outputs", "temp", "instructions", "step", "XLA")
    columns = (Column("workload"), Column("target"), *(Column(h, right=True) for h in headings))
    return Table("As XLA has them", columns, tuple(map(_own_row, owns)))


def _own_row(own: Own) -> tuple[str, ...]:
    if own.failure:
        return (own.workload, own.target, *["–"] * 7, _short(own.failure))
    return (
        own.workload,
        own.target,
        format_bytes(own.total),
        f"{own.staying / own.total:.0%}",
        format_bytes(own.arguments),
        format_bytes(own.outputs),
        format_bytes(own.temp),
        str(own.instructions),
        format_seconds(own.step_time_s),
        format_seconds(own.xla_s),
    )


_POINT_COLUMNS = (
    Column("workload"),
    Column("target"),
    Column("budget", right=True),
    Column("hbm=", right=True),
    Column("kept"),
    Column("XLA total", right=True),
    Column("moved", right=True),
    Column("evictions", right=True),
    Column("recomputes", right=True),
    Column("in chunks", right=True),
    Column("recompute", right=True),
    Column("step / XLA's", right=True),
    Column("bound / XLA's", right=True),
    Column("gap", right=True),
    Column("planning", right=True),
    Column("planning / XLA", right=True),
)


def _point_table(points: Iterable[tuple[Own, Point]]) -> Table:
    rows = tuple(_point_row(own, point) for own, point in points)
    return Table("Within shares of XLA's own total", _POINT_COLUMNS, rows)


def _point_row(own: Own, point: Point) -> tuple[str, ...]:
    named = (point.workload, point.target, f"{point.percent} %", format_bytes(point.budget))
    if not point.total:
        verdict = _short(point.failure) or _least_verdict(own, point)
        return (*named, verdict, *["–"] * (len(_POINT_COLUMNS) - len(named) - 1))
    return (
        *named,
        "yes" if point.is_kept else "NO",
        format_bytes(point.total),
        format_bytes(point.moved),
        str(point.evictions),
        str(point.recomputes),
        str(point.loops),
        f"{point.recompute_s / point.compute_s:.1%}" if point.compute_s else "–",
        f"{point.step_time_s / own.step_time_s:.3f}",
        f"{point.bound_s / own.step_time_s:.3f}",
        "–" if point.gap is None else f"{point.gap:.1%}",
        format_seconds(point.planning_s),
        f"{point.planning_s / own.xla_s:.0%}",
    )


def _short(failure: str) -> str:
    """A failure in a cell; all of it is told when it comes, and in the file."""
    return textwrap.shorten(failure, 60, placeholder=" …")


def _least_verdict(own: Own, point: Point) -> str:
    text = f"least {format_bytes(point.least)} ({point.least / own.total:.0%})"
    if point.least_works is None:
        return text
    _, wrong = point.least_works
    return f"{text}, does not work: {wrong}" if wrong else f"{text}, works"


def _training_table(points: Iterable[tuple[Own, Point]]) -> Table:
    """Programs against targets and shares: the step over XLA's, and its gap."""
    found = {(p.workload, p.target, p.percent): (own, p) for own, p in points}
    cases = [(t, n) for t in TARGETS for n in PERCENTS]
    programs = [w for w in CORPUS if w.endswith("-train")]
    rows = (
        (program, *(_training_cell(found.get((program, *case))) for case in cases))
        for program in programs
        if any((program, *case) in found for case in cases)
    )
    columns = (Column("step / XLA's (gap)"), *(Column(f"{t}, {n} %") for t, n in cases))
    return Table("Training steps", columns, tuple(rows))


def _training_cell(found: tuple[Own, Point] | None) -> str:
    if found is None:
        return ""
    own, point = found
    if not point.total:
        return "failed" if point.failure else f"least {point.least / own.total:.0%}"
    gap = "" if point.gap is None else f" ({point.gap:.1%})"
    return f"{point.step_time_s / own.step_time_s:.3f}{gap}"


def _summary(points: Sequence[tuple[Own, Point]]) -> Table:
    headings = (
        "points",
        "feasible",
        "kept",
        "step at 50 %",
        "where the bound is within 5 %",
        "gap",
        "planning / XLA",
    )
    columns = (Column("target"), *(Column(h, right=True) for h in headings))
    targets = list(dict.fromkeys(own.target for own, _ in points))
    rows = [_summary_row(t, [p for p in points if p[0].target == t]) for t in targets]
    note = (
        "The last four: medians, of points that are kept; the gap and planning of plans. A point "
        "that failed counts as feasible, and not as kept."
    )
    return Table("Summary", columns, (*rows, _summary_row("all", points)), note)


def _summary_row(name: str, points: Sequence[tuple[Own, Point]]) -> tuple[str, ...]:
    feasible = [(own, point) for own, point in points if not point.least]
    kept = [(own, point) for own, point in feasible if point.is_kept]
    planned = [(own, point) for own, point in kept if point.gap is not None]
    half = [(own, point) for own, point in kept if point.percent == 50]
    allowed = [(own, point) for own, point in half if point.bound_s <= 1.05 * own.step_time_s]
    return (
        name,
        str(len(points)),
        str(len(feasible)),
        f"{len(kept) / len(feasible):.0%}" if feasible else "–",
        _median((p.step_time_s / own.step_time_s for own, p in half), ".3f"),
        _median((p.step_time_s / own.step_time_s for own, p in allowed), ".3f"),
        _median((p.gap for _, p in planned if p.gap is not None), ".1%"),
        _median((p.planning_s / own.xla_s for own, p in planned), ".0%"),
    )


def _median(values: Iterable[float], form: str) -> str:
    found = list(values)
    return format(statistics.median(found), form) if found else "–"


def _plot(rows: Sequence[Row]) -> Any:
    """A panel a target: steps over XLA's own, dotted what no plan undercuts."""
    from matplotlib.figure import Figure

    points = [(own, p) for own, p in _points(rows) if p.is_kept]
    targets = list(dict.fromkeys(own.target for own, _ in points))
    figure = Figure(figsize=(4 * len(targets), 4), layout="constrained")
    panels = figure.subplots(1, len(targets), squeeze=False, sharey=True)[0]
    for axes, target in zip(panels, targets, strict=True):
        for color, workload in enumerate(CORPUS):
            found = [(o, p) for o, p in points if (o.workload, o.target) == (workload, target)]
            shares = [p.total / o.total for o, p in found]
            steps = [p.step_time_s / o.step_time_s for o, p in found]
            bounds = [p.bound_s / o.step_time_s for o, p in found]
            style: dict[str, Any] = {"color": f"C{color % 10}", "lw": 1.2, "ms": 3}
            axes.plot(shares, steps, "o-" if color < 10 else "s-", label=workload, **style)
            axes.plot(shares, bounds, ":", **style)
        axes.set(title=target, xlabel="device bytes / XLA's own", yscale="log")
        axes.invert_xaxis()
    panels[0].set_ylabel("step / XLA's own, predicted")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


EXPERIMENT = Experiment(_rows, _tables, _define, _plot)

if __name__ == "__main__":
    EXPERIMENT.main()
