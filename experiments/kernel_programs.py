"""The kernels of the shapes that models ask for, as programs to compile.

A program is a function that can be pickled, and what to compile it for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention import problem as attention_problem
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.decode import api as decode_api
from pallas_kernels.decode import problem as decode_problem
from pallas_kernels.decode import shapes as decode_shapes
from pallas_kernels.streamed_matmul import shapes as product_shapes
from pallas_kernels.streamed_matmul.api import streamed_matmul

type Program = tuple[Callable[..., Any], tuple[Any, ...]]


def attention(options: dict[str, Any], q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    return attention_api.attention(q, k, v, q_segment_ids=ids, **options)


def gradient_of(options: dict[str, Any], q: Any, k: Any, v: Any, ids: Any, d_out: Any) -> Any:
    """Forward and backward: both are in the program."""
    out, back = jax.vjp(lambda q, k, v: attention(options, q, k, v, ids), q, k, v)
    return out, back(d_out)


def gradient(
    shape: attention_shapes.Shape, implementation: str = "hopper", dtype: Any = jnp.bfloat16
) -> Program:
    """`attention` and its gradient."""
    q = jax.ShapeDtypeStruct((shape.batch, shape.q_len, shape.q_heads, shape.head_dim), dtype)
    kv = jax.ShapeDtypeStruct((shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim), dtype)
    ids = None
    if shape.segment_lens:
        ids = jax.ShapeDtypeStruct((shape.batch, shape.q_len), jnp.int32)
    options = shape.options | {"implementation": implementation}
    return partial(gradient_of, options), (q, kv, kv, ids, q)


def attention_problem_of(shape: attention_shapes.Shape) -> attention_problem.Problem:
    """The problem that `attention` makes of a shape, where it is differentiated."""
    _, (q, k, v, *_) = gradient(shape)
    problem = attention_api.problem_of(q, k, v, **shape.options)
    return dataclasses.replace(problem, segments=bool(shape.segment_lens), lse=True)


def decoded(options: dict[str, Any], positional: Any, named: Any) -> jax.Array:
    return decode_api.decode_attention(*positional, **named, **options)


def decode(shape: decode_shapes.Shape, implementation: str = "hopper") -> Program:
    """`decode_attention`."""
    options = shape.options | {"implementation": implementation}
    return partial(decoded, options), shape.abstract()


def decode_problem_of(shape: decode_shapes.Shape) -> decode_problem.Problem:
    """The problem that `decode_attention` makes of a shape."""
    (q, k, v, lengths), named = shape.abstract()
    tables = named.get("block_tables")
    return decode_api.problem_of(q, k, v, lengths, tables, **shape.options)


def multiplied(x: Any, w: Any, w_scales: Any) -> jax.Array:
    return streamed_matmul(x, w, w_scales=w_scales, implementation="tpu")


def product(shape: product_shapes.Shape) -> Program:
    """`streamed_matmul`."""
    problem = shape.problem
    memory = jax.memory.Space.Host if problem.on_host else jax.memory.Space.Device
    x = jax.ShapeDtypeStruct((problem.m, problem.k), jnp.dtype(problem.dtype))
    w = ShapedArray((problem.k, problem.n), jnp.dtype(problem.w_dtype), memory_space=memory)
    scales = jax.ShapeDtypeStruct((problem.n,), jnp.float32) if problem.scaled else None
    return multiplied, (x, w, scales)
