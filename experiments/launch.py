"""What does it cost to have a runtime bring what a step streams? Steps of 1,000 small products.

    python -m experiments.launch [--operations 1000]

Weights are in memory, so that copies take next to nothing and what is left is what it costs to
order them: a descriptor to copy each, gates in XLA's program that wait for it and let its bytes go.
Ways take turns, and what counts is the median turn:

jax.jit       the step, all weights on the device
runtime       memplan, half of the weights streamed through an arena
calls         memplan, the same by the custom calls in the program
one by one    ``jax.jit`` of one product, called from a loop in Python
chain         no program: the chain of the runtime alone, replayed
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.chains import replay_alone
from memplan.report.tables import Column, Table

_TURNS, _CALLS, _WIDTH = 31, 5, 64

_COLUMNS = (
    Column("operations", right=True),
    Column("way"),
    Column("a step", right=True),
    Column("of jax.jit", right=True),
    Column("descriptors", right=True),
    Column("beyond jax.jit, a descriptor", right=True),
    Column("page faults a step", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_integer("operations", [100, 1000], "products")


def _rows(rows: Rows) -> Iterator[Row]:
    for n in FLAGS.operations:
        yield rows.of({"operations": n}, lambda n=n: measure(n))


def products(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def measure(operations: int) -> Row:
    """Seconds and page faults of a step by each way."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((_WIDTH, _WIDTH), np.float32) / 8 for _ in range(operations)]
    x = jnp.ones((1, _WIDTH))
    step = jit(products, hbm=sum(w.nbytes for w in weights) // 2)
    here, plain, one = [jnp.array(w) for w in weights], jax.jit(products), jax.jit(product)
    placed, _ = step.place(weights, x)

    def one_by_one(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = one(w, x)
        return x

    with step.runtime(weights, x) as run:
        assert run.chain is not None
        descriptors = len(run.chain.descriptors)
        ways: dict[str, Callable[[], Any]] = {
            "jax.jit": lambda: plain(here, x),
            "runtime": lambda: run(weights, x),
            "calls": lambda: step(placed, x),
            "one by one": lambda: one_by_one(here, x),
        }
        expected = plain(here, x)
        for way in ways.values():
            np.testing.assert_allclose(way(), expected, rtol=1e-5, atol=1e-6)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        faults: dict[str, list[int]] = {name: [] for name in ways}
        gc.disable()
        for _ in range(_TURNS):
            for name, way in ways.items():
                before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
                for _ in range(_CALLS):
                    jax.block_until_ready(way())
                seconds[name].append((time.perf_counter() - begin) / _CALLS)
                after = resource.getrusage(resource.RUSAGE_SELF)
                faults[name].append(after.ru_minflt - before.ru_minflt)
        gc.enable()
        chain = statistics.median(replay_alone(run.chain, _TURNS * _CALLS).seconds)
    found = {name: statistics.median(of) for name, of in seconds.items()}
    return {
        "seconds": {**found, "chain": chain},
        "faults": {name: statistics.median(of) / _CALLS for name, of in faults.items()},
        "descriptors": descriptors,
    }


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def _tables(rows: Sequence[Row]) -> list[Table]:
    cells = tuple(cells for row in rows for cells in _cells(row))
    return [Table("A step of small products", _COLUMNS, cells)]


def _cells(row: Row) -> Iterator[tuple[str, ...]]:
    plain = row["seconds"]["jax.jit"]
    for way, seconds in row["seconds"].items():
        faults = row["faults"].get(way)
        has_chain = way in ("runtime", "chain")
        beyond = seconds - plain if way == "runtime" else seconds
        yield (
            f"{row['operations']:,}",
            way,
            format_seconds(seconds),
            f"{seconds / plain:.2f}x",
            f"{row['descriptors']:,}" if has_chain else "",
            format_seconds(beyond / row["descriptors"]) if has_chain else "",
            "" if faults is None else f"{faults:,.0f}",
        )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
