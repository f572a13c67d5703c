"""Between the caller's layout and the kernels', which have one matrix product a key/value head.

q    [batch, q_len, kv_heads * group, head_dim]  ◄─►  [batch, kv_heads, q_len * group, head_dim]
lse  [batch, kv_heads * group, q_len]            ◄──  [batch, kv_heads, q_len * group]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.decode.problem import Problem


def queries_by_kv_head(problem: Problem, q: jax.Array) -> jax.Array:
    """[batch, kv_heads, rows, head_dim]: row t * group + g is query t of head g of the group."""
    shape = (problem.batch, problem.q_len, problem.kv_heads, problem.group, problem.head_dim)
    by_head = q.reshape(shape).swapaxes(1, 2)
    return by_head.reshape(problem.batch, problem.kv_heads, problem.rows, problem.head_dim)


def results_by_query(
    problem: Problem, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The caller's output and log-sum-exp.

    Args:
      out: [batch, kv_heads, rows, head_dim].
      lse: f32[batch, kv_heads, rows].
    """
    shape = (problem.batch, problem.kv_heads, problem.q_len, problem.group)
    out = out.reshape(*shape, problem.head_dim).swapaxes(1, 2)
    out = out.reshape(problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
    lse = lse.reshape(shape).swapaxes(2, 3)
    lse = lse.reshape(problem.batch, problem.q_heads, problem.q_len)
    return out.astype(problem.dtype), lse


def merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The attention to all keys, from that to each part of them.

    A few hundred bytes a row, element by element and a sum over the parts: XLA makes one loop
    of it, together with the transposition to the caller's layout.

    Args:
      out: [parts, ..., head_dim].
      lse: f32[parts, ...].

    Returns:
      The same without the first axis.
    """
    if out.shape[0] == 1:
        return out[0], lse[0]
    top = lse.max(axis=0)
    # Where no part has seen a key, -inf less -inf would not be a number.
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0))
    total = weight.sum(axis=0)
    safe = jnp.where(total > 0, total, 1)
    return (out * weight[..., None]).sum(axis=0) / safe[..., None], top + jnp.log(safe)
