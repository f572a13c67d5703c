"""What the Hopper kernels of attention share: a thread block's tile, its warpgroups, masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.attention.spans import Scalar, Span, filled_up, seen, segment_spans, span
from pallas_kernels.tuned import Key

CONSUMERS = 2
# Launched with 168 registers each, the most that leave one block in the 65536 of an SM, three
# warpgroups have 128 * (2 * CONSUMER_REGISTERS + 24).
_PRODUCER_REGISTERS = 24

specialise = partial(gpu.specialise, CONSUMERS, producer_registers=_PRODUCER_REGISTERS)


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
        segment_spans: gpu.Ref | None,
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
    row_ids, column_ids = filled_up(rows, tile), filled_up(columns, block)
    return row_ids, column_ids, segment_spans(row_ids, column_ids, tile, block)


def row_statistics(lse: jax.Array, delta: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Log-sum-exp as an exponent of 2, and delta: both padded to a multiple of `rows`.

    Queries that see nothing, and those that are padding, get an infinite sum: no weight.
    """
    padding = ((0, 0), (0, 0), (0, -lse.shape[-1] % rows))
    exponents = jnp.where(lse == -jnp.inf, jnp.inf, lse * gpu.LOG2_E)
    return jnp.pad(exponents, padding, constant_values=jnp.inf), jnp.pad(delta, padding)


# --- masks --------------------------------------------------------------------------------


def where_seen(
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
        return plgpu.broadcasted_iota(jnp.int32, values.shape, axis, layout=gpu.WGMMA) + first

    sees = seen(
        tile.band,
        positions(gpu.opaque(jnp.int32(first_row)), 0),
        positions(block * tile.block, 1),
        tile.columns if tile.is_cut else None,
    )
    if sees is not None:
        values = jnp.where(sees, values, otherwise)
    if row_ids is not None and column_ids is not None:
        same = gpu.over_columns(values.shape, row_ids) == gpu.over_rows(values.shape, column_ids)
        values = jnp.where(same, values, otherwise)
    return values


# --- tuning -------------------------------------------------------------------------------


def by_queries(problem: Problem) -> Key:
    """What the choice of a configuration depends on, where thread blocks have queries."""
    return _key(problem, problem.q_heads * problem.q_len, problem.kv_len)


def by_keys(problem: Problem) -> Key:
    """What the choice of a configuration depends on, where thread blocks have keys."""
    return _key(problem, problem.kv_heads * problem.kv_len, problem.group * problem.q_len)


def _key(problem: Problem, rows: int, columns: int) -> Key:
    """Rows are what thread blocks divide, columns what each of them streams: those in the band."""
    band = problem.band
    pairs = band.pairs(problem.q_len, problem.kv_len)
    share = pairs / (problem.q_len * problem.kv_len)
    return Key(
        {
            "head_dim": problem.head_dim,
            "left": band.left is not None,
            "right": band.right is not None,
            "soft_cap": problem.soft_cap is not None,
            "segments": problem.segments,
        },
        {"rows": problem.batch * rows, "columns": max(1, round(columns * share))},
    )
