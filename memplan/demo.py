"""``memplan demo``: one model under a budget on two accelerators that are not here, and a
small one run on this machine.

The accelerator part compiles with the accelerators' own compilers and runs nothing; bytes
are what XLA reports of the executables, seconds are predictions of the machine model. The
CPU part runs, transfers included.
"""

from __future__ import annotations

import functools
import importlib
import json as json_format
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import custom_calls
from hlo_passes.errors import MemplanError
from hlo_passes.machine import load_machine
from hlo_passes.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan import __version__
from memplan.api import Compiled, jit
from memplan.report.build import view_run
from memplan.report.html import render_html
from memplan.report.tables import Column, Table, write_tables
from memplan.report.trace import render_trace
from memplan.report.view import Report, RunView
from memplan.topology import topology

MODEL = "llama2-7b"
BATCH, CACHE_LENGTH = 8, 512
BUDGET = "4GiB"
TARGETS = ("v5e", "h200")

# The small configuration on the CPU: prompts, so that there is compute to hide behind, and
# this share of what XLA takes by itself.
SMALL_MODEL, SMALL_BATCH, SMALL_PROMPT = "tiny", 4, 16
SMALL_SHARE = 0.5


class DemoError(MemplanError):
    """The demo cannot run here."""


def main(*, json: bool = False, folder: Path = Path("memplan-demo")) -> None:
    """Runs the demo and prints its tables; with `json`, one document instead.

    Writes for every target a report, a trace and the plan into `folder`.
    """
    models = _models()
    reports = {target: _accelerator(models, target) for target in TARGETS}
    small = _cpu(models)
    files = [path for target in TARGETS for path in _write(folder, target, *reports[target])]
    if json:
        rows = [_row(t, run) for t in TARGETS for run in reports[t][0].runs]
        print(json_format.dumps({"targets": rows, "cpu": small, "files": files}, indent=2))
        return
    write_tables([_table(reports), _cpu_table(small)], sys.stdout)
    print("\nReports (open in a browser), traces (open in Perfetto) and plans:")
    for path in files:
        print(f"  {path}")


def _models() -> Any:
    """The project's models, which a checkout has and the wheel has not."""
    try:
        return importlib.import_module("models.llama"), importlib.import_module("models.configs")
    except ImportError as error:
        raise DemoError(
            f"the demo needs the models of a checkout, with flax ({error}). "
            "Try: git clone, then make demo."
        ) from error


def _decode(models: Any, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    llama, configs = models
    config = configs.CONFIGS[name]
    nnx = importlib.import_module("flax.nnx")
    graphdef, params = nnx.split(llama.abstract_model(config))
    tokens = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32)
    cache = llama.abstract_cache(config, BATCH, CACHE_LENGTH)
    return functools.partial(llama.decode_step, graphdef), (params, tokens, cache)


def _accelerator(models: Any, target: str) -> tuple[Report, Compiled]:
    step, args = _decode(models, MODEL)
    planned = jit(step, hbm=BUDGET, machine=topology(target), donate_argnames="cache")
    machine = load_machine(target)
    with _said(f"{target}: compiling {MODEL} decode within {BUDGET}"):
        compiled: Compiled = planned.lower(*args).compile()
    with _said(f"{target}: compiling it with the same weights on the host, XLA alone"):
        alone = compiled.unscheduled()
    runs = (
        view_run("XLA alone", read_module(alone), machine, compiled=alone.memory_analysis()),
        view_run(
            "memplan",
            compiled.module,
            machine,
            plan=compiled.plan,
            compiled=compiled.memory_analysis(),
        ),
    )
    title = f"{MODEL} decode, batch {BATCH}, cache {CACHE_LENGTH}"
    return Report(title, machine.name, compiled.plan and compiled.plan.budget_bytes, runs, __version__), compiled


def _cpu(models: Any) -> dict[str, Any]:
    """Runs the small configuration with its weights streamed, against plain jax."""
    llama, configs = models
    config = configs.CONFIGS[SMALL_MODEL]
    nnx = importlib.import_module("flax.nnx")
    graphdef, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(SMALL_BATCH * SMALL_PROMPT).reshape(SMALL_BATCH, -1) % config.vocab_size
    cache = llama.init_cache(config, SMALL_BATCH, SMALL_PROMPT)
    fun = functools.partial(llama.prefill, graphdef)
    with _said(f"cpu: running {SMALL_MODEL} prefill, plain jax.jit and memplan.jit"):
        plain = jax.jit(fun).lower(params, tokens, cache).compile()
        m = plain.memory_analysis()
        total = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
        budget = int((total - m.alias_size_in_bytes) * SMALL_SHARE)
        step = jit(fun, hbm=budget)
        args = step.place(params, tokens, cache)
        compiled: Compiled = step.lower(*args).compile()
        with custom_calls.trace() as events:
            found = jax.block_until_ready(step(*args))
        expected = plain(params, tokens, cache)
    difference = max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )
    return {
        "model": f"{SMALL_MODEL} prefill, batch {SMALL_BATCH}, {SMALL_PROMPT} tokens",
        "budget_bytes": budget,
        "xla_total_bytes": total - m.alias_size_in_bytes,
        "memplan_total_bytes": compiled.device_bytes,
        "transfers": len(events),
        "bytes_moved": sum(e.bytes for e in events),
        "overlap_recorded": custom_calls.overlap_fraction(events),
        "largest_difference": difference,
    }


def _row(target: str, run: RunView) -> dict[str, Any]:
    clock = run.clock
    assert clock is not None  # A machine was named.
    return {
        "target": target,
        "run": run.name,
        "hbm_temp_bytes": run.device.temp,
        "hbm_total_bytes": run.device.total,
        "moved_bytes": run.moved_bytes,
        "overlapped": run.overlapped,
        "link_busy": clock.link_s / clock.step_time_s,
        "predicted_step_time_s": clock.step_time_s,
        "predicted_lower_bound_s": clock.lower_bound_s,
    }


def _table(reports: dict[str, tuple[Report, Compiled]]) -> Table:
    columns = (
        Column("target"),
        Column("run"),
        Column("HBM temp", right=True),
        Column("HBM total", right=True),
        Column("moved", right=True),
        Column("overlapped", right=True),
        Column("link busy", right=True),
        Column("step, predicted", right=True),
        Column("lower bound", right=True),
    )
    rows = [_row(target, run) for target in reports for run in reports[target][0].runs]
    return Table(
        f"{MODEL} decode, batch {BATCH}, cache {CACHE_LENGTH}, hbm={BUDGET}",
        columns,
        tuple(
            (
                row["target"],
                row["run"],
                format_bytes(row["hbm_temp_bytes"]),
                format_bytes(row["hbm_total_bytes"]),
                format_bytes(row["moved_bytes"]),
                "–" if row["overlapped"] is None else f"{row['overlapped']:.1%}",
                f"{row['link_busy']:.1%}",
                format_seconds(row["predicted_step_time_s"]),
                format_seconds(row["predicted_lower_bound_s"]),
            )
            for row in rows
        ),
        "Bytes as XLA reports them of the final executables. Seconds, overlap and link are "
        "predictions of the machine model for the final schedules. Where the link is busy "
        "100% of the step, it is what holds it: there is less compute than bytes to hide.",
    )


def _cpu_table(small: dict[str, Any]) -> Table:
    rows = (
        ("total by XLA, plain jax.jit", format_bytes(small["xla_total_bytes"])),
        ("budget", format_bytes(small["budget_bytes"])),
        ("total by XLA, memplan.jit", format_bytes(small["memplan_total_bytes"])),
        ("transfers executed", str(small["transfers"])),
        ("bytes moved", format_bytes(small["bytes_moved"])),
        ("overlap recorded by the handlers", f"{small['overlap_recorded']:.1%}"),
        ("largest difference from plain jax.jit", f"{small['largest_difference']:g}"),
    )
    return Table(f"Run on this CPU: {small['model']}", (Column(""), Column("", right=True)), rows)


def _write(folder: Path, target: str, report: Report, compiled: Compiled) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    texts = {
        f"{target}.html": render_html(report),
        f"{target}.trace.json": render_trace(report),
    }
    if compiled.plan is not None:
        texts[f"{target}.plan.json"] = compiled.plan.to_json(indent=1)
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        yield str(path)


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Tells on stderr what takes its time, and how long it took."""
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    begin = time.monotonic()
    yield
    print(f" {time.monotonic() - begin:.1f} s", file=sys.stderr)
