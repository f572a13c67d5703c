"""Decode attention with the pages gathered and the scores materialised.

It is what the kernels are measured against, in whichever precision the caller asks for, and
what runs where there is no kernel. It gathers `capacity` tokens of every sequence, however
short.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.decode.problem import Cache, Problem
from pallas_kernels.targets import Target


def refusal(problem: Problem, target: Target) -> str | None:
    """It takes everything."""
    del problem, target
    return None


def visible(problem: Problem, lengths: jax.Array) -> jax.Array:
    """Returns bool[batch, q_len, capacity]: where a query sees a key, by position."""
    key = jnp.arange(problem.capacity)
    query = lengths[:, None] - problem.q_len + jnp.arange(problem.q_len)
    distance = key[None, None, :] - query[:, :, None]
    seen = distance <= 0
    if problem.window is not None:
        seen &= distance >= -problem.window
    return seen


def gather(problem: Problem, pool: jax.Array, cache: Cache) -> jax.Array:
    """The pages of each sequence in order, zero past its length and before its window.

    Args:
      pool: [num_pages, kv_heads, page_size, ...].

    Returns:
      [batch, kv_heads, capacity, ...].
    """
    size = problem.page_size
    token = jnp.arange(problem.capacity)
    used = token < cache.lengths[:, None]
    if problem.window is not None:
        # Else what is not a number there would not be one in the sum, either.
        used &= token >= cache.lengths[:, None] - problem.q_len - problem.window
    if cache.block_tables is None:
        dense = pool
    else:
        of_page = used.reshape(problem.batch, problem.max_pages, size).any(axis=2)
        tables = jnp.where(of_page, cache.block_tables, 0)
        pages = jnp.moveaxis(pool[tables], 2, 1)
        dense = pages.reshape(*pages.shape[:2], problem.capacity, *pages.shape[4:])
    used = used.reshape(problem.batch, 1, problem.capacity, *(1,) * (dense.ndim - 3))
    return jnp.where(used, dense, jnp.zeros((), dense.dtype))


def attend(
    problem: Problem, q: jax.Array, cache: Cache, accumulate: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Decode attention.

    Args:
      q: [batch, q_len, q_heads, head_dim].
      accumulate: type of scores, softmax and sums.

    Returns:
      The output, like `q`, and the natural logarithm of each query's sum of exponentials,
      `accumulate`[batch, q_heads, q_len]. A query that sees no key has output 0 and -inf.
    """
    k = gather(problem, cache.k, cache).astype(q.dtype)
    v = gather(problem, cache.v, cache).astype(q.dtype)
    grouped = q.reshape(
        problem.batch, problem.q_len, problem.kv_heads, problem.group, problem.head_dim
    )
    scores = _product("btkgd,bksd->bkgts", grouped, k, accumulate) * problem.scale
    if cache.k_scales is not None:
        scales = gather(problem, cache.k_scales, cache)
        scores *= scales[:, :, None, None, :].astype(accumulate)
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    seen = visible(problem, cache.lengths)[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)

    largest = scores.max(axis=-1, keepdims=True)
    # Where nothing is seen the largest is -inf, and -inf - -inf would not be a number.
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    some = total > 0
    safe = jnp.where(some, total, 1)
    lse = jnp.where(some, largest + jnp.log(safe), -jnp.inf)[..., 0]
    weights = weights / safe
    if cache.v_scales is not None:
        scales = gather(problem, cache.v_scales, cache)
        weights *= scales[:, :, None, None, :].astype(accumulate)
    mixed = _product("bkgts,bksd->btkgd", weights.astype(v.dtype), v, accumulate)
    lse = lse.reshape(problem.batch, problem.q_heads, problem.q_len)
    return mixed.reshape(q.shape).astype(q.dtype), lse


def _product(subscripts: str, a: jax.Array, b: jax.Array, accumulate: DTypeLike) -> jax.Array:
    # Converted first, as XLA's CPU runtime lacks some products of bfloat16 with a wider result.
    # It changes no number: those of a narrow type are exact in a wide one.
    return jnp.einsum(subscripts, a.astype(accumulate), b.astype(accumulate))


def forward(
    problem: Problem, target: Target, q: jax.Array, cache: Cache
) -> tuple[jax.Array, jax.Array]:
    """`attend`, with the signature that all implementations have."""
    del target
    return attend(problem, q, cache)
