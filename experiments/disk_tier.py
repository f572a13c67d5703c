"""How fast does a model run whose weights stay on the disk? A Llama of 6.4 GiB in a pool of 1 GiB.

    python -m experiments.disk_tier --path FOLDER [--pool 1GiB] [--layers 36] [--rounds 5]

FOLDER gets the weights, random, in one file. A token is decoded by each way in turn, each in a
process of its own, the file's pages dropped from the page cache before:

raw           no model: the weights' bytes from begin to end, past the page cache, in each turn
              at the best of three settings, which were the best of a sweep over how many requests
              are under way and how large they are
runtime       memplan: the plan's transfers by the runtime, into its arena
calls         memplan: the plan's transfers by the custom calls in the program
mmap          ``jax.jit`` on arrays of the mapped file, which the kernel reads page by page
mmap, ...     the same, after ``madvise``
llama.cpp     the same model by llama.cpp, whose file the kernel reads page by page, if
              ``pip install llama-cpp-python gguf`` was done
in memory     ``jax.jit`` on weights that were all read before: what no disk makes slower

All but raw and the last are held to the pool by a control group, in which what a process had
before, and its compilation, do not count; the page cache does. Without the right to make one
(``limited`` in the rows) nothing holds them.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from custom_calls import library
from experiments import llama_cpp
from experiments.isolated import Failure, Worker
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.budget import parse_bytes
from hlo_passes.units import format_bytes, format_seconds
from memplan import disk
from memplan.api import jit
from memplan.report.tables import Column, Table
from models.configs import LlamaConfig
from models.llama import abstract_cache, abstract_model, decode_step, init_cache

_RAW, _RUNTIME, _CALLS, _MEMORY = "raw", "runtime", "calls", "in memory"
_PEER = "llama.cpp"
_ADVICE = {
    "mmap": None,
    "mmap, sequential": mmap.MADV_SEQUENTIAL,
    "mmap, random": mmap.MADV_RANDOM,
    "mmap, willneed": mmap.MADV_WILLNEED,
}
_WAYS = (_RAW, _RUNTIME, _CALLS, *_ADVICE, _PEER, _MEMORY)

_CONTEXT = 128
_BUFFER = 512 << 20  # Bytes that the raw reader reads into.
_DEPTHS, _CHUNKS = (4, 8, 16, 32, 64), (256 << 10, 1 << 20, 4 << 20)

# A call in a child may compile, and read all from a slow disk.
_TIMEOUT_S = 1800

_COLUMNS = (
    Column("way"),
    Column("held to", right=True),
    Column("peak", right=True),
    Column("read a step", right=True),
    Column("a step, median", right=True),
    Column("slowest", right=True),
    Column("rate", right=True),
    Column("of raw", right=True),
    Column("page faults a step", right=True),
    Column("CPU", right=True),
)


def _define() -> None:
    flags.DEFINE_string("path", None, "folder on the disk to measure", required=True)
    flags.DEFINE_string("pool", "1GiB", "memory for weights, cache and temporaries")
    flags.DEFINE_integer("layers", 36, "of the model, 168 MiB each")
    flags.DEFINE_integer("rounds", 5, "how often each way has its turn")
    flags.DEFINE_integer("steps", 2, "of each turn")
    flags.DEFINE_multi_string("ways", list(_WAYS), "which")


def config(layers: int, dtype: Any = jnp.float32) -> LlamaConfig:
    """The widths of TinyLlama (Zhang et al., 2024, arXiv:2401.02385)."""
    return LlamaConfig(
        vocab_size=32_000,
        num_layers=layers,
        embed_dim=2_048,
        mlp_dim=5_632,
        num_heads=32,
        num_kv_heads=4,
        dtype=dtype,
    )


def _rows(rows: Rows) -> Iterator[Row]:
    path = Path(FLAGS.path) / f"llama-{FLAGS.layers}.safetensors"
    if not path.exists():
        _write(path, FLAGS.layers)
    pool = parse_bytes(FLAGS.pool)
    found = measure(path, FLAGS.layers, pool, FLAGS.ways, FLAGS.rounds, FLAGS.steps)
    for way, row in found.items():
        case = {"way": way, "layers": FLAGS.layers, "pool": pool}
        yield rows.of(case, functools.partial(dict, row))


def _write(path: Path, layers: int) -> None:
    """Weights of the model's shapes, layer by layer."""
    _, params = nnx.split(abstract_model(config(layers)))
    rng = np.random.default_rng(0)

    def drawn(like: Any) -> Any:
        return _Drawn(like.shape, like.dtype, rng)

    disk.save(path, jax.tree.map(drawn, params))


class _Drawn:
    """An array that is drawn when it is written."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> None:
        self.shape, self.dtype, self._rng = shape, np.dtype(dtype), rng
        self.nbytes = self.dtype.itemsize * int(np.prod(shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._rng.standard_normal(self.shape, np.float32) * np.float32(0.02)


def measure(
    path: Path, layers: int, pool: int, ways: Sequence[str], rounds: int, steps: int
) -> dict[str, Row]:
    """Lets the ways take turns.

    Args:
      pool: bytes.
      steps: of a turn.
    """
    # XLA:CPU's temporaries are malloc's, which has an arena for each thread that ever ran a step.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    workers = {way: Worker(_TIMEOUT_S) for way in ways}
    found: dict[str, Row] = {}
    turns: dict[str, list[Row]] = {way: [] for way in ways}
    try:
        for way, worker in workers.items():
            opened = worker.call(_open, way, str(path), layers, pool)
            found[way] = {"failure": opened.reason} if isinstance(opened, Failure) else opened
        for _ in range(rounds):
            for way, worker in workers.items():
                if "failure" in found[way]:
                    continue
                drop_pages(path)
                turn = worker.call(_turn, steps)
                if isinstance(turn, Failure):
                    found[way]["failure"] = turn.reason
                else:
                    turns[way].append(turn)
    finally:
        for worker in workers.values():
            worker.__exit__()
    for way, own in turns.items():
        if not own:
            continue
        seconds = [s for turn in own for s in turn["seconds"]]
        rates = [of["bytes"] * len(of["seconds"]) / sum(of["seconds"]) for of in own]
        found[way] |= {
            "bytes": own[-1]["bytes"],
            "peak": own[-1]["peak"],
            "faults": statistics.median(turn["faults"] for turn in own),
            "cpu_s": statistics.median(turn["cpu_s"] for turn in own),
            "seconds": seconds,
            "rates": rates,
            # Of the turns beside this one's, for what a disk gives changes.
            "of_raw": [
                rate / (raw["bytes"] * len(raw["seconds"]) / sum(raw["seconds"]))
                for rate, raw in zip(rates, turns.get(_RAW, ()), strict=False)
            ],
        }
    return found


def drop_pages(path: Path) -> None:
    """Has the kernel forget the file's pages, but for those that somebody has mapped."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- in a child ----------------------------------------------------------------------------


@dataclass
class _Way:
    """What a child has opened.

    Attributes:
      step: does one; `bytes` of weights that it reads.
      group: the control group that it is in, if it is in one.
      forget: ends a turn: the kernel keeps no page for it that others would find.
      settings: what `step` takes, where it is the raw reader.
    """

    step: Callable[..., Any]
    bytes: int
    group: Path | None
    forget: Callable[[], Any]
    settings: Sequence[tuple[int, int]] = ()


_way: _Way | None = None


def _open(way: str, path: str, layers: int, pool: int) -> Row:
    global _way
    jax.config.update("jax_platforms", "cpu")
    if way == _RAW:
        _way, best = _raw(path)
        return best
    if way == _MEMORY:
        step, size, forget = _jitted(path, layers, None, in_memory=True)
        _way = _Way(step, 0, None, forget)
        return {"pool": size, "limited": False}
    forget = gc.collect
    if way == _PEER:
        file = Path(path).with_suffix(".gguf")
        if not file.exists():
            llama_cpp.write(file, config(layers))
        drop_pages(file)  # Those that are there do not count for the group.
        group = limited(pool)
        step, size = llama_cpp.opened(file), file.stat().st_size
    elif way in (_RUNTIME, _CALLS):
        step, size, group = _planned(way, path, layers, pool)
    else:
        step, size, forget = _jitted(path, layers, _ADVICE[way], in_memory=False)
        group = limited(pool)
    _way = _Way(step, size, group, forget)
    return {"pool": pool, "limited": group is not None}


def _turn(steps: int) -> Row:
    assert _way is not None
    if _way.settings:
        return _best(_way)
    _way.step()  # What waited since the last turn, the disk did not bring just now.
    taken = [_measured(_way.step) for _ in range(steps)]
    _way.forget()
    peak = 0
    if _way.group is not None:
        peak = int((_way.group / "memory.max_usage_in_bytes").read_text())
    return {
        "seconds": [seconds for seconds, _, _ in taken],
        "bytes": _way.bytes,
        "faults": statistics.mean(faults for _, _, faults in taken),
        "cpu_s": statistics.mean(cpu_s for _, cpu_s, _ in taken),
        "peak": peak,
    }


def _best(way: _Way) -> Row:
    """The raw reader's turn at the best of its settings."""
    seconds, cpu_s, faults = min(_measured(way.step, *setting) for setting in way.settings)
    return {"seconds": [seconds], "bytes": way.bytes, "faults": faults, "cpu_s": cpu_s, "peak": 0}


def _measured(step: Callable[..., Any], *args: Any) -> tuple[float, float, int]:
    """Seconds of a step, those of processors, and page faults."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    step(*args)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
    return seconds, cpu_s, faults


def _raw(path: str) -> tuple[_Way, Row]:
    read, best = best_of_sweep(path)
    size = Path(path).stat().st_size
    return _Way(read, size, None, gc.collect, best), {"pool": _BUFFER, "limited": False}


def best_of_sweep(
    path: str, repeats: int = 3
) -> tuple[Callable[..., Any], Sequence[tuple[int, int]]]:
    """What reads a file from begin to end, and the best three settings for it."""
    region = mmap.mmap(-1, _BUFFER)
    region.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(region, np.uint8)
    buffer[:] = 1
    size = Path(path).stat().st_size
    reads = [(at, min(_BUFFER, size - at)) for at in range(0, size, _BUFFER)]

    def read(depth: int, chunk: int, most: int | None = None) -> None:
        for at, length in reads[:most]:
            library.load().read_file(path, buffer[:length], at, depth=depth, chunk=chunk)

    taken: dict[tuple[int, int], list[float]] = {}
    for _ in range(repeats):
        for depth in _DEPTHS:
            for chunk in _CHUNKS:
                begin = time.perf_counter()
                read(depth, chunk, 2)
                taken.setdefault((depth, chunk), []).append(time.perf_counter() - begin)
    best = sorted(taken, key=lambda setting: statistics.median(taken[setting]))[:3]
    return read, best


def _planned(way: str, path: str, layers: int, pool: int) -> tuple[Callable[[], Any], int, Any]:
    graph, shapes = nnx.split(abstract_model(config(layers)))
    params = disk.load(path, like=shapes)
    step = jit(
        lambda params, token, cache: decode_step(graph, params, token, cache),
        hbm=pool,
        donate_argnums=2,
    )
    state = [_token(), init_cache(config(layers), 1, _CONTEXT)]
    compiled = (step.runtime if way == _RUNTIME else step.lower)(params, *state)
    if way == _RUNTIME:
        compiled.close()
        compiled = compiled.compiled
    else:
        compiled = compiled.compile()
    size = sum(t.size for t in compiled.plan.transfers)
    gc.collect()
    group = limited(pool)
    if way == _RUNTIME:
        run, placed = step.runtime(params, *state), params
    else:
        run, (placed, *state) = step, step.place(params, *state)
    return functools.partial(_decode, run, placed, state), size, group


def _jitted(
    path: str, layers: int, advice: int | None, *, in_memory: bool
) -> tuple[Callable[[], Any], int, Callable[[], None]]:
    """A step, the bytes of its weights, and what takes those out of the process's page tables."""
    graph, shapes = nnx.split(abstract_model(config(layers)))
    on_disk = disk.load(path, like=shapes)

    def here(array: jax.Array) -> jax.Array:
        view = np.asarray(array)
        return jnp.array(view) if in_memory else jax.device_put(view, may_alias=True)

    params = jax.tree.map(here, on_disk)
    step = jax.jit(
        lambda params, token, cache: decode_step(graph, params, token, cache), donate_argnums=2
    )
    cache = abstract_cache(config(layers), 1, _CONTEXT)
    state = [_token(), init_cache(config(layers), 1, _CONTEXT)]
    compiled = step.lower(shapes, state[0], cache).compile()
    arrays = jax.tree.leaves(params)
    size = sum(a.nbytes for a in arrays)

    def advised() -> Any:
        if advice is not None:
            advise(arrays, advice)
        return _decode(compiled, params, state)

    def forget() -> None:
        if not in_memory:
            advise(arrays, mmap.MADV_DONTNEED)

    return advised, size, forget


def advise(arrays: Sequence[jax.Array], advice: int) -> None:
    """Tells the kernel what is to be expected of the pages of arrays in mapped files."""
    libc = ctypes.CDLL(None, use_errno=True)
    for array in arrays:
        begin = array.unsafe_buffer_pointer() // mmap.PAGESIZE * mmap.PAGESIZE
        length = array.unsafe_buffer_pointer() + array.nbytes - begin
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)


def _token() -> jax.Array:
    return jnp.ones((1, 1), jnp.int32)


def _decode(step: Callable[..., Any], params: Any, state: list[Any]) -> None:
    """One token, chosen by the one before."""
    logits, cache = step(params, *state)
    if int(cache.position) >= _CONTEXT - 1:
        cache = type(cache)(cache.keys, cache.values, jnp.zeros((), jnp.int32), cache.layout)
    state[:] = [jnp.argmax(logits, axis=-1).astype(jnp.int32), cache]
    jax.block_until_ready(state[0])


def limited(pool: int) -> Path | None:
    """Moves this process into a control group of so many bytes and 5 %; None where it may not."""
    group = Path("/sys/fs/cgroup/memory") / f"memplan-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(pool * 105 // 100))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None
    return group


# --- tables --------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> list[Table]:
    cells = tuple(tuple(_cells(row)) for row in rows)
    return [Table("A token, with the weights on the disk", _COLUMNS, cells)]


def _cells(row: Row) -> Iterator[str]:
    yield row["way"]
    yield format_bytes(row["pool"]) if row.get("limited") else "not"
    if "failure" in row:
        yield row["failure"]
        yield from [""] * 7
        return
    yield format_bytes(row["peak"]) if row["peak"] else ""
    yield format_bytes(row["bytes"])
    yield format_seconds(statistics.median(row["seconds"]))
    yield format_seconds(max(row["seconds"]))
    yield f"{statistics.median(row['rates']) / 1e9:.2f} GB/s" if row["bytes"] else ""
    yield f"{statistics.median(row['of_raw']):.1%}" if row["bytes"] and row["of_raw"] else ""
    yield f"{row['faults']:,.0f}"
    yield format_seconds(row["cpu_s"])


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
