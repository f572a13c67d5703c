"""How fast are the attention kernels on the accelerator that is here, beside their peers?

    python -m experiments.attention_bench [--only causal] [--json bench.jsonl] [--tune rows.json]
    python -m experiments.attention_bench --platform tpu

Each row is one problem by all contenders, in one run, side by side: cuDNN through
`jax.nn.dot_product_attention`, tokamax where it is installed, on a TPU jax's splash attention, and
each implementation of `pallas_kernels` that takes the problem. They are timed in turns
(`memplan.kernels.timing`): medians of what the GPU's profiler (CUPTI) counts for the kernels of a
call; where there is none, of calls that follow one another, waited for together. FLOP/s count the
pairs of query and key that see each other: 4 a pair and width of the head forward, 2.5 times as
many backward. Decode attention is measured in bytes/s of keys and values, beside a copy in the same
run. Results are compared with the first contender's that runs. What one contender cannot do does
not end the others.

`--tune` measures the configurations of the same problems afterwards (`experiments.autotune`), and
writes rows that `pallas_kernels.tuned.using` reads. With ``--platform cpu`` everything is small and
the times mean nothing: it tells whether all of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments import autotune, kernel_programs
from experiments.running import FLAGS, Experiment, Row, Rows
from memplan.kernels import search_gpu
from memplan.kernels.autotune import first_line, measured
from memplan.kernels.timing import Call, Timer, device_seconds, in_turns
from memplan.report.tables import Column, Table
from pallas_kernels.attention.api import IMPLEMENTATIONS, attention, problem_of
from pallas_kernels.attention.problem import Problem as AttentionProblem
from pallas_kernels.decode.api import IMPLEMENTATIONS as DECODE_IMPLEMENTATIONS
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.decode.shapes import SHAPES as DECODE_SHAPES
from pallas_kernels.decode.shapes import Shape as DecodeShape

_COPY_BYTES = 1 << 30
# Of a cache, so that the largest shapes fit beside what else is on the device.
_CACHE_BYTES = 8 << 30
# Largest difference of two that compute the same in bfloat16, over the largest number.
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Problem:
    """Self-attention in bfloat16: of the published comparisons, as many tokens in all."""

    length: int
    head_dim: int = 128
    q_heads: int = 16
    kv_heads: int = 16
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return max(1, min(4, 16384 // self.length))

    @property
    def name(self) -> str:
        what = " ".join(f"{k}={v}" for k, v in self.options.items()) or "full"
        return f"{what} {self.length} d{self.head_dim} {self.q_heads}/{self.kv_heads}"

    def flops(self) -> float:
        """Of the forward pass: of the pairs of query and key that see each other."""
        band = self.of_kernels().band
        pairs = self.batch * self.q_heads * band.pairs(self.length, self.length)
        return 4.0 * self.head_dim * pairs

    def of_kernels(self) -> AttentionProblem:
        """What the kernels are asked to compute."""
        q, k, v, _ = jax.eval_shape(self.arrays)
        return problem_of(q, k, v, **self.options)

    def arrays(self) -> tuple[jax.Array, ...]:
        """Queries, keys, values and the gradient of the output."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        return tuple(
            jax.random.normal(key, (self.batch, self.length, h, self.head_dim), jnp.bfloat16)
            for key, h in zip(keys, heads, strict=True)
        )


_CAUSAL: dict[str, Any] = {"causal": True}

PROBLEMS = (
    *(Problem(length) for length in (4096, 8192, 16384)),
    *(Problem(length, options=_CAUSAL) for length in (4096, 8192, 16384)),
    Problem(8192, head_dim=64, q_heads=32, kv_heads=32, options=_CAUSAL),
    Problem(8192, head_dim=256, q_heads=8, kv_heads=8, options=_CAUSAL),
    Problem(8192, q_heads=32, kv_heads=8, options=_CAUSAL),
    Problem(16384, options={"causal": True, "window": (4095, 0)}),
)

# To try on a CPU.
SMALL = (Problem(128, 64, 2, 1), Problem(128, 64, 2, 2, {"causal": True, "window": (31, 0)}))
SMALL_DECODE = (
    DecodeShape("small", 2, 1, 4, 2, 64, 256, 16),
    DecodeShape("small-int8", 2, 1, 4, 2, 64, 256, 32, "int8", {"window": 63}),
)


def contenders(problem: Problem) -> Iterator[tuple[str, Callable[..., jax.Array]]]:
    """Functions of q, k and v that compute the same."""
    options, platform = problem.options, jax.default_backend()
    theirs: dict[str, Any] = {"is_causal": bool(options.get("causal"))}
    if "window" in options:
        theirs["local_window_size"] = options["window"]
    for peer in {"gpu": ("cudnn",), "cpu": ("xla",)}.get(platform, ()):
        yield peer, partial(jax.nn.dot_product_attention, implementation=peer, **theirs)
    if find_spec("tokamax") is not None:
        yield "tokamax", partial(_tokamax, theirs)
    if platform == "tpu" and "window" not in options:
        yield "splash", partial(_splash, problem)
    for name in _ours(IMPLEMENTATIONS):
        # The scores of the longest would not fit.
        if name != "xla" or problem.length <= 4096:
            yield f"memplan {name}", partial(attention, implementation=name, **options)


def _ours(implementations: Iterable[str]) -> Iterator[str]:
    """Those for the platform that is here."""
    elsewhere = {"gpu": {"tpu"}, "tpu": {"hopper", "triton"}, "cpu": {"tpu", "hopper", "triton"}}
    yield from (name for name in implementations if name not in elsewhere[jax.default_backend()])


def _tokamax(options: dict[str, Any], *qkv: jax.Array) -> jax.Array:
    # Imported where one that fails is only this contender's failure.
    return import_module("tokamax").dot_product_attention(*qkv, **options)


def _splash(problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (problem.length, problem.length)
    one = masks.CausalMask(shape) if problem.options.get("causal") else masks.FullMask(shape)
    mask = masks.MultiHeadMask([one] * problem.q_heads)
    make = kernel.make_splash_mha if problem.q_heads == problem.kv_heads else kernel.make_splash_mqa
    blocks = kernel.BlockSizes(block_q=1024, block_kv=2048, block_kv_compute=1024)
    run = make(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * problem.head_dim**-0.5, k, v))
    mixed: Any = jax.vmap(run)(q, k, v)
    return jnp.swapaxes(mixed, 1, 2)


def difference(found: Any, expected: Any) -> float:
    """The largest, over the largest number expected."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)

    def one(a: jax.Array, b: jax.Array) -> float:
        a, b = (x.astype(jnp.float32) for x in (a, b))
        # Looked for by itself: on a CPU the largest of many numbers passes over what is none.
        if not jnp.isfinite(a).all():
            return float("inf")
        return float(jnp.abs(a - b).max() / jnp.abs(b).max())

    return max(one(a, b) for a, b in pairs)


def compare(problem: Problem, phase: str, timer: Timer = device_seconds) -> Row:
    """Forward or backward by each contender."""
    *qkv, d_out = problem.arrays()
    calls: dict[str, Call] = {}
    failed: dict[str, Row] = {}
    for name, function in contenders(problem):
        try:
            call = _forward(function, qkv)
            if phase == "backward":
                call = _backward(function, qkv, d_out)
            calls[name] = call
        except Exception as error:  # Whatever one cannot do, the others are still compared.
            failed[name] = {"error": first_line(error)}
    work = problem.flops() * (1 if phase == "forward" else 2.5)
    return {"by": {**failed, **_compared(calls, timer, work)}}


def _forward(function: Callable[..., Any], qkv: Sequence[jax.Array]) -> Call:
    return Call(jax.jit(function), tuple(qkv))


def _backward(function: Callable[..., Any], qkv: Sequence[jax.Array], d_out: jax.Array) -> Call:
    """What the forward pass leaves is there before, and its time is not counted."""
    _, pull = jax.jit(partial(jax.vjp, function))(*qkv)
    return Call(jax.jit(lambda pull, d_out: pull(d_out)), (pull, d_out))


def _compared(calls: dict[str, Call], timer: Timer, work: float) -> dict[str, Row]:
    """Of each contender seconds, its rate, and how far it is off the first that runs.

    Args:
      work: of a call, in FLOPs or bytes.
    """
    found: dict[str, Row] = {}
    first: tuple[float, Any] | None = None
    for name, taken in in_turns(calls, timer).items():
        if isinstance(taken, Exception):
            found[name] = {"error": first_line(taken)}
            continue
        result = calls[name]()
        first = first or (taken, result)
        found[name] = {
            "seconds": taken,
            "rate": work / taken,
            "of_first": first[0] / taken,
            "off": difference(result, first[1]),
        }
    return found


def copy_rate(size: int, timer: Timer = device_seconds) -> float:
    """Bytes/s, read and written, of a copy of so many bytes in the device's memory."""
    x = jnp.zeros(size // 2, jnp.bfloat16)
    call = Call(jax.jit(lambda x: x + 1), (x,))
    call()
    return 2 * size / timer(call)


def decode(shape: DecodeShape, timer: Timer = device_seconds) -> Row:
    """Decode attention of full sequences, pages shuffled, by each contender."""
    (q, k, _, _), arrays = shape.abstract()
    whole = cache_bytes(shape)
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], q.shape, q.dtype)
    cache = [jax.random.normal(key, k.shape, jnp.bfloat16).astype(k.dtype) for key in keys[1:3]]
    lengths = jnp.full(shape.batch, shape.context, jnp.int32)
    given: dict[str, Any] = {}
    if "block_tables" in arrays:
        pages = jax.random.permutation(keys[3], k.shape[0]).astype(jnp.int32)
        given["block_tables"] = pages.reshape(arrays["block_tables"].shape)
    for name in ("k_scales", "v_scales"):
        if name in arrays:
            given[name] = jnp.ones(arrays[name].shape, jnp.float32)
    window = shape.options.get("window")
    read = whole if window is None else whole * min(1, (window + shape.q_len) / shape.context)
    calls = {
        f"memplan {name}": Call(
            jax.jit(partial(decode_attention, implementation=name, **shape.options)),
            (query, *cache, lengths),
            given,
        )
        for name in _ours(DECODE_IMPLEMENTATIONS)
    }
    return {"by": _compared(calls, timer, read)}


def cache_bytes(shape: DecodeShape) -> int:
    """Of keys and values."""
    (_, k, _, _), _ = shape.abstract()
    return 2 * k.size * k.dtype.itemsize


def _define() -> None:
    flags.DEFINE_string("only", "", "a part of the names of what to measure")
    flags.DEFINE_string("tune", None, "file of rows: measure configurations, too")
    flags.DEFINE_enum("platform", "cuda", ["cuda", "tpu", "cpu"], "what to measure on")


def _rows(rows: Rows) -> Iterator[Row]:
    is_real = FLAGS.platform != "cpu"
    jax.config.update("jax_platforms", f"{FLAGS.platform},cpu" if is_real else "cpu")
    if is_real and jax.devices()[0].platform == "cpu":
        raise app.UsageError("found neither a GPU nor a TPU: --platform cpu tries whether it runs")
    problems = [p for p in (PROBLEMS if is_real else SMALL) if FLAGS.only in p.name]
    shapes = DECODE_SHAPES if is_real else SMALL_DECODE
    shapes = [s for s in shapes if FLAGS.only in f"{s.name} decode"]
    size = _COPY_BYTES if is_real else 1 << 20
    yield rows.of({"problem": "copy", "phase": "copy"}, lambda: {"rate": copy_rate(size)})
    for problem in problems:
        for phase in ("forward", "backward"):
            case = {"problem": problem.name, "phase": phase}
            yield rows.of(case, lambda p=problem, phase=phase: compare(p, phase))
    for shape in (s for s in shapes if cache_bytes(s) <= _CACHE_BYTES):
        yield rows.of({"problem": shape.name, "phase": "decode"}, lambda s=shape: decode(s))
    if FLAGS.tune is not None:
        kernels = ((search, p.of_kernels()) for p in problems for search in autotune.ATTENTION)
        caches = ((search_gpu.DECODE, kernel_programs.decode_problem_of(s)) for s in shapes)
        method = measured(search_gpu.versions())
        autotune.run((*kernels, *caches), method, Path(FLAGS.tune))


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    copied = next((row["rate"] for row in rows if row["phase"] == "copy"), None)
    for phase in ("forward", "backward", "decode"):
        if of_phase := [row for row in rows if row["phase"] == phase]:
            yield _table(phase, of_phase, copied if phase == "decode" else None)


def _table(phase: str, rows: Sequence[Row], copied: float | None) -> Table:
    """The rates of each contender that can do one of the problems; what others said stands below.

    Args:
      copied: bytes/s of a copy, where rates are of bytes.
    """
    unit, per = ("GB/s", 1e9) if phase == "decode" else ("TFLOP/s", 1e12)
    names = sorted({name for row in rows for name in row["by"]}, key=_is_ours)
    runs = [name for name in names if any("rate" in row["by"].get(name, {}) for row in rows)]
    columns = (
        Column("problem"),
        *(Column(f"{name}, {unit}", right=True) for name in runs),
        *(Column(h, right=True) for h in ("memplan's best", "off by at most")),
    )
    cells = tuple(
        (row["problem"], *(_rate(row["by"].get(name), per) for name in runs), *_told(row, copied))
        for row in rows
    )
    errors = {
        f"{name}: {row['by'][name]['error']}"
        for row in rows
        for name in row["by"].keys() - set(runs)
    }
    against = "the best other" if copied is None else f"a copy's {copied / per:.0f} {unit}"
    note = f"memplan's best: over {against}. {'. '.join(sorted(errors))}".strip()
    return Table(f"Attention, {phase}", columns, cells, note)


def _is_ours(name: str) -> tuple[bool, str]:
    return name.startswith("memplan"), name


def _rate(found: Row | None, per: float) -> str:
    if found is None or "error" in found:
        return "–"
    return "WRONG" if _is_wrong(found) else f"{found['rate'] / per:,.0f}"


def _is_wrong(found: Row) -> bool:
    return found["off"] > _TOLERANCE


def _told(row: Row, copied: float | None) -> Iterator[str]:
    right = {n: f for n, f in row["by"].items() if "rate" in f and not _is_wrong(f)}
    ours = max((f["rate"] for n, f in right.items() if _is_ours(n)[0]), default=0.0)
    other = max((f["rate"] for n, f in right.items() if not _is_ours(n)[0]), default=copied)
    yield f"{ours / other:.2f}" if ours and other else "–"
    yield f"{max((f['off'] for f in right.values()), default=0.0):.1e}"


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
