"""Which blocks of columns a tile of rows has to look at, and which of them without a mask.

    columns   0    1    2    3    4    5    6    7      one block each
    rows      .    m    m    f    f    m    .    .      . unseen  m masked  f full
                   │         │         │    │
               start     full_start  full_stop  stop

Rows are queries and columns keys, or, through `transposed`, the other way round. Kernels on a GPU
ask this of the tile that they have; for those on a TPU `blocks` makes arrays of all tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from pallas_kernels.attention.problem import Band

type Scalar = int | jax.Array
type Numbers = Scalar | npt.NDArray[np.integer]
"""An int, a NumPy array, or a scalar that is traced in a kernel: the arithmetic is the same."""


class Span(NamedTuple):
    """Blocks, in half-open ranges: start <= full_start <= full_stop <= stop.

    Attributes:
      start, stop: `Numbers`; outside of these no row of the tile sees a column.
      full_start, full_stop: within these every row of the tile sees every column.
    """

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any

    def meet(self, other: Span) -> Span:
        """The span of what is seen by both."""
        return _ordered(
            Span(
                most(self.start, other.start),
                most(self.full_start, other.full_start),
                least(self.full_stop, other.full_stop),
                least(self.stop, other.stop),
            )
        )


def transposed(band: Band) -> Band:
    """The band seen from the keys: which queries each key is seen by."""
    return Band(left=band.right, right=band.left, offset=-band.offset)


def span(
    band: Band, first_row: Numbers, rows: int, total_rows: int, block: int, columns: int
) -> Span:
    """Where a tile of rows meets the band.

    Args:
      band: which columns a row sees.
      first_row: of the tile, or of each of several, less than `total_rows`.
      rows: of the tile; those past `total_rows` see nothing.
      total_rows: that there are.
      block: columns of a block.
      columns: that there are; the last block may be cut short, and then is never full.
    """
    last_row = least(first_row + rows, total_rows) - 1
    blocks = -(-columns // block)
    start: Numbers = 0
    full_start: Numbers = 0
    stop: Numbers = blocks
    full_stop: Numbers = columns // block
    if band.left is not None:
        start = least(_blocks_before(first_row + band.offset - band.left, block), blocks)
        full_start = _blocks_up_to(last_row + band.offset - band.left, block)
    if band.right is not None:
        stop = least(_blocks_up_to(last_row + band.offset + band.right + 1, block), blocks)
        full_stop = least(
            _blocks_before(first_row + band.offset + band.right + 1, block), full_stop
        )
    return _ordered(Span(start, full_start, full_stop, stop))


def segment_spans(row_ids: jax.Array, column_ids: jax.Array, rows: int, block: int) -> jax.Array:
    """Which blocks hold tokens of a tile's segments, by the least and the largest id of each.

    Exact where ids are sorted, as in a packed batch; else some blocks too many are looked at.

    Args:
      row_ids, column_ids: int32[batch, length].
      rows, block: of one tile, of one block; the last of each may be cut short.

    Returns:
      int32[batch, tiles, 4]: the `Span` of each tile. Of several stretches of full blocks it
      has the first.
    """
    tile = filled_up(row_ids, rows).reshape(row_ids.shape[0], -1, 1, rows)
    column = filled_up(column_ids, block).reshape(column_ids.shape[0], 1, -1, block)
    first, last = tile.min(-1), tile.max(-1)
    least, largest = column.min(-1), column.max(-1)
    some = (first <= largest) & (least <= last)
    every = (first == last) & (least == largest) & (first == least)
    blocks = some.shape[-1]
    start = jnp.where(some.any(-1), some.argmax(-1), 0)
    stop = blocks - jnp.where(some.any(-1), some[..., ::-1].argmax(-1), blocks)
    full_start = jnp.where(every.any(-1), every.argmax(-1), stop)
    after = ~every & (jnp.arange(blocks) >= full_start[..., None])
    full_stop = jnp.where(after.any(-1), after.argmax(-1), blocks)
    full_stop = jnp.where(every.any(-1), full_stop, stop)
    return jnp.stack([start, full_start, full_stop, stop], axis=-1).astype(jnp.int32)


def filled_up(ids: jax.Array, size: int) -> jax.Array:
    """Ids, [batch, length], up to a multiple of `size` of them."""
    # The last id over again, so that a tile of one segment stays of one.
    return jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge")


def seen(band: Band, rows: jax.Array, columns: jax.Array, total_columns: int | None) -> Any:
    """Where a row sees a column, by position; None where every row sees every column.

    Args:
      rows, columns: positions, int32, of shapes that broadcast.
      total_columns: columns from this one on are padding; None if there are none.
    """
    conditions: list[jax.Array] = []
    if band.left is not None:
        conditions.append(columns >= rows + (band.offset - band.left))
    if band.right is not None:
        conditions.append(columns <= rows + (band.offset + band.right))
    if total_columns is not None:
        conditions.append(columns < total_columns)
    if not conditions:
        return None
    result = conditions[0]
    for condition in conditions[1:]:
        result &= condition
    return result


def _ordered(span: Span) -> Span:
    stop = most(span.start, span.stop)
    full_start = least(most(span.full_start, span.start), stop)
    return Span(span.start, full_start, most(least(span.full_stop, stop), full_start), stop)


def _blocks_before(column: Numbers, block: int) -> Numbers:
    """Whole blocks before a column, which may be negative."""
    return _divide(most(column, 0), block)


def _blocks_up_to(column: Numbers, block: int) -> Numbers:
    """Blocks that reach up to a column, the last perhaps in part."""
    return _divide(most(column, 0) + (block - 1), block)


def _divide(x: Numbers, by: int) -> Numbers:
    # Of what is not negative: lax.div is one instruction where // is five.
    return lax.div(x, jnp.asarray(by, x.dtype)) if isinstance(x, jax.Array) else x // by


def least(x: Numbers, y: Numbers) -> Numbers:
    """The lesser, each."""
    if isinstance(x, int) and isinstance(y, int):
        return min(x, y)
    return (jnp if isinstance(x, jax.Array) or isinstance(y, jax.Array) else np).minimum(x, y)


def most(x: Numbers, y: Numbers) -> Numbers:
    """The greater, each."""
    if isinstance(x, int) and isinstance(y, int):
        return max(x, y)
    return (jnp if isinstance(x, jax.Array) or isinstance(y, jax.Array) else np).maximum(x, y)
