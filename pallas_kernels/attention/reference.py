"""Attention as written in the paper (Vaswani et al., 2017, section 3.2.1), scores materialised.

It is what the kernels are measured against, in whichever precision the caller asks for, and
what runs where there is no kernel. O(batch * q_heads * q_len * kv_len) bytes of scores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention.problem import Band, Problem, Segments
from pallas_kernels.targets import Target


def refusal(problem: Problem, target: Target) -> str | None:
    """It takes everything."""
    del problem, target
    return None


def visible(band: Band, q_len: int, kv_len: int) -> jax.Array:
    """Returns bool[q_len, kv_len]: where a query sees a key, by position."""
    distance = jnp.arange(kv_len)[None, :] - (jnp.arange(q_len)[:, None] + band.offset)
    seen = jnp.ones((q_len, kv_len), bool)
    if band.left is not None:
        seen &= distance >= -band.left
    if band.right is not None:
        seen &= distance <= band.right
    return seen


def attend(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    accumulate: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Attention, differentiable by jax.

    Args:
      q: [batch, q_len, q_heads, head_dim].
      k, v: [batch, kv_len, kv_heads, head_dim].
      segments: of queries and keys, where `problem.segments`.
      accumulate: type of scores, softmax and sums.

    Returns:
      The output, like `q`, and the natural logarithm of each query's sum of exponentials,
      `accumulate`[batch, q_heads, q_len]. A query that sees no key has output 0 and -inf.
    """
    group = problem.group
    grouped = q.reshape(*q.shape[:2], problem.kv_heads, group, problem.head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=accumulate)
    scores = scores.astype(accumulate) * problem.scale
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    seen = visible(problem.band, problem.q_len, problem.kv_len)[None, None, None]
    if segments is not None:
        seen &= (segments.q[:, :, None] == segments.kv[:, None, :])[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)

    largest = scores.max(axis=-1, keepdims=True)
    # Where nothing is seen the largest is -inf, and -inf - -inf would not be a number.
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    some = total > 0
    safe = jnp.where(some, total, 1)
    lse = jnp.where(some, largest + jnp.log(safe), -jnp.inf)[..., 0]
    weights = (weights / safe).astype(v.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v, preferred_element_type=accumulate)
    lse = lse.reshape(problem.batch, problem.q_heads, problem.q_len)
    return mixed.reshape(q.shape).astype(q.dtype), lse


def forward(
    problem: Problem,
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`attend`, with the signature that all implementations have. The log-sum-exp is only looked
    at where `problem.lse` asks for it, and may be None otherwise."""
    del target
    return attend(problem, q, k, v, segments)


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
    """Gradients of the three inputs, recomputing the scores (Dao, 2023, arXiv:2307.08691, 2.3).

    Args:
      lse: f32[batch, q_heads, q_len], as `forward` returned it.
      delta: f32[batch, q_heads, q_len]: sum over the head of out * d_out, less the gradient of
        `lse`.
      d_out: gradient of the output, like `q`.

    Returns:
      Gradients of `q`, `k` and `v`, in their types.
    """
    del target
    wide = jnp.float32
    batch, q_len, heads, width = q.shape

    def by_group(x: jax.Array) -> jax.Array:
        return x.reshape(batch, q_len, problem.kv_heads, problem.group, width)

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(batch, problem.kv_heads, problem.group, q_len, 1)

    raw = jnp.einsum("btkgd,bskd->bkgts", by_group(q), k, preferred_element_type=wide)
    scores = raw * problem.scale
    slope = jnp.ones_like(scores)
    if problem.soft_cap is not None:
        bent = jnp.tanh(scores / problem.soft_cap)
        scores, slope = problem.soft_cap * bent, 1 - bent * bent
    seen = visible(problem.band, problem.q_len, problem.kv_len)[None, None, None]
    if segments is not None:
        seen &= (segments.q[:, :, None] == segments.kv[:, None, :])[:, None, None]
    # Not exp of a masked score: with lse = -inf it would not be a number.
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - rows(lse), 0)), 0)
    d_v = jnp.einsum(
        "bkgts,btkgd->bskd", weights.astype(v.dtype), by_group(d_out), preferred_element_type=wide
    )
    d_weights = jnp.einsum("btkgd,bskd->bkgts", by_group(d_out), v, preferred_element_type=wide)
    d_raw = weights * (d_weights - rows(delta)) * slope * problem.scale
    d_raw = d_raw.astype(q.dtype)
    d_q = jnp.einsum("bkgts,bskd->btkgd", d_raw, k, preferred_element_type=wide)
    d_k = jnp.einsum("bkgts,btkgd->bskd", d_raw, by_group(q), preferred_element_type=wide)
    d_q = d_q.reshape(batch, q_len, heads, width)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)
