"""What do rings make of scanned layers? Llama 7B, 13B and 70B on one TPU v5e and one H200.

    python -m experiments.scanned [--models llama2-7b ...] [--targets v5e h200] [--forms]

A prompt's worth of tokens goes through ``lax.scan`` over the stacked layers, whose weights
are on the host. Three times each: as XLA schedules the scan by itself, and under memplan with
one slot and with as many as it chooses. Columns:

    slots         K times a layer's slices of the stacks that are on the host, by their shapes;
                  or what share of them has K slots where the others have one
    activations   the other temporaries that are live where most are, by the final schedule
    packing       how much HBM temp is more than slots + activations: what XLA's arena loses
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
from dataclasses import replace

from hlo_passes.machine import Machine
from hlo_passes.memory import memory_usage
from hlo_passes.units import format_bytes
from memplan.api import Compiled
from memplan.compare import COLUMNS, cells, view_planned, view_unscheduled
from memplan.demo import HOST_BYTES, WORKLOADS, Workload
from memplan.report.tables import Column, Table, write_tables
from memplan.topologies import topology
from models import workloads

_SCANNED = [w for w in WORKLOADS if w.is_scanned]
_UNROLLED = [w for w in WORKLOADS if not w.is_scanned]

_SLOTS = (
    Column("slots", right=True),
    Column("activations", right=True),
    Column("packing", right=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[w.model for w in _SCANNED])
    parser.add_argument("--targets", nargs="+", default=["v5e", "h200"])
    parser.add_argument("--forms", action="store_true", help="compare unrolled with scanned")
    options = parser.parse_args()
    if options.forms:
        columns = (Column("target"), Column("layers"), *COLUMNS)
        tables = [
            Table(w.title, columns, tuple(r for t in options.targets for r in _forms(w, t)))
            for w in _UNROLLED
        ]
    else:
        columns = (Column("target"), Column("run"), *_SLOTS, *COLUMNS)
        tables = [
            Table(w.title, columns, tuple(r for t in options.targets for r in _runs(w, t)))
            for w in _SCANNED
            if w.model in options.models
        ]
    write_tables(tables, sys.stdout)


def _forms(workload: Workload, target_name: str) -> Iterator[tuple[str, ...]]:
    target = topology(target_name).with_host_memory(HOST_BYTES)
    for is_scanned in (False, True):
        compiled = replace(workload, is_scanned=is_scanned).compile(workloads, target)
        run = view_planned(compiled, target.machine)
        yield target_name, "scanned" if is_scanned else "unrolled", *cells(run)


def _runs(workload: Workload, target_name: str) -> Iterator[tuple[str, ...]]:
    target = topology(target_name).with_host_memory(HOST_BYTES)
    single, chosen = (workload.compile(workloads, target, slots) for slots in (1, None))
    alone = view_unscheduled(chosen, target.machine)
    yield target_name, "XLA alone", *["–"] * len(_SLOTS), *cells(alone)
    for compiled in (single, chosen):
        run = view_planned(compiled, target.machine)
        yield target_name, run.name, *_slots(compiled, target.machine), *cells(run)


def _slots(compiled: Compiled, machine: Machine) -> tuple[str, ...]:
    (ring,) = compiled.streams
    live = memory_usage(compiled.module, machine.platform).lower_bound_bytes
    packing = f"{compiled.memory_analysis().temp_size_in_bytes / live - 1:+.1%}"
    layer = format_bytes(ring.fetched_bytes)
    if ring.share < 1:
        return f"{ring.slots} of {ring.share:.0%}, 1 of {layer}", "–", packing
    return (
        f"{ring.slots} × {layer}",
        format_bytes(live - ring.slots * ring.fetched_bytes),
        packing,
    )


if __name__ == "__main__":
    main()
