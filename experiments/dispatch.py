"""What does a call cost beside one of ``jax.jit``? Functions of 10 to 1,000 arrays, on this CPU.

    python -m experiments.dispatch [--leaves 10 100 1000]

Seconds that a call keeps Python waiting, not those of the program; ``jax.jit``, and memplan with
and without a plan, take turns, and what counts is the median turn. With a plan half of the arrays
are on the host, and plain jax is given the same arrays on the device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table, write_tables

_TURNS, _CALLS = 31, 10

_COLUMNS = (
    Column("arrays", right=True),
    Column("jax.jit", right=True),
    Column("memplan.jit, no plan", right=True),
    Column("", right=True),
    Column("with a plan", right=True),
    Column("", right=True),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", nargs="+", type=int, default=[10, 100, 1000])
    options = parser.parse_args(arguments)
    rows = tuple(_row(n) for n in options.leaves)
    write_tables([Table("A call, without the program's own time", _COLUMNS, rows)], sys.stdout)


def total(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = x + w.sum()
    return x


def _row(leaves: int) -> tuple[str, ...]:
    weights = [jnp.full((64, 64), n, jnp.float32) for n in range(leaves)]
    x = jnp.ones(())
    budget = sum(w.nbytes for w in weights) * 3 // 4
    planned, unplanned = jit(total, hbm=budget), jit(total, hbm="1GiB")
    placed = planned.place(weights, x)
    if planned.lower(*placed).compile().plan is None:
        raise AssertionError(f"{leaves} arrays: there is no plan")
    calls: dict[str, tuple[Callable[..., Any], Any]] = {
        "jax": (jax.jit(total), (weights, x)),
        "unplanned": (unplanned, (weights, x)),
        "planned": (planned, placed),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_TURNS + 1):
        for name, (function, args) in calls.items():
            taken = _waiting_s(function, args)
            if turn:  # The first one compiles.
                seconds[name].append(taken)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return (
        f"{leaves}",
        format_seconds(median["jax"]),
        *(
            cell
            for name in ("unplanned", "planned")
            for cell in (format_seconds(median[name]), f"{median[name] / median['jax']:.2f}x")
        ),
    )


def _waiting_s(function: Callable[..., Any], args: Any) -> float:
    """Seconds that one call takes to return."""
    taken = 0.0
    for _ in range(_CALLS):
        begin = time.perf_counter()
        result = function(*args)
        taken += time.perf_counter() - begin
        jax.block_until_ready(result)
    return taken / _CALLS


if __name__ == "__main__":
    main()
