"""What do buckets cost: padding, memory, and steps that wait?

    python -m experiments.buckets TRACE [--json FILE [--resume | --show]]

*Padding*: of the prompts of a trace (`memplan.kv.Trace`), what part of all tokens that are computed
is padding, with so many buckets: those of `choose_buckets`, and beside them the sizes that people
take: powers of two up to the longest prompt, steps of one width, steps of one factor (the best of
all, with as many), and quantiles of the lengths.

*Memory*: a decoder's prefill in the chosen buckets, within so much that a part of its weights is on
the host, by the target's own compiler; nothing is run. Bytes are XLA's report of the executables;
the arena is what they take that run one after another, with weights where they are for all.

*Steps*, run on a CPU: prompts of the trace at a 64th of their length, one after another, after all
buckets were compiled; how many programs XLA compiled meanwhile, the processor seconds of a step,
the 99th of a hundred beside the median of the same bucket, and what ``jax.jit`` takes, which
compiles each new length. Of each bucket that had at least a hundred calls, the worst is shown; in
*full* buckets all prompts are as long as these, so that nothing is padded or cut.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

import memplan
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.units import format_bytes, format_seconds
from memplan.kv import Trace
from memplan.report.tables import Column, Table
from models.configs import CONFIGS, LlamaConfig
from models.llama import Llama, abstract_model, forward

_COUNTS = (4, 8, 16, 32)
_TARGETS = ("v5e", "h200", "cpu")
_MULTIPLE = 128  # Of which a prompt's buckets are, as kernels' blocks are.
_SCALE = 64
_FACTORS = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0)


def _define() -> None:
    flags.DEFINE_multi_integer("buckets", list(_COUNTS), "how many")
    flags.DEFINE_multi_string("target", list(_TARGETS), "topologies")
    flags.DEFINE_string("config", "llama-160m", "of the decoder whose memory is measured")
    flags.DEFINE_integer("calls", 1000, "that are run")


def _rows(rows: Rows, path: str) -> Iterator[Row]:
    lengths, name = np.asarray(Trace.load(Path(path)).n_in), Path(path).stem
    for count in FLAGS.buckets:
        for choice, make in _CHOICES.items():
            case: Row = {"part": "padding", "trace": name, "choice": choice, "buckets": count}
            yield rows.of(case, functools.partial(_padding, lengths, make, count))
    for target in FLAGS.target:
        case = {"part": "memory", "config": FLAGS.config, "target": target}
        yield rows.of(case, functools.partial(_memory, lengths, target))
    for way in ("buckets", "full buckets", "jax.jit"):
        case = {"part": "steps", "trace": name, "way": way}
        yield rows.of(case, functools.partial(_steps, lengths, way))


# --- padding --------------------------------------------------------------------------------


def _up(length: float) -> int:
    return int(-(-length // _MULTIPLE) * _MULTIPLE)


def _chosen(lengths: Any, count: int) -> Sequence[int]:
    return memplan.choose_buckets(lengths.tolist(), most=count, multiple=_MULTIPLE).sizes


def _powers(lengths: Any, count: int) -> Sequence[int]:
    """The largest powers of two; as many as there are."""
    top = 1 << (int(lengths.max()) - 1).bit_length()
    return [max(top >> n, _MULTIPLE) for n in range(count)]


def _steps_of_one_width(lengths: Any, count: int) -> Sequence[int]:
    return [_up(lengths.max() * (n + 1) / count) for n in range(count)]


def _steps_of_one_factor(lengths: Any, count: int) -> Sequence[int]:
    found = ([_up(lengths.max() / f**n) for n in range(count)] for f in _FACTORS)
    return min(found, key=lambda sizes: _computed(lengths, sizes))


def _quantiles(lengths: Any, count: int) -> Sequence[int]:
    return [_up(q) for q in np.quantile(lengths, np.arange(1, count + 1) / count)]


_CHOICES: dict[str, Callable[[Any, int], Sequence[int]]] = {
    "chosen": _chosen,
    "powers of two": _powers,
    "one width": _steps_of_one_width,
    "one factor": _steps_of_one_factor,
    "quantiles": _quantiles,
}


def _computed(lengths: Any, sizes: Sequence[int]) -> int:
    """Tokens, padding included."""
    ascending = np.unique(sizes)
    return int(ascending[np.searchsorted(ascending, lengths)].sum())


def _padding(
    lengths: Any, choice: Callable[[Any, int], Sequence[int]], count: int
) -> dict[str, Any]:
    sizes = choice(lengths, count)
    computed = _computed(lengths, sizes)
    return {"padding": 1 - float(lengths.sum()) / computed, "used": len({*sizes})}


# --- memory ---------------------------------------------------------------------------------


def _prefill(config: LlamaConfig) -> tuple[Callable[..., Any], Any]:
    graphdef, params = nnx.split(abstract_model(config))
    return functools.partial(forward, graphdef), params


def _memory(lengths: Any, target: str) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")
    config = CONFIGS[FLAGS.config]
    fun, params = _prefill(config)
    sizes = _scaled(lengths, most=6)
    machine = None if target == "cpu" else memplan.topology(target)
    tokens = jax.ShapeDtypeStruct((1, sizes[-1]), jnp.int32)
    own = memplan.jit(fun, machine=machine).lower(params, tokens).compile().device_bytes
    budget = own * 3 // 4
    step = memplan.jit(
        fun, hbm=budget, machine=machine, buckets={"tokens": sizes}, dims={"tokens": "_ tokens"}
    )
    prepared = step.prepare(params, tokens)
    hosted = {
        tuple(sorted(compiled.hosting.arguments))
        for n in sizes
        for compiled in [step.lower(params, tokens.update(shape=(1, n))).compile()]
    }
    return {
        "own": own,
        "budget": budget,
        "bytes": {str(size): total for (size,), total in prepared.device_bytes.items()},
        "arena": prepared.arena_bytes,
        "one_place": len(hosted) == 1,
        "on_host": len(next(iter(hosted))),
    }


def _scaled(lengths: Any, most: int) -> list[int]:
    return list(
        memplan.choose_buckets((-(-lengths // _SCALE)).tolist(), most=most, multiple=16).sizes
    )


# --- steps ----------------------------------------------------------------------------------


def _steps(lengths: Any, way: str) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")
    config = dataclasses.replace(CONFIGS["tiny"], dtype=jnp.float32)
    graphdef, params = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    fun = functools.partial(forward, graphdef)
    sizes = _scaled(lengths, most=6)
    scaled = -(-lengths[: FLAGS.calls] // _SCALE)
    rng = np.random.default_rng(0)
    if way == "full buckets":
        scaled = np.asarray(sizes)[np.searchsorted(sizes, scaled)]
    prompts = [rng.integers(0, config.vocab_size, (1, n), np.int32) for n in scaled]
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    begin = time.process_time()
    step: Any = jax.jit(fun)
    if way != "jax.jit":
        step = memplan.jit(fun, buckets={"tokens": sizes}, dims={"tokens": "_ tokens"})
        step.prepare(params, prompts[0])
        for size in sizes:
            jax.block_until_ready(step(params, np.zeros((1, size), np.int32)))
    ready_s = time.process_time() - begin
    compiled.clear()
    seconds: dict[int, list[float]] = {}
    begin = time.process_time()
    for prompt in prompts:
        before = time.process_time()
        jax.block_until_ready(step(params, prompt))
        size = next(n for n in sizes if n >= prompt.shape[1])
        seconds.setdefault(size, []).append(time.process_time() - before)
    enough = [np.asarray(of) for of in seconds.values() if len(of) >= 100]
    spread = max((float(np.quantile(of, 0.99) / np.median(of)) for of in enough), default=0.0)
    return {
        "calls": len(prompts),
        "lengths": len({*scaled.tolist()}),
        "ready_s": ready_s,
        "compilations": len(compiled),
        "calls_s": time.process_time() - begin,
        "spread": spread,
    }


# --- tables ---------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    of = {
        part: [row for row in rows if row["part"] == part]
        for part in ("padding", "memory", "steps")
    }
    if of["padding"]:
        counts = sorted({row["buckets"] for row in of["padding"]})
        columns = (Column("sizes"), *(Column(f"{n} buckets", right=True) for n in counts))
        found = {(row["choice"], row["buckets"]): row["padding"] for row in of["padding"]}
        names = dict.fromkeys(row["choice"] for row in of["padding"])
        yield Table(
            "Padding, of all tokens computed",
            columns,
            tuple((name, *(f"{found[name, n]:.1%}" for n in counts)) for name in names),
        )
    if of["memory"]:
        headings = ("own", "budget", "least bucket", "largest", "arena", "on the host")
        yield Table(
            "Memory of a prefill in buckets",
            (Column("target"), *(Column(h, right=True) for h in headings)),
            tuple(map(_memory_row, of["memory"])),
        )
    if of["steps"]:
        headings = ("calls", "lengths", "compiled before", "meanwhile", "all calls", "p99 / p50")
        yield Table(
            "Calls of every length, on a CPU",
            (Column("way"), *(Column(h, right=True) for h in headings)),
            tuple(
                (
                    row["way"],
                    str(row["calls"]),
                    str(row["lengths"]),
                    format_seconds(row["ready_s"]),
                    str(row["compilations"]),
                    format_seconds(row["calls_s"]),
                    f"{row['spread']:.2f}",
                )
                for row in of["steps"]
            ),
        )


def _memory_row(row: Row) -> tuple[str, ...]:
    of = row["bytes"]
    numbers = (row["own"], row["budget"], min(of.values()), max(of.values()), row["arena"])
    place = f"{row['on_host']} weights" if row["one_place"] else "not in one place"
    return row["target"], *map(format_bytes, numbers), place


EXPERIMENT = Experiment(_rows, _tables, _define, words=("TRACE",))

if __name__ == "__main__":
    EXPERIMENT.main()
