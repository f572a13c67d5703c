"""How fast does a model run on a GPU whose weights stay on the disk? A Llama of 3.2 GiB in 1 GiB.

    python -m experiments.disk_gpu --path FOLDER [--pool 1GiB] [--layers 36] [--rounds 5]

FOLDER gets the weights, random, in one file. A token is decoded by each way in turn, the file's
pages dropped from the page cache before each:

raw           no model: the weights' bytes into the host's memory, past the page cache, in each turn
              at the best of three settings, which were the best of a sweep over how many requests
              are under way and how large they are
kvikio        no model: the same bytes into the GPU's memory by KvikIO (cuFile), if it is installed,
              at the best of three settings of a sweep over threads and sizes, direct or not
disk          memplan: a runtime brings them into its arena on the GPU
host          memplan: the same, from pinned memory
calls         memplan: from pinned memory, by XLA's own copies, where the plan has them
load          ``jax.jit``, all weights given anew from the mapped file
device        ``jax.jit`` with all weights on the GPU: what no link makes slower

Logits of each are compared with those of the last.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx

from experiments.disk_tier import advise, best_of_sweep, config, drop_pages
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.budget import parse_bytes
from hlo_passes.units import format_bytes, format_seconds
from memplan import disk
from memplan.api import jit
from memplan.report.tables import Column, Table
from memplan.running import StepRuntime
from models.llama import abstract_model, decode_step, init_cache

_CONTEXT = 128
_BUFFER = 512 << 20  # Bytes that KvikIO reads into.
_THREADS, _TASKS = (4, 8, 16, 32), (1 << 20, 4 << 20, 16 << 20)

_COLUMNS = (
    Column("way"),
    Column("on the device", right=True),
    Column("read a step", right=True),
    Column("a step, median", right=True),
    Column("slowest", right=True),
    Column("rate", right=True),
    Column("of raw", right=True),
    Column("logits"),
)


def _define() -> None:
    flags.DEFINE_string("path", None, "folder on the disk to measure", required=True)
    flags.DEFINE_string("pool", "1GiB", "device memory for weights, cache and temporaries")
    flags.DEFINE_integer("layers", 36, "of the model, 84 MiB each")
    flags.DEFINE_integer("rounds", 5, "how often each way has its turn")
    flags.DEFINE_integer("steps", 3, "of each turn")


def _rows(rows: Rows) -> Iterator[Row]:
    jax.config.update("jax_platforms", "cuda,cpu")
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise app.UsageError(f"expected a GPU, found {device.device_kind}")
    path = Path(FLAGS.path) / f"llama-bf16-{FLAGS.layers}.safetensors"
    pool = parse_bytes(FLAGS.pool)
    found = _measured(path, pool)
    for way, row in found.items():
        yield rows.of({"way": way, "layers": FLAGS.layers, "pool": pool}, lambda row=row: row)


def _measured(path: Path, pool: int) -> dict[str, Row]:
    model = config(FLAGS.layers, jnp.bfloat16)
    graph, shapes = nnx.split(abstract_model(model))
    if not path.exists():
        disk.save(path, _drawn(shapes))
    params = disk.load(path, like=shapes)

    def decode(params: Any, token: Any, cache: Any) -> Any:
        return decode_step(graph, params, token, cache)

    state = jnp.ones((1, 1), jnp.int32), init_cache(model, 1, _CONTEXT)

    logging.info("reading %s", path)
    raw, settings = best_of_sweep(str(path), 1)
    readers: dict[str, Sequence[Callable[[], Any]]] = {
        "raw": [functools.partial(raw, *setting) for setting in settings]
    }
    if importlib.util.find_spec("kvikio") is not None:
        readers["kvikio"] = _best_of_kvikio(path)
    whole = jax.jit(decode)
    on_device = jax.tree.map(lambda a: jax.device_put(np.asarray(a), jax.devices()[0]), params)
    expected = whole(on_device, *state)[0]
    on_host = jax.device_put(
        on_device, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    )
    logging.info("planning")
    planned = jit(decode, hbm=pool)
    runs = {"disk": planned.runtime(params, *state), "host": planned.runtime(on_host, *state)}
    placed = planned.place(on_host, *state)
    calls = planned.lower(on_host, *state).compile()
    size = sum(a.nbytes for a in jax.tree.leaves(params))
    ways: dict[str, tuple[Callable[[], Any], int, int]] = {
        "disk": (lambda: runs["disk"](params, *state), *_told(runs["disk"])),
        "host": (lambda: runs["host"](on_host, *state), *_told(runs["host"])),
        "calls": (lambda: planned(*placed), calls.device_bytes, _moved(calls.plan)),
        "load": (lambda: whole(jax.tree.map(np.asarray, params), *state), size, size),
        "device": (lambda: whole(on_device, *state), size, 0),
    }

    def cold(step: Callable[[], Any]) -> float:
        advise(jax.tree.leaves(params), mmap.MADV_DONTNEED)
        return _from_disk(path, step)

    found: dict[str, Row] = {
        way: {"device": 0, "bytes": path.stat().st_size, "seconds": []} for way in readers
    }
    for way, (_, held, moved) in ways.items():
        found[way] = {"device": held, "bytes": moved, "seconds": []}
    for _ in range(FLAGS.rounds):
        for way, settled in readers.items():
            found[way]["seconds"].append(min(_from_disk(path, read) for read in settled))
            logging.info("%s: %s", way, found[way]["seconds"])
        for way, (step, _, _) in ways.items():
            step()  # What waited since the last turn, the disk did not bring just now.
            found[way]["seconds"] += [cold(step) for _ in range(FLAGS.steps)]
            difference = jnp.max(jnp.abs(step()[0].astype(jnp.float32) - expected))
            found[way]["difference"] = float(difference / jnp.max(jnp.abs(expected)))
            logging.info("%s: %s", way, found[way]["seconds"])
    for run in runs.values():
        run.close()
    return found


def _best_of_kvikio(path: Path) -> Sequence[Callable[[], Any]]:
    """What reads a file from begin to end into the GPU's memory, at the best three settings."""
    kvikio, defaults = map(importlib.import_module, ("kvikio", "kvikio.defaults"))
    buffer = jnp.zeros(_BUFFER, jnp.uint8)
    size = path.stat().st_size
    reads = [(at, min(_BUFFER, size - at)) for at in range(0, size, _BUFFER)]

    def read(threads: int, task: int, direct: bool, most: int | None = None) -> None:
        defaults.set({"num_threads": threads, "auto_direct_io_read": direct})
        with kvikio.CuFile(path) as file:
            for at, length in reads[:most]:
                file.pread(buffer, length, at, task_size=task).get()

    taken = {}
    for setting in itertools.product(_THREADS, _TASKS, (False, True)):
        taken[setting] = _from_disk(path, functools.partial(read, *setting, 2))
    best = sorted(taken, key=taken.__getitem__)[:3]
    logging.info("kvikio: the best of %s are %s", taken, best)
    return [functools.partial(read, *setting) for setting in best]


def _from_disk(path: Path, read: Callable[[], Any]) -> float:
    """Seconds of a call that finds no page of the file in memory."""
    drop_pages(path)
    begin = time.perf_counter()
    jax.block_until_ready(read())
    return time.perf_counter() - begin


def _told(run: StepRuntime) -> tuple[int, int]:
    return run.compiled.device_bytes, _moved(run.compiled.plan)


def _moved(plan: Any) -> int:
    return sum(t.size for t in plan.transfers)


def _drawn(shapes: Any) -> Any:
    """Weights of these shapes, of a normal distribution's scale."""
    rng = np.random.default_rng(0)

    def drawn(like: Any) -> Any:
        values = rng.random(like.shape, np.float32)
        return ((values - 0.5) * 0.04).astype(like.dtype)

    return jax.tree.map(drawn, shapes)


# --- tables --------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> list[Table]:
    raw = next((_rate(row) for row in rows if row["way"] == "raw"), None)
    cells = tuple(tuple(_cells(row, raw)) for row in rows)
    return [Table("A token on a GPU, with the weights on the disk", _COLUMNS, cells)]


def _rate(row: Row) -> float:
    return row["bytes"] / statistics.median(row["seconds"])


def _cells(row: Row, raw: float | None) -> Iterator[str]:
    yield row["way"]
    yield format_bytes(row["device"]) if row["device"] else ""
    yield format_bytes(row["bytes"])
    yield format_seconds(statistics.median(row["seconds"]))
    yield format_seconds(max(row["seconds"]))
    yield f"{_rate(row) / 1e9:.2f} GB/s" if row["bytes"] else ""
    yield f"{_rate(row) / raw:.1%}" if row["bytes"] and raw else ""
    if "difference" not in row:
        yield ""
    else:
        yield f"within {row['difference']:.1e}" if row["difference"] else "bit-identical"


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
