"""Which pairs of a query block and a key block there is work in.

            key block   0   1   2   3   4
    query block 0       m   .   .   .   .        m  some of its pairs are visible
                1       f   m   .   .   .        f  all are: no mask is applied
                2       m   f   m   .   .        .  none is: never fetched
                3       .   m   f   m   .
    first[2] = 0, full_first[2] = 1, full_last[2] = 2, last[2] = 3

What a query block sees is a range of key blocks, for bands always; ids of segments narrow it to
the range between the first and the last block that it shares an id with, which is exact where
segments are packed one after another. All four are arrays that a kernel reads from scalar
memory: the kernels themselves know nothing of bands.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import pallas as pl

from pallas_kernels.attention.problem import Problem, Segments

type _Ints = npt.NDArray[np.int64]


class Ranges(NamedTuple):
    """Half-open ranges of column blocks, of each row block.

    Each is int32[batch, row blocks]; of bands alone a NumPy array, with a batch of 1.
    `first` < `last` always: a row block that sees nothing has one, masked. Blocks from
    `full_first` to `full_last` need no mask.
    """

    first: Any
    last: Any
    full_first: Any
    full_last: Any

    def counts(self) -> tuple[int, int]:
        """How many full and how many masked items all row blocks have, where that is known."""
        full = np.minimum(self.full_last, self.last) - np.maximum(self.full_first, self.first)
        fulls = int(np.maximum(full, 0).sum())
        return fulls, int((self.last - self.first).sum()) - fulls


class Item(NamedTuple):
    """A turn of a kernel's loop, int32 scalars: a step, which has a row block; one of the column
    blocks of that; and their whole range."""

    step: jax.Array
    block: jax.Array
    seen: Ranges

    @property
    def opens(self) -> jax.Array:
        """Whether it is the first of its step."""
        return self.block == self.seen.first

    @property
    def closes(self) -> jax.Array:
        """Whether it is the last of its step."""
        return self.block + 1 == self.seen.last

    @property
    def is_full(self) -> jax.Array:
        """Whether all its pairs see each other."""
        return (self.block >= self.seen.full_first) & (self.block < self.seen.full_last)


class Counts(NamedTuple):
    """How much work a problem is, of all its sequences and query heads.

    Attributes:
      full, masked: items without and with a mask.
      rows: row blocks.
    """

    full: int
    masked: int
    rows: int


def count_items(
    problem: Problem, block_q: int, block_kv: int, rows: Literal["queries", "keys"]
) -> Counts:
    """Counts the items of a problem's band. With segments it cannot be known which are skipped:
    then none is, and all are masked."""
    ranges = key_ranges if rows == "queries" else query_ranges
    found = ranges(dataclasses.replace(problem, segments=False), None, block_q, block_kv)
    full, masked = found.counts()
    if problem.segments:
        full, masked = 0, full + masked
    heads = problem.batch * problem.q_heads
    return Counts(heads * full, heads * masked, heads * found.first.size)


def cost_estimate(
    problem: Problem, counts: Counts, pairs: int, products: int, item_bytes: int, whole_bytes: int
) -> pl.CostEstimate:
    """What XLA, and memplan's planner, are told that a kernel takes.

    Args:
      pairs: of an item, queries times keys.
      products: matrix products that a pair takes part in.
      item_bytes: that are fetched for each item.
      whole_bytes: that are read or written once.
    """
    items = counts.full + counts.masked
    return pl.CostEstimate(
        flops=2 * products * items * pairs * problem.head_dim,
        transcendentals=items * pairs,
        bytes_accessed=items * item_bytes + whole_bytes,
    )


def key_ranges(problem: Problem, segments: Segments | None, block_q: int, block_kv: int) -> Ranges:
    """The key blocks that each query block has to look at."""
    band = problem.band
    seen, full = _spans(band.left, band.right, band.offset, problem.q_len, problem.kv_len, block_q)
    return _ranges(
        seen,
        full,
        problem.kv_len,
        block_kv,
        None if segments is None else (segments.q, segments.kv, block_q),
    )


def query_ranges(
    problem: Problem, segments: Segments | None, block_q: int, block_kv: int
) -> Ranges:
    """The query blocks that each key block has to look at: the same, seen from the keys."""
    band = problem.band
    seen, full = _spans(
        band.right, band.left, -band.offset, problem.kv_len, problem.q_len, block_kv
    )
    if problem.kv_len % block_kv:
        # Its last rows are no keys: unlike queries that are none, they need a mask.
        full[1][-1] = full[0][-1]
    return _ranges(
        seen,
        full,
        problem.q_len,
        block_q,
        None if segments is None else (segments.kv, segments.q, block_kv),
    )


def paths(ranges: Ranges) -> tuple[bool, bool]:
    """Whether there may be items without a mask, and items with one."""
    if not isinstance(ranges.first, np.ndarray):
        return True, True
    full, masked = ranges.counts()
    return full > 0, masked > 0


def _spans(
    left: int | None, right: int | None, offset: int, rows: int, columns: int, block: int
) -> tuple[tuple[_Ints, _Ints], tuple[_Ints, _Ints]]:
    """Half-open ranges of columns that some row of each block sees, and that all its rows see."""
    start = np.arange(0, rows, block)
    end = np.minimum(start + block, rows)

    def column(row: _Ints, side: int | None, otherwise: int) -> _Ints:
        reached = np.full_like(row, otherwise) if side is None else row + offset + side
        return np.clip(reached, 0, columns)

    to_left = None if left is None else -left
    after = None if right is None else right + 1
    seen = column(start, to_left, 0), column(end - 1, after, columns)
    full = column(end - 1, to_left, 0), column(start, after, columns)
    return seen, full


def _ranges(
    seen: tuple[_Ints, _Ints],
    full: tuple[_Ints, _Ints],
    columns: int,
    block: int,
    ids: tuple[jax.Array, jax.Array, int] | None,
) -> Ranges:
    blocks = -(-columns // block)
    first = seen[0][None] // block
    last = -(-seen[1][None] // block)
    # A padded last block is not full.
    full_first = -(-full[0][None] // block)
    full_last = full[1][None] // block
    if ids is None:
        first = np.minimum(first, blocks - 1)
        last = np.maximum(last, first + 1)
        return Ranges(*(x.astype(np.int32) for x in (first, last, full_first, full_last)))

    row_ids, column_ids, row_block = ids
    low, high = _extremes(row_ids, row_block)
    column_low, column_high = _extremes(column_ids, block)
    shared = (low[:, :, None] <= column_high[:, None]) & (column_low[:, None] <= high[:, :, None])
    some = shared.any(axis=-1)
    shared_first = jnp.where(some, jnp.argmax(shared, axis=-1), blocks)
    shared_last = jnp.where(some, blocks - jnp.argmax(shared[..., ::-1], axis=-1), 0)
    first = jnp.minimum(jnp.maximum(first, shared_first), blocks - 1)
    last = jnp.maximum(jnp.minimum(last, shared_last), first + 1)
    # A block is free of masks where row and column block are of one segment, the same one; the
    # blocks between a row block's own segment's first and last are that.
    uniform = (low == high)[:, :, None] & (column_low == column_high)[:, None]
    same = uniform & (low[:, :, None] == column_low[:, None])
    index = jnp.arange(blocks)
    same &= (index >= full_first[..., None]) & (index < full_last[..., None])
    any_same = same.any(axis=-1)
    same_first = jnp.where(any_same, jnp.argmax(same, axis=-1), 0)
    # The first run of such blocks: ids may come back after others.
    ended = ~same & (index >= same_first[..., None])
    same_last = jnp.where(ended.any(axis=-1), jnp.argmax(ended, axis=-1), blocks)
    same_last = jnp.where(any_same, same_last, 0)
    return Ranges(*(x.astype(jnp.int32) for x in (first, last, same_first, same_last)))


def _extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Least and largest id of each block: int32[batch, blocks] twice."""
    batch, length = ids.shape
    blocks = -(-length // block)
    # The last id again instead of padding: it changes neither.
    padded = jnp.pad(ids, ((0, 0), (0, blocks * block - length)), mode="edge")
    parts = padded.reshape(batch, blocks, block)
    return parts.min(axis=-1), parts.max(axis=-1)
