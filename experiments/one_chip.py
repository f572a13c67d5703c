"""How little memory does one chip need? 7B and 70B decode on a single 16 GiB TPU v5e.

    python -m experiments.one_chip [--models llama2-7b llama2-70b]

7B: the plan for 4 GiB. 70B (129 GiB of weights): the least budget that works, as the error
of an impossible one names it, then plans for that and for twice that. All are compiled by
the TPU compiler, verified by the checker, and compared with XLA's own report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.compare import COLUMNS, cells, compared, view_planned
from memplan.demo import HOST_BYTES
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.workloads import decode

TARGET = "v5e"

_COLUMNS = (
    Column("model"),
    Column("hbm="),
    Column("XLA total", right=True),
    *COLUMNS,
    Column("follows", right=True),
    Column("compiled in", right=True),
)


def _define() -> None:
    models = ["llama2-7b", "llama2-70b"]
    flags.DEFINE_multi_enum("models", models, models, "which")


def _rows(rows: Rows) -> Iterator[Row]:
    def row(model: str, batch: int, budget: int) -> Row:
        case = {"model": model, "batch": batch, "budget": budget}
        return rows.of(case, lambda: measure(model, batch, budget))

    if "llama2-7b" in FLAGS.models:
        yield row("llama2-7b", 8, 4 << 30)
    if "llama2-70b" in FLAGS.models:
        asked = row("llama2-70b", 1, 1 << 30)
        yield asked
        if "least" in asked:
            for budget in (asked["least"], 2 * asked["least"]):
                yield row("llama2-70b", 1, budget)


def measure(model: str, batch: int, budget: int) -> Row:
    """Figures of a decode step within a budget, or the least one that would do."""
    target = topology(TARGET).with_host_memory(HOST_BYTES)
    fun, args = decode(model, batch=batch, cache_length=512)
    begin = time.monotonic()
    step = jit(fun, hbm=budget, machine=target, donate_argnames="cache")
    try:
        compiled = step.lower(*args).compile()
    except MemoryBudgetError as error:
        return {"least": error.least_budget()}
    seconds = time.monotonic() - begin
    assert compiled.followed is not None
    return {
        "total_by_xla": compiled.device_bytes,
        **compared(view_planned(compiled, target.machine)),
        "follows": "exactly" if compiled.followed.exactly else str(compiled.followed),
        "compile_s": seconds,
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    title = f"decode on one TPU {TARGET}, cache 512"
    return [Table(title, _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    asked = (f"{row['model']}, batch {row['batch']}", str(row["budget"]))
    if "least" in row:
        return (*asked, f"least {row['least']}", *["–"] * (len(_COLUMNS) - 3))
    return (
        *asked,
        str(row["total_by_xla"]),
        *cells(row),
        row["follows"],
        format_seconds(row["compile_s"]),
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
