"""Is training bound by the disk when its state is there? Adam on 24 layers, three times the pool.

    python -m experiments.disk_state --path FOLDER [--layers 24] [--pool 400MiB] [--turns 6]

A step and the raw reader and writer take turns: the latter reads as many bytes as a step does and
writes as many at the same time, past the page cache, at the best of a sweep over how many requests
are under way. Turns end when all is on the disk.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from custom_calls import library
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.budget import parse_bytes
from hlo_passes.chains.chain import Copy
from hlo_passes.units import format_bytes, format_seconds
from memplan import state
from memplan.api import jit
from memplan.report.tables import Column, Table

_WIDTH, _BATCH, _STEPS = 2048, 8, 3  # Steps of a turn.
_BUFFER = 128 << 20  # Bytes, of the raw reader and of the raw writer.
_DEPTHS, _CHUNK = (4, 8, 16, 32), 1 << 20

_COLUMNS = (
    Column("state", right=True),
    Column("pool", right=True),
    Column("read a step", right=True),
    Column("written", right=True),
    Column("a step, median", right=True),
    Column("slowest", right=True),
    Column("raw, the same bytes", right=True),
    Column("raw / step", right=True),
    Column("memory, beyond what was there", right=True),
)


def _define() -> None:
    flags.DEFINE_string("path", None, "folder on the disk to measure", required=True)
    flags.DEFINE_string("pool", "400MiB", "memory for state and temporaries")
    flags.DEFINE_integer("layers", 24, "of the model, 48 MiB of state each")
    flags.DEFINE_integer("turns", 6, "of each")


def _rows(rows: Rows) -> Iterator[Row]:
    pool = parse_bytes(FLAGS.pool)
    case = {"layers": FLAGS.layers, "pool": pool}
    yield rows.of(
        case, functools.partial(measure, Path(FLAGS.path), FLAGS.layers, pool, FLAGS.turns)
    )


def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def train(of: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step of Adam (Kingma and Ba, 2015)."""
    value, grads = jax.value_and_grad(loss)(of["w"], x)
    t = of["t"] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, of["m"], grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, of["v"], grads)

    def updated(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return w - 1e-4 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return {"w": jax.tree.map(updated, of["w"], m, v), "m": m, "v": v, "t": t}, value


def measure(path: Path, layers: int, pool: int, turns: int) -> Row:
    """Seconds of steps, and of raw transfers of as many bytes."""
    rng = np.random.default_rng(0)

    def drawn() -> list[np.ndarray]:
        return [rng.standard_normal((_WIDTH, _WIDTH), np.float32) / 45 for _ in range(layers)]

    zeros = [np.zeros((_WIDTH, _WIDTH), np.float32)] * layers
    start = {"w": drawn(), "m": zeros, "v": zeros, "t": np.float32(0)}
    folder = path / "state"
    shutil.rmtree(folder, ignore_errors=True)
    state.save(folder, start)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(start))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), start)
    del start, zeros
    given, x = state.load(folder, like=shapes), jnp.ones((_BATCH, _WIDTH))
    before = _resident()
    with jit(train, hbm=pool, donate_argnums=0).runtime(given, x) as run:
        assert run.chain is not None
        copies = [d for d in run.chain.descriptors if isinstance(d.action, Copy)]
        names = [run.chain.streams[d.stream].name for d in copies]
        moved = {
            name: sum(d.action.bytes for d, n in zip(copies, names, strict=True) if n == name) // 2
            for name in ("read", "write")
        }
        raw = _Raw(folder / "even.safetensors", path / "raw", moved["read"], moved["write"])
        seconds, of_raw = list[float](), list[float]()
        for turn in range(turns + 1):
            begin = time.perf_counter()
            for _ in range(_STEPS):
                given, _ = run(given, x)
            run.wait()
            if turn:  # The first one finds the arena full.
                seconds.append((time.perf_counter() - begin) / _STEPS)
                of_raw.append(statistics.mean(raw.seconds() for _ in range(_STEPS)))
        resident = _resident() - before
    shutil.rmtree(folder)
    raw.remove()
    return {
        "state": size,
        "read": moved["read"],
        "written": moved["write"],
        "seconds": seconds,
        "raw_seconds": of_raw,
        "resident": resident - raw.bytes,
        "depth": raw.depth,
    }


def _resident() -> int:
    """Bytes of this process that are in memory and in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kib) << 10


class _Raw:
    """Reads one file and writes another at the same time."""

    def __init__(self, source: Path, target: Path, read: int, written: int) -> None:
        self._source, self._target = source, target
        with target.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, min(written, source.stat().st_size))
        self._read, self._written = read, written
        self._buffers = [np.ones(_BUFFER + 4096, np.uint8) for _ in range(2)]
        self._buffers = [b[-b.ctypes.data % 4096 :][:_BUFFER] for b in self._buffers]
        self.bytes = 2 * _BUFFER
        self.depth = 0
        taken = {depth: self._once(depth) for depth in _DEPTHS}
        self.depth = min(taken, key=lambda depth: taken[depth])

    def seconds(self) -> float:
        return self._once(self.depth)

    def remove(self) -> None:
        self._target.unlink()

    def _once(self, depth: int) -> float:
        begin = time.perf_counter()
        threads = [
            threading.Thread(target=self._read_all, args=[depth]),
            threading.Thread(target=self._write_all, args=[depth]),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    def _parts(self, path: Path, total: int) -> Iterator[tuple[int, int]]:
        """Offsets in a file, from its begin again where it ends, and sizes."""
        size = path.stat().st_size // 4096 * 4096
        done = 0
        while done < total:
            at = done % size
            length = min(_BUFFER, total - done, size - at) // 4096 * 4096
            if not length:
                return
            yield at, length
            done += length

    def _read_all(self, depth: int) -> None:
        for at, length in self._parts(self._source, self._read):
            library.load().read_file(
                self._source, self._buffers[0][:length], at, depth=depth, chunk=_CHUNK
            )

    def _write_all(self, depth: int) -> None:
        for at, length in self._parts(self._target, self._written):
            library.load().write_file(
                self._target, self._buffers[1][:length], at, depth=depth, chunk=_CHUNK
            )
        with self._target.open("rb") as file:
            os.fdatasync(file.fileno())


def _tables(rows: Sequence[Row]) -> list[Table]:
    cells = tuple(
        (
            format_bytes(row["state"]),
            format_bytes(row["pool"]),
            format_bytes(row["read"]),
            format_bytes(row["written"]),
            format_seconds(statistics.median(row["seconds"])),
            format_seconds(max(row["seconds"])),
            format_seconds(statistics.median(row["raw_seconds"])),
            f"{statistics.median(row['raw_seconds']) / statistics.median(row['seconds']):.1%}",
            format_bytes(row["resident"]),
        )
        for row in rows
    )
    return [Table("Training with its state on the disk", _COLUMNS, cells)]


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
