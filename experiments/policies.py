"""Training steps that do not fit: what does memplan do beside what users do today?

    python -m experiments.policies [--steps llama] [--targets v5e h200]
                                   [--results FILE] [--out docs/policies.svg]

One step, compiled in every way of keeping less of it in device memory:

    XLA alone               ``jax.jit``
    jax.checkpoint          a policy for each layer: what the backward pass computes again
    offload by policy       a policy that also sends named residuals, or products, to the host
    XLA's rematerialisation ``jax.jit`` with an option that lets XLA use less memory
    memplan                 ``memplan.jit(hbm=...)``, shares of what XLA alone takes; no policy
    memplan on a policy     the same on a step whose layers are computed again

Columns:

    total, temp   device bytes as XLA reports them for the executable
    host          bytes of temporaries in host memory, as XLA reports them
    moved         bytes that a step moves between the two
    overlapped    share of those that move while the device computes
    step          seconds, predicted by the machine model for the executable's schedule
    within it     least step of the others that take no more memory than this one (of memplan
                  that of any way without memplan)

Each compilation is a process of its own; one that fails or takes too long is a row. With
``--results`` what was found is kept in a file, one JSON line each, and not compiled again.

What XLA has of its own: ``xla_jf_rematerialization_percent_shared_memory_limit`` on TPU and
``xla_gpu_memory_limit_slop_factor`` on GPU set what its rematerialisation aims at, and an
executable comes of it also where it misses that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.isolated import Failure, isolated
from experiments.scatter import Panel, Point, scatter
from experiments.steps import STEPS, Policy
from hlo_passes.errors import MemplanError
from hlo_passes.machine import Machine
from hlo_passes.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.executable import device_bytes
from memplan.report.build import view_run
from memplan.report.tables import Column, Table, write_tables
from memplan.topologies import topology

_POLICIES = jax.checkpoint_policies


def _named(*, saved: Sequence[str] = (), offloaded: Sequence[str] = ()) -> Policy:
    return _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


_ATTENTION = ("query", "key", "value", "context")

POLICIES: Mapping[str, Policy | None] = {
    "none": None,
    "nothing_saveable": _POLICIES.nothing_saveable,
    "dots_saveable": _POLICIES.dots_saveable,
    "dots_with_no_batch_dims_saveable": _POLICIES.dots_with_no_batch_dims_saveable,
    "everything_saveable": _POLICIES.everything_saveable,
    "offload layer_in": _named(offloaded=["layer_in"]),
    "offload layer_in, attended": _named(offloaded=["layer_in", "attended"]),
    "offload attention": _named(offloaded=_ATTENTION),
    "offload gate, up": _named(offloaded=["gate", "up"]),
    "offload layer_in, save attention": _named(saved=_ATTENTION, offloaded=["layer_in"]),
    "offload all dots": _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""What is tried of each layer; the names are those of `experiments.steps`."""

_ALONE, _CHECKPOINT, _OFFLOAD = "XLA alone", "jax.checkpoint", "offload by policy"
_XLA_REMAT, _MEMPLAN, _BOTH = "XLA's rematerialisation", "memplan", "memplan on a policy"

_LIMITS = (0.75, 0.5, 0.25)
_BUDGETS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.25)
_BUDGETS_ON_POLICY = {
    "dots_with_no_batch_dims_saveable": (0.5, 0.4),
    "nothing_saveable": (0.3, 0.25, 0.2),
}

_COLUMNS = (
    Column("way"),
    Column("what"),
    Column("total", right=True),
    Column("temp", right=True),
    Column("host", right=True),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("step", right=True),
    Column("within it", right=True),
)


@dataclass(frozen=True)
class Run:
    """One compilation.

    Attributes:
      step: a key of `experiments.steps.STEPS`.
      target: of `memplan.topology`.
      policy: a key of `POLICIES`.
      hbm: bytes that memplan keeps to; None without memplan.
      limit: bytes that XLA's own rematerialisation aims at; None for the device's.
    """

    step: str
    target: str
    policy: str = "none"
    hbm: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Found:
    """What came of a run; the figures are None where there is no executable.

    Attributes:
      failure: why there is none, or ``""``.
      total, temp, host, moved: bytes.
      overlapped: a fraction; None where nothing moves.
      step_s: predicted.
    """

    failure: str = ""
    total: int | None = None
    temp: int | None = None
    host: int | None = None
    moved: int | None = None
    overlapped: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Row:
    """A run as the table and the figure show it."""

    way: str
    what: str
    run: Run
    found: Found

    @property
    def is_ours(self) -> bool:
        return self.run.hbm is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--targets", nargs="+", default=["v5e", "h200"])
    parser.add_argument("--results", type=Path, help="keep what is found there, and go on from it")
    parser.add_argument("--out", type=Path, help="draw the figure there")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a compilation")
    parser.add_argument("--peers", action="store_true", help="all ways but memplan's")
    options = parser.parse_args()
    results = Results(options.results, options.timeout)
    cases = [(step, target) for step in options.steps for target in options.targets]
    rows = {case: tuple(_rows(*case, results, options.peers)) for case in cases}
    titles = {case: f"{STEPS[case[0]].title}, {case[1]}" for case in cases}
    write_tables([_table(titles[case], rows[case]) for case in cases], sys.stdout)
    if options.out:
        panels = [_panel(titles[case], rows[case]) for case in cases]
        options.out.write_text(scatter(panels), encoding="utf-8")


class Results:
    """Runs, each in a process of its own, once."""

    def __init__(self, file: Path | None, timeout_s: float) -> None:
        self._file = file
        self._timeout_s = timeout_s
        self._found: dict[Run, Found] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                run, found = json.loads(line)
                self._found[Run(**run)] = Found(**found)

    def of(self, run: Run) -> Found:
        """What comes of `run`: known already, or compiled now."""
        if run not in self._found:
            print(run, "...", end="", file=sys.stderr, flush=True)
            found = isolated(compile_run, run, timeout_s=self._timeout_s)
            if isinstance(found, Failure):
                found = Found(found.reason)
            print(f" {found.failure or 'compiled'}", file=sys.stderr)
            self._keep(run, found)
        return self._found[run]

    def _keep(self, run: Run, found: Found) -> None:
        self._found[run] = found
        if self._file is not None:
            line = json.dumps([dataclasses.asdict(run), dataclasses.asdict(found)])
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def compile_run(run: Run) -> Found:
    """Compiles for a target that need not be here, and reads the executable."""
    target = topology(run.target)
    fun, args = STEPS[run.step].make(POLICIES[run.policy])
    hbm = "1TiB" if run.hbm is None else run.hbm
    lowered = jit(fun, hbm=hbm, machine=target, donate_argnums=0).lower(*args)
    try:
        if run.hbm is None:
            executable = lowered.unplanned(_limit_options(target.machine, run.limit))
        else:
            executable = lowered.compile()
    except (MemplanError, jax.errors.JaxRuntimeError) as error:
        return Found(str(error).splitlines()[0])
    memory = executable.memory_analysis()
    view = view_run("", read_module(executable), target.machine, compiled=memory)
    assert view.clock is not None  # A machine was named.
    return Found(
        total=device_bytes(executable, 0),
        temp=memory.temp_size_in_bytes,
        host=memory.host_temp_size_in_bytes,
        moved=view.moved_bytes,
        overlapped=view.overlapped,
        step_s=view.clock.step_time_s,
    )


def _limit_options(machine: Machine, limit: int | None) -> Mapping[str, Any] | None:
    """The XLA options that make its rematerialisation aim at `limit` bytes.

    Both take whole percents of the device's memory. ``xla_tpu_max_hbm_size_mib`` would take
    bytes, but ends the compilation where rematerialisation misses them.
    """
    if limit is None:
        return None
    percent = max(1, round(100 * limit / machine.device_memory.capacity_bytes))
    if machine.platform == "tpu":
        return {"xla_jf_rematerialization_percent_shared_memory_limit": str(percent)}
    return {"xla_gpu_memory_limit_slop_factor": str(percent)}


def _rows(step: str, target: str, results: Results, peers: bool) -> Iterator[Row]:
    def row(way: str, what: str, **how: Any) -> Row:
        run = Run(step, target, **how)
        return Row(way, what, run, results.of(run))

    alone = row(_ALONE, "jax.jit")
    yield alone
    for policy in STEPS[step].policies:
        yield row(_OFFLOAD if "offload" in policy else _CHECKPOINT, policy, policy=policy)
    own = alone.found.total
    if own is None:
        return
    for share in _LIMITS:
        yield row(_XLA_REMAT, f"limit {share:.0%}", limit=int(own * share))
    if peers:
        return
    for share in _BUDGETS:
        yield row(_MEMPLAN, f"hbm {share:.0%}", hbm=int(own * share))
    for policy, shares in _BUDGETS_ON_POLICY.items():
        for share in shares:
            yield row(_BOTH, f"{policy}, hbm {share:.0%}", policy=policy, hbm=int(own * share))


def _table(title: str, rows: Sequence[Row]) -> Table:
    return Table(title, _COLUMNS, tuple(_cells(row, rows) for row in rows))


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    found = row.found
    if found.total is None or found.step_s is None:
        return (row.way, row.what, found.failure, *["–"] * (len(_COLUMNS) - 3))
    within = [
        other.found.step_s
        for other in rows
        if other.found.total is not None
        and other.found.step_s is not None
        and other.found.total <= found.total
        and other is not row
        and not other.is_ours
    ]
    return (
        row.way,
        row.what,
        format_bytes(found.total),
        format_bytes(found.temp or 0),
        format_bytes(found.host or 0),
        format_bytes(found.moved or 0),
        "–" if found.overlapped is None else f"{found.overlapped:.1%}",
        format_seconds(found.step_s),
        format_seconds(min(within)) if within else "–",
    )


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    series: dict[str, list[Point]] = {}
    for row in rows:
        found = row.found
        if found.total is None or found.step_s is None:
            continue
        point = Point(found.total / 2**30, found.step_s * 1e3, row.what)
        series.setdefault(row.way, []).append(point)
    return Panel(title, "device memory, GiB", "step, predicted, ms", series)


if __name__ == "__main__":
    main()
