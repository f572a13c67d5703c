"""MaxText's train step: within less memory by memplan, and by each of MaxText's own switches.

    python -m experiments.maxtext --path FOLDER [--axes 1 0] [--policies full minimal ...]
        [--offloads nothing optimizer] [--plans full ...] [--shares 0.75 0.5 0.35] [--plan]

MaxText is not a dependency: FOLDER is one that its wheel and what that imports were unpacked
into. The step is that of its ``train_compile``, four layers of Llama 2 7B fully sharded over
v5e:2x2, AdamW, 2048 tokens a chip, scanned, with the layers on the axis that MaxText puts them on
by itself (1), or on the leading one.

*Policies* are MaxText's ``remat_policy``, *offloads* what its switches keep on the host besides:
the optimizer's state, the parameters, or both. memplan plans the step of the policies ``--plans``,
with nothing offloaded by MaxText, within shares of what ``full`` takes.

Bytes are XLA's report of the executables, or with ``--plan``, which compiles only what MaxText's
switches do, the plan's. Seconds of steps are predictions of one machine model for the executables'
schedules, those of XLA and of all planning, without what XLA does for it, processor time.
"""

from __future__ import annotations

import importlib
import itertools
import math
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

from experiments.corpus import planning
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import compared, view_planned
from memplan.compiled import Compiled
from memplan.report.build import view_run
from memplan.report.tables import Column, Table
from memplan.topologies import Topology, topology

_TARGET = "v5e:2x2"
_TITLE = "MaxText's train step, four layers of Llama 2 7B on v5e:2x2, layers on axis {}"

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
    "scan_layers": True,
    "attention": "dot_product",
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
    "jax_cache_dir": "",
}
_POLICIES = (
    "full",
    "save_out_proj",
    "save_qkv_proj",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_with_context_except_mlp",
    "minimal",
    "minimal_with_context",
    "qkv_proj_offloaded",
    "minimal_offloaded",
)
_SWITCHES = {
    "nothing": (),
    "optimizer": ("optimizer_memory_host_offload",),
    "parameters": ("parameter_memory_host_offload",),
    "both": ("optimizer_memory_host_offload", "parameter_memory_host_offload"),
}

_COLUMNS = (
    Column("by"),
    Column("remat_policy"),
    Column("on the host"),
    Column("budget", right=True),
    Column("device bytes", right=True),
    Column("of"),
    Column("moved", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
    Column("taken", right=True),
    Column("XLA, or planning", right=True),
)


def _define() -> None:
    flags.DEFINE_string("path", None, "folder that MaxText and what it imports are in")
    flags.DEFINE_multi_enum("axes", ["1", "0"], ["1", "0"], "of the layers in scanned parameters")
    flags.DEFINE_multi_enum("policies", _POLICIES, _POLICIES, "MaxText's; full always is")
    flags.DEFINE_multi_enum("offloads", [*_SWITCHES], [*_SWITCHES], "MaxText's")
    flags.DEFINE_multi_enum("plans", ["full"], ["none", *_POLICIES], "policies that memplan plans")
    flags.DEFINE_multi_float("shares", [0.75, 0.5, 0.35], "budgets, of what full takes", 0.0, 1.0)
    flags.DEFINE_bool("plan", False, "of memplan the plans only")
    flags.DEFINE_float("timeout_s", 3600, "for a row")


def _rows(rows: Rows) -> Iterator[Row]:
    if FLAGS.path is None or not (Path(FLAGS.path) / "maxtext").is_dir():
        raise app.UsageError(
            f"--path needs a folder with MaxText's package maxtext in it, found {FLAGS.path}: "
            "unpack its wheel, and what it imports, into one (pip install --target)"
        )
    for axis in map(int, FLAGS.axes):
        full_case = {"axis": axis, "policy": "full", "offload": "nothing"}
        full = yield from _row(rows, full_case)
        for policy, offload in itertools.product(FLAGS.policies, FLAGS.offloads):
            case = {"axis": axis, "policy": policy, "offload": offload}
            if case != full_case:
                yield from _row(rows, case)
        if "total" not in full:
            continue
        for policy, share in itertools.product(FLAGS.plans, FLAGS.shares):
            if policy != "none":
                case = {"axis": axis, "policy": policy, "share": share, "plan": FLAGS.plan}
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
    step = _step(path, case["axis"], case["policy"], _SWITCHES[case.get("offload", "nothing")])
    begin = time.monotonic()
    with jax.set_mesh(step.mesh), step.rules:
        found = _within(step, target, case, budget) if "share" in case else _alone(step, target)
    return {**found, "taken_s": time.monotonic() - begin}


def _alone(step: _Step, target: Topology) -> Row:
    begin = time.process_time()
    executable = jax.jit(step.fun, **step.options).lower(*step.args).compile()
    xla_s = time.process_time() - begin
    memory, module = executable.memory_analysis(), read_module(executable)
    found = compared(view_run("XLA alone", module, target.machine, compiled=memory))
    return {**found, "xla_s": xla_s}


def _within(step: _Step, target: Topology, case: Row, budget: int) -> Row:
    lowered = jit(step.fun, hbm=budget, machine=target, **step.options).lower(*step.args)
    asked: Row = {"budget": budget}
    with planning() as planned:
        try:
            made = lowered.plan() if case["plan"] else lowered.compile()
        except MemoryBudgetError as error:
            return {**asked, "least": error.least if case["plan"] else error.least_budget()}
    asked["planning_s"] = sum(planned)
    if isinstance(made, Compiled):
        return {**asked, **compared(view_planned(made, target.machine))}
    return {
        **asked,
        "total": made.prediction.total_bytes,
        "moved": made.moved_bytes,
        "step_s": made.prediction.step_time_s,
        "bound_s": made.prediction.lower_bound_s,
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


def _step(path: str, axis: int, policy: str, switches: Sequence[str]) -> _Step:
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    sys.path.insert(0, path)
    train_compile = importlib.import_module("maxtext.trainers.pre_train.train_compile")

    def reached(fun: Any, args: Any, _: Any, mesh: Any, *rest: Any) -> None:
        names = "in_shardings", "out_shardings", "static_argnums", "donate_argnums"
        *options, _, rules = rest
        raise _Reached(_Step(fun, args, dict(zip(names, options, strict=True)), mesh, rules))

    options = {**_OPTIONS, "param_scan_axis": axis, "remat_policy": policy}
    options |= dict.fromkeys(switches, True)
    base = str(Path(train_compile.__file__ or "").parents[2] / "configs" / "base.yml")
    try:
        with mock.patch.object(train_compile, "jit_and_compile", reached):
            train_compile.main(["", base, *(f"{name}={value}" for name, value in options.items())])
    except _Reached as found:
        return found.args[0]
    raise RuntimeError("MaxText's train_compile ended without compiling a step")


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    for axis in sorted({row["axis"] for row in rows}, reverse=True):
        of_axis = [row for row in rows if row["axis"] == axis]
        of_axis.sort(key=lambda row: (-row.get("total", math.inf), row.get("step_s", math.inf)))
        yield Table(_TITLE.format(axis), _COLUMNS, tuple(map(_cells, of_axis)))


def _cells(row: Row) -> tuple[str, ...]:
    asked = (
        "memplan" if "share" in row else "MaxText",
        row["policy"],
        row.get("offload", "planned"),
        f"{format_bytes(row['budget'])} ({row['share']:.0%})" if "budget" in row else "–",
    )
    if "failure" in row:
        return (*asked, f"failed: {row['failure']}", *["–"] * 6)
    if "least" in row:
        least = f"refused, least {format_bytes(row['least'])}"
        return (*asked, least, "–", "–", "–", "–", format_seconds(row["taken_s"]), "–")
    processor_s = row.get("planning_s", row.get("xla_s"))
    return (
        *asked,
        format_bytes(row["total"]),
        "the plan" if row.get("plan") else "XLA's report",
        format_bytes(row["moved"]),
        format_seconds(row["step_s"]),
        format_seconds(row["bound_s"]),
        format_seconds(row["taken_s"]),
        format_seconds(processor_s) if processor_s is not None else "–",
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
