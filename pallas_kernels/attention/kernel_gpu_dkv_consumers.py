"""The consumers of the kernel of dK and dV, of the two ways to divide the work between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu
from pallas_kernels.attention.gpu_ring import Ring
from pallas_kernels.attention.gpu_tiles import for_blocks, where_seen
from pallas_kernels.attention.kernel_gpu_dkv_work import Smem, Work
from pallas_kernels.attention.spans import Scalar
from pallas_kernels.gpu import Ref


@dataclass(frozen=True)
class _Keys:
    """What a consumer knows of its keys.

    Attributes:
      tile: which of SMEM's they are in.
      first: of them.
      ids: of their segments, one a row, if there are segments.
    """

    tile: Scalar
    first: jax.Array
    ids: jax.Array | None


def _keys(work: Work, tile: Scalar, kv_ids: Ref | None) -> _Keys:
    first = work.tile.first + tile * work.config.block_kv
    ids = None
    if kv_ids is not None:
        rows = pl.ds(first, work.config.block_kv)
        ids = plgpu.load(kv_ids.at[work.batch, rows], layout=gpu.BY_ROW, optimized=False)
    return _Keys(tile, first, ids)


def _weights(
    work: Work,
    smem: Smem,
    keys: _Keys,
    masked: bool,
    block: jax.Array,
    slot: jax.Array,
    scores: gpu.Logits,
) -> jax.Array:
    """Pᵀ of Sᵀ."""
    masks_ids = masked and keys.ids is not None
    columns = (smem.lse.at[slot], smem.q_ids.at[slot]) if masks_ids else (smem.lse.at[slot],)
    exponents, *q_ids = gpu.load(gpu.BY_COLUMN, *columns)
    base = gpu.over_rows(scores.values.shape, exponents)
    weights = jnp.exp2(scores.values * scores.factor - base)
    if not masked:
        return weights
    of_queries = q_ids[0] if q_ids else None
    return where_seen(weights, 0.0, work.tile, keys.first, block, keys.ids, of_queries)


def _minus_delta(smem: Smem, slot: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """What dPᵀ - delta starts from."""
    (delta,) = gpu.load(gpu.BY_COLUMN, smem.delta.at[slot])
    return -gpu.over_rows(shape, delta)


def _over_heads(work: Work, one_head: Any, carry: Any) -> Any:
    """`one_head` of each query head's first step, in order."""
    return lax.fori_loop(
        0, work.q_heads, lambda index, carry: one_head(index * work.tile.steps, carry), carry
    )


def consume_keys(
    work: Work, smem: Smem, me: jax.Array, kv_ids: Ref | None, d_k: Ref, d_v: Ref
) -> None:
    """Split.KEYS: this consumer's keys, both gradients."""
    config, tile = work.config, work.tile
    keys = _keys(work, me, kv_ids)
    plgpu.barrier_wait(smem.kv_full.at[me])
    zeros = gpu.zeros(config.block_kv, work.problem.head_dim)
    own = tile.seen_by(keys.first, config.block_kv)

    def one_head(first_step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
        return for_blocks(
            tile,
            own,
            partial(_attend, work, smem, keys, first_step),
            partial(_pass_by, work, smem, first_step),
            carry,
        )

    of_keys, of_values = _over_heads(work, one_head, (zeros, zeros))
    _store(work, smem.k.at[me], keys, of_keys * work.problem.scale, d_k)
    _store(work, smem.v.at[me], keys, of_values, d_v)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _attend(
    work: Work,
    smem: Smem,
    keys: _Keys,
    first_step: jax.Array,
    masked: bool,
    block: jax.Array,
    carry: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Split.KEYS: one block of queries and of gradients of the output."""
    problem, config = work.problem, work.config
    step = first_step + block - work.tile.blocks.start
    slot = smem.q_ring.slot(step)
    q, d_out = smem.q.at[slot], smem.d_out.at[slot]
    mine = gpu.opaque(jnp.int32(keys.tile))
    shape = (config.block_kv, config.block_q)
    smem.q_ring.await_full(step)
    smem.do_ring.await_full(step)

    def issue(d_key: Ref, d_value: Ref, products: Ref, difference: Ref) -> None:
        plgpu.wgmma(products, smem.k.at[mine], q.T)
        plgpu.wgmma(difference, smem.v.at[mine], d_out.T)
        scores = gpu.logits(problem, plgpu.wgmma_accumulator_load(products, wait_n=1))
        weights = _weights(work, smem, keys, masked, block, slot, scores)
        plgpu.wgmma(d_value, weights.astype(problem.dtype), d_out)
        # Without waiting for dV.
        d_weights = plgpu.wgmma_accumulator_load(difference, wait_n=1)
        d_scores = scores.through_cap(weights) * d_weights
        plgpu.wgmma(d_key, d_scores.astype(problem.dtype), q)
        plgpu.wgmma_wait(1)
        smem.do_ring.release(step)

    minus_delta = _minus_delta(smem, slot, shape)
    d_key, d_value, *_ = gpu.accumulate(issue, *carry, gpu.zeros(*shape), minus_delta)
    smem.q_ring.release(step)
    return d_key, d_value


def _pass_by(work: Work, smem: Smem, first_step: jax.Array, block: jax.Array) -> None:
    """A block that only the other consumer sees: the barriers of `_attend`, in its order."""
    step = first_step + block - work.tile.blocks.start
    smem.q_ring.await_full(step)
    smem.do_ring.await_full(step)
    smem.do_ring.release(step)
    smem.q_ring.release(step)


def _store_rows(rows: Ref, values: jax.Array) -> None:
    """Stores rows of any width in HBM: jax 0.12 takes whole lines only, unless it is told not to
    optimize, and jax 0.11 knows no other way than that."""
    store = getattr(plgpu, "store", None)
    if store is None:
        rows[...] = values
    else:
        store(rows, values, optimized=False)


def _store(work: Work, smem: Ref, keys: _Keys, gradient: jax.Array, to: Ref) -> None:
    """A gradient of a consumer's keys; through SMEM, where they were, if it is the last word."""
    rows = pl.ds(keys.first, work.config.block_kv)
    if work.config.group_splits > 1:
        part = to.at[work.part, work.batch, rows, work.kv_head]
        _store_rows(part, gradient)
        return
    smem[...] = gradient.astype(work.problem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, to.at[work.batch, rows, work.kv_head])


# --- Split.GRADIENTS ----------------------------------------------------------------------


def consume_gradients(
    work: Work, smem: Smem, me: jax.Array, kv_ids: Ref | None, d_k: Ref, d_v: Ref
) -> None:
    """Split.GRADIENTS: dV in the first consumer, dK in the second."""
    p_ring = smem.p_ring
    assert p_ring is not None
    keys = _keys(work, 0, kv_ids)
    plgpu.barrier_wait(smem.kv_full.at[0])
    zeros = gpu.zeros(work.config.block_kv, work.problem.head_dim)
    own = work.tile.seen_by(keys.first, work.config.block_kv)

    def of_values() -> None:
        def one_head(first_step: jax.Array, carry: jax.Array) -> jax.Array:
            attend = partial(_attend_values, work, smem, p_ring, keys, first_step)
            return for_blocks(work.tile, own, attend, _nothing, carry)

        gradient = _over_heads(work, one_head, zeros)
        p_ring.drain(work.steps)
        # The second consumer may still read V's tile; K's is this one's alone.
        _store(work, smem.k.at[0], keys, gradient, d_v)

    def of_keys() -> None:
        def step(step: jax.Array, carry: jax.Array) -> jax.Array:
            return _attend_keys(work, smem, p_ring, step, carry)

        gradient = lax.fori_loop(0, work.steps, step, zeros)
        _store(work, smem.v.at[0], keys, gradient * work.problem.scale, d_k)

    lax.cond(me == 0, of_values, of_keys)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _nothing(block: jax.Array) -> None:
    """There are no blocks that only the other consumer sees: both have the same keys."""


def _attend_values(
    work: Work,
    smem: Smem,
    p_ring: Ring,
    keys: _Keys,
    first_step: jax.Array,
    masked: bool,
    block: jax.Array,
    gradient: jax.Array,
) -> jax.Array:
    """Split.GRADIENTS, first consumer: one block of queries."""
    problem, config = work.problem, work.config
    step = first_step + block - work.tile.blocks.start
    slot = smem.q_ring.slot(step)
    mine = gpu.opaque(jnp.int32(0))
    smem.q_ring.await_full(step)

    def issue(products: Ref) -> None:
        plgpu.wgmma(products, smem.k.at[mine], smem.q.at[slot].T)

    scores = gpu.logits(
        problem,
        *gpu.accumulate(issue, gpu.zeros(config.block_kv, config.block_q)),
    )
    weights = _weights(work, smem, keys, masked, block, slot, scores)
    smem.q_ring.release(step)
    # Neither is f32 for longer than need be.
    rounded = lax.optimization_barrier(weights.astype(problem.dtype))
    handed_over = scores.through_cap(rounded.astype(jnp.float32)).astype(problem.dtype)
    rounded, handed_over = lax.optimization_barrier((rounded, handed_over))
    p_ring.await_empty(step)
    smem.p[p_ring.slot(step)] = handed_over
    p_ring.hand_over(step)
    smem.do_ring.await_full(step)

    def mix(gradient: Ref) -> None:
        plgpu.wgmma(gradient, rounded, smem.d_out.at[slot])

    (gradient,) = gpu.accumulate(mix, gradient)
    smem.do_ring.release(step)
    return gradient


def _attend_keys(
    work: Work, smem: Smem, p_ring: Ring, step: jax.Array, gradient: jax.Array
) -> jax.Array:
    """Split.GRADIENTS, second consumer: one block of gradients of the output."""
    problem, config = work.problem, work.config
    slot = smem.q_ring.slot(step)
    mine = gpu.opaque(jnp.int32(0))
    smem.do_ring.await_full(step)

    def issue(difference: Ref) -> None:
        plgpu.wgmma(difference, smem.v.at[mine], smem.d_out.at[slot].T)

    shape = (config.block_kv, config.block_q)
    (difference,) = gpu.accumulate(issue, _minus_delta(smem, slot, shape))
    smem.do_ring.release(step)
    p_ring.await_full(step)
    weights = plgpu.load(smem.p.at[p_ring.slot(step)], layout=gpu.WGMMA).astype(jnp.float32)
    p_ring.release(step)
    rounded = (weights * difference).astype(problem.dtype)
    smem.q_ring.await_full(step)

    def mix(gradient: Ref) -> None:
        plgpu.wgmma(gradient, rounded, smem.q.at[slot])

    (gradient,) = gpu.accumulate(mix, gradient)
    smem.q_ring.release(step)
    return gradient
