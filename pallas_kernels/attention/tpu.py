"""Attention on a TPU: which blocks, in which parts, on how many cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.attention import kernel_tpu, kernel_tpu_backward, tuning
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.targets import TPUS, Target

_HEAD_DIMS = (64, 96, 128, 256)


def refusal(problem: Problem, target: Target) -> str | None:
    """Takes problems on TPUs whose heads fill registers well enough."""
    if target.platform != "tpu":
        return "needs a TPU"
    if target.generation not in TPUS:
        known = ", ".join(TPUS)
        return f"its blocks are chosen for {known}; a {target.kind} is not known"
    if problem.dtype == "float16":
        return "dtype is float16, which its compiler has no registers for: takes bfloat16, float32"
    if problem.head_dim not in _HEAD_DIMS:
        widths = ", ".join(map(str, _HEAD_DIMS))
        return f"head_dim is {problem.head_dim}: takes {widths}. Pad the heads with zeros"
    if problem.dtype == "float32" and problem.head_dim > 128:
        return (
            f"head_dim is {problem.head_dim} of float32, whose spills are not measured: takes 128"
        )
    return None


def forward(
    problem: Problem,
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `reference.forward`."""
    chip = TPUS[target.generation]
    config, launch = tuning.forward_choice(problem, chip)
    # The kernels count in 32 bits, whatever the program around them does.
    with jax.enable_x64(False):
        return kernel_tpu.forward(problem, config, launch, q, k, v, segments)


def backward(
    problem: Problem,
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference.backward`.

    The kernel holds the sums of whole sequences in VMEM. Where these are too long for that, it
    runs for parts of queries and of keys, and its results are added up as float32.
    """
    chip = TPUS[target.generation]
    parts = tuning.backward_parts(problem, chip)
    if parts == 1:
        config, launch = tuning.backward_choice(problem, chip)
        with jax.enable_x64(False):
            return kernel_tpu_backward.backward(
                problem, config, launch, q, k, v, segments, lse, delta, d_out
            )
    d_q, d_k, d_v = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    for part, queries, keys in _rectangles(problem, parts):
        ids = segments and Segments(segments.q[:, queries], segments.kv[:, keys])
        config, launch = tuning.backward_choice(part, chip)
        with jax.enable_x64(False):
            some_q, some_k, some_v = kernel_tpu_backward.backward(
                part,
                config,
                launch,
                q[:, queries],
                k[:, keys],
                v[:, keys],
                ids,
                lse[:, :, queries],
                delta[:, :, queries],
                d_out[:, queries],
                result=jnp.float32,
            )
        d_q = d_q.at[:, queries].add(some_q)
        d_k = d_k.at[:, keys].add(some_k)
        d_v = d_v.at[:, keys].add(some_v)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _rectangles(problem: Problem, parts: int) -> Iterator[tuple[Problem, slice, slice]]:
    """Pairs of a part of the queries and one of the keys, where some see each other."""
    q_size, kv_size = -(-problem.q_len // parts), -(-problem.kv_len // parts)
    band = problem.band
    for q_start in range(0, problem.q_len, q_size):
        q_end = min(q_start + q_size, problem.q_len)
        for kv_start in range(0, problem.kv_len, kv_size):
            kv_end = min(kv_start + kv_size, problem.kv_len)
            too_early = band.left is not None and kv_end - 1 < q_start + band.offset - band.left
            too_late = band.right is not None and kv_start > q_end - 1 + band.offset + band.right
            if too_early or too_late:
                continue
            moved = dataclasses.replace(band, offset=band.offset + q_start - kv_start)
            part = dataclasses.replace(
                problem, q_len=q_end - q_start, kv_len=kv_end - kv_start, band=moved
            )
            yield part, slice(q_start, q_end), slice(kv_start, kv_end)
