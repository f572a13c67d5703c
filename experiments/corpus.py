"""Which programs can be planned for which budget, and at what price?

    python -m experiments.corpus [--target v5e --target h200 --target cpu] [--workload vit-train]
        [--budget 75 50] [--least] [--json corpus.jsonl [--resume]]

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
limit of its own: one that fails is a row that says so. ``--json`` writes a line a result as
it comes; with ``--resume`` what stands there is not measured again, and with ``--show`` nothing
is, and the tables are of what stands there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from experiments.isolated import Failure, isolated
from hlo_passes import inject
from hlo_passes.cost import instruction_costs
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.ir import Module
from hlo_passes.machine import Machine
from hlo_passes.plan import Plan
from hlo_passes.reader import read_module
from hlo_passes.timeline import schedule_events, simulate
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import Lowered, jit
from memplan.looks import Look, Looks
from memplan.report.tables import Column, Table, write_tables
from memplan.topologies import topology
from models.corpus import CORPUS

TARGETS = ("v5e", "h200", "cpu")
PERCENTS = (100, 75, 50, 35, 25)

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
      least: the least budget that the planner names, where this one cannot be kept; else 0.
      least_works: what came of that: the bytes that XLA reports for it, and ``""`` or what is
        wrong with it; None where it was not tried.
      total: device bytes as XLA reports them.
      moved: bytes that a step moves between tiers.
      evictions, recomputes: how many.
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


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    settings = Settings(options.small, options.least, options.timeout)
    log = Log(options.json, options.resume or options.show)
    pairs = [(w, t) for t in options.target or TARGETS for w in options.workload or CORPUS]
    if options.show:
        found = list(log.known(pairs, options.budget))
    else:
        with ThreadPoolExecutor(options.jobs) as pool:
            sweeps = [pool.submit(_sweep, *pair, options.budget, settings, log) for pair in pairs]
            found = [sweep.result() for sweep in sweeps]
    owns = [own for own, _ in found]
    points = [(own, point) for own, of in found for point in of]
    compared = [_point_table(points), _summary(points)] if points else []
    write_tables([_own_table(owns), *compared], sys.stdout)


class Log:
    """Results as JSON lines.

    Args:
      path: of the file; None keeps nothing.
      resume: take what is in it for measured; otherwise it is written anew.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], Own | Point] = {}
        if path is None:
            return
        if resume and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                result = _decoded(json.loads(line))
                self._known[_key(result)] = result
        else:
            path.write_text("", encoding="utf-8")

    def known(
        self, pairs: Iterable[tuple[str, str]], percents: Iterable[int]
    ) -> Iterator[tuple[Own, list[Point]]]:
        """Of each workload and target what is known."""
        wanted = sorted(percents, reverse=True)
        for pair in pairs:
            own = self._known.get(pair)
            if isinstance(own, Own):
                points = (self._known.get((*pair, percent)) for percent in wanted)
                yield own, [point for point in points if isinstance(point, Point)]

    def measured[Result: (Own, Point)](
        self, wanted: Result, measure: Callable[[], Result]
    ) -> Result:
        """What is known of the case that `wanted` names, else what `measure` returns."""
        known = self._known.get(_key(wanted))
        if isinstance(known, type(wanted)):
            return known
        begin = time.monotonic()
        result = measure()
        seconds = format_seconds(time.monotonic() - begin)
        with self._lock:
            print(f"{_key(result)}: {seconds} {result.failure}", file=sys.stderr, flush=True)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
        return result


def _key(result: Own | Point) -> tuple[Any, ...]:
    percent = (result.percent,) if isinstance(result, Point) else ()
    return (result.workload, result.target, *percent)


def _decoded(document: dict[str, Any]) -> Own | Point:
    if "percent" not in document:
        return Own(**document)
    tried = document["least_works"]
    return Point(**{**document, "least_works": None if tried is None else tuple(tried)})


def _sweep(
    workload: str, target: str, percents: Sequence[int], settings: Settings, log: Log
) -> tuple[Own, list[Point]]:
    """A program as XLA has it, then within each share of that."""
    own = Own(workload, target)
    own = log.measured(own, lambda: _attempt(own, settings, measure_own))
    if own.failure:
        return own, []
    points = [Point(workload, target, p, budget=own.total * p // 100) for p in percents]
    measured = (log.measured(p, lambda p=p: _attempt(p, settings, measure_point)) for p in points)
    return own, list(measured)


def _attempt[Result: (Own, Point)](
    wanted: Result, settings: Settings, measure: Callable[[Result, Settings], Result]
) -> Result:
    """`wanted` measured in a process of its own, or with the reason why that failed."""
    result = isolated(measure, wanted, settings, timeout_s=settings.timeout_s)
    return _with(wanted, failure=result.reason) if isinstance(result, Failure) else result


def _with[Result: (Own, Point)](result: Result, **numbers: Any) -> Result:
    return type(result)(**{**asdict(result), **numbers})


def measure_own(wanted: Own, settings: Settings) -> Own:
    """Compiles a program as ``jax.jit`` does."""
    lowered = _lower(wanted, _UNLIMITED, settings)
    begin = time.process_time()
    executable = lowered.unplanned()
    xla_s = time.process_time() - begin
    module, memory = read_module(executable), executable.memory_analysis()
    return _with(
        wanted,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        instructions=len(module.entry.instructions),
        step_time_s=_step_time_s(module, topology(wanted.target).machine),
        xla_s=xla_s,
    )


def measure_point(wanted: Point, settings: Settings) -> Point:
    """Compiles a program within its budget."""
    lowered = _lower(wanted, wanted.budget, settings)
    begin = time.process_time()
    try:
        with _planning() as planned:
            compiled = lowered.compile()
    except MemoryBudgetError as error:
        tried = _try_least(wanted, error.least, settings) if settings.try_least else None
        return _with(wanted, least=error.least, least_works=tried)
    compile_s = time.process_time() - begin
    machine = topology(wanted.target).machine
    return _with(
        wanted,
        total=compiled.device_bytes,
        step_time_s=_step_time_s(compiled.module, machine),
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
def _planning() -> Generator[list[float]]:
    """Yields the processor seconds of every planning meanwhile, without XLA's."""
    found: list[float] = []
    xla_s, look, capture = 0.0, Looks.look, inject.capture

    def capturing(*args: Any) -> Module:
        nonlocal xla_s
        begin = time.process_time()
        try:
            return capture(*args)
        finally:
            xla_s += time.process_time() - begin

    def looking(*args: Any) -> Look:
        begin = time.process_time() - xla_s
        try:
            return look(*args)
        finally:
            found.append(time.process_time() - xla_s - begin)

    with mock.patch.object(inject, "capture", capturing), mock.patch.object(Looks, "look", looking):
        yield found


def _try_least(wanted: Point, least: int, settings: Settings) -> tuple[int, str]:
    """See `Point.least_works`."""
    try:
        total = _lower(wanted, least, settings).compile().device_bytes
    except MemoryBudgetError as error:
        return 0, f"{format_bytes(error.least)} would do"
    return total, "" if total <= least else "exceeded"


def _step_time_s(module: Module, machine: Machine) -> float:
    costs = instruction_costs(module, machine)
    return simulate(schedule_events(module, costs, machine), machine).step_time_s


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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", metavar="NAME", help=f"of {TARGETS}")
    parser.add_argument("--workload", action="append", choices=CORPUS, metavar="NAME")
    parser.add_argument("--budget", nargs="*", type=int, default=PERCENTS, metavar="PERCENT")
    parser.add_argument("--small", action="store_true", help="the small size of each program")
    parser.add_argument("--least", action="store_true", help="try the least budgets named")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="keep what is in FILE")
    parser.add_argument("--show", action="store_true", help="measure nothing, show FILE")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at once")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each")
    options = parser.parse_args(arguments)
    if (options.resume or options.show) and options.json is None:
        parser.error("--resume and --show need --json FILE")
    return options


if __name__ == "__main__":
    main()
