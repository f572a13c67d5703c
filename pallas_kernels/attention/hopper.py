"""Attention on Hopper (sm90) by three Mosaic GPU kernels: forward, dQ, and dK with dV.

They read and write [batch, tokens, heads, head_dim] as it is, by TMA, which fills what is past
the last token with zeros and leaves it alone when storing. Only lengths that are no multiple of
8, the rows of a tile in SMEM, are padded first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.attention import kernel_gpu, kernel_gpu_dkv, kernel_gpu_dq
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.targets import Target

_ROWS = 8
_MAX_HEAD_DIM = 256
_MAX_GRID = 65535


def refusal(problem: Problem, target: Target) -> str | None:
    """Why it does not take a problem, and what that would take; None if it does."""
    if target.generation != "sm90":
        return f"it is for Hopper (sm90), whose wgmma and TMA {target} does not have."
    if problem.dtype not in ("bfloat16", "float16"):
        return (
            f"it takes bfloat16 and float16, not {problem.dtype}: wgmma multiplies that as "
            "tensorfloat-32, with 10 bits of mantissa."
        )
    if problem.head_dim > _MAX_HEAD_DIM or not gpu.swizzle_bytes(problem.head_dim, problem.dtype):
        return (
            f"it takes heads of a multiple of 16 up to {_MAX_HEAD_DIM}, not {problem.head_dim}: "
            "pad them with zeros and pass scale=."
        )
    if max(problem.batch, problem.q_heads) > _MAX_GRID:
        return f"it takes up to {_MAX_GRID} sequences and heads, as many as a grid has blocks."
    return None


def forward(
    problem: Problem,
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp; the signature is `reference.forward`'s."""
    del target
    q, k, v = map(_padded, (q, k, v))
    out, lse = kernel_gpu.forward(problem, kernel_gpu.TUNABLE.choose(problem), q, k, v, segments)
    return out[:, : problem.q_len], lse


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
    """Gradients of queries, keys and values; the signature is `reference.backward`'s."""
    del target
    q, k, v, d_out = map(_padded, (q, k, v, d_out))
    d_q = kernel_gpu_dq.query_gradient(
        problem, kernel_gpu_dq.TUNABLE.choose(problem), q, k, v, segments, lse, delta, d_out
    )
    d_k, d_v = kernel_gpu_dkv.key_gradients(
        problem, kernel_gpu_dkv.TUNABLE.choose(problem), q, k, v, segments, lse, delta, d_out
    )
    return d_q[:, : problem.q_len], d_k[:, : problem.kv_len], d_v[:, : problem.kv_len]


def _padded(x: jax.Array) -> jax.Array:
    """[batch, tokens, heads, head_dim] with zeros up to a multiple of `_ROWS` tokens."""
    padding = -x.shape[1] % _ROWS
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x
