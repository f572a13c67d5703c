"""MaxText's train step beside XLA alone and MaxText's own host offload, within less memory.

    python -m experiments.maxtext --path FOLDER [--axes 1 0] [--runs offload ...] [--plan]

MaxText is not a dependency: FOLDER is one that its wheel and what that imports were unpacked
into. The step is that of its ``train_compile``, four layers of Llama 2 7B fully sharded over
v5e:2x2, AdamW, 2048 tokens a chip, each layer computed again in the backward pass; scanned, with
the layers on the axis that MaxText puts them on by itself (1), or on the leading one.

full        XLA alone, everything on the device
offload     XLA alone, Adam's state on the host (``optimizer_memory_host_offload``)
memplan     within a share of what ``full`` takes
both        the same, with Adam's state on the host by MaxText

Bytes are XLA's report of the executables, or with ``--plan``, which compiles nothing but
``full``, the plan's. Seconds are predictions of one machine model for the executables' schedules.
A row that is compiled takes five to fifteen minutes.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from absl import app, flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import compared, view_planned
from memplan.report.build import view_run
from memplan.report.tables import Column, Table
from memplan.topologies import Topology, topology

_TARGET = "v5e:2x2"
_TITLE = "MaxText's train step, four layers of Llama 2 7B on v5e:2x2"

_OPTIONS: Mapping[str, Any] = {
    "run_name": "step",
    "model_name": "llama2-7b",
    "override_model_config": True,
    "base_num_decoder_layers": 4,
    "per_device_batch_size": 1,
    "max_target_length": 2048,
    "compile_topology": "v5e-4",
    "compile_topology_num_slices": 1,
    "ici_fsdp_parallelism": 4,
    "remat_policy": "full",
    "scan_layers": True,
    "attention": "dot_product",
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
    "jax_cache_dir": "",
}
_OFFLOAD = "optimizer_memory_host_offload"
_OFFLOADED = ("offload", "both")
_ALONE = ("full", "offload")

_COLUMNS = (
    Column("layers on axis", right=True),
    Column("run"),
    Column("budget", right=True),
    Column("device bytes", right=True),
    Column("of"),
    Column("moved", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
    Column("taken", right=True),
)


def _define() -> None:
    flags.DEFINE_string("path", None, "folder that MaxText and what it imports are in")
    flags.DEFINE_multi_enum("axes", ["1", "0"], ["1", "0"], "of the layers in scanned parameters")
    flags.DEFINE_multi_enum("runs", [*_NAMES], [*_NAMES], "which; full always is")
    flags.DEFINE_multi_float("shares", [0.75, 0.5], "budgets, of what full takes", 0.0, 1.0)
    flags.DEFINE_bool("plan", False, "of memplan the plans only")
    flags.DEFINE_float("timeout_s", 3600, "for a row")


def _rows(rows: Rows) -> Iterator[Row]:
    if FLAGS.path is None or not (Path(FLAGS.path) / "maxtext").is_dir():
        raise app.UsageError(
            f"--path needs a folder with MaxText's package maxtext in it, found {FLAGS.path}: "
            "unpack its wheel, and what it imports, into one (pip install --target)"
        )
    for axis in map(int, FLAGS.axes):
        full = yield from _row(rows, {"axis": axis, "run": "full"})
        for run in (r for r in FLAGS.runs if r != "full"):
            if run in _ALONE:
                yield from _row(rows, {"axis": axis, "run": run})
            elif "total" in full:
                for share in FLAGS.shares:
                    case = {"axis": axis, "run": run, "share": share, "plan": FLAGS.plan}
                    yield from _row(rows, case, int(share * full["total"]))


def _row(rows: Rows, case: Row, budget: int = 0) -> Iterator[Row]:
    """Yields the row of a case, and returns it."""
    measured = partial(found_apart, measure, FLAGS.path, case, budget, timeout_s=FLAGS.timeout_s)
    row = rows.of(case, measured)
    yield row
    return row


def measure(path: str, case: Row, budget: int) -> Row:
    """Figures of MaxText's step, which is imported from `path`."""
    target = topology(_TARGET)  # Before MaxText asks libtpu for it, which looks for chips then.
    step = _step(path, case["axis"], case["run"] in _OFFLOADED)
    begin = time.monotonic()
    with jax.set_mesh(step.mesh), step.rules:
        found = (
            _alone(step, target) if case["run"] in _ALONE else _within(step, target, case, budget)
        )
    return {**found, "taken_s": time.monotonic() - begin}


def _alone(step: _Step, target: Topology) -> Row:
    executable = jax.jit(step.fun, **step.options).lower(*step.args).compile()
    memory, module = executable.memory_analysis(), read_module(executable)
    return compared(view_run("XLA alone", module, target.machine, compiled=memory))


def _within(step: _Step, target: Topology, case: Row, budget: int) -> Row:
    lowered = jit(step.fun, hbm=budget, machine=target, **step.options).lower(*step.args)
    asked: Row = {"budget": budget}
    try:
        if not case["plan"]:
            compiled = lowered.compile()
            return {**asked, **compared(view_planned(compiled, target.machine))}
        plan = lowered.plan()
    except MemoryBudgetError as error:
        return {**asked, "least": error.least if case["plan"] else error.least_budget()}
    return {
        **asked,
        "total": plan.prediction.total_bytes,
        "moved": plan.moved_bytes,
        "step_s": plan.prediction.step_time_s,
        "bound_s": plan.prediction.lower_bound_s,
    }


@dataclass(frozen=True)
class _Step:
    """A step as MaxText is about to compile it.

    Attributes:
      options: of ``jax.jit``.
      mesh, rules: contexts that it is traced in.
    """

    fun: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    mesh: Any
    rules: Any


class _Reached(Exception):
    """MaxText is about to compile a step, the first argument."""


def _step(path: str, axis: int, offloaded: bool) -> _Step:
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    sys.path.insert(0, path)
    train_compile = importlib.import_module("maxtext.trainers.pre_train.train_compile")

    def reached(fun: Any, args: Any, _: Any, mesh: Any, *rest: Any) -> None:
        names = "in_shardings", "out_shardings", "static_argnums", "donate_argnums"
        *options, _, rules = rest
        raise _Reached(_Step(fun, args, dict(zip(names, options, strict=True)), mesh, rules))

    options = {**_OPTIONS, "param_scan_axis": axis, _OFFLOAD: offloaded}
    base = str(Path(train_compile.__file__ or "").parents[2] / "configs" / "base.yml")
    try:
        with mock.patch.object(train_compile, "jit_and_compile", reached):
            train_compile.main(["", base, *(f"{name}={value}" for name, value in options.items())])
    except _Reached as found:
        return found.args[0]
    raise RuntimeError("MaxText's train_compile ended without compiling a step")


_NAMES = {
    "full": "XLA alone",
    "offload": "XLA alone, MaxText's host offload",
    "memplan": "memplan",
    "both": "memplan, MaxText's host offload",
}


def _tables(rows: Sequence[Row]) -> list[Table]:
    order = sorted(rows, key=lambda r: (-r["axis"], [*_NAMES].index(r["run"]), -r.get("share", 1)))
    return [Table(_TITLE, _COLUMNS, tuple(map(_cells, order)))]


def _cells(row: Row) -> tuple[str, ...]:
    of = "the plan" if row.get("plan") else "XLA's report"
    name = _NAMES[row["run"]]
    budget = "–"
    if "budget" in row:
        budget = f"{format_bytes(row['budget'])} ({row['share']:.0%})"
    asked = str(row["axis"]), name, budget
    if "failure" in row:
        return (*asked, f"failed: {row['failure']}", *["–"] * 5)
    if "least" in row:
        least = f"refused, least {format_bytes(row['least'])}"
        return (*asked, least, "–", "–", "–", "–", format_seconds(row["taken_s"]))
    return (
        *asked,
        format_bytes(row["total"]),
        of,
        format_bytes(row["moved"]),
        format_seconds(row["step_s"]),
        format_seconds(row["bound_s"]),
        format_seconds(row["taken_s"]),
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
