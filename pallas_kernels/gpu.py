"""What the Hopper kernels share: SMEM, warpgroups, tiles in registers, which of them fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

type Ref = Any
"""A reference to SMEM, GMEM, an accumulator or barriers; jax has no public type for it."""

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

SMEM_CAPACITY = 227 * 1024
"""Bytes of one thread block, at most (CUDA C++ Programming Guide, compute capability 9.0)."""

SMS = 132
"""Of an H100 or H200."""

WARPGROUP = 128
"""Threads; an f32 tile in the accumulator's layout takes rows * columns / 128 registers of each."""

CONSUMER_REGISTERS = 240
"""Of a thread of a warpgroup that multiplies, after setmaxnreg."""

WGMMA = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)

# A row of an accumulator is in one quad of threads: to reduce it takes no SMEM.
PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    reduction_scratch_bytes=0,
)

# Addresses, bounds of loops and parities: what ptxas was seen to need besides the tiles.
_OTHER_REGISTERS = 24

# plgpu.SMEM is laid out from multiples of this.
_SMEM_ALIGNMENT = 1024


# --- configurations -----------------------------------------------------------------------


def fitting[Config](
    configs: Iterable[Config],
    smem_bytes: Callable[[Config], int],
    registers: Callable[[Config], int] = lambda _: 0,
    *,
    preferred: Callable[[Config], bool],
) -> list[Config]:
    """Those for which SMEM and a consumer's registers are there, the preferred ones first.

    Args:
      smem_bytes: of one thread block.
      registers: of a consumer's thread, for tiles, at the peak; none where that is not known.
    """
    found = [
        config
        for config in configs
        if smem_bytes(config) <= SMEM_CAPACITY
        and registers(config) <= CONSUMER_REGISTERS - _OTHER_REGISTERS
    ]
    return sorted(found, key=lambda config: not preferred(config))


# --- SMEM ---------------------------------------------------------------------------------


def swizzle_bytes(columns: int, dtype: str) -> int:
    """The widest swizzle that divides a row: 128, 64 or 32 bytes; 0 if none does."""
    row = columns * jnp.dtype(dtype).itemsize
    return next((width for width in (128, 64, 32) if row % width == 0), 0)


def smem_tiles(dtype: str, *shape: int) -> Any:
    """SMEM for tiles [..., rows, columns], laid out for TMA and wgmma."""
    swizzle = swizzle_bytes(shape[-1], dtype)
    columns = swizzle // jnp.dtype(dtype).itemsize
    # jax's own classes leave a method of their base abstract.
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=(tiling, swizzling))


def scratch_bytes(scratch: object) -> int:
    """Bytes of SMEM that Mosaic GPU sets aside for a tree of scratch types."""

    def one(leaf: Any) -> int:
        if isinstance(leaf, plgpu.Barrier):
            barriers = leaf.num_barriers
            return 8 * (barriers if isinstance(barriers, int) else math.prod(barriers))
        size = math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        return -(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT

    return sum(one(leaf) for leaf in jax.tree.leaves(scratch))


# --- warpgroups ---------------------------------------------------------------------------


def specialise(
    consumers: int,
    *,
    producer_registers: int,
    consumer: Callable[[jax.Array], None],
    producer: Callable[[], None],
) -> None:
    """Runs `consumer` of its number in the first warpgroups and `producer` in the last.

    Args:
      producer_registers: of a thread, after setmaxnreg; what consumers take above those that the
        thread block was launched with has to be left by it.
    """
    me = lax.axis_index("warpgroup")

    def consume() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consumer(me)

    def produce() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        producer()

    # Not two `pl.when`: what the second needs would be alive all through the first.
    lax.cond(me < consumers, consume, produce)


# --- registers ----------------------------------------------------------------------------


def opaque(index: jax.Array) -> jax.Array:
    """The same, so that the compiler does not see that it is the same at each step of a loop.

    Else it computes what depends on the index before the loop and keeps it: of a tile that
    never moves, two registers for the descriptor of every wgmma.
    """
    return lax.optimization_barrier(index)


def accumulate(issue: Callable[..., None], *initial: jax.Array) -> tuple[jax.Array, ...]:
    """What wgmmas add up to.

    Args:
      issue: takes an accumulator for each of `initial`, and multiplies into it. All that it
        issued is done when `accumulate` returns.
      initial: f32 [rows, columns] each, what they start from.
    """
    start = tuple(map(plgpu.WGMMAAccumulatorRef.init, initial))
    result: Any = pl.run_state(lambda accumulators: issue(*accumulators))(start)
    return result


def load(layout: Any, *slots: Ref) -> tuple[jax.Array, ...]:
    """What TMA put in slots of a ring, in registers, so that TMA may overwrite it."""
    values = tuple(plgpu.load(slot, layout=layout) for slot in slots)
    # TMA's writes are not ordered after the reads of threads without this fence.
    plgpu.commit_smem()
    return values


def zeros(rows: int, columns: int) -> jax.Array:
    """f32, in the accumulator's layout."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), WGMMA)


def per_row(rows: int, value: float) -> jax.Array:
    """f32, one a row of the accumulator's layout."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), BY_ROW)


def over_columns(shape: tuple[int, ...], vector: jax.Array) -> jax.Array:
    """One a row, [rows], to [rows, columns]."""
    return lax.broadcast_in_dim(vector, shape, [0])


def over_rows(shape: tuple[int, ...], vector: jax.Array) -> jax.Array:
    """One a column, [columns], to [rows, columns]."""
    return lax.broadcast_in_dim(vector, shape, [1])


# --- scores -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logits:
    """Scores as exponents of 2.

    Attributes:
      values: f32; times `factor` they are the exponents.
      factor: positive, so that the largest value has the largest exponent.
      tanh: f32, where there is a soft cap.
    """

    values: jax.Array
    factor: float
    tanh: jax.Array | None

    def through_cap(self, gradient: jax.Array) -> jax.Array:
        """The gradient of the scores, from that of the capped ones."""
        return gradient if self.tanh is None else gradient * (1.0 - self.tanh * self.tanh)


class Scaled(Protocol):
    """A problem, as far as scores go."""

    @property
    def scale(self) -> float: ...

    @property
    def soft_cap(self) -> float | None: ...


def logits(problem: Scaled, products: jax.Array) -> Logits:
    """Of the products of queries and keys: what softmax is taken of."""
    scale, soft_cap = problem.scale, problem.soft_cap
    if soft_cap is None:
        if scale > 0:
            return Logits(products, scale * LOG2_E, None)
        return Logits(products * (scale * LOG2_E), 1.0, None)
    # tanh(x) = 1 - 2 / (1 + e^2x). The tanh of the hardware is good to 2^-11: times a cap of 50
    # that would be 2 % of a weight. 1 / x is one instruction, which 2 / x is not.
    doubled = products * (2 * scale / soft_cap * LOG2_E)
    tanh = 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(doubled)))
    return Logits(tanh * (soft_cap * LOG2_E), 1.0, tanh)
