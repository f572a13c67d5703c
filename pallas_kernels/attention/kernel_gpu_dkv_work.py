"""What the kernel of dK and dV works on: its configuration, its SMEM, a thread block's share."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu
from pallas_kernels.attention.gpu_ring import Ring, ring_barriers
from pallas_kernels.attention.gpu_tiles import CONSUMERS, Tile
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.spans import Scalar
from pallas_kernels.gpu import Ref


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
P_SLOTS = 2


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM of one thread block."""
    return gpu.scratch_bytes(scratch_types(problem, config))


def registers(problem: Problem, config: Config) -> int:
    """Of each consumer's thread, for tiles at the peak: gradients, P, dP, and dS rounded.

    And tanh, where there is a soft cap, which only the first way has next to dP.
    """
    width, block_q = problem.head_dim, config.block_q
    columns = width + 2 * block_q + block_q // 2
    if config.split is Split.KEYS:
        columns += width + (block_q if problem.soft_cap is not None else 0)
    return config.block_kv * columns // gpu.WARPGROUP


def scratch_types(problem: Problem, config: Config) -> dict[str, Any]:
    """SMEM and barriers of one thread block, by the attributes of `Smem`."""
    width, slots, block_q = problem.head_dim, config.slots, config.block_q
    q_ids = plgpu.SMEM((slots, block_q), jnp.int32) if problem.segments else None
    p = p_ring = None
    if config.split is Split.GRADIENTS:
        p = gpu.smem_tiles(problem.dtype, P_SLOTS, config.block_kv, block_q)
        p_ring = ring_barriers(P_SLOTS, consumers=1)
    return {
        "k": gpu.smem_tiles(problem.dtype, config.tiles, config.block_kv, width),
        "v": gpu.smem_tiles(problem.dtype, config.tiles, config.block_kv, width),
        "q": gpu.smem_tiles(problem.dtype, slots, block_q, width),
        "d_out": gpu.smem_tiles(problem.dtype, slots, block_q, width),
        "lse": plgpu.SMEM((slots, block_q), jnp.float32),
        "delta": plgpu.SMEM((slots, block_q), jnp.float32),
        "q_ids": q_ids,
        "p": p,
        "kv_full": plgpu.Barrier(num_arrivals=2, num_barriers=config.tiles),
        "q_ring": ring_barriers(slots, copies=3 if problem.segments else 2),
        "do_ring": ring_barriers(slots, copies=2),
        "p_ring": p_ring,
    }


@dataclass(frozen=True)
class Smem:
    """`scratch_types` as references."""

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
class Work:
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
