"""What holds the programs of the corpus, products or memory? Arithmetic intensity on a machine.

    python -m experiments.roofline [--targets h200 v5e] [--workload vit-train] [--plot roofline.svg]

FLOPs of dots and convolutions, bytes to and from device memory, and predicted seconds, of each
program as XLA has it; beside the peaks of the machine library. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.analysis.flops import matrix_work
from hlo_passes.analysis.traffic import traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.hardware.machine import load_machine
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Computation, Module
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator.cost import step_seconds
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS

_COLUMNS = (
    Column("program"),
    Column("target"),
    *(
        Column(heading, right=True)
        for heading in ("TFLOP", "bytes", "FLOP/byte", "step, predicted", "of the roof")
    ),
    Column("held by"),
)


def _define() -> None:
    flags.DEFINE_multi_string("targets", ["h200"], "machines")
    flags.DEFINE_multi_enum("workload", list(CORPUS), list(CORPUS), "of `models.corpus`")
    flags.DEFINE_float("timeout", 900.0, "seconds for each compilation")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.targets:
        for workload in FLAGS.workload:
            case = {"workload": workload, "target": target}
            yield rows.of(
                case,
                lambda c=case: found_apart(compile_own, *c.values(), timeout_s=FLAGS.timeout),
            )


def compile_own(workload: str, target: str) -> Row:
    """Compiles a program as ``jax.jit`` does, and measures it."""
    jax.config.update("jax_platforms", "cpu")
    fun, args = CORPUS[workload].planning()
    where = topology(target)
    step = jit(fun, hbm="1TiB", machine=where, donate_argnames=CORPUS[workload].donate)
    module = read_module(step.lower(*args).unplanned())
    flops, size = work(module, module.entry)
    return {"flops": flops, "bytes": size, "step_s": step_seconds(module, where.machine)}


def work(module: Module, computation: Computation) -> tuple[int, int]:
    """FLOPs, and bytes to and from device memory; a loop of unknown count runs once."""
    moved, flops, size = traffic(module), 0, 0
    for i in computation.instructions:
        if i.opcode in ("while", "call", "conditional"):
            times = (trip_count(module, i) or 1) if i.opcode == "while" else 1
            inside = [work(module, module.computations[c]) for c in i.called_computation_ids]
            flops += times * sum(f for f, _ in inside)
            size += times * sum(b for _, b in inside)
            continue
        flops += sum(part.flops for part in matrix_work(module, i))
        if i.id in moved:
            size += moved[i.id].read.get(DEVICE_MEMORY_SPACE, 0)
            size += moved[i.id].written.get(DEVICE_MEMORY_SPACE, 0)
    return flops, size


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("The corpus under a roofline", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    named = (row["workload"], row["target"])
    if "failure" in row:
        return (*named, *["–"] * (len(_COLUMNS) - 3), row["failure"])
    machine = load_machine(row["target"])
    products_s = row["flops"] / machine.flops("bf16")
    memory_s = row["bytes"] / machine.hbm_bytes_per_s
    return (
        *named,
        f"{row['flops'] / 1e12:,.2f}",
        format_bytes(row["bytes"]),
        f"{row['flops'] / row['bytes']:,.1f}",
        format_seconds(row["step_s"]),
        f"{max(products_s, memory_s) / row['step_s']:.0%}",
        "products" if products_s > memory_s else "memory",
    )


def _plot(rows: Sequence[Row]) -> Any:
    """FLOP/s over FLOP/byte, a panel a target, with the peaks of bfloat16 and of memory."""
    from matplotlib.figure import Figure

    found = [row for row in rows if row.get("flops")]
    targets = list(dict.fromkeys(row["target"] for row in found))
    figure = Figure(figsize=(8, 5 * len(targets)), layout="constrained")
    panels = figure.subplots(len(targets), 1, squeeze=False)[:, 0]
    for axes, target in zip(panels, targets, strict=True):
        machine = load_machine(target)
        peak, rate = machine.flops("bf16"), machine.hbm_bytes_per_s
        ridge = peak / rate
        of = [row for row in found if row["target"] == target]
        points = [(r["flops"] / r["bytes"], r["flops"] / r["step_s"], r["workload"]) for r in of]
        ends = [min(ridge / 2, *(x for x, *_ in points)), max(2 * ridge, *(x for x, *_ in points))]
        roof = [ends[0], ridge, ends[1]]
        axes.plot(roof, [min(peak, rate * x) for x in roof], color="gray", label="roof, bfloat16")
        for x, y, workload in points:
            axes.plot(x, y, "o", label=workload)
        axes.set(xscale="log", yscale="log", xlabel="FLOP / byte of device memory")
        axes.set(ylabel="FLOP/s, predicted", title=machine.name)
        axes.legend(fontsize=7)
    return figure


EXPERIMENT = Experiment(_rows, _tables, _define, _plot)

if __name__ == "__main__":
    EXPERIMENT.main()
