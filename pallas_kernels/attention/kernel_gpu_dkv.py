"""The gradients of keys and values on Hopper: the second of two backward kernels.

One thread block has a tile of keys of one key/value head, and streams the queries that see any
of them, of every query head that shares it, through rings of slots (`gpu_tiles`). So the sum
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
    q, do rings                     see `gpu_tiles`; with Q comes lse, with dO delta
    p ring                          likewise: consumer 0 is its producer, consumer 1 its consumer
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import gpu_tiles as gpu
from pallas_kernels.attention.gpu_tiles import CONSUMERS, Ref, Ring, Tile
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.attention.spans import Scalar, transposed


class Split(enum.Enum):
    """What the two consumers divide."""

    KEYS = "keys"
    GRADIENTS = "gradients"


@dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_kv: keys of one consumer, a multiple of 64.
      block_q: queries of a slot, a multiple of 64.
      slots: of Q, and as many of dO.
      split: what the consumers divide; a thread block has twice `block_kv` keys if it is keys.
      group_splits: thread blocks that divide the query heads of a group; divides their number.
    """

    block_kv: int
    block_q: int
    slots: int
    split: Split
    group_splits: int = 1

    @property
    def tile_kv(self) -> int:
        """Keys of a thread block."""
        return self.block_kv * self.tiles

    @property
    def tiles(self) -> int:
        """Of `block_kv` keys, in a thread block."""
        return CONSUMERS if self.split is Split.KEYS else 1


# P, from one consumer to the other.
_P_SLOTS = 2


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM of one thread block."""
    return gpu.scratch_bytes(_scratch(problem, config))


def registers(problem: Problem, config: Config) -> int:
    """Of each consumer's thread, for tiles at the peak: gradients, P, dP, and dS rounded.

    And tanh, where there is a soft cap, which only the first way has next to dP.
    """
    width, block_q = problem.head_dim, config.block_q
    columns = width + 2 * block_q + block_q // 2
    if config.split is Split.KEYS:
        columns += width + (block_q if problem.soft_cap is not None else 0)
    return config.block_kv * columns // gpu.WARPGROUP


def candidates(problem: Problem) -> Iterator[Config]:
    """Every configuration that fits SMEM and registers; the default is one of them."""
    for split in Split:
        for block_kv in (64, 128):
            for block_q in (64, 128):
                for slots in (2, 3, 4):
                    config = _with_group_splits(problem, Config(block_kv, block_q, slots, split))
                    if gpu.fits(smem_bytes(problem, config), registers(problem, config)):
                        yield config


def default(problem: Problem) -> Config:
    """What is taken where nobody has measured: two tiles of keys if they fit, the most slots."""
    fitting = [c for c in candidates(problem) if (c.block_kv, c.block_q) == (64, 64)]
    return max(fitting, key=lambda config: (config.tiles, config.slots))


def _with_group_splits(problem: Problem, config: Config) -> Config:
    """With the fewest that give each SM a thread block, if there are any."""
    blocks = problem.batch * problem.kv_heads * pl.cdiv(problem.kv_len, config.tile_kv)
    divisors = [n for n in range(1, problem.group + 1) if problem.group % n == 0]
    enough = next((n for n in divisors if n * blocks >= gpu.SMS), problem.group)
    return Config(config.block_kv, config.block_q, config.slots, config.split, enough)


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
        ids = gpu.segment_operands(segments.kv, segments.q, config.tile_kv, config.block_q)
    splits = config.group_splits
    gradient = jax.ShapeDtypeStruct(k.shape, k.dtype)
    if splits > 1:
        rows = kv_tiles * config.tile_kv
        part = (splits, problem.batch, rows, problem.kv_heads, problem.head_dim)
        gradient = jax.ShapeDtypeStruct(part, jnp.float32)
    gradients = plgpu.kernel(
        partial(_thread_block, problem, config),
        out_type=(gradient, gradient),
        scratch_types=_scratch(problem, config),
        # The last varies fastest: a head's tiles run together, and share its queries in L2.
        grid=(problem.batch, problem.kv_heads * splits, kv_tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=gpu.PARAMS,
        kernel_name="attention_key_gradients",
    )(q, k, v, d_out, *gpu.statistics(lse, delta, config.block_q), *ids)
    if splits > 1:
        gradients = (x.sum(axis=0)[:, : k.shape[1]].astype(k.dtype) for x in gradients)
    d_k, d_v = gradients
    return d_k, d_v


def _scratch(problem: Problem, config: Config) -> dict[str, Any]:
    width, slots, block_q = problem.head_dim, config.slots, config.block_q
    q_ids = plgpu.SMEM((slots, block_q), jnp.int32) if problem.segments else None
    p = p_ring = None
    if config.split is Split.GRADIENTS:
        p = gpu.tiles(problem, _P_SLOTS, config.block_kv, block_q)
        p_ring = gpu.ring_barriers(_P_SLOTS, consumers=1)
    return {
        "k": gpu.tiles(problem, config.tiles, config.block_kv, width),
        "v": gpu.tiles(problem, config.tiles, config.block_kv, width),
        "q": gpu.tiles(problem, slots, block_q, width),
        "d_out": gpu.tiles(problem, slots, block_q, width),
        "lse": plgpu.SMEM((slots, block_q), jnp.float32),
        "delta": plgpu.SMEM((slots, block_q), jnp.float32),
        "q_ids": q_ids,
        "p": p,
        "kv_full": plgpu.Barrier(num_arrivals=2, num_barriers=config.tiles),
        "q_ring": gpu.ring_barriers(slots, copies=3 if problem.segments else 2),
        "do_ring": gpu.ring_barriers(slots, copies=2),
        "p_ring": p_ring,
    }


@dataclass(frozen=True)
class _Smem:
    """`_scratch` as references."""

    k: Ref
    v: Ref
    q: Ref
    d_out: Ref
    lse: Ref
    delta: Ref
    q_ids: Ref
    p: Ref
    kv_full: Ref
    q_ring: Ring
    do_ring: Ring
    p_ring: Ring | None


@dataclass(frozen=True)
class _Work:
    """What one thread block does: a tile of the keys of a head, for some of its query heads.

    Attributes:
      batch, kv_head: of the keys.
      part: of the group, one of `config.group_splits`.
      tile: its columns are queries.
    """

    problem: Problem
    config: Config
    batch: jax.Array
    kv_head: jax.Array
    part: jax.Array
    tile: Tile

    @property
    def q_heads(self) -> int:
        """How many query heads, each of which takes `tile.steps` steps."""
        return self.problem.group // self.config.group_splits

    def q_head(self, index: Scalar) -> jax.Array:
        """The `index`-th of them."""
        first = self.kv_head * self.problem.group + self.part * self.q_heads
        return first + index

    @property
    def steps(self) -> Scalar:
        return self.q_heads * self.tile.steps


def _thread_block(problem: Problem, config: Config, *refs: Ref, **scratch: Any) -> None:
    q, k, v, d_out, lse, delta, *segments, d_k, d_v = refs
    kv_ids, q_ids, spans = segments or (None, None, None)
    p_ring = scratch.pop("p_ring")
    smem = _Smem(
        q_ring=Ring(config.slots, *scratch.pop("q_ring")),
        do_ring=Ring(config.slots, *scratch.pop("do_ring")),
        p_ring=None if p_ring is None else Ring(_P_SLOTS, *p_ring),
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
    work = _Work(problem, config, batch, lax.div(head, splits), lax.rem(head, splits), tile)
    me = lax.axis_index("warpgroup")
    consume = _consume_keys if config.split is Split.KEYS else _consume_gradients
    gpu.specialise(
        me,
        consumer=lambda: consume(work, smem, me, kv_ids, d_k, d_v),
        producer=lambda: _produce(work, smem, q, k, v, d_out, lse, delta, q_ids),
    )


# --- the producer -------------------------------------------------------------------------


def _produce(
    work: _Work,
    smem: _Smem,
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


# --- the consumers ------------------------------------------------------------------------


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


def _keys(work: _Work, tile: Scalar, kv_ids: Ref | None) -> _Keys:
    first = work.tile.first + tile * work.config.block_kv
    ids = None
    if kv_ids is not None:
        rows = pl.ds(first, work.config.block_kv)
        ids = plgpu.load(kv_ids.at[work.batch, rows], layout=gpu.BY_ROW, optimized=False)
    return _Keys(tile, first, ids)


def _weights(
    work: _Work,
    smem: _Smem,
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
    return gpu.masked(weights, 0.0, work.tile, keys.first, block, keys.ids, of_queries)


def _minus_delta(smem: _Smem, slot: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """What dPᵀ - delta starts from."""
    (delta,) = gpu.load(gpu.BY_COLUMN, smem.delta.at[slot])
    return -gpu.over_rows(shape, delta)


def _over_heads(work: _Work, one_head: Any, carry: Any) -> Any:
    """`one_head` of each query head's first step, in order."""
    return lax.fori_loop(
        0, work.q_heads, lambda index, carry: one_head(index * work.tile.steps, carry), carry
    )


def _consume_keys(
    work: _Work, smem: _Smem, me: jax.Array, kv_ids: Ref | None, d_k: Ref, d_v: Ref
) -> None:
    """Split.KEYS: this consumer's keys, both gradients."""
    config, tile = work.config, work.tile
    keys = _keys(work, me, kv_ids)
    plgpu.barrier_wait(smem.kv_full.at[me])
    zeros = gpu.zeros(config.block_kv, work.problem.head_dim)
    own = tile.seen_by(keys.first, config.block_kv)

    def one_head(first_step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
        return gpu.for_blocks(
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
    work: _Work,
    smem: _Smem,
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


def _pass_by(work: _Work, smem: _Smem, first_step: jax.Array, block: jax.Array) -> None:
    """A block that only the other consumer sees: the barriers of `_attend`, in its order."""
    step = first_step + block - work.tile.blocks.start
    smem.q_ring.await_full(step)
    smem.do_ring.await_full(step)
    smem.do_ring.release(step)
    smem.q_ring.release(step)


def _store(work: _Work, smem: Ref, keys: _Keys, gradient: jax.Array, to: Ref) -> None:
    """A gradient of a consumer's keys; through SMEM, where they were, if it is the last word."""
    rows = pl.ds(keys.first, work.config.block_kv)
    if work.config.group_splits > 1:
        part = to.at[work.part, work.batch, rows, work.kv_head]
        plgpu.store(part, gradient, optimized=False)
        return
    smem[...] = gradient.astype(work.problem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, to.at[work.batch, rows, work.kv_head])


# --- Split.GRADIENTS ----------------------------------------------------------------------


def _consume_gradients(
    work: _Work, smem: _Smem, me: jax.Array, kv_ids: Ref | None, d_k: Ref, d_v: Ref
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
            return gpu.for_blocks(work.tile, own, attend, _nothing, carry)

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
    work: _Work,
    smem: _Smem,
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

    scores = gpu.logits(problem, *gpu.accumulate(issue, gpu.zeros(config.block_kv, config.block_q)))
    weights = _weights(work, smem, keys, masked, block, slot, scores)
    smem.q_ring.release(step)
    handed_over = scores.through_cap(weights).astype(problem.dtype)
    # Neither is f32 for longer than need be.
    rounded, handed_over = lax.optimization_barrier((weights.astype(problem.dtype), handed_over))
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
    work: _Work, smem: _Smem, p_ring: Ring, step: jax.Array, gradient: jax.Array
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
