"""The kernels on the accelerator that is here, at the shapes of models.

What a kernel computes differs from the reference in float32 by at most twice what the reference in
the kernel's own types does, and a little. The reference has its scores in memory, so it is asked
for the first and the last sequence, and of these for the first and the last head of keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.attention.problem import Problem as AttentionProblem
from pallas_kernels.attention.problem import Segments
from pallas_kernels.decode import api as decode_api
from pallas_kernels.decode import reference as decode_reference
from pallas_kernels.decode import shapes as decode_shapes
from pallas_kernels.decode.problem import Cache
from pallas_kernels.decode.problem import Problem as DecodeProblem
from pallas_kernels.streamed_matmul import api as streamed_api
from pallas_kernels.streamed_matmul import shapes as streamed_shapes
from pallas_kernels.targets import current_target

# Of what both sides round to zero.
ATOL = 1e-5


def kernels(implementations: dict[str, Any]) -> list[str]:
    """All but the reference."""
    return [name for name in implementations if name != "xla"]


def skip_refused(implementation: Any, problem: Any) -> None:
    """Skips what a kernel does not take here, with its reason."""
    refused = implementation.refusal(problem, current_target())
    if refused is not None:
        pytest.skip(refused)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)


def compare(name: str, found: Any, near: Any, exact: Any) -> None:
    """The rule."""
    found, near, exact = (np.asarray(x, np.float64) for x in (found, near, exact))
    nothing = np.isneginf(exact)
    np.testing.assert_array_equal(np.isneginf(found), nothing, name)
    found, near, exact = (np.where(nothing, 0, x) for x in (found, near, exact))
    assert np.isfinite(found).all(), f"{name} has what is not finite"
    off, allowed = np.abs(found - exact).max(), 2 * np.abs(near - exact).max() + ATOL
    assert off <= allowed, f"{name} is {off:.3g} off; allowed are {allowed:.3g}"


def ends(count: int) -> tuple[int, ...]:
    return (0, count - 1) if count > 1 else (0,)


# --- attention ----------------------------------------------------------------------------


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", kernels(attention_api.IMPLEMENTATIONS))
@pytest.mark.parametrize("shape", attention_shapes.SHAPES, ids=lambda shape: shape.name)
def test_attention_and_its_gradients(shape: attention_shapes.Shape, name: str) -> None:
    q, d_out = (
        normal(n, (shape.batch, shape.q_len, shape.q_heads, shape.head_dim)) for n in (0, 1)
    )
    k, v = (normal(n, (shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim)) for n in (2, 3))
    problem = attention_api.problem_of(q, k, v, **shape.options)
    problem = dataclasses.replace(problem, segments=bool(shape.segment_lens), lse=True)
    skip_refused(attention_api.IMPLEMENTATIONS[name], problem)
    ids = None
    if shape.segment_lens:
        numbers = np.repeat(np.arange(len(shape.segment_lens)), shape.segment_lens)
        ids = jnp.asarray(np.tile(numbers, (shape.batch, 1)), jnp.int32)

    @jax.jit
    def results(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple[Any, ...]:
        def attend(*qkv: jax.Array) -> Any:
            options = {**shape.options, "q_segment_ids": ids, "return_lse": True}
            return attention_api.attention(*qkv, **options, implementation=name)

        (out, lse), pull = jax.vjp(attend, q, k, v)
        return out, lse, *pull((d_out, jnp.zeros_like(lse)))

    found = results(q, k, v, d_out)
    for row in ends(shape.batch):
        for head in ends(shape.kv_heads):
            group = slice(head * problem.group, (head + 1) * problem.group)
            given = (q[row, :, group], k[row, :, head], v[row, :, head], d_out[row, :, group])
            segments = None if ids is None else Segments(ids[:1], ids[:1])
            near = of_one_head(problem, *given, segments)
            with jax.default_matmul_precision("highest"):
                q32, k32, v32, d_out32 = (x.astype(jnp.float32) for x in given)
                exact = of_one_head(problem, q32, k32, v32, d_out32, segments)
            out, lse, d_q, d_k, d_v = found
            mine = (
                out[row, :, group],
                lse[row, group],
                d_q[row, :, group],
                d_k[row, :, head],
                d_v[row, :, head],
            )
            names = ("out", "lse", "d_q", "d_k", "d_v")
            for what, *three in zip(names, mine, near, exact, strict=True):
                compare(f"{what} of sequence {row}, head {head}", *three)


def of_one_head(
    problem: AttentionProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, ...]:
    """By the reference, one query head after the other.

    Args:
      q, d_out: [q_len, group, head_dim].
      k, v: [kv_len, head_dim], of the head that they share.

    Returns:
      Output, log-sum-exp [group, q_len], and the gradients of q, k and v.
    """
    one = dataclasses.replace(problem, batch=1, q_heads=1, kv_heads=1, dtype=q.dtype.name)
    target = current_target()
    keys, values = k[None, :, None], v[None, :, None]

    @jax.jit
    def each(queries: jax.Array, gradients: jax.Array) -> Any:
        def of(given: Any) -> Any:
            q, d_out = (x[None, :, None] for x in given)
            out, lse = attention_reference.attend(one, q, keys, values, segments)
            wide = (x.astype(jnp.float32) for x in (out, d_out))
            delta = jnp.einsum("bthd,bthd->bht", *wide)
            backward = (q, keys, values, segments, lse, delta, d_out)
            d_q, d_k, d_v = attention_reference.backward(one, target, *backward)
            sums = (x[0, :, 0].astype(jnp.float32) for x in (d_k, d_v))
            return out[0, :, 0], lse[0, 0], d_q[0, :, 0], *sums

        return jax.lax.map(of, (queries, gradients))

    out, lse, d_q, d_k, d_v = each(q.swapaxes(0, 1), d_out.swapaxes(0, 1))
    return out.swapaxes(0, 1), lse, d_q.swapaxes(0, 1), d_k.sum(axis=0), d_v.sum(axis=0)


# --- decode attention ---------------------------------------------------------------------


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", kernels(decode_api.IMPLEMENTATIONS))
@pytest.mark.parametrize("shape", decode_shapes.SHAPES, ids=lambda shape: shape.name)
def test_decode_attention(shape: decode_shapes.Shape, name: str) -> None:
    q, cache = drawn(shape)
    arrays = (q, cache.k, cache.v, cache.lengths)
    asked = {k: shape.options.get(k) for k in ("window", "scale", "soft_cap")}
    problem = decode_api.problem_of(*arrays, cache.block_tables, **asked)
    skip_refused(decode_api.IMPLEMENTATIONS[name], problem)
    options = {
        **shape.options,
        "block_tables": cache.block_tables,
        "k_scales": cache.k_scales,
        "v_scales": cache.v_scales,
        "implementation": name,
        "return_lse": True,
    }
    out, lse = jax.jit(lambda *x: decode_api.decode_attention(*x, **options))(*arrays)
    for row in ends(shape.batch):
        near = of_one_sequence(problem, q, cache, row)
        with jax.default_matmul_precision("highest"):
            exact = of_one_sequence(problem, q.astype(jnp.float32), cache, row)
        compare(f"out of sequence {row}", out[row], near[0], exact[0])
        compare(f"lse of sequence {row}", lse[row], near[1], exact[1])


def drawn(shape: decode_shapes.Shape) -> tuple[jax.Array, Cache]:
    """Queries, and a cache of sequences of many lengths, their pages shuffled."""
    (q, k, _, _), arrays = shape.abstract()
    random = np.random.default_rng(0)

    def pool(seed: int) -> jax.Array:
        if shape.kv_dtype != "int8":
            return normal(seed, k.shape, k.dtype)
        return jax.random.randint(jax.random.key(seed), k.shape, -127, 128, jnp.int8)

    def scales() -> jax.Array | None:
        if "k_scales" not in arrays:
            return None
        drawn = random.uniform(0.5, 1.5, arrays["k_scales"].shape)
        return jnp.asarray(drawn / (64 if shape.kv_dtype == "int8" else 1), jnp.float32)

    lengths = random.integers(shape.context // 2, shape.context + 1, shape.batch)
    lengths[0] = shape.context
    tables = None
    if "block_tables" in arrays:
        pages = random.permutation(k.shape[0]).reshape(arrays["block_tables"].shape)
        tables = jnp.asarray(pages, jnp.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    return normal(0, q.shape), Cache(pool(1), pool(2), lengths, tables, scales(), scales())


def of_one_sequence(problem: DecodeProblem, q: jax.Array, cache: Cache, row: int) -> Any:
    """Output and log-sum-exp of a sequence, by the reference."""
    this = slice(row, row + 1)
    one = dataclasses.replace(problem, batch=1, dtype=q.dtype.name)
    lengths = cache.lengths[this]
    if cache.block_tables is not None:
        part = dataclasses.replace(cache, lengths=lengths, block_tables=cache.block_tables[this])
    else:
        one = dataclasses.replace(one, num_pages=1)
        part = jax.tree.map(lambda x: x[this], cache)
    out, lse = jax.jit(decode_reference.attend, static_argnums=0)(one, q[this], part)
    return out[0], lse[0]


# --- streamed products --------------------------------------------------------------------


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", kernels(streamed_api.IMPLEMENTATIONS))
@pytest.mark.parametrize("shape", streamed_shapes.SHAPES, ids=lambda shape: shape.name)
def test_streamed_product(shape: streamed_shapes.Shape, name: str) -> None:
    skip_refused(streamed_api.IMPLEMENTATIONS[name], shape.problem)
    x, scales = normal(0, (shape.m, shape.k)), None
    if shape.w_dtype == "int8":
        w = jax.random.randint(jax.random.key(1), (shape.k, shape.n), -127, 128, jnp.int8)
        scales = jax.random.uniform(jax.random.key(2), (shape.n,), jnp.float32) / 64
    else:
        w = normal(1, (shape.k, shape.n))
    place = "pinned_host" if shape.on_host else "device"
    there = jax.device_put(w, SingleDeviceSharding(jax.devices()[0], memory_kind=place))

    @jax.jit
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return streamed_api.streamed_matmul(x, w, w_scales=scales, implementation=name)

    found = product(x, there)
    rows = jnp.array(ends(shape.m))
    factors = 1 if scales is None else scales
    near = (jnp.dot(x[rows], w.astype(x.dtype)) * factors).astype(x.dtype)
    wide = (a.astype(jnp.float32) for a in (x[rows], w))
    exact = jnp.dot(*wide, precision="highest") * factors
    compare("out", found[rows], near, exact)
