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
import logging
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import custom_calls
from hlo_passes.budget import parse_bytes
from hlo_passes.errors import MemplanError
from hlo_passes.hardware.machine import Machine
from hlo_passes.units import format_bytes
from memplan import __version__
from memplan.api import Compiled, jit
from memplan.compare import COLUMNS, cells, compared, view_planned, view_unscheduled
from memplan.executable import device_bytes
from memplan.report.html import render_html
from memplan.report.tables import Column, Table, write_tables
from memplan.report.trace import render_trace
from memplan.report.view import Report, RunView
from memplan.topologies import Topology, topology

TARGETS = ("v5e", "h200")


@dataclass(frozen=True)
class Workload:
    """One program to plan: `tokens` new tokens for each of `batch` sequences.

    Attributes:
      is_scanned: its layers are stacked, and ``lax.scan`` goes over them.
      offload: of `memplan.jit`.
    """

    name: str
    model: str
    batch: int
    tokens: int
    cache_length: int
    hbm: str
    is_scanned: bool = False
    offload: tuple[str, ...] | None = None

    @property
    def title(self) -> str:
        layers = "scanned layers" if self.is_scanned else "unrolled layers"
        return (
            f"{self.model} {self.name}, {layers}, batch {self.batch} × {self.tokens} tokens, "
            f"cache {self.cache_length}, hbm={self.hbm}"
        )

    @property
    def file(self) -> str:
        return f"{self.model}-{'scanned-' if self.is_scanned else ''}{self.name}"

    def compile(self, workloads: Any, target: Topology, slots: int | None = None) -> Compiled:
        """Compiles it for `target` within its budget; `workloads`: ``models.workloads``."""
        make = workloads.decode
        if self.is_scanned:
            make = workloads.scanned_decode if self.tokens == 1 else workloads.scanned_prefill
        fun, args = make(
            self.model, batch=self.batch, tokens=self.tokens, cache_length=self.cache_length
        )
        step = jit(
            fun,
            hbm=self.hbm,
            machine=target,
            offload=self.offload,
            slots=slots,
            donate_argnames="cache",
        )
        return step.lower(*args).compile()


# A decode step reads every weight for a handful of tokens: the link holds it. A prompt's
# worth of tokens is enough compute to hide the transfer of every weight.
WORKLOADS = (
    Workload("decode", "llama2-7b", 8, 1, 512, "4GiB"),
    Workload("prefill", "llama3-8b", 32, 512, 640, "8GiB"),
    Workload("prefill", "llama2-7b", 16, 512, 512, "6.3GiB", True, ("params.*",)),
    Workload("prefill", "llama2-13b", 16, 512, 512, "9GiB", True, ("params.*",)),
    Workload("prefill", "llama2-70b", 32, 512, 512, "14GiB", True, ("params.*",)),
)

# What shows in a minute or two what it is about: the same weights, far too large for the device.
SHORT = {WORKLOADS[0]: ("h200",), WORKLOADS[4]: ("v5e",)}
FULL = dict.fromkeys(WORKLOADS, TARGETS)

# One chip that has the memory of its host to itself: 384 GB on an 8-chip VM of TPU v5e
# (ct5lp-hightpu-8t, cloud.google.com/tpu/docs/v5e). 70B take 129 GiB of it.
HOST_BYTES = 384_000_000_000

# The small configuration on the CPU: prompts, so that there is compute to hide behind, and
# this share of what XLA takes by itself.
SMALL_MODEL, SMALL_BATCH, SMALL_PROMPT = "tiny", 4, 16
SMALL_SHARE = 0.5


class DemoError(MemplanError):
    """The demo cannot run here."""


def main(*, full: bool = False, json: bool = False, folder: Path = Path("memplan-demo")) -> None:
    """Runs the demo and prints each table when it is there; with `json`, one document at the end.

    Writes for every workload and target a report, a trace and the plan into `folder`.

    Args:
      full: all workloads for all targets, some ten minutes; else two, in one or two.
    """
    # An accelerator of this machine is neither needed nor taken.
    jax.config.update("jax_platforms", "cpu")
    with _quiet():
        _run(_models(), FULL if full else SHORT, json, folder)
    if not (full or json):
        print("All models on both targets: memplan demo --full (ten minutes)")


def _run(models: Any, steps: Mapping[Workload, tuple[str, ...]], json: bool, folder: Path) -> None:
    count = 1 + sum(2 * len(targets) for targets in steps.values())
    said = _Progress(count)

    def show(table: Table) -> None:
        if not json:
            write_tables([table], sys.stdout)
            print(flush=True)

    small = _cpu(models, said)
    show(_cpu_table(small))
    results: list[_Result] = []
    files: list[str] = []
    for workload, targets in steps.items():
        made = [_accelerator(models, workload, target, said) for target in targets]
        files += [path for result in made for path in _write(folder, result)]
        results += made
        show(_table(workload, made))
    if json:
        rows = [_row(r, run) for r in results for run in r.runs]
        print(json_format.dumps({"targets": rows, "cpu": small, "files": files}, indent=2))
        return
    print("Reports (open in a browser), traces (open in Perfetto) and plans:")
    for path in files:
        print(f"  {path}")


def _models() -> Any:
    """The project's models, which a checkout has and the wheel has not."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "models" / "workloads.py").exists() and str(checkout) not in sys.path:
        sys.path.append(str(checkout))  # A console script does not look where it is called.
    try:
        importlib.import_module("models.workloads")
        return importlib.import_module("models")
    except ImportError as error:
        raise DemoError(
            f"the demo needs the models of a checkout, with flax ({error}). "
            "Try: git clone, then make demo."
        ) from error


@dataclass(frozen=True)
class _Result:
    """A workload compiled for a target; `alone` is None where XLA alone runs out of memory."""

    workload: Workload
    target: str
    machine: Machine
    compiled: Compiled
    alone: RunView | None
    planned: RunView

    @property
    def runs(self) -> tuple[RunView, ...]:
        return (self.planned,) if self.alone is None else (self.alone, self.planned)


def _accelerator(models: Any, workload: Workload, target: str, said: _Progress) -> _Result:
    device = topology(target).with_host_memory(HOST_BYTES)
    machine = device.machine
    what = f"{workload.model} {workload.name} for {target}"
    with said(f"{what}: compiling within {workload.hbm}"):
        compiled = workload.compile(models.workloads, device)
    planned = view_planned(compiled, machine)
    with said(f"{what}: compiling what XLA does alone with the same weights on the host"):
        alone = view_unscheduled(compiled, machine)
    return _Result(workload, target, machine, compiled, alone, planned)


def _cpu(models: Any, said: _Progress) -> dict[str, Any]:
    """Runs the small configuration with its weights streamed, against plain jax."""
    llama, config = models.llama, models.configs.CONFIGS[SMALL_MODEL]
    nnx = importlib.import_module("flax.nnx")
    graphdef, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(SMALL_BATCH * SMALL_PROMPT).reshape(SMALL_BATCH, -1) % config.vocab_size
    cache = llama.init_cache(config, SMALL_BATCH, SMALL_PROMPT)
    fun = functools.partial(llama.prefill, graphdef)
    with said(f"{SMALL_MODEL} prefill on this CPU: running it, plain and within half the memory"):
        plain = jax.jit(fun).lower(params, tokens, cache).compile()
        own = device_bytes(plain, 0)
        budget = int(own * SMALL_SHARE)
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
        "xla_total_bytes": own,
        "memplan_total_bytes": compiled.device_bytes,
        "transfers": len(events),
        "bytes_moved": sum(e.bytes for e in events),
        "overlap_recorded": custom_calls.overlap_fraction(events),
        "largest_difference": difference,
    }


def _row(result: _Result, run: RunView) -> dict[str, Any]:
    clock = run.clock
    assert clock is not None  # A machine was named.
    return {
        "workload": result.workload.title,
        "target": result.target,
        "run": run.name,
        "hbm_temp_bytes": run.device.temp,
        "hbm_total_bytes": run.device.total,
        "moved_bytes": run.moved_bytes,
        "overlapped": run.overlapped,
        "link_busy": clock.link_s / clock.step_time_s,
        "predicted_step_time_s": clock.step_time_s,
        "predicted_lower_bound_s": clock.lower_bound_s,
    }


def _table(workload: Workload, results: list[_Result]) -> Table:
    rows = [
        (result.target, name, *cells(run and compared(run)))
        for result in results
        for name, run in (("XLA alone", result.alone), ("memplan", result.planned))
    ]
    return Table(
        workload.title,
        (Column("target"), Column("run"), *COLUMNS),
        tuple(rows),
        "Bytes: XLA's report of the final executables. Seconds, overlap and link: predictions "
        "of the machine model for the final schedules.",
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


def _write(folder: Path, result: _Result) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    plan = result.compiled.plan
    budget = None if plan is None else parse_bytes(result.workload.hbm)
    report = Report(result.workload.title, result.machine.name, budget, result.runs, __version__)
    texts = {"html": render_html(report), "trace.json": render_trace(report)}
    if plan is not None:
        texts["plan.json"] = plan.to_json(indent=1)
    for suffix, text in texts.items():
        path = folder / f"{result.target}-{result.workload.file}.{suffix}"
        path.write_text(text, encoding="utf-8")
        yield str(path)


@contextmanager
def _quiet() -> Generator[None]:
    """Has the log say nothing that the tables do; then it is as it was."""
    log = logging.getLogger("memplan")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class _Progress:
    """Tells on stderr what takes its time, how long it took, and how much is still to do."""

    def __init__(self, count: int) -> None:
        self._count, self._done = count, 0

    @contextmanager
    def __call__(self, what: str) -> Generator[None]:
        self._done += 1
        print(f"[{self._done}/{self._count}] {what} ...", end="", file=sys.stderr, flush=True)
        begin = time.monotonic()
        yield
        print(f" {time.monotonic() - begin:.1f} s", file=sys.stderr)
