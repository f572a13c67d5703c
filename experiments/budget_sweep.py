"""Which budgets can be kept, and how much of each is used? Shares of what XLA takes by itself.

    python -m experiments.budget_sweep
    python -m experiments.budget_sweep --program attention

*decode* is 8 layers of 7B width, 100 % to 10 %; *attention* the gradient of 6 small layers, whose
temporaries are more than their weights, in steps of 5 % down to the first that is refused. Every
point is compiled by the target's own compiler. A point that cannot be kept shows the least budget
that was found to work, and what comes of asking for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import compared, view_planned
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.workloads import Workload, attention_grad, decode

TARGETS = ("v5e", "h200")


@dataclass(frozen=True)
class _Program:
    title: str
    make: Callable[[], Workload]
    shares: tuple[float, ...]
    donated: str | None = None
    to_the_least: bool = False

    def jit(self, budget: int | str, target: str) -> tuple[Any, tuple[Any, ...]]:
        fun, args = self.make()
        step = jit(fun, hbm=budget, machine=topology(target), donate_argnames=self.donated)
        return step, args


PROGRAMS = {
    "decode": _Program(
        "llama2-7b-8l decode, batch 8, cache 512",
        partial(decode, "llama2-7b-8l", batch=8, cache_length=512),
        (1.0, 0.75, 0.5, 0.25, 0.1),
        donated="cache",
    ),
    "attention": _Program(
        "gradient of 6 layers of attention, width 512, batch 8, 256 tokens",
        partial(attention_grad, 6, batch=8, tokens=256, width=512),
        tuple(share / 100 for share in range(100, 0, -5)),
        to_the_least=True,
    ),
}

_COLUMNS = (
    Column("target"),
    Column("asked", right=True),
    Column("hbm=", right=True),
    Column("XLA total", right=True),
    Column("kept"),
    Column("idle", right=True),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("link busy", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
    Column("compilations", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_enum("program", ["decode"], list(PROGRAMS), "what is to fit")
    flags.DEFINE_multi_enum("target", list(TARGETS), list(TARGETS), "whose compiler")


def _rows(rows: Rows) -> Iterator[Row]:
    for name in FLAGS.program:
        for target in FLAGS.target:
            yield from _sweep(rows, name, target)


def _sweep(rows: Rows, name: str, target: str) -> Iterator[Row]:
    program = PROGRAMS[name]
    case = {"program": name, "target": target}
    own = rows.of({**case, "asked": "own"}, lambda: _own(program, target))
    yield own

    def row(asked: str, budget: int) -> Row:
        asked_for = {**case, "asked": asked, "budget": budget}
        return rows.of(asked_for, lambda: measure(program, target, budget))

    for share in program.shares:
        found = row(f"{share:.0%}", int(own["total"] * share))
        yield found
        if "least" in found:
            yield row("least", found["least"])
            if program.to_the_least:
                return


def _own(program: _Program, target: str) -> Row:
    """What XLA takes by itself."""
    free, args = program.jit("1TiB", target)
    return {"total": device_bytes(free.lower(*args).compile(), 0)}


def measure(program: _Program, target: str, budget: int) -> Row:
    """What becomes of a budget: figures, or the least one that would do."""
    step, args = program.jit(budget, target)
    try:
        compiled = step.lower(*args).compile()
    except MemoryBudgetError as error:
        return {"least": error.least_budget()}
    found = compared(view_planned(compiled, topology(target).machine))
    rounds = max(1, len(compiled.rounds))
    return {**found, "total": compiled.device_bytes, "compilations": rounds}


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    for name, program in PROGRAMS.items():
        found = [row for row in rows if row["program"] == name and row["asked"] != "own"]
        if found:
            title = f"{program.title}: budgets as shares of XLA's own"
            yield Table(title, _COLUMNS, tuple(map(_cells, found)))


def _cells(row: Row) -> tuple[str, ...]:
    asked = (row["target"], row["asked"], str(row["budget"]))
    if "least" in row:
        return (*asked, f"least {row['least']}", *["–"] * (len(_COLUMNS) - 4))
    return (
        *asked,
        str(row["total"]),
        "yes" if row["total"] <= row["budget"] else "NO",
        f"{1 - row['total'] / row['budget']:.1%}",
        format_bytes(row["moved"]),
        "–" if row["overlapped"] is None else f"{row['overlapped']:.1%}",
        f"{row['link_busy']:.1%}",
        format_seconds(row["step_s"]),
        format_seconds(row["bound_s"]),
        str(row["compilations"]),
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
