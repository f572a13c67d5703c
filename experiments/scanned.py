"""What do rings make of scanned layers? Llama 7B, 13B and 70B on one TPU v5e and one H200.

    python -m experiments.scanned [--models llama2-7b ...] [--targets v5e h200]

A prompt's worth of tokens goes through ``lax.scan`` over the stacked layers, whose weights
are on the host. Three times each: as XLA schedules the scan by itself, and under memplan with
one slot and with as many as it chooses. Columns:

    slots         K, and the bytes of K slots: K times a layer's slices of the stacks that are
                  on the host, by their shapes
    activations   HBM temp of the program with one slot, less that slot
    off by        HBM temp against slots + activations
    overlapped    share of the transferred bytes that move while the device computes

Bytes are XLA's report of executables of the real compilers; seconds and overlap are
predictions of the machine model for their schedules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax

from hlo_passes.units import format_bytes, format_seconds
from memplan.api import Compiled, jit
from memplan.compare import view_planned, view_unscheduled
from memplan.report.tables import Column, Table, write_tables
from memplan.report.view import RunView
from memplan.topologies import Topology, topology
from models.workloads import scanned_prefill


class Case(NamedTuple):
    """A prompt of `tokens` for each of `batch` sequences, within `hbm`."""

    model: str
    batch: int
    tokens: int
    hbm: str


CASES = (
    Case("llama2-7b", 16, 512, "6GiB"),
    Case("llama2-13b", 16, 512, "9GiB"),
    Case("llama2-70b", 32, 512, "13GiB"),
)

_COLUMNS = (
    Column("target"),
    Column("run"),
    Column("slots", right=True),
    Column("activations", right=True),
    Column("HBM temp", right=True),
    Column("off by", right=True),
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
    options = parser.parse_args()
    tables = [
        Table(
            f"{case.model} prefill, {case.batch} × {case.tokens} tokens, hbm={case.hbm}",
            _COLUMNS,
            tuple(row for target in options.targets for row in _rows(case, target)),
        )
        for case in CASES
        if case.model in options.models
    ]
    write_tables(tables, sys.stdout)


def alone_on_its_host(target: Topology) -> Topology:
    """One device that has the memory of its whole host, which the machine library divides
    among all devices: 384 GB on an 8-chip VM of TPU v5e (ct5lp-hightpu-8t,
    cloud.google.com/tpu/docs/v5e), and no less beside an H200."""
    tiers = tuple(
        replace(t, capacity_bytes=max(t.capacity_bytes, 384_000_000_000)) if t.name == "host" else t
        for t in target.machine.tiers
    )
    return replace(target, machine=replace(target.machine, tiers=tiers))


def _rows(case: Case, target_name: str) -> Iterator[tuple[str, ...]]:
    target = alone_on_its_host(topology(target_name))
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
    leaves = jax.tree.leaves(args)

    def slot_bytes(of: Compiled) -> int:
        stacks = [leaves[n] for n in of.hosting.arguments if len(leaves[n].shape) > 2]
        return sum(a.size // a.shape[0] * a.dtype.itemsize for a in stacks)

    activations = view_planned(single, target.machine).device.temp - slot_bytes(single)
    alone = view_unscheduled(chosen, target.machine)
    if alone is not None:
        yield _row(target_name, alone)
    for run in (single, chosen):
        yield _row(
            target_name,
            view_planned(run, target.machine),
            run.hosting.depth,
            slot_bytes(run),
            activations,
        )


def _row(
    target: str, run: RunView, slots: int = 0, slot_bytes: int = 0, activations: int = 0
) -> tuple[str, ...]:
    """`slots`: 0 for a run without a ring."""
    assert run.clock is not None
    temp, expected = run.device.temp, slots * slot_bytes + activations
    return (
        target,
        run.name,
        f"{slots} × {format_bytes(slot_bytes)}" if slots else "–",
        format_bytes(activations) if slots else "–",
        format_bytes(temp),
        f"{temp / expected - 1:+.1%}" if slots else "–",
        format_bytes(run.device.total),
        format_bytes(run.moved_bytes),
        f"{run.overlapped or 0.0:.1%}",
        f"{run.clock.link_s / run.clock.step_time_s:.1%}",
        format_seconds(run.clock.step_time_s),
        format_seconds(run.clock.lower_bound_s),
    )


if __name__ == "__main__":
    main()
