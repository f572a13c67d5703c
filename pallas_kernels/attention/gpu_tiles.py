"""What the Hopper kernels share: a thread block's tile, its warpgroups, SMEM, scores and masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.attention.spans import Scalar, Span, seen, segment_spans, span

type Ref = Any
"""A reference to SMEM, GMEM, an accumulator or barriers; jax has no public type for it."""

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

CONSUMERS = 2
# Of a thread, after setmaxnreg: 128 * (2 * 240 + 24) registers are what the three warpgroups are
# launched with, 168 each, the most that leave one block in the 65536 of an SM.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24

SMEM_CAPACITY = 227 * 1024
"""Bytes of one thread block, at most (CUDA C++ Programming Guide, compute capability 9.0)."""

SMS = 132
"""Of an H100 or H200."""

WARPGROUP = 128
"""Threads; an f32 tile in the accumulator's layout takes rows * columns / 128 registers of each."""

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


# --- SMEM ---------------------------------------------------------------------------------


def swizzle_bytes(head_dim: int, dtype: str) -> int:
    """The widest swizzle that divides a row of a head: 128, 64 or 32 bytes; 0 if none does."""
    row = head_dim * jnp.dtype(dtype).itemsize
    return next((width for width in (128, 64, 32) if row % width == 0), 0)


def tiles(problem: Problem, *shape: int) -> Any:
    """SMEM for tiles [..., rows, columns] of the inputs' type, laid out for TMA and wgmma."""
    dtype = jnp.dtype(problem.dtype)
    swizzle = swizzle_bytes(shape[-1], problem.dtype)
    columns = swizzle // dtype.itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))


def scratch_bytes(scratch: object) -> int:
    """Bytes of SMEM that Mosaic GPU sets aside for a tree of scratch types."""

    def one(leaf: Any) -> int:
        if isinstance(leaf, plgpu.Barrier):
            barriers = leaf.num_barriers
            return 8 * (barriers if isinstance(barriers, int) else math.prod(barriers))
        size = math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        return -(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT

    return sum(one(leaf) for leaf in jax.tree.leaves(scratch))


# --- work ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """The rows of one thread block, and the blocks of columns that it streams.

    Rows are queries and columns keys, or the other way round.

    Attributes:
      band: which columns a row sees.
      total_rows, columns: that there are.
      block: columns of a block.
      first: row.
      blocks: that any row sees.
      of_segments: those with tokens of the rows' segments, if there are segments.
    """

    band: Band
    total_rows: int
    columns: int
    block: int
    first: jax.Array
    blocks: Span
    of_segments: Span | None

    @classmethod
    def at(
        cls,
        band: Band,
        total_rows: int,
        columns: int,
        block: int,
        rows: int,
        index: jax.Array,
        segment_spans: Ref | None,
    ) -> Tile:
        """The `index`-th of `rows` rows; `segment_spans` is its row of that, in GMEM."""
        first = index * rows
        blocks = span(band, first, rows, total_rows, block, columns)
        of_segments = None
        if segment_spans is not None:
            of_segments = Span(*(segment_spans[i] for i in range(4)))
            blocks = blocks.meet(of_segments)
        return cls(band, total_rows, columns, block, first, blocks, of_segments)

    @property
    def steps(self) -> Scalar:
        """Blocks that are streamed."""
        return self.blocks.stop - self.blocks.start

    @property
    def is_cut(self) -> bool:
        """Whether the last block has columns past the end."""
        return self.columns % self.block != 0

    def seen_by(self, first: Scalar, rows: int) -> Span:
        """Of some of the rows: blocks that they see."""
        own = span(self.band, first, rows, self.total_rows, self.block, self.columns)
        return own if self.of_segments is None else own.meet(self.of_segments)


def for_blocks[Carry](
    tile: Tile,
    own: Span,
    attend: Callable[[bool, jax.Array, Carry], Carry],
    pass_by: Callable[[jax.Array], None],
    carry: Carry,
) -> Carry:
    """All the blocks of a tile, in order, for a consumer that sees those of `own`.

    Args:
      attend: of whether scores have to be masked, the block and the carry.
      pass_by: of a block that only the other consumer sees.
    """

    def passing(block: jax.Array, nothing: None) -> None:
        pass_by(block)

    lax.fori_loop(tile.blocks.start, own.start, passing, None)
    carry = lax.fori_loop(own.start, own.full_start, partial(attend, True), carry)
    carry = lax.fori_loop(own.full_start, own.full_stop, partial(attend, False), carry)
    carry = lax.fori_loop(own.full_stop, own.stop, partial(attend, True), carry)
    lax.fori_loop(own.stop, tile.blocks.stop, passing, None)
    return carry


def segment_operands(
    rows: jax.Array, columns: jax.Array, tile: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ids padded to whole tiles and blocks, and each tile's `segment_spans`."""
    # The last id over again, so that a tile of one segment stays of one.
    row_ids, column_ids = (
        jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge")
        for ids, size in ((rows, tile), (columns, block))
    )
    return row_ids, column_ids, segment_spans(row_ids, column_ids, tile, block)


def statistics(lse: jax.Array, delta: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Log-sum-exp as an exponent of 2, and delta: both padded to a multiple of `rows`.

    Queries that see nothing, and those that are padding, get an infinite sum: no weight.
    """
    padding = ((0, 0), (0, 0), (0, -lse.shape[-1] % rows))
    exponents = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    return jnp.pad(exponents, padding, constant_values=jnp.inf), jnp.pad(delta, padding)


# --- warpgroups ---------------------------------------------------------------------------


def specialise(
    me: jax.Array, *, consumer: Callable[[], None], producer: Callable[[], None]
) -> None:
    """Runs `consumer` in the first warpgroups and `producer` in the last, registers to match."""

    def consume() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consumer()

    def produce() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        producer()

    # Not two `pl.when`: what the second needs would be alive all through the first.
    lax.cond(me < CONSUMERS, consume, produce)


def fits(smem: int, registers: int) -> bool:
    """Whether so many bytes of a thread block, and registers of a thread for tiles, are there."""
    return smem <= SMEM_CAPACITY and registers <= CONSUMER_REGISTERS - _OTHER_REGISTERS


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


def masked(
    values: jax.Array,
    otherwise: float,
    tile: Tile,
    first_row: Scalar,
    block: Scalar,
    row_ids: jax.Array | None,
    column_ids: jax.Array | None,
) -> jax.Array:
    """[rows, columns] of a block, and `otherwise` where a row does not see a column.

    Args:
      first_row: of these rows.
      row_ids, column_ids: their segments, one a row and one a column, if there are segments.
    """

    def positions(first: Scalar, axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, values.shape, axis, layout=WGMMA) + first

    sees = seen(
        tile.band,
        positions(opaque(jnp.int32(first_row)), 0),
        positions(block * tile.block, 1),
        tile.columns if tile.is_cut else None,
    )
    if sees is not None:
        values = jnp.where(sees, values, otherwise)
    if row_ids is not None and column_ids is not None:
        same = over_columns(values.shape, row_ids) == over_rows(values.shape, column_ids)
        values = jnp.where(same, values, otherwise)
    return values


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


def logits(problem: Problem, products: jax.Array) -> Logits:
    """Of the products of queries and keys: what softmax is taken of."""
    if problem.soft_cap is None:
        if problem.scale > 0:
            return Logits(products, problem.scale * LOG2_E, None)
        return Logits(products * (problem.scale * LOG2_E), 1.0, None)
    # tanh(x) = 1 - 2 / (1 + e^2x). The tanh of the hardware is good to 2^-11: times a cap of 50
    # that would be 2 % of a weight. 1 / x is one instruction, which 2 / x is not.
    doubled = products * (2 * problem.scale / problem.soft_cap * LOG2_E)
    tanh = 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(doubled)))
    return Logits(tanh * (problem.soft_cap * LOG2_E), 1.0, tanh)
