"""How fast are the attention kernels on the accelerator that is here, beside their peers?

    python -m experiments.attention_bench [--platform tpu] [--only causal] [--json bench.jsonl]

Each line is one problem by one contender, all in one run, side by side: cuDNN through
`jax.nn.dot_product_attention`, tokamax where it is installed, on a TPU jax's splash attention, and
each implementation of `pallas_kernels`. Seconds are medians of what the GPU's profiler (CUPTI)
counts for the kernels of a call; where there is none, of calls that follow one another, waited
for together. FLOP/s count the pairs of query and key that see each other: 4 a pair and width of
the head forward, 2.5 times as many backward. Decode attention is measured in bytes/s of keys and
values, beside a copy in the same run. Results are compared with the first contender's that runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.api import IMPLEMENTATIONS, attention
from pallas_kernels.decode.api import IMPLEMENTATIONS as DECODE_IMPLEMENTATIONS
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.decode.shapes import SHAPES as DECODE_SHAPES
from pallas_kernels.decode.shapes import Shape as DecodeShape

_CALLS = 20
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
        return max(1, 16384 // self.length)

    @property
    def name(self) -> str:
        what = " ".join(f"{k}={v}" for k, v in self.options.items()) or "full"
        return f"{what} {self.length} d{self.head_dim} {self.q_heads}/{self.kv_heads}"

    def pairs(self) -> int:
        """Pairs of query and key that see each other."""
        one = np.full(self.length, self.length)
        if self.options.get("causal"):
            one = np.arange(1, self.length + 1)
        if "window" in self.options:
            one = np.minimum(one, self.options["window"][0] + 1)
        return self.batch * self.q_heads * int(one.sum())

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


def contenders(problem: Problem) -> Iterator[tuple[str, Callable[..., jax.Array]]]:
    """Functions of q, k and v that compute the same."""
    options = problem.options
    theirs: dict[str, Any] = {"is_causal": bool(options.get("causal"))}
    if "window" in options:
        theirs["local_window_size"] = options["window"]
    if jax.devices()[0].platform == "gpu":
        yield "cudnn", partial(jax.nn.dot_product_attention, implementation="cudnn", **theirs)
    if find_spec("tokamax") is not None:
        tokamax = import_module("tokamax")
        yield "tokamax", partial(tokamax.dot_product_attention, **theirs)
    if jax.devices()[0].platform == "tpu" and "window" not in options:
        yield "splash", partial(_splash, problem)
    for name in IMPLEMENTATIONS:
        # The scores of the longest would not fit.
        if name != "xla" or problem.length <= 4096:
            yield f"memplan {name}", partial(attention, implementation=name, **options)


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


def seconds(function: Callable[..., Any], *args: Any) -> float:
    """Median of `_CALLS` calls of a jitted function, after one."""
    jax.block_until_ready(function(*args))
    if jax.devices()[0].platform == "gpu":
        from jax.experimental.mosaic.gpu import profiler

        _, milliseconds = profiler.measure(function, iterations=_CALLS)(*args)
        if milliseconds:
            return statistics.median(milliseconds) / 1e3
    samples = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready([function(*args) for _ in range(_CALLS)][-1])
        samples.append((time.perf_counter() - started) / _CALLS)
    return statistics.median(samples)


def difference(found: Any, expected: Any) -> float:
    """The largest, over the largest number expected."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)

    def one(a: jax.Array, b: jax.Array) -> float:
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return float(jnp.abs(a - b).max() / jnp.abs(b).max())

    return max(one(a, b) for a, b in pairs)


class Out:
    """Lines on the terminal, and as JSON in a file."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def write(self, text: str, **record: Any) -> None:
        """A line, and what it says."""
        print(text, flush=True)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def compare(problem: Problem, out: Out) -> None:
    """Forward and backward by each contender."""
    *qkv, d_out = problem.arrays()
    flops = 4 * problem.head_dim * problem.pairs()
    for phase, work in (("forward", flops), ("backward", 2.5 * flops)):
        expected, first_s = None, None
        for name, function in contenders(problem):
            record = {"problem": problem.name, "phase": phase, "by": name}
            line = f"{problem.name:40s} {phase:8s} {name:16s}"
            try:
                if phase == "forward":
                    call: Callable[..., Any] = jax.jit(function)
                    args: tuple[Any, ...] = tuple(qkv)
                    taken = seconds(call, *args)
                else:
                    # What the forward pass leaves is there before, and its time is not counted.
                    _, pull = jax.jit(partial(jax.vjp, function))(*qkv)
                    call, args = jax.jit(lambda pull, d: pull(d)), (pull, d_out)
                    taken = seconds(call, *args)
                found = call(*args)
            except Exception as error:  # Whatever one cannot do, the others are still compared.
                reason = str(error).strip().splitlines()[-1][:120]
                out.write(f"{line} {type(error).__name__}: {reason}", **record, error=reason)
                continue
            if expected is None:
                expected, first_s = found, taken
            assert first_s is not None
            off = difference(found, expected)
            wrong = "  WRONG" if off > _TOLERANCE else ""
            rate = work / taken / 1e12
            out.write(
                f"{line} {1e3 * taken:9.3f} ms {rate:7.1f} TFLOP/s {first_s / taken:5.2f} x"
                f"  off by {off:.1e}{wrong}",
                **record,
                seconds=taken,
                tflops=rate,
                of_first=first_s / taken,
                off=off,
            )


def copy_rate() -> float:
    """Bytes/s, read and written, of a copy in the device's memory."""
    x = jnp.zeros(_COPY_BYTES // 2, jnp.bfloat16)
    return 2 * _COPY_BYTES / seconds(jax.jit(lambda x: x + 1), x)


def decode(shape: DecodeShape, copied: float, out: Out) -> None:
    """Decode attention of full sequences, pages shuffled."""
    (q, k, _, _), arrays = shape.abstract()
    whole = 2 * k.size * k.dtype.itemsize
    if whole > _CACHE_BYTES:
        return
    rng = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], q.shape, q.dtype)
    cache = [jax.random.normal(key, k.shape, jnp.bfloat16).astype(k.dtype) for key in keys[1:]]
    lengths = jnp.full(shape.batch, shape.context, jnp.int32)
    given: dict[str, Any] = {}
    if "block_tables" in arrays:
        table = arrays["block_tables"]
        pages = rng.permutation(k.shape[0])[: table.size].reshape(table.shape)
        given["block_tables"] = jnp.asarray(pages, jnp.int32)
    for name in ("k_scales", "v_scales"):
        if name in arrays:
            given[name] = jnp.ones(arrays[name].shape, jnp.float32)
    window = shape.options.get("window")
    read = whole if window is None else whole * min(1, (window + shape.q_len) / shape.context)
    expected = None
    for name in DECODE_IMPLEMENTATIONS:
        record = {"problem": shape.name, "phase": "decode", "by": f"memplan {name}"}
        line = f"{shape.name:40s} decode   memplan {name:8s}"
        call = jax.jit(partial(decode_attention, implementation=name, **shape.options))
        try:
            taken = seconds(partial(call, **given), query, *cache, lengths)
            found = call(query, *cache, lengths, **given)
        except Exception as error:  # As above.
            reason = str(error).strip().splitlines()[-1][:120]
            out.write(f"{line} {type(error).__name__}: {reason}", **record, error=reason)
            continue
        expected = found if expected is None else expected
        rate = read / taken
        out.write(
            f"{line} {1e6 * taken:9.1f} us {rate / 1e9:7.0f} GB/s {rate / copied:6.1%} of a copy"
            f"  off by {difference(found, expected):.1e}",
            **record,
            seconds=taken,
            bytes_per_s=rate,
            of_copy=rate / copied,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of what to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--platform", default="cuda", choices=("cuda", "tpu"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", f"{options.platform},cpu")
    device = jax.devices()[0]
    if device.platform == "cpu":
        sys.exit("expected a GPU or a TPU: on a CPU no time of a kernel means anything")
    out = Out(options.json)
    peers = {name: version(name) for name in ("jax", "jaxlib", "tokamax") if find_spec(name)}
    copied = copy_rate()
    out.write(
        f"{device.device_kind}, {peers}, copy {copied / 1e9:.0f} GB/s",
        device=device.device_kind,
        versions=peers,
        copy_bytes_per_s=copied,
    )
    for problem in PROBLEMS:
        if options.only in problem.name:
            compare(problem, out)
    for shape in DECODE_SHAPES:
        if options.only in f"{shape.name} decode":
            decode(shape, copied, out)


if __name__ == "__main__":
    main()
