"""`decode_attention_in_parts`: attention to keys and values that lie in several arrays.

    earlier parts    all their tokens are seen by every query     ┐
    the last part    has the queries' own tokens, causal          ┴─► merge by log-sum-exp

A part that is in slower memory, an argument on the host, is needed by its own kernel only, so
that a plan brings it while the kernels before it run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode.api import decode_attention, problem_of
from pallas_kernels.decode.layout import merge, queries_by_kv_head, results_by_query
from pallas_kernels.decode.problem import Cache
from pallas_kernels.errors import KernelArgumentError

_OP = "decode_attention_in_parts"


def decode_attention_in_parts(
    q: jax.Array,
    parts: Sequence[Cache],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of the last tokens of each sequence to a cache that lies in several arrays.

    Each part is a call of `decode_attention`; what they find is merged in float32 by the
    log-sum-exp of the scores (Dao et al., 2023, Flash-Decoding; Milakov & Gimelshein, 2018,
    arXiv:1805.02867). Of one part it is that call.

    Args:
      q: [batch, q_len, q_heads, head_dim], as of `decode_attention`.
      parts: one or more; in the last one are the tokens of `q`, at its end. Of the others every
        query sees all tokens, so these may lie in any order and anywhere before it. Numbers and
        sizes of pages may be a part's own. A length of 0 is a sequence that has nothing there.
      scale, soft_cap, implementation: as of `decode_attention`, for each part.

    Returns:
      Like `q`. Where there are several parts, each one's result was rounded to the type of `q`.

    Raises:
      KernelArgumentError: of no parts; and as `decode_attention`, as for `NotSupportedError` and
        `NotDifferentiableError`.
    """
    if not parts:
        hint = "The last one has the tokens of q."
        raise KernelArgumentError(_OP, "parts", "empty", "one part or more", hint)
    options = {"scale": scale, "soft_cap": soft_cap, "implementation": implementation}
    *earlier, last = parts
    found = [*(_seen_whole(q, part, options) for part in earlier), _attend(q, last, options)]
    if not earlier:
        return found[0][0]
    outs, sums = (jnp.stack(x) for x in zip(*found, strict=True))
    merged, _ = merge(outs.astype(jnp.float32), sums.swapaxes(2, 3))
    return merged.astype(q.dtype)


def _seen_whole(q: jax.Array, part: Cache, options: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Attention to all tokens of a part: one query token, whose heads are those of all."""
    problem = problem_of(q, part.k, part.v, part.lengths, part.block_tables)
    folded = queries_by_kv_head(problem, q)
    single = folded.reshape(problem.batch, 1, -1, problem.head_dim)
    out, lse = _attend(single, part, options)
    return results_by_query(problem, out.reshape(folded.shape), lse.reshape(folded.shape[:-1]))


def _attend(q: jax.Array, part: Cache, options: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    return decode_attention(
        q, part.k, part.v, part.lengths, block_tables=part.block_tables, k_scales=part.k_scales,
        v_scales=part.v_scales, return_lse=True, **options,
    )  # fmt: skip
