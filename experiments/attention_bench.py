"""How fast are the attention kernels on the accelerator that is here, beside their peers?

    python -m experiments.attention_bench [--only causal] [--json bench.jsonl] [--tune rows.json]
    python -m experiments.attention_bench --platform tpu

Each line is one problem by one contender, all in one run, side by side: cuDNN through
`jax.nn.dot_product_attention`, tokamax where it is installed, on a TPU jax's splash attention, and
each implementation of `pallas_kernels` that takes the problem. They are timed in turns
(`memplan.kernels.timing`): medians of what the GPU's profiler (CUPTI) counts for the kernels of a
call; where there is none, of calls that follow one another, waited for together. FLOP/s count the
pairs of query and key that see each other: 4 a pair and width of the head forward, 2.5 times as
many backward. Decode attention is measured in bytes/s of keys and values, beside a copy in the same
run. Results are compared with the first contender's that runs. What one contender cannot do does
not end the others, and each problem's lines are written as soon as it is done.

`--tune` measures the configurations of the same problems afterwards (`experiments.autotune`), and
writes rows that `pallas_kernels.tuned.using` reads. With ``--platform cpu`` everything is small and
the times mean nothing: it tells whether all of it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import autotune, kernel_programs
from memplan.kernels import search_gpu
from memplan.kernels.autotune import first_line, measured
from memplan.kernels.timing import Call, Timer, device_seconds, in_turns
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


class Out:
    """Lines on the terminal, and as JSON in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, text: str, **record: Any) -> None:
        """A line, and what it says."""
        print(text, flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def compare(problem: Problem, out: Out, timer: Timer = device_seconds) -> None:
    """Forward and backward by each contender."""
    *qkv, d_out = problem.arrays()
    flops = problem.flops()
    for phase, work in (("forward", flops), ("backward", 2.5 * flops)):
        calls: dict[str, Call] = {}
        for name, function in contenders(problem):
            try:
                calls[name] = _forward(function, qkv)
                if phase == "backward":
                    calls[name] = _backward(function, qkv, d_out)
            except Exception as error:  # Whatever one cannot do, the others are still compared.
                del calls[name]
                _failed(out, problem.name, phase, name, error)
        _lines(out, problem.name, phase, calls, timer, Rate(work, "TFLOP/s", 1e12))


def _forward(function: Callable[..., Any], qkv: Sequence[jax.Array]) -> Call:
    return Call(jax.jit(function), tuple(qkv))


def _backward(function: Callable[..., Any], qkv: Sequence[jax.Array], d_out: jax.Array) -> Call:
    """What the forward pass leaves is there before, and its time is not counted."""
    _, pull = jax.jit(partial(jax.vjp, function))(*qkv)
    return Call(jax.jit(lambda pull, d_out: pull(d_out)), (pull, d_out))


@dataclass(frozen=True)
class Rate:
    """What a call does, for its rate.

    Attributes:
      work: FLOPs or bytes.
      unit, unit_size: of the rate, on the terminal.
      limit: of the rate, measured in the same run: a copy's bytes/s.
    """

    work: float
    unit: str
    unit_size: float
    limit: float | None = None

    def said(self, per_s: float) -> str:
        share = "" if self.limit is None else f" {per_s / self.limit:6.1%} of a copy"
        return f"{per_s / self.unit_size:7.1f} {self.unit}{share}"


def _lines(
    out: Out,
    problem: str,
    phase: str,
    calls: dict[str, Call],
    timer: Timer,
    rate: Rate,
) -> None:
    """A line for each contender: its rate, and how far it is off the first that runs."""
    first: tuple[float, Any] | None = None
    for name, taken in in_turns(calls, timer).items():
        if isinstance(taken, Exception):
            _failed(out, problem, phase, name, taken)
            continue
        found = calls[name]()
        first = first or (taken, found)
        off, per_s = difference(found, first[1]), rate.work / taken
        wrong = "  WRONG" if off > _TOLERANCE else ""
        out.write(
            f"{_start(problem, phase, name)} {1e3 * taken:9.3f} ms {rate.said(per_s)}"
            f" {first[0] / taken:5.2f} x  off by {off:.1e}{wrong}",
            problem=problem,
            phase=phase,
            by=name,
            seconds=taken,
            rate=per_s,
            of_limit=None if rate.limit is None else per_s / rate.limit,
            of_first=first[0] / taken,
            off=off,
        )


def _failed(out: Out, problem: str, phase: str, name: str, error: Exception) -> None:
    reason = first_line(error)
    line = f"{_start(problem, phase, name)} {reason}"
    out.write(line, problem=problem, phase=phase, by=name, error=reason)


def _start(problem: str, phase: str, name: str) -> str:
    return f"{problem:40s} {phase:8s} {name:16s}"


def copy_rate(size: int, timer: Timer = device_seconds) -> float:
    """Bytes/s, read and written, of a copy of so many bytes in the device's memory."""
    x = jnp.zeros(size // 2, jnp.bfloat16)
    call = Call(jax.jit(lambda x: x + 1), (x,))
    call()
    return 2 * size / timer(call)


def decode(shape: DecodeShape, copied: float, out: Out, timer: Timer = device_seconds) -> None:
    """Decode attention of full sequences, pages shuffled."""
    (q, k, _, _), arrays = shape.abstract()
    whole = 2 * k.size * k.dtype.itemsize
    if whole > _CACHE_BYTES:
        return
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
    _lines(out, shape.name, "decode", calls, timer, Rate(read, "GB/s", 1e9, copied))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the names of what to measure")
    parser.add_argument("--json", type=Path, help="append the lines, as JSON")
    parser.add_argument("--tune", type=Path, metavar="ROWS", help="measure configurations, too")
    parser.add_argument("--platform", default="cuda", choices=("cuda", "tpu", "cpu"))
    options = parser.parse_args()
    is_real = options.platform != "cpu"
    jax.config.update("jax_platforms", f"{options.platform},cpu" if is_real else "cpu")
    device = jax.devices()[0]
    if is_real and device.platform == "cpu":
        sys.exit("found neither a GPU nor a TPU: --platform cpu tries whether it runs")
    out = Out(options.json)
    versions = {name: version(name) for name in ("jax", "jaxlib", "tokamax") if find_spec(name)}
    copied = copy_rate(_COPY_BYTES if is_real else 1 << 20)
    out.write(
        f"{device.device_kind}, {versions}, copy {copied / 1e9:.0f} GB/s",
        device=device.device_kind,
        versions=versions,
        copy_bytes_per_s=copied,
    )
    problems = [p for p in (PROBLEMS if is_real else SMALL) if options.only in p.name]
    shapes = DECODE_SHAPES if is_real else SMALL_DECODE
    shapes = [s for s in shapes if options.only in f"{s.name} decode"]
    for problem in problems:
        compare(problem, out)
    for shape in shapes:
        decode(shape, copied, out)
    if options.tune is not None:
        kernels = ((search, p.of_kernels()) for p in problems for search in autotune.ATTENTION)
        caches = ((search_gpu.DECODE, kernel_programs.decode_problem_of(s)) for s in shapes)
        method = measured(search_gpu.versions())
        autotune.run((*kernels, *caches), method, options.tune)


if __name__ == "__main__":
    main()
