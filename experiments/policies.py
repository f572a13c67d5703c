"""Training steps that do not fit: what does memplan do beside what users do today?

    python -m experiments.policies [--steps llama] [--targets v5e h200]
        [--json FILE [--resume | --show]] [--plot policies.svg]

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

Each compilation is a process of its own; one that fails or takes too long is a row. ``--plot``
draws steps against device memory, and of each way a line below what it reaches.

What XLA has of its own: ``xla_jf_rematerialization_percent_shared_memory_limit`` on TPU and
``xla_gpu_memory_limit_slop_factor`` on GPU set what its rematerialisation aims at, and an
executable comes of it also where it misses that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from experiments.steps import STEPS, Policy
from hlo_passes.errors import MemplanError
from hlo_passes.hardware.machine import Machine
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.executable import device_bytes
from memplan.report.build import view_run
from memplan.report.tables import Column, Table
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


def _define() -> None:
    flags.DEFINE_multi_enum("steps", list(STEPS), list(STEPS), "which")
    flags.DEFINE_multi_string("targets", ["v5e", "h200"], "topologies")
    flags.DEFINE_float("timeout", 1800.0, "seconds for a compilation")
    flags.DEFINE_bool("peers", False, "all ways but memplan's")


def _rows(rows: Rows) -> Iterator[Row]:
    for step in FLAGS.steps:
        for target in FLAGS.targets:
            yield from _ways(rows, step, target)


def _ways(rows: Rows, step: str, target: str) -> Iterator[Row]:
    def row(
        way: str, what: str, policy: str = "none", hbm: int | None = None, limit: int | None = None
    ) -> Row:
        run = {"step": step, "target": target, "policy": policy, "hbm": hbm, "limit": limit}
        return rows.of(
            {"way": way, "what": what, **run},
            lambda: found_apart(compile_run, *run.values(), timeout_s=FLAGS.timeout),
        )

    alone = row(_ALONE, "jax.jit")
    yield alone
    for policy in STEPS[step].policies:
        yield row(_OFFLOAD if "offload" in policy else _CHECKPOINT, policy, policy=policy)
    if "failure" in alone:
        return
    own = alone["total"]
    for share in _LIMITS:
        yield row(_XLA_REMAT, f"limit {share:.0%}", limit=int(own * share))
    if FLAGS.peers:
        return
    for share in _BUDGETS:
        yield row(_MEMPLAN, f"hbm {share:.0%}", hbm=int(own * share))
    for policy, shares in _BUDGETS_ON_POLICY.items():
        for share in shares:
            yield row(_BOTH, f"{policy}, hbm {share:.0%}", policy=policy, hbm=int(own * share))


def compile_run(step: str, target: str, policy: str, hbm: int | None, limit: int | None) -> Row:
    """Compiles for a target that need not be here, and reads the executable.

    Args:
      step: a key of `experiments.steps.STEPS`.
      target: of `memplan.topology`.
      policy: a key of `POLICIES`.
      hbm: bytes that memplan keeps to; None without memplan.
      limit: bytes that XLA's own rematerialisation aims at; None for the device's.

    Returns:
      ``total``, ``temp``, ``host``, ``moved`` in bytes, ``overlapped`` (None where nothing moves)
      and predicted ``step_s``; or ``failure`` and why there is no executable.
    """
    where = topology(target)
    fun, args = STEPS[step].make(POLICIES[policy])
    budget = "1TiB" if hbm is None else hbm
    lowered = jit(fun, hbm=budget, machine=where, donate_argnums=0).lower(*args)
    try:
        if hbm is None:
            executable = lowered.unplanned(_limit_options(where.machine, limit))
        else:
            executable = lowered.compile()
    except (MemplanError, jax.errors.JaxRuntimeError) as error:
        return {"failure": str(error).splitlines()[0]}
    memory = executable.memory_analysis()
    view = view_run("", read_module(executable), where.machine, compiled=memory)
    assert view.clock is not None  # A machine was named.
    return {
        "total": device_bytes(executable, 0),
        "temp": memory.temp_size_in_bytes,
        "host": memory.host_temp_size_in_bytes,
        "moved": view.moved_bytes,
        "overlapped": view.overlapped,
        "step_s": view.clock.step_time_s,
    }


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


def _cases(rows: Iterable[Row]) -> Mapping[str, list[Row]]:
    """The rows of each step and target, by title."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{STEPS[row['step']].title}, {row['target']}"
        found.setdefault(title, []).append(row)
    return found


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    for title, found in _cases(rows).items():
        yield Table(title, _COLUMNS, tuple(_cells(row, found) for row in found))


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    if "failure" in row:
        return (row["way"], row["what"], row["failure"], *["–"] * (len(_COLUMNS) - 3))
    within = [
        other["step_s"]
        for other in rows
        if "failure" not in other
        and other["total"] <= row["total"]
        and other is not row
        and other["hbm"] is None
    ]
    return (
        row["way"],
        row["what"],
        format_bytes(row["total"]),
        format_bytes(row["temp"]),
        format_bytes(row["host"]),
        format_bytes(row["moved"]),
        "–" if row["overlapped"] is None else f"{row['overlapped']:.1%}",
        format_seconds(row["step_s"]),
        format_seconds(min(within)) if within else "–",
    )


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point equals or beats both ways, by falling y. O(n log n).

    >>> front([(1, 9), (2, 9), (3, 5), (4, 7)])
    [(1, 9), (3, 5)]
    """
    found: list[tuple[float, float]] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def _plot(rows: Sequence[Row]) -> Any:
    """A panel a step and target; less is better both ways."""
    from matplotlib.figure import Figure

    cases = _cases(rows)
    figure = Figure(figsize=(8, 5 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, (title, of) in zip(panels, cases.items(), strict=True):
        found = [row for row in of if "failure" not in row]
        for way in dict.fromkeys(row["way"] for row in found):
            points = [
                (row["total"] / 2**30, row["step_s"] * 1e3, row["what"])
                for row in found
                if row["way"] == way
            ]
            (line,) = axes.plot(*zip(*(p[:2] for p in points), strict=True), "o", label=way)
            reached = front(p[:2] for p in points)
            axes.step(*zip(*reached, strict=True), where="post", color=line.get_color(), lw=1)
            for x, y, what in points:
                axes.annotate(what, (x, y), fontsize=5, xytext=(4, 2), textcoords="offset points")
        axes.set(title=title, xlabel="device memory, GiB", ylabel="step, predicted, ms")
        if found:
            axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(_rows, _tables, _define, _plot)

if __name__ == "__main__":
    EXPERIMENT.main()
