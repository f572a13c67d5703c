"""The gradient of the queries on Hopper: the first of two backward kernels.

Both recompute the weights P from the log-sum-exp (Dao, 2023, arXiv:2307.08691, section 2.3).
One kernel for all three gradients would take five products in place of these two's seven, but
its thread blocks add into one dQ: in f32 in memory, in whatever order they come.

One thread block has two tiles of queries of one head, one a consumer, and streams the keys and
values that either sees through rings of slots (`gpu_ring`).

    producer     fill Q, dO, then for each block K[i mod slots], V[i mod slots]
    consumer w   for each block i:
                   S = Q Kᵀ, dP = dO Vᵀ      both issued
                   P = exp(S - lse)          while dP is computed; then release V
                   dS = P (dP - delta)
                   dQ += dS K                dS from registers; then release K

K is needed from the first to the last of a block and V for one product, so K has more slots.

    barrier    arrivals a phase    phases    waited for by
    q_full[w]  2 (TMA: Q, dO)      1         consumer w
    k, v rings                     see `gpu_ring`
"""

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
from pallas_kernels.attention.gpu_ring import Ring, ring_barriers
from pallas_kernels.attention.gpu_tiles import (
    CONSUMERS,
    Tile,
    by_queries,
    for_blocks,
    row_statistics,
    segment_operands,
    specialise,
    where_seen,
)
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.gpu import Ref
from pallas_kernels.tuned import Tunable


@dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_q: queries of one consumer, a multiple of 64; a thread block has two.
      block_kv: keys of a slot, a multiple of 64.
      k_slots, v_slots: of the rings.
    """

    block_q: int
    block_kv: int
    k_slots: int
    v_slots: int

    @property
    def tile_q(self) -> int:
        """Queries of a thread block."""
        return CONSUMERS * self.block_q


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM of one thread block."""
    return gpu.scratch_bytes(_scratch(problem, config))


def registers(problem: Problem, config: Config) -> int:
    """Of each consumer's thread, for tiles at the peak: dQ, P, dP, and dS rounded."""
    columns = problem.head_dim + 2 * config.block_kv + config.block_kv // 2
    return config.block_q * columns // gpu.WARPGROUP


def candidates(problem: Problem) -> list[Config]:
    """Every configuration that fits; first those of 64 keys, with the most slots."""
    slots = ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2), (2, 1))
    return gpu.fitting(
        (Config(64, block_kv, *each) for block_kv in (64, 128) for each in slots),
        partial(smem_bytes, problem),
        partial(registers, problem),
        # Of 128 keys scores and their gradients leave no registers for a mask.
        preferred=lambda config: config.block_kv == 64,
    )


TUNABLE = Tunable("sm90", "attention_query_gradient", by_queries, candidates)


def query_gradient(
    problem: Problem,
    config: Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> jax.Array:
    """dQ of arrays whose lengths are multiples of 8.

    Args:
      q, d_out: [batch, rows, q_heads, head_dim], rows at least `problem.q_len`.
      k, v: [batch, rows, kv_heads, head_dim], rows at least `problem.kv_len`; what is past that
        is not looked at, but has to be finite.
      segments: of the tokens, not padded.
      lse, delta: f32[batch, q_heads, q_len], as `reference.backward` takes them.

    Returns:
      Like `q`.
    """
    q_tiles = pl.cdiv(problem.q_len, config.tile_q)
    ids = ()
    if segments is not None:
        ids = segment_operands(segments.q, segments.kv, config.tile_q, config.block_kv)
    statistics = row_statistics(lse, delta, config.tile_q)
    return plgpu.kernel(
        partial(_thread_block, problem, config),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_scratch(problem, config),
        # The last varies fastest: a head's tiles run together, and share its keys in L2.
        grid=(problem.batch, problem.q_heads, q_tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=gpu.PARAMS,
        kernel_name="attention_query_gradient",
    )(q, k, v, d_out, *statistics, *ids)


def _scratch(problem: Problem, config: Config) -> dict[str, Any]:
    width = problem.head_dim
    kv_ids = None
    if problem.segments:
        kv_ids = plgpu.SMEM((config.k_slots, config.block_kv), jnp.int32)
    return {
        "q": gpu.smem_tiles(problem.dtype, CONSUMERS, config.block_q, width),
        "d_out": gpu.smem_tiles(problem.dtype, CONSUMERS, config.block_q, width),
        "k": gpu.smem_tiles(problem.dtype, config.k_slots, config.block_kv, width),
        "v": gpu.smem_tiles(problem.dtype, config.v_slots, config.block_kv, width),
        "kv_ids": kv_ids,
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
        "k_ring": ring_barriers(config.k_slots, copies=2 if problem.segments else 1),
        "v_ring": ring_barriers(config.v_slots),
    }


@dataclass(frozen=True)
class _Smem:
    """`_scratch` as references."""

    q: Ref
    d_out: Ref
    k: Ref
    v: Ref
    kv_ids: Ref
    q_full: Ref
    k_ring: Ring
    v_ring: Ring


@dataclass(frozen=True)
class _Work:
    """What one thread block does: a tile of the queries of a head."""

    problem: Problem
    config: Config
    batch: jax.Array
    head: jax.Array
    tile: Tile


def _thread_block(problem: Problem, config: Config, *refs: Ref, **scratch: Any) -> None:
    q, k, v, d_out, lse, delta, *segments, d_q = refs
    q_ids, kv_ids, spans = segments or (None, None, None)
    rings = {
        "k_ring": Ring(config.k_slots, *scratch.pop("k_ring")),
        "v_ring": Ring(config.v_slots, *scratch.pop("v_ring")),
    }
    smem = _Smem(**scratch, **rings)
    batch, head, index = (lax.axis_index(name) for name in ("batch", "head", "tile"))
    if problem.band.right is not None:
        # Later queries see more keys: those first, so that none of them is left for the end.
        index = pl.cdiv(problem.q_len, config.tile_q) - 1 - index
    tile = Tile.at(
        problem.band,
        problem.q_len,
        problem.kv_len,
        config.block_kv,
        config.tile_q,
        index,
        None if spans is None else spans.at[batch, index],
    )
    work = _Work(problem, config, batch, head, tile)
    specialise(
        consumer=lambda me: _consume(work, smem, me, lse, delta, q_ids, d_q),
        producer=lambda: _produce(work, smem, q, k, v, d_out, kv_ids),
    )


def _produce(
    work: _Work, smem: _Smem, q: Ref, k: Ref, v: Ref, d_out: Ref, kv_ids: Ref | None
) -> None:
    config, tile = work.config, work.tile
    for consumer in range(CONSUMERS):
        rows = pl.ds(tile.first + consumer * config.block_q, config.block_q)
        for source, to in ((q, smem.q), (d_out, smem.d_out)):
            plgpu.copy_gmem_to_smem(
                source.at[work.batch, rows, work.head], to.at[consumer], smem.q_full.at[consumer]
            )
    kv_head = lax.div(work.head, jnp.int32(work.problem.group))

    @pl.loop(0, tile.steps)
    def _(step: jax.Array) -> None:
        rows = pl.ds((tile.blocks.start + step) * config.block_kv, config.block_kv)
        ids = [] if kv_ids is None else [(kv_ids.at[work.batch, rows], smem.kv_ids)]
        smem.k_ring.fill(step, (k.at[work.batch, rows, kv_head], smem.k), *ids)
        smem.v_ring.fill(step, (v.at[work.batch, rows, kv_head], smem.v))

    smem.k_ring.drain(tile.steps)
    smem.v_ring.drain(tile.steps)


@dataclass(frozen=True)
class _Queries:
    """What a consumer knows of its queries: one a row each.

    Attributes:
      first: of them.
      exponents: their log-sum-exp, as an exponent of 2.
      delta: f32.
      ids: of their segments, if there are segments.
    """

    first: jax.Array
    exponents: jax.Array
    delta: jax.Array
    ids: jax.Array | None


def _consume(
    work: _Work, smem: _Smem, me: jax.Array, lse: Ref, delta: Ref, q_ids: Ref | None, d_q: Ref
) -> None:
    config, tile = work.config, work.tile
    first = tile.first + me * config.block_q
    rows = pl.ds(first, config.block_q)
    load = partial(plgpu.load, layout=gpu.BY_ROW, optimized=False)
    queries = _Queries(
        first,
        load(lse.at[work.batch, work.head, rows]),
        load(delta.at[work.batch, work.head, rows]),
        None if q_ids is None else load(q_ids.at[work.batch, rows]),
    )
    plgpu.barrier_wait(smem.q_full.at[me])
    gradient = for_blocks(
        tile,
        tile.seen_by(first, config.block_q),
        partial(_attend, work, smem, me, queries),
        partial(_pass_by, work, smem),
        gpu.zeros(config.block_q, work.problem.head_dim),
    )
    smem.q[me] = (gradient * work.problem.scale).astype(work.problem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.q.at[me], d_q.at[work.batch, rows, work.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _attend(
    work: _Work,
    smem: _Smem,
    me: jax.Array,
    queries: _Queries,
    masked: bool,
    block: jax.Array,
    gradient: jax.Array,
) -> jax.Array:
    """One block of keys and values."""
    problem, config = work.problem, work.config
    shape = (config.block_q, config.block_kv)
    step = block - work.tile.blocks.start
    k, v = smem.k.at[smem.k_ring.slot(step)], smem.v.at[gpu.opaque(smem.v_ring.slot(step))]

    me = gpu.opaque(me)
    smem.k_ring.await_full(step)
    smem.v_ring.await_full(step)

    def issue(d_query: Ref, products: Ref, difference: Ref) -> None:
        plgpu.wgmma(products, smem.q.at[me], k.T)
        plgpu.wgmma(difference, smem.d_out.at[me], v.T)
        scores = gpu.logits(problem, plgpu.wgmma_accumulator_load(products, wait_n=1))
        base = gpu.over_columns(shape, queries.exponents)
        weights = jnp.exp2(scores.values * scores.factor - base)
        if masked:
            kv_ids = None
            if queries.ids is not None:
                (kv_ids,) = gpu.load(gpu.BY_COLUMN, smem.kv_ids.at[smem.k_ring.slot(step)])
            weights = where_seen(weights, 0.0, work.tile, queries.first, block, queries.ids, kv_ids)
        d_scores = scores.through_cap(weights) * difference[...]
        smem.v_ring.release(step)
        plgpu.wgmma(d_query, d_scores.astype(problem.dtype), k)

    # dP - delta: the product starts from - delta.
    difference = -gpu.over_columns(shape, queries.delta)
    gradient, *_ = gpu.accumulate(issue, gradient, gpu.zeros(*shape), difference)
    smem.k_ring.release(step)
    return gradient


def _pass_by(work: _Work, smem: _Smem, block: jax.Array) -> None:
    """A block that only the other consumer sees: the barriers of `_attend`, in its order."""
    step = block - work.tile.blocks.start
    smem.k_ring.await_full(step)
    smem.v_ring.await_full(step)
    smem.v_ring.release(step)
    smem.k_ring.release(step)
