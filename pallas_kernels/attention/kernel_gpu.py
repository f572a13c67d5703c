"""Attention forward on Hopper, after FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608).

One thread block computes the output of two tiles of queries of one head, one a consumer, and
streams the keys and values that either sees through a ring of slots (`gpu_ring`).

    producer     fill Q, then for each block K[i mod slots], V[i mod slots]
    consumer w   for each block i:
                   S = Q Kᵀ     issued, then    take_turn()      release K
                   softmax, P rounded; O scaled
                   await V                      take_turn()
                   O += P V     P from registers; meanwhile await the next K; release V

The two consumers take turns at the tensor cores. `turn` is one mbarrier where both arrive and
wait, so that the n-th turn of one is the n-th of the other; the second consumer takes one more
at the start, and the first one more at the end:

    consumer 0   S₀ ┊ softmax₀    ┊ PV₀ S₁ ┊ softmax₁    ┊ PV₁ ...
    consumer 1      ┊ S₀          ┊ softmax₀     ┊ PV₀ S₁      ┊ softmax₁ ...
    turn            1             2        3             4

Both take two turns for every block of the thread block, also for those that only the other
one sees (`pass_by`).

    barrier    arrivals a phase    phases          waited for by
    q_full[w]  1 (TMA)             1               consumer w
    k, v rings                     see `gpu_ring`
    turn       2 (consumers)       2 * blocks + 1  both consumers

Where the band cuts a block some scores are masked, and where it does not, none; each is a loop
of its own, and blocks outside of it are not fetched:

    pass_by | masked | full | masked | pass_by
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product, starmap
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
    segment_operands,
    specialise,
    where_seen,
)
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.gpu import Ref
from pallas_kernels.tuned import Tunable


@dataclass(frozen=True)
class Config:
    """How the forward kernel is cut.

    Attributes:
      block_q: queries of one consumer, a multiple of 64; a thread block has two.
      block_kv: keys of a slot, a multiple of 64.
      slots: of K, and as many of V.
    """

    block_q: int
    block_kv: int
    slots: int

    @property
    def tile_q(self) -> int:
        """Queries of a thread block."""
        return CONSUMERS * self.block_q


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM of one thread block."""
    return gpu.scratch_bytes(_scratch(problem, config))


def registers(problem: Problem, config: Config) -> int:
    """Of each consumer's thread, for tiles at the peak: O, the weights, and those rounded."""
    columns = problem.head_dim + config.block_kv + config.block_kv // 2
    return config.block_q * columns // gpu.WARPGROUP


def candidates(problem: Problem) -> list[Config]:
    """Every configuration that fits; first those of FlashAttention-3's tiles, as it compiles."""
    usual = (64, 128 if problem.head_dim <= 128 else 64)
    return gpu.fitting(
        starmap(Config, product((64, 128), (64, 128, 192, 256), (4, 3, 2))),
        partial(smem_bytes, problem),
        partial(registers, problem),
        preferred=lambda config: (config.block_q, config.block_kv) == usual,
    )


TUNABLE = Tunable("sm90", "attention_forward", by_queries, candidates)


def forward(
    problem: Problem,
    config: Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of arrays whose lengths are multiples of 8.

    Args:
      q: [batch, rows, q_heads, head_dim], rows at least `problem.q_len`.
      k, v: [batch, rows, kv_heads, head_dim], rows at least `problem.kv_len`; what is past that
        is not looked at, but has to be finite.
      segments: of the tokens, not padded.

    Returns:
      The output like `q`, and f32[batch, q_heads, q_len].
    """
    q_tiles = pl.cdiv(problem.q_len, config.tile_q)
    lse = jax.ShapeDtypeStruct(
        (problem.batch, problem.q_heads, q_tiles * config.tile_q), jnp.float32
    )
    ids = ()
    if segments is not None:
        ids = segment_operands(segments.q, segments.kv, config.tile_q, config.block_kv)
    out, lse = plgpu.kernel(
        partial(_thread_block, problem, config),
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), lse),
        scratch_types=_scratch(problem, config),
        # The last varies fastest: a head's tiles run together, and share its keys in L2.
        grid=(problem.batch, problem.q_heads, q_tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=gpu.PARAMS,
        kernel_name="attention_forward",
    )(q, k, v, *ids)
    return out, lse[:, :, : problem.q_len]


def _scratch(problem: Problem, config: Config) -> dict[str, Any]:
    width, slots = problem.head_dim, config.slots
    kv_ids = plgpu.SMEM((slots, config.block_kv), jnp.int32) if problem.segments else None
    return {
        "q": gpu.smem_tiles(problem.dtype, CONSUMERS, config.block_q, width),
        "k": gpu.smem_tiles(problem.dtype, slots, config.block_kv, width),
        "v": gpu.smem_tiles(problem.dtype, slots, config.block_kv, width),
        "kv_ids": kv_ids,
        "lse": plgpu.SMEM((CONSUMERS, config.block_q), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=CONSUMERS),
        "k_ring": ring_barriers(slots, copies=2 if problem.segments else 1),
        "v_ring": ring_barriers(slots),
        "turn": plgpu.Barrier(num_arrivals=CONSUMERS),
    }


@dataclass(frozen=True)
class _Smem:
    """`_scratch` as references."""

    q: Ref
    k: Ref
    v: Ref
    kv_ids: Ref
    lse: Ref
    q_full: Ref
    k_ring: Ring
    v_ring: Ring
    turn: Ref

    def take_turn(self) -> None:
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


@dataclass(frozen=True)
class _Work:
    """What one thread block does: a tile of the queries of a head."""

    problem: Problem
    config: Config
    batch: jax.Array
    head: jax.Array
    tile: Tile


def _thread_block(problem: Problem, config: Config, *refs: Ref, **scratch: Any) -> None:
    q, k, v, *segments, out, lse = refs
    q_ids, kv_ids, spans = segments or (None, None, None)
    rings = {name: Ring(config.slots, *scratch.pop(name)) for name in ("k_ring", "v_ring")}
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
        consumer=lambda me: _consume(work, smem, me, q_ids, out, lse),
        producer=lambda: _produce(work, smem, q, k, v, kv_ids),
    )


# --- the producer -------------------------------------------------------------------------


def _produce(work: _Work, smem: _Smem, q: Ref, k: Ref, v: Ref, kv_ids: Ref | None) -> None:
    config, tile = work.config, work.tile
    for consumer in range(CONSUMERS):
        rows = pl.ds(tile.first + consumer * config.block_q, config.block_q)
        plgpu.copy_gmem_to_smem(
            q.at[work.batch, rows, work.head], smem.q.at[consumer], smem.q_full.at[consumer]
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


# --- the consumers ------------------------------------------------------------------------

type _Carry = tuple[jax.Array, jax.Array, jax.Array]
"""O, unnormalised; the largest exponent of each query so far; its sum of powers of 2."""


def _consume(
    work: _Work, smem: _Smem, me: jax.Array, q_ids: Ref | None, out: Ref, lse: Ref
) -> None:
    config, tile = work.config, work.tile
    first_query = tile.first + me * config.block_q
    own_ids = None
    if q_ids is not None:
        rows = pl.ds(first_query, config.block_q)
        own_ids = plgpu.load(q_ids.at[work.batch, rows], layout=gpu.BY_ROW, optimized=False)
    plgpu.barrier_wait(smem.q_full.at[me])

    @pl.when(tile.steps > 0)
    def _() -> None:
        smem.k_ring.await_full(0)

    pl.when(me == 1)(smem.take_turn)
    carry: _Carry = (
        gpu.zeros(config.block_q, work.problem.head_dim),
        gpu.per_row(config.block_q, -jnp.inf),
        gpu.per_row(config.block_q, 0.0),
    )
    carry = for_blocks(
        tile,
        tile.seen_by(first_query, config.block_q),
        partial(_attend, work, smem, me, first_query, own_ids),
        partial(_pass_by, work, smem),
        carry,
    )
    pl.when(me == 0)(smem.take_turn)
    _store(work, smem, me, first_query, carry, out, lse)


def _attend(
    work: _Work,
    smem: _Smem,
    me: jax.Array,
    first_query: jax.Array,
    q_ids: jax.Array | None,
    masked: bool,
    block: jax.Array,
    carry: _Carry,
) -> _Carry:
    """One block of keys and values."""
    problem, config = work.problem, work.config
    shape = (config.block_q, config.block_kv)
    step = block - work.tile.blocks.start
    slot = smem.k_ring.slot(step)
    acc, largest, total = carry
    me = gpu.opaque(me)

    def issue(products: Ref) -> None:
        plgpu.wgmma(products, smem.q.at[me], smem.k.at[slot].T)
        smem.take_turn()

    scores = gpu.logits(problem, *gpu.accumulate(issue, gpu.zeros(*shape)))
    values = scores.values
    if masked:
        kv_ids = None if q_ids is None else gpu.load(gpu.BY_COLUMN, smem.kv_ids.at[slot])[0]
        values = where_seen(values, -jnp.inf, work.tile, first_query, block, q_ids, kv_ids)
    smem.k_ring.release(step)

    new_largest = jnp.maximum(largest, values.max(axis=1) * scores.factor)
    # Of a query that has seen no key yet: -inf less -inf would not be a number.
    base = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
    weights = jnp.exp2(values * scores.factor - gpu.over_columns(shape, base))
    shrink = jnp.exp2(largest - base)
    acc *= gpu.over_columns(acc.shape, shrink)
    total = total * shrink + weights.sum(axis=1)
    rounded = weights.astype(problem.dtype)
    # All of softmax comes before the turn is handed over.
    acc, total, new_largest, rounded = lax.optimization_barrier((acc, total, new_largest, rounded))
    plgpu.barrier_arrive(smem.turn)
    smem.v_ring.await_full(step)
    plgpu.barrier_wait(smem.turn)

    def mix(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, rounded, smem.v.at[slot])
        _await_next_k(work, smem, block)

    (acc,) = gpu.accumulate(mix, acc)
    smem.v_ring.release(step)
    return acc, new_largest, total


def _pass_by(work: _Work, smem: _Smem, block: jax.Array) -> None:
    """A block that only the other consumer sees: the barriers of `_attend`, in its order."""
    step = block - work.tile.blocks.start
    smem.take_turn()
    smem.k_ring.release(step)
    plgpu.barrier_arrive(smem.turn)
    smem.v_ring.await_full(step)
    plgpu.barrier_wait(smem.turn)
    _await_next_k(work, smem, block)
    smem.v_ring.release(step)


def _await_next_k(work: _Work, smem: _Smem, block: jax.Array) -> None:
    @pl.when(block + 1 < work.tile.blocks.stop)
    def _() -> None:
        smem.k_ring.await_full(block + 1 - work.tile.blocks.start)


def _store(
    work: _Work,
    smem: _Smem,
    me: jax.Array,
    first_query: jax.Array,
    carry: _Carry,
    out: Ref,
    lse: Ref,
) -> None:
    """Output and log-sum-exp, through SMEM: the output where this consumer's queries were."""
    acc, largest, total = carry
    some = total > 0
    inverse = jnp.where(some, 1.0 / total, 0.0)
    smem.q[me] = (acc * gpu.over_columns(acc.shape, inverse)).astype(work.problem.dtype)
    smem.lse[me] = jnp.where(some, largest * gpu.LN_2 + jnp.log(total), -jnp.inf)
    plgpu.commit_smem()
    rows = pl.ds(first_query, work.config.block_q)
    plgpu.copy_smem_to_gmem(smem.q.at[me], out.at[work.batch, rows, work.head])
    plgpu.copy_smem_to_gmem(smem.lse.at[me], lse.at[work.batch, work.head, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
