"""A step of one program on several machines: what `memplan simulate` tells.

The module is read once, and costed and simulated for each machine::

    module, machine ─► costs, work ─► events ─► timeline ─────► where the time goes
                                         └────► many draws ───► p50, p99

Only shapes are needed, no values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import HOST_MEMORY_SPACE, Module
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.events import Compute, Direction, Done, TimelineEvent
from hlo_passes.simulator.timeline import (
    Conditions,
    Jitter,
    Timeline,
    TransferSpan,
    drawn_step_times,
    schedule_events,
    simulate,
)
from hlo_passes.simulator.work import instruction_work
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.tables import Column, Table

ARITHMETIC, MEMORY, SHARING, LAUNCHES = "arithmetic", "device memory", "sharing", "launches"
"""What a step spends its time with, beside waits for what a link or the interconnect carries."""


@dataclass(frozen=True)
class WayView:
    """What one way carries in a step.

    Attributes:
      way: the tiers it is between, ``"host→hbm"``; of collectives device memory and the
        interconnect.
      transfers: how many, collectives as well.
      size: bytes; of collectives those that the device sends.
      busy_s: seconds in which at least one of them moves.
    """

    way: str
    transfers: int
    size: int
    busy_s: float


@dataclass(frozen=True)
class SimulatedView:
    """A step on one machine; all in seconds and bytes.

    Attributes:
      machine: its name, or what it was compiled for.
      module: the program's.
      step_s: of the step.
      undisturbed_s: of it, if nothing shared a memory and launches took no time: what plans count
        with.
      compute_s, stall_s, launch_s: of `step_s`; see `Timeline`.
      where: seconds of the step by what they are spent with: kernels that arithmetic holds back,
        and device memory; what sharing memories adds; launches; the way of what is waited for.
      ways: what moves, in the order in which it begins.
      launches: of kernels, graphs and copies; none where the machine does not say what they take.
      captured: kernels in graphs.
      p50_s, p99_s: of the steps that were drawn; None where none were.
    """

    machine: str
    module: str
    step_s: float
    undisturbed_s: float
    compute_s: float
    stall_s: float
    launch_s: float
    where: Mapping[str, float]
    ways: tuple[WayView, ...]
    launches: int
    captured: int
    p50_s: float | None = None
    p99_s: float | None = None


def simulated(
    module: Module, machine: Machine, name: str, jitter: Jitter | None = None
) -> SimulatedView:
    """Simulates a step.

    Args:
      module: scheduled.
      name: of the machine, in the view.
      jitter: draws steps as well.

    Raises:
      MalformedModuleError: when the module has no schedule.
    """
    costs = instruction_costs(module, machine)
    work = instruction_work(module, machine, costs)
    events = list(schedule_events(module, costs, machine, with_synchronous=True, work=work))
    conditions = Conditions(is_shared=True, is_launched=True)
    timeline = simulate(events, machine, conditions)
    launches, captured = _launches(events) if machine.launch_s is not None else (0, 0)
    view = SimulatedView(
        machine=name,
        module=module.name,
        step_s=timeline.step_time_s,
        undisturbed_s=simulate(events, machine).step_time_s,
        compute_s=timeline.compute_s,
        stall_s=timeline.stall_s,
        launch_s=timeline.launch_s,
        where=_where(timeline),
        ways=tuple(_ways(timeline)),
        launches=launches,
        captured=captured,
    )
    return view if jitter is None else _with_draws(view, events, machine, conditions, jitter)


def _launches(events: Sequence[TimelineEvent]) -> tuple[int, int]:
    """Those of kernels, graphs and copies; and the kernels in graphs."""
    kernels = [event.work for event in events if isinstance(event, Compute)]
    copies = sum(not isinstance(event, Compute | Done) for event in events)
    launches = sum(work.launches + work.graphs for work in kernels)
    return round(launches) + copies, round(sum(work.captured for work in kernels))


def _with_draws(
    view: SimulatedView,
    events: Sequence[TimelineEvent],
    machine: Machine,
    conditions: Conditions,
    jitter: Jitter,
) -> SimulatedView:
    drawn = drawn_step_times(events, machine, conditions, jitter)
    p50_s, p99_s = np.percentile(drawn, [50, 99]).tolist()
    return replace(view, p50_s=p50_s, p99_s=p99_s)


def hosted_at(machine: Machine, tier: str) -> Machine:
    """Returns the same machine where what XLA has in host memory is in another tier, from where it
    comes by the host's memory.

    Raises:
      NotOnMachineError: when the machine has no such tier, or it is not linked to the host.
    """
    machine.tier(tier)
    fed = machine.fed_from(tier)
    if not machine.has_host_memory:
        return fed
    spaces = {tier: HOST_MEMORY_SPACE}
    tiers = [
        replace(t, memory_space=spaces.get(t.name))
        if t.name == tier or t.memory_space == HOST_MEMORY_SPACE
        else t
        for t in fed.tiers
    ]
    return replace(fed, tiers=tuple(tiers))


def _where(timeline: Timeline) -> dict[str, float]:
    alone_s = timeline.compute_s - timeline.shared_s
    return {
        ARITHMETIC: max(0.0, alone_s - timeline.memory_s),
        MEMORY: timeline.memory_s,
        SHARING: timeline.shared_s,
        LAUNCHES: timeline.launch_s,
        **{_way(route): seconds for route, seconds in timeline.stalls.items()},
    }


def _ways(timeline: Timeline) -> Iterator[WayView]:
    spans: dict[Direction, list[TransferSpan]] = defaultdict(list)
    for span in (*timeline.transfers, *timeline.collectives):
        spans[span.source, span.destination].append(span)
    for route, moved in spans.items():
        busy_s, until = 0.0, 0.0
        for span in moved:  # Those of one way begin in the order of their issue.
            busy_s += max(0.0, span.end - max(span.begin, until))
            until = max(until, span.end)
        yield WayView(_way(route), len(moved), sum(span.size for span in moved), busy_s)


def _way(route: Direction) -> str:
    return "→".join(route)


def summarize_simulated(
    views: Sequence[SimulatedView],
    jitter: Jitter | None,
    skipped: Mapping[str, str],
    version: str,
) -> dict[str, Any]:
    """Returns the views as JSON-ready data, with the names of the dataclasses.

    Args:
      skipped: machines that were left out, and why.
      version: memplan's.
    """
    return {
        "format": "memplan.simulation",
        "version": 1,
        "memplan": version,
        "jitter": None if jitter is None else asdict(jitter),
        "machines": [asdict(view) for view in views],
        "skipped": dict(skipped),
    }


def simulated_tables(
    views: Sequence[SimulatedView], jitter: Jitter | None, skipped: Mapping[str, str]
) -> Iterator[Table]:
    """Yields the tables of some machines: the step, where its time goes, and what moves.

    Args:
      jitter: of the steps that were drawn, if any were.
      skipped: machines that were left out, and why.
    """
    yield _steps_table(views, jitter)
    yield _where_table(views)
    if any(view.ways for view in views):
        yield _ways_table(views)
    if skipped:
        columns = Column("machine"), Column("why")
        yield Table("left out", columns, tuple(skipped.items()))


def _steps_table(views: Sequence[SimulatedView], jitter: Jitter | None) -> Table:
    modules = dict.fromkeys(view.module for view in views)
    columns = [Column("machine")]
    headings = ["step", "undisturbed", "computes", "waits", "launching", "launches"]
    headings += [] if jitter is None else ["p50", "p99"]
    columns += [Column(heading, right=True) for heading in headings]
    note = ""
    if jitter is not None:
        note = (
            f"p50 and p99 of {jitter.steps} steps in which each kernel and each transfer varies by "
            f"{100 * jitter.variation:g} % (seed {jitter.seed})"
        )
    return Table(
        f"a step of {', '.join(modules)}, simulated",
        tuple(columns),
        tuple(
            (
                view.machine,
                *(
                    format_seconds(seconds)
                    for seconds in (
                        view.step_s,
                        view.undisturbed_s,
                        view.compute_s,
                        view.stall_s,
                        view.launch_s,
                    )
                ),
                _launched(view),
                *(format_seconds(s) for s in (view.p50_s, view.p99_s) if s is not None),
            )
            for view in views
        ),
        note,
    )


def _launched(view: SimulatedView) -> str:
    if not view.launches:
        return "–"
    return f"{view.launches:,}" + (f" + {view.captured:,} in graphs" if view.captured else "")


def _where_table(views: Sequence[SimulatedView]) -> Table:
    # What rounds to nothing is not worth a column.
    shown = {
        name: any(v.where.get(name, 0.0) >= 5e-4 * v.step_s > 0 for v in views)
        for view in views
        for name in view.where
    }
    what = [name for name, is_shown in shown.items() if is_shown]
    return Table(
        "where the time goes",
        (Column("machine"), *(Column(_heading(name), right=True) for name in what)),
        tuple(
            (view.machine, *(_share(view.where.get(name, 0.0), view.step_s) for name in what))
            for view in views
        ),
    )


def _heading(name: str) -> str:
    return f"waits for {name}" if "→" in name else name


def _ways_table(views: Sequence[SimulatedView]) -> Table:
    headings = "transfers", "bytes", "busy", "of the step"
    return Table(
        "what moves",
        (
            Column("machine"),
            Column("way"),
            *(Column(heading, right=True) for heading in headings),
        ),
        tuple(
            (
                view.machine,
                way.way,
                f"{way.transfers:,}",
                format_bytes(way.size),
                format_seconds(way.busy_s),
                _share(way.busy_s, view.step_s),
            )
            for view in views
            for way in view.ways
        ),
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"
