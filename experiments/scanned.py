"""What do rings make of scanned layers? Llama 7B, 13B and 70B on one TPU v5e and one H200.

    python -m experiments.scanned [--models llama2-7b ...] [--targets v5e h200] [--forms]

A prompt's worth of tokens goes through ``lax.scan`` over the stacked layers, whose weights
are on the host. Three times each: as XLA schedules the scan by itself, and under memplan with
one slot and with as many as it chooses. Columns:

    slots         K times a layer's slices of the stacks that are on the host, by their shapes;
                  or what share of them has K slots where the others have one
    activations   the other temporaries that are live where most are, by the final schedule
    packing       HBM temp against slots + activations
    overlapped    share of the transferred bytes that move while the device computes

With ``--forms``: two workloads, each with unrolled and with scanned layers, within the same
budget.

Bytes are XLA's report of executables of the real compilers; seconds and overlap are
predictions of the machine model for their schedules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from hlo_passes.memory import memory_usage
from hlo_passes.plan import LoopStreams
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import Compiled, jit
from memplan.compare import view_planned, view_unscheduled
from memplan.demo import HOST_BYTES, Workload
from memplan.demo import WORKLOADS as DEMO
from memplan.report.tables import Column, Table, write_tables
from memplan.report.view import RunView
from memplan.topologies import topology
from models.workloads import decode, scanned_decode, scanned_prefill


class Case(NamedTuple):
    """A prompt of `tokens` for each of `batch` sequences, within `hbm`."""

    model: str
    batch: int
    tokens: int
    hbm: str


CASES = (
    Case("llama2-7b", 16, 512, "7GiB"),
    Case("llama2-13b", 16, 512, "9GiB"),
    Case("llama2-70b", 32, 512, "14GiB"),
)

_COLUMNS = (
    Column("target"),
    Column("run"),
    Column("slots", right=True),
    Column("activations", right=True),
    Column("HBM temp", right=True),
    Column("packing", right=True),
    Column("HBM total", right=True),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("link busy", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
)


# The first workloads of the demo, in either form.
_FORMS = DEMO[:2]

_FORM_COLUMNS = (
    Column("workload"),
    Column("target"),
    Column("layers"),
    Column("HBM total", right=True),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("link busy", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES])
    parser.add_argument("--targets", nargs="+", default=["v5e", "h200"])
    parser.add_argument("--forms", action="store_true", help="compare unrolled with scanned")
    options = parser.parse_args()
    tables = [
        Table(
            f"{case.model} prefill, {case.batch} × {case.tokens} tokens, hbm={case.hbm}",
            _COLUMNS,
            tuple(row for target in options.targets for row in _rows(case, target)),
        )
        for case in CASES
        if case.model in options.models and not options.forms
    ]
    if options.forms:
        rows = [
            _form(w, scan, t) for w in _FORMS for t in options.targets for scan in (False, True)
        ]
        tables = [Table("the same model, unrolled and scanned", _FORM_COLUMNS, tuple(rows))]
    write_tables(tables, sys.stdout)


def _form(workload: Workload, is_scanned: bool, target_name: str) -> tuple[str, ...]:
    target = topology(target_name).with_host_memory(HOST_BYTES)
    make = scanned_decode if is_scanned else decode
    fun, args = make(
        workload.model,
        batch=workload.batch,
        tokens=workload.tokens,
        cache_length=workload.cache_length,
    )
    step = jit(fun, hbm=workload.hbm, machine=target, donate_argnames="cache")
    run = view_planned(step.lower(*args).compile(), target.machine)
    return (
        f"{workload.model} {workload.name}, {workload.batch} × {workload.tokens}, "
        f"hbm={workload.hbm}",
        target_name,
        "scanned" if is_scanned else "unrolled",
        *_figures(run),
    )


def _rows(case: Case, target_name: str) -> Iterator[tuple[str, ...]]:
    target = topology(target_name).with_host_memory(HOST_BYTES)
    fun, args = scanned_prefill(
        case.model, batch=case.batch, tokens=case.tokens, cache_length=case.tokens
    )

    def compiled(slots: int | None) -> Compiled:
        step = jit(
            fun,
            hbm=case.hbm,
            machine=target,
            offload=("params.*",),
            slots=slots,
            donate_argnames="cache",
        )
        return step.lower(*args).compile()

    single, chosen = compiled(1), compiled(None)
    alone = view_unscheduled(chosen, target.machine)
    if alone is not None:
        yield _row(target_name, alone)
    for run in (single, chosen):
        backend = "tpu" if target.platform == "tpu" else "gpu"
        live = memory_usage(run.module, backend).lower_bound_bytes
        yield _row(target_name, view_planned(run, target.machine), _ring(run), live)


def _ring(compiled: Compiled) -> LoopStreams:
    assert compiled.plan is not None
    (ring,) = compiled.plan.streams
    return ring


def _row(
    target: str, run: RunView, ring: LoopStreams | None = None, live: int = 0
) -> tuple[str, ...]:
    """`live`: bytes of the temporaries that are live where most are."""
    temp = format_bytes(run.device.temp)
    columns = ("–", "–", temp, "–")
    if ring is not None:
        slots, is_uniform = ring.slots * ring.fetched_bytes, ring.share == 1
        columns = (
            f"{ring.slots} × {format_bytes(ring.fetched_bytes)}"
            if is_uniform
            else f"{ring.slots} of {ring.share:.0%}, 1 of {format_bytes(ring.fetched_bytes)}",
            format_bytes(live - slots) if is_uniform else "–",
            temp,
            f"{run.device.temp / live - 1:+.1%}",
        )
    return (target, run.name, *columns, *_figures(run))


def _figures(run: RunView) -> tuple[str, ...]:
    assert run.clock is not None
    return (
        format_bytes(run.device.total),
        format_bytes(run.moved_bytes),
        f"{run.overlapped or 0.0:.1%}",
        f"{run.clock.link_s / run.clock.step_time_s:.1%}",
        format_seconds(run.clock.step_time_s),
        format_seconds(run.clock.lower_bound_s),
    )


if __name__ == "__main__":
    main()
