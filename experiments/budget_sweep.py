"""Which budgets can be kept? 8 layers of 7B width, 100 % to 25 % of what XLA takes by itself.

    python -m experiments.budget_sweep

Every point is compiled by the target's own compiler. A point that cannot be kept shows the
least budget that the error names, and what comes of asking for that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import view_planned
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table, write_tables
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


def main() -> None:
    rows = tuple(row for target in TARGETS for row in _sweep(target))
    title = f"{MODEL} decode, batch {BATCH}, cache {CACHE_LENGTH}: budgets as shares of XLA's own"
    write_tables([Table(title, _COLUMNS, rows)], sys.stdout)


def _sweep(target: str) -> Iterator[tuple[str, ...]]:
    fun, args = decode(MODEL, batch=BATCH, cache_length=CACHE_LENGTH)
    free = jit(fun, hbm="1TiB", machine=topology(target), donate_argnames="cache")
    own = device_bytes(free.lower(*args).compile(), 0)
    for share in SHARES:
        try:
            yield _row(target, f"{share:.0%}", int(own * share))
        except MemoryBudgetError as error:
            refused = (target, f"{share:.0%}", str(int(own * share)), f"least {error.least}")
            yield (*refused, *["–"] * (len(_COLUMNS) - len(refused)))
            yield _row(target, "least", error.least)


def _row(target: str, asked: str, budget: int) -> tuple[str, ...]:
    fun, args = decode(MODEL, batch=BATCH, cache_length=CACHE_LENGTH)
    step = jit(fun, hbm=budget, machine=topology(target), donate_argnames="cache")
    compiled = step.lower(*args).compile()
    view = view_planned(compiled, topology(target).machine)
    assert view.clock is not None
    return (
        target,
        asked,
        str(budget),
        str(compiled.device_bytes),
        "yes" if compiled.device_bytes <= budget else "NO",
        format_bytes(view.moved_bytes),
        "–" if view.overlapped is None else f"{view.overlapped:.1%}",
        f"{view.clock.link_s / view.clock.step_time_s:.1%}",
        format_seconds(view.clock.step_time_s),
        format_seconds(view.clock.lower_bound_s),
        str(max(1, len(compiled.rounds))),
    )


if __name__ == "__main__":
    main()
