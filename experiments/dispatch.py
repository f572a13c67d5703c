"""What does a call cost beside one of ``jax.jit``? Functions of 10 to 1,000 arrays, on this CPU.

    python -m experiments.dispatch [--leaves 10 100 1000]

Seconds that a call keeps Python waiting, not those of the program; ``jax.jit``, and memplan with
and without a plan, take turns, and what counts is the median turn. With a plan half of the arrays
are on the host, and plain jax is given the same arrays on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table

_TURNS, _CALLS = 31, 10

_COLUMNS = (
    Column("arrays", right=True),
    Column("jax.jit", right=True),
    Column("memplan.jit, no plan", right=True),
    Column("", right=True),
    Column("with a plan", right=True),
    Column("", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_integer("leaves", [10, 100, 1000], "arrays")


def _rows(rows: Rows) -> Iterator[Row]:
    for n in FLAGS.leaves:
        yield rows.of({"arrays": n}, lambda n=n: measure(n))


def total(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = x + w.sum()
    return x


def measure(leaves: int) -> Row:
    """Seconds of a call of each."""
    weights = [jnp.full((64, 64), n, jnp.float32) for n in range(leaves)]
    x = jnp.ones(())
    budget = sum(w.nbytes for w in weights) * 3 // 4
    planned, unplanned = jit(total, hbm=budget), jit(total, hbm="1GiB")
    placed = planned.place(weights, x)
    if planned.lower(*placed).compile().plan is None:
        raise AssertionError(f"{leaves} arrays: there is no plan")
    calls: dict[str, tuple[Callable[..., Any], Any]] = {
        "jax_s": (jax.jit(total), (weights, x)),
        "unplanned_s": (unplanned, (weights, x)),
        "planned_s": (planned, placed),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_TURNS + 1):
        for name, (function, args) in calls.items():
            taken = _waiting_s(function, args)
            if turn:  # The first one compiles.
                seconds[name].append(taken)
    return {name: statistics.median(found) for name, found in seconds.items()}


def _waiting_s(function: Callable[..., Any], args: Any) -> float:
    """Seconds that one call takes to return."""
    taken = 0.0
    for _ in range(_CALLS):
        begin = time.perf_counter()
        result = function(*args)
        taken += time.perf_counter() - begin
        jax.block_until_ready(result)
    return taken / _CALLS


def _tables(rows: Sequence[Row]) -> list[Table]:
    cells = tuple((f"{row['arrays']:,}", *_cells(row)) for row in rows)
    return [Table("A call, without the program's own time", _COLUMNS, cells)]


def _cells(row: Row) -> Iterator[str]:
    yield format_seconds(row["jax_s"])
    for name in ("unplanned_s", "planned_s"):
        yield format_seconds(row[name])
        yield f"{row[name] / row['jax_s']:.2f}x"


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
