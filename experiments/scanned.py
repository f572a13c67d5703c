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

from collections.abc import Iterator, Sequence
from dataclasses import replace

from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.hardware.machine import Machine
from hlo_passes.memory.usage import memory_usage
from hlo_passes.units import format_bytes
from memplan.api import Compiled
from memplan.compare import COLUMNS, cells, compared, view_planned, view_unscheduled
from memplan.demo import HOST_BYTES, WORKLOADS, Workload
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models import workloads

_SCANNED = [w for w in WORKLOADS if w.is_scanned]
_UNROLLED = [w for w in WORKLOADS if not w.is_scanned]

_SLOTS = (
    Column("slots", right=True),
    Column("activations", right=True),
    Column("packing", right=True),
)


def _define() -> None:
    models = [w.model for w in _SCANNED]
    flags.DEFINE_multi_enum("models", models, models, "which")
    flags.DEFINE_multi_string("targets", ["v5e", "h200"], "topologies")
    flags.DEFINE_bool("forms", False, "compare unrolled with scanned")


def _rows(rows: Rows) -> Iterator[Row]:
    """A row a target and workload, of all its runs: they share a compilation."""
    chosen = _UNROLLED if FLAGS.forms else [w for w in _SCANNED if w.model in FLAGS.models]
    measure = _forms if FLAGS.forms else _slotted
    for workload in chosen:
        for target in FLAGS.targets:
            case = {"workload": workload.title, "target": target, "forms": FLAGS.forms}
            yield rows.of(case, lambda w=workload, t=target: {"runs": list(measure(w, t))})


def _forms(workload: Workload, target_name: str) -> Iterator[Row]:
    target = topology(target_name).with_host_memory(HOST_BYTES)
    for is_scanned in (False, True):
        compiled = replace(workload, is_scanned=is_scanned).compile(workloads, target)
        run = compared(view_planned(compiled, target.machine))
        yield {"name": "scanned" if is_scanned else "unrolled", "figures": run}


def _slotted(workload: Workload, target_name: str) -> Iterator[Row]:
    target = topology(target_name).with_host_memory(HOST_BYTES)
    single, chosen = (workload.compile(workloads, target, slots) for slots in (1, None))
    alone = view_unscheduled(chosen, target.machine)
    yield {"name": "XLA alone", "figures": alone and compared(alone)}
    for compiled in (single, chosen):
        run = view_planned(compiled, target.machine)
        ring = _ring(compiled, target.machine)
        yield {"name": run.name, "figures": compared(run), "ring": ring}


def _ring(compiled: Compiled, machine: Machine) -> Row:
    (ring,) = compiled.streams
    return {
        "slots": ring.slots,
        "share": ring.share,
        "layer": ring.fetched_bytes,
        "live": memory_usage(compiled.module, machine.platform).lower_bound_bytes,
    }


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    for title, forms in dict.fromkeys((row["workload"], row["forms"]) for row in rows):
        columns = (Column("layers"),) if forms else (Column("run"), *_SLOTS)
        found = [row for row in rows if (row["workload"], row["forms"]) == (title, forms)]
        cells = (_cells(row["target"], run, forms) for row in found for run in row["runs"])
        yield Table(title, (Column("target"), *columns, *COLUMNS), tuple(cells))


def _cells(target: str, run: Row, forms: bool) -> tuple[str, ...]:
    return (target, run["name"], *(() if forms else _slots(run)), *cells(run["figures"]))


def _slots(run: Row) -> tuple[str, ...]:
    if "ring" not in run:
        return ("–",) * len(_SLOTS)
    ring = run["ring"]
    packing, layer = (
        f"{run['figures']['temp'] / ring['live'] - 1:+.1%}",
        format_bytes(ring["layer"]),
    )
    if ring["share"] < 1:
        return f"{ring['slots']} of {ring['share']:.0%}, 1 of {layer}", "–", packing
    activations = format_bytes(ring["live"] - ring["slots"] * ring["layer"])
    return f"{ring['slots']} × {layer}", activations, packing


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
