"""The gradients of keys and values on Hopper: the second of two backward kernels.

One thread block has a tile of keys of one key/value head, and streams the queries that see any
of them, of every query head that shares it, through rings of slots (`gpu_ring`). So the sum
over the group is taken in its accumulators, in f32 and in a fixed order. Where that leaves too
few thread blocks (one key/value head for 71 query heads), `Config.group_splits` of them divide
the group; each writes f32 that XLA adds up.

Scores have a key a row: Sᵀ = K Qᵀ, so that Pᵀ and dSᵀ are the left operands of dV and dK, from
registers. The consumers divide the work in one of two ways:

    Split.KEYS       each has its own keys, and both of their gradients
      consumer w     Sᵀ = K Qᵀ, dPᵀ = V dOᵀ    both issued
                     Pᵀ = exp(Sᵀ - lse)        while dPᵀ is computed
                     dV += Pᵀ dO               issued
                     dSᵀ = Pᵀ (dPᵀ - delta)    while dV is computed
                     dK += dSᵀ Q               then release dO and Q

    Split.GRADIENTS  both have the same keys, and one gradient each
      consumer 0     Sᵀ = K Qᵀ
                     Pᵀ = exp(Sᵀ - lse)        rounded, handed over through SMEM
                     dV += Pᵀ dO               then release Q and dO
      consumer 1     dPᵀ = V dOᵀ               then release dO
                     dSᵀ = Pᵀ (dPᵀ - delta)
                     dK += dSᵀ Q               then release Q

The accumulators of 64 keys take head_dim registers of each thread the first way, of which there
are not enough for 256, and half of that the second way; either does four products a block.

    barrier     arrivals a phase    waited for by
    kv_full[w]  2 (TMA: K, V)       consumer w; under Split.GRADIENTS there is one, for both
    q, do rings                     see `gpu_ring`; with Q comes lse, with dO delta
    p ring                          likewise: consumer 0 is its producer, consumer 1 its consumer
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu
from pallas_kernels.attention.gpu_ring import Ring
from pallas_kernels.attention.gpu_tiles import (
    CONSUMERS,
    Tile,
    by_keys,
    row_statistics,
    segment_operands,
    specialise,
)
from pallas_kernels.attention.kernel_gpu_dkv_consumers import consume_gradients, consume_keys
from pallas_kernels.attention.kernel_gpu_dkv_work import (
    P_SLOTS,
    Config,
    Smem,
    Split,
    Work,
    registers,
    scratch_types,
    smem_bytes,
)
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.attention.spans import transposed
from pallas_kernels.gpu import Ref
from pallas_kernels.tuned import Tunable

__all__ = ["TUNABLE", "Config", "Split", "candidates", "key_gradients", "registers", "smem_bytes"]


def candidates(problem: Problem) -> list[Config]:
    """Every configuration that fits; first those of 64 keys and queries, by keys if they fit."""
    found = gpu.fitting(
        (
            Config(block_kv, block_q, slots, split)
            for split, block_kv, block_q, slots in product(Split, (64, 128), (64, 128), (4, 3, 2))
        ),
        partial(smem_bytes, problem),
        partial(registers, problem),
        preferred=lambda config: (config.block_kv, config.block_q) == (64, 64),
    )
    return [_with_group_splits(problem, config) for config in found]


def _with_group_splits(problem: Problem, config: Config) -> Config:
    """With the fewest that give each SM a thread block, if there are any."""
    blocks = problem.batch * problem.kv_heads * pl.cdiv(problem.kv_len, config.tile_kv)
    divisors = [n for n in range(1, problem.group + 1) if problem.group % n == 0]
    enough = next((n for n in divisors if n * blocks >= gpu.SMS), problem.group)
    return Config(config.block_kv, config.block_q, config.slots, config.split, enough)


TUNABLE = Tunable("sm90", "attention_key_gradients", by_keys, candidates, derived=("group_splits",))


def key_gradients(
    problem: Problem,
    config: Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dK and dV of arrays whose lengths are multiples of 8.

    Args:
      q, d_out: [batch, rows, q_heads, head_dim], rows at least `problem.q_len`; what is past
        that has to be finite.
      k, v: [batch, rows, kv_heads, head_dim], rows at least `problem.kv_len`.
      segments: of the tokens, not padded.
      lse, delta: f32[batch, q_heads, q_len], as `reference.backward` takes them.

    Returns:
      Like `k` and `v`; past `problem.kv_len` they are undefined.
    """
    kv_tiles = pl.cdiv(problem.kv_len, config.tile_kv)
    ids = ()
    if segments is not None:
        ids = segment_operands(segments.kv, segments.q, config.tile_kv, config.block_q)
    splits = config.group_splits
    gradient = jax.ShapeDtypeStruct(k.shape, k.dtype)
    if splits > 1:
        rows = kv_tiles * config.tile_kv
        part = (splits, problem.batch, rows, problem.kv_heads, problem.head_dim)
        gradient = jax.ShapeDtypeStruct(part, jnp.float32)
    gradients = plgpu.kernel(
        partial(_thread_block, problem, config),
        out_type=(gradient, gradient),
        scratch_types=scratch_types(problem, config),
        # The last varies fastest: a head's tiles run together, and share its queries in L2.
        grid=(problem.batch, problem.kv_heads * splits, kv_tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=gpu.PARAMS,
        kernel_name="attention_key_gradients",
    )(q, k, v, d_out, *row_statistics(lse, delta, config.block_q), *ids)
    if splits > 1:
        gradients = (x.sum(axis=0)[:, : k.shape[1]].astype(k.dtype) for x in gradients)
    d_k, d_v = gradients
    return d_k, d_v


def _thread_block(problem: Problem, config: Config, *refs: Ref, **scratch: Any) -> None:
    q, k, v, d_out, lse, delta, *segments, d_k, d_v = refs
    kv_ids, q_ids, spans = segments or (None, None, None)
    p_ring = scratch.pop("p_ring")
    smem = Smem(
        q_ring=Ring(config.slots, *scratch.pop("q_ring")),
        do_ring=Ring(config.slots, *scratch.pop("do_ring")),
        p_ring=None if p_ring is None else Ring(P_SLOTS, *p_ring),
        **scratch,
    )
    batch, head, index = (lax.axis_index(name) for name in ("batch", "head", "tile"))
    if problem.band.left is not None and problem.band.right is None:
        # Later keys are seen by more queries: those first, so that none is left for the end.
        index = pl.cdiv(problem.kv_len, config.tile_kv) - 1 - index
    tile = Tile.at(
        transposed(problem.band),
        problem.kv_len,
        problem.q_len,
        config.block_q,
        config.tile_kv,
        index,
        None if spans is None else spans.at[batch, index],
    )
    splits = jnp.int32(config.group_splits)
    work = Work(problem, config, batch, lax.div(head, splits), lax.rem(head, splits), tile)
    consume = consume_keys if config.split is Split.KEYS else consume_gradients
    specialise(
        consumer=lambda me: consume(work, smem, me, kv_ids, d_k, d_v),
        producer=lambda: _produce(work, smem, q, k, v, d_out, lse, delta, q_ids),
    )


# --- the producer -------------------------------------------------------------------------


def _produce(
    work: Work,
    smem: Smem,
    q: Ref,
    k: Ref,
    v: Ref,
    d_out: Ref,
    lse: Ref,
    delta: Ref,
    q_ids: Ref | None,
) -> None:
    config, tile, batch = work.config, work.tile, work.batch
    for i in range(config.tiles):
        rows = pl.ds(tile.first + i * config.block_kv, config.block_kv)
        for source, to in ((k, smem.k), (v, smem.v)):
            plgpu.copy_gmem_to_smem(
                source.at[batch, rows, work.kv_head], to.at[i], smem.kv_full.at[i]
            )

    @pl.loop(0, work.q_heads)
    def _(index: jax.Array) -> None:
        head = work.q_head(index)

        @pl.loop(0, tile.steps)
        def _(block: jax.Array) -> None:
            step = index * tile.steps + block
            rows = pl.ds((tile.blocks.start + block) * config.block_q, config.block_q)
            ids = [] if q_ids is None else [(q_ids.at[batch, rows], smem.q_ids)]
            smem.q_ring.fill(
                step, (q.at[batch, rows, head], smem.q), (lse.at[batch, head, rows], smem.lse), *ids
            )
            smem.do_ring.fill(
                step,
                (d_out.at[batch, rows, head], smem.d_out),
                (delta.at[batch, head, rows], smem.delta),
            )

    smem.q_ring.drain(work.steps)
    smem.do_ring.drain(work.steps)
