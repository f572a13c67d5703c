"""`attention` of the shapes that models ask for, to compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.shapes import Shape


def forward(options: dict[str, Any], q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    return attention(q, k, v, q_segment_ids=ids, **options)


def gradient_of(options: dict[str, Any], q: Any, k: Any, v: Any, ids: Any, d_out: Any) -> Any:
    """Forward and backward: both are in the program."""
    out, back = jax.vjp(lambda q, k, v: forward(options, q, k, v, ids), q, k, v)
    return out, back(d_out)


def gradient(
    shape: Shape, implementation: str = "hopper", dtype: Any = jnp.bfloat16
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that can be pickled, and what to compile it for."""
    q = jax.ShapeDtypeStruct((shape.batch, shape.q_len, shape.q_heads, shape.head_dim), dtype)
    kv = jax.ShapeDtypeStruct((shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim), dtype)
    ids = None
    if shape.segment_lens:
        ids = jax.ShapeDtypeStruct((shape.batch, shape.q_len), jnp.int32)
    options = shape.options | {"implementation": implementation}
    return partial(gradient_of, options), (q, kv, kv, ids, q)
