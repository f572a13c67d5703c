"""Which budgets can be kept? 8 layers of 7B width, 100 % to 25 % of what XLA takes by itself.

    python -m experiments.budget_sweep

Every point is compiled by the target's own compiler. A point that cannot be kept shows the
least budget that the error names, and what comes of asking for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.running import Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import compared, view_planned
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.workloads import decode

MODEL, BATCH, CACHE_LENGTH = "llama2-7b-8l", 8, 512
TARGETS = ("v5e", "h200")
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)

_COLUMNS = (
    Column("target"),
    Column("asked", right=True),
    Column("hbm=", right=True),
    Column("XLA total", right=True),
    Column("kept"),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("link busy", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
    Column("compilations", right=True),
)


def _rows(rows: Rows) -> Iterator[Row]:
    for target in TARGETS:
        own = rows.of({"target": target, "asked": "own"}, lambda t=target: _own(t))
        yield own
        for share in SHARES:
            row = _row(rows, target, f"{share:.0%}", int(own["total"] * share))
            yield row
            if "least" in row:
                yield _row(rows, target, "least", row["least"])


def _row(rows: Rows, target: str, asked: str, budget: int) -> Row:
    case = {"target": target, "asked": asked, "budget": budget}
    return rows.of(case, lambda: measure(target, budget))


def _own(target: str) -> Row:
    """What XLA takes by itself."""
    fun, args = decode(MODEL, batch=BATCH, cache_length=CACHE_LENGTH)
    free = jit(fun, hbm="1TiB", machine=topology(target), donate_argnames="cache")
    return {"total": device_bytes(free.lower(*args).compile(), 0)}


def measure(target: str, budget: int) -> Row:
    """What becomes of a budget: figures, or the least one that would do."""
    fun, args = decode(MODEL, batch=BATCH, cache_length=CACHE_LENGTH)
    step = jit(fun, hbm=budget, machine=topology(target), donate_argnames="cache")
    try:
        compiled = step.lower(*args).compile()
    except MemoryBudgetError as error:
        return {"least": error.least}
    found = compared(view_planned(compiled, topology(target).machine))
    rounds = max(1, len(compiled.rounds))
    return {**found, "total": compiled.device_bytes, "compilations": rounds}


def _tables(rows: Sequence[Row]) -> list[Table]:
    title = f"{MODEL} decode, batch {BATCH}, cache {CACHE_LENGTH}: budgets as shares of XLA's own"
    found = (row for row in rows if row["asked"] != "own")
    return [Table(title, _COLUMNS, tuple(map(_cells, found)))]


def _cells(row: Row) -> tuple[str, ...]:
    asked = (row["target"], row["asked"], str(row["budget"]))
    if "least" in row:
        return (*asked, f"least {row['least']}", *["–"] * (len(_COLUMNS) - 4))
    return (
        *asked,
        str(row["total"]),
        "yes" if row["total"] <= row["budget"] else "NO",
        format_bytes(row["moved"]),
        "–" if row["overlapped"] is None else f"{row['overlapped']:.1%}",
        f"{row['link_busy']:.1%}",
        format_seconds(row["step_s"]),
        format_seconds(row["bound_s"]),
        str(row["compilations"]),
    )


EXPERIMENT = Experiment(_rows, _tables)

if __name__ == "__main__":
    EXPERIMENT.main()
