"""Does a step that reads its weights from the disk always take as long? 1,000 steps by each way.

    python -m experiments.steady --path FOLDER [--steps 1000]

A network of 16 layers, 64 MiB, in a pool of 24 MiB, alone, and beside a neighbour that burns one
core and reads the same disk. Each way has a process of its own, held to the pool and 16 MiB as in
`disk_tier`; ways take turns of 50 steps, and the raw reader reads as many bytes as a step of the
runtime.
"""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from custom_calls import library
from experiments.disk_tier import advise, drop_pages, limited
from experiments.isolated import Failure, Worker
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.units import format_seconds
from memplan import disk
from memplan.api import jit
from memplan.report.tables import Column, Table

_LAYERS, _WIDTH, _POOL = 16, 1024, 24 << 20
_SLACK = 16 << 20  # Bytes for what Python does meanwhile.
_TURN = 50
_WAYS = ("raw", "runtime", "mmap")

_COLUMNS = (
    Column("beside"),
    Column("way"),
    Column("steps", right=True),
    Column("p50", right=True),
    Column("p99", right=True),
    Column("p99 / p50", right=True),
    Column("slowest", right=True),
)


def _define() -> None:
    flags.DEFINE_string("path", None, "folder on the disk to measure", required=True)
    flags.DEFINE_integer("steps", 1000, "of each way")


def _rows(rows: Rows) -> Iterator[Row]:
    path = Path(FLAGS.path) / "steady.safetensors"
    rng = np.random.default_rng(0)
    shape = _WIDTH, _WIDTH
    disk.save(path, [rng.standard_normal(shape, np.float32) / 32 for _ in range(_LAYERS)])
    for beside in ("nothing", "a neighbour"):
        found = measure(path, FLAGS.steps, beside != "nothing")
        for way, row in found.items():
            yield rows.of({"beside": beside, "way": way}, functools.partial(dict, row))


def measure(path: Path, steps: int, has_neighbour: bool) -> dict[str, Row]:
    """Seconds of steps of each way."""
    neighbour = None
    if has_neighbour:
        neighbour = multiprocessing.get_context("spawn").Process(
            target=_disturb, args=(str(path),), daemon=True
        )
        neighbour.start()
    os.environ["MALLOC_ARENA_MAX"] = "1"  # As in `disk_tier`.
    workers = {way: Worker(600) for way in _WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    try:
        for way, worker in workers.items():
            opened = worker.call(_open, way, str(path))
            if isinstance(opened, Failure):
                raise RuntimeError(f"{way}: {opened.reason}")
        for _ in range(-(-steps // _TURN)):
            for way, worker in workers.items():
                drop_pages(path)
                turn = worker.call(_turn, _TURN)
                if isinstance(turn, Failure):
                    raise RuntimeError(f"{way}: {turn.reason}")
                seconds[way] += turn
    finally:
        for worker in workers.values():
            worker.__exit__()
        if neighbour is not None:
            neighbour.kill()
    return {way: {"seconds": own} for way, own in seconds.items()}


def _disturb(path: str) -> None:
    """Burns a core, and reads the file again and again."""
    buffer = np.ones(8 << 20, np.uint8)
    while True:
        library.load().read_file(path, buffer, 0, depth=2)
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass


# --- in a child ----------------------------------------------------------------------------

_step: Callable[[], Any] | None = None
_mapped: Sequence[jax.Array] = ()


def forward(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def _open(way: str, path: str) -> None:
    global _step, _mapped
    jax.config.update("jax_platforms", "cpu")
    shapes = [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.float32)] * _LAYERS
    weights, x = disk.load(path, like=shapes), jnp.ones((1, _WIDTH))
    step = jit(forward, hbm=_POOL)
    if way == "runtime":
        step.runtime(weights, x).close()
        limited(_POOL + _SLACK)
        _step = functools.partial(step.runtime(weights, x), weights, x)
    elif way == "mmap":
        _mapped = [jax.device_put(np.asarray(w), may_alias=True) for w in weights]
        compiled = jax.jit(forward).lower(shapes, x).compile()
        limited(_POOL + _SLACK)
        _step = functools.partial(compiled, _mapped, x)
    else:
        with step.runtime(weights, x) as run:
            plan = run.compiled.plan
            assert plan is not None
            size = sum(t.size for t in plan.transfers)
        buffer = np.ones(size + 4096, np.uint8)
        own = buffer[-buffer.ctypes.data % 4096 :][: size // 4096 * 4096]
        _step = functools.partial(library.load().read_file, path, own, 0)
    jax.block_until_ready(_step())


def _turn(steps: int) -> list[float]:
    assert _step is not None
    jax.block_until_ready(_step())  # What waited since the last turn was ready.
    seconds = list[float]()
    for _ in range(steps):
        begin = time.perf_counter()
        jax.block_until_ready(_step())
        seconds.append(round(time.perf_counter() - begin, 6))
    advise(_mapped, mmap.MADV_DONTNEED)  # So that the pages can be dropped before the next one.
    return seconds


# --- tables --------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("Steps, one after the other", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    cuts = statistics.quantiles(row["seconds"], n=100)
    p50, p99 = cuts[49], cuts[98]
    return (
        row["beside"],
        row["way"],
        f"{len(row['seconds']):,}",
        format_seconds(p50),
        format_seconds(p99),
        f"{p99 / p50:.2f}",
        format_seconds(max(row["seconds"])),
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
