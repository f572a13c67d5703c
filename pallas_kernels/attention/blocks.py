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
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.attention.problem import Band, Problem, Segments
from pallas_kernels.attention.spans import Span, least, most, segment_spans, span, transposed


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
    ids = None if segments is None else (segments.q, segments.kv)
    return _ranges(problem.band, problem.q_len, problem.kv_len, block_q, block_kv, ids)


def query_ranges(
    problem: Problem, segments: Segments | None, block_q: int, block_kv: int
) -> Ranges:
    """The query blocks that each key block has to look at: the same, seen from the keys."""
    ids = None if segments is None else (segments.kv, segments.q)
    band = transposed(problem.band)
    found = _ranges(band, problem.kv_len, problem.q_len, block_kv, block_q, ids)
    if problem.kv_len % block_kv == 0:
        return found
    # The last block has rows that are no keys: unlike queries that are none, they need a mask.
    is_whole = np.arange(found.first.shape[1]) < problem.kv_len // block_kv
    return found._replace(full_last=found.full_last * is_whole.astype(np.int32))


def paths(ranges: Ranges) -> tuple[bool, bool]:
    """Whether there may be items without a mask, and items with one."""
    if not isinstance(ranges.first, np.ndarray):
        return True, True
    full, masked = ranges.counts()
    return full > 0, masked > 0


def _ranges(
    band: Band,
    rows: int,
    columns: int,
    row_block: int,
    block: int,
    ids: tuple[jax.Array, jax.Array] | None,
) -> Ranges:
    """Of each block of rows: the blocks of columns; `ids` are of rows and of columns."""
    starts = np.arange(0, rows, row_block, dtype=np.int32)[None]
    seen = span(band, starts, row_block, rows, block, columns)
    if ids is not None:
        tables = segment_spans(*ids, row_block, block)
        seen = seen.meet(Span(*(tables[..., i] for i in range(4))))
    start, full_start, full_stop, stop = (x + np.zeros_like(starts) for x in seen)
    first = least(start, -(-columns // block) - 1)
    return Ranges(first, most(stop, first + 1), full_start, full_stop)
