"""What decode attention is asked to compute: everything that is known before any number is.

A cache is a pool of pages. A page holds `page_size` consecutive tokens of one sequence, for all
heads; row b of the block table names the pages of sequence b, in order:

    pool [num_pages, kv_heads, page_size, head_dim]          block_tables      lengths
    page  0        1        2        3        4              [[4, 1, -1],      [6,      page_size 4
         |B8 B9 ..|A4 A5 ..|B4 B5 B6|B0 B1 B2|A0 A1 A2|       [3, 2,  0]]       10]

With the heads outside the tokens a page of all heads is one contiguous run of memory, one DMA,
and each head in it is a slab [page_size, head_dim] of whole tiles, which goes to the matrix unit
as it is. Without a block table sequence b has one page, b, of max_len tokens.

XLA for TPU lays an argument out otherwise where its last axis is narrower than 128, as that of a
head of 64 or of the scales of a page of 32 tokens, and would copy the pool at each call. Where
such a pool enters and leaves a jitted function, ask for its rows in order:

    jax.jit(step, in_shardings=Format(Layout(major_to_minor=(0, 1, 2, 3)), sharding), ...)
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hlo_passes.analysis.kernel_cost import KernelCost


@dataclass(frozen=True)
class Problem:
    """Shapes, types and options of one call, hashable.

    Attributes:
      batch: sequences.
      q_len: query tokens of each, its last ones.
      q_heads, kv_heads: the former a multiple of the latter: query heads h * group to
        (h + 1) * group - 1 share key/value head h.
      head_dim: width of a head.
      num_pages: in the pool.
      page_size: tokens of a page.
      max_pages: of one sequence.
      paged: whether there is a block table; without one, sequence b has page b.
      dtype: of queries and output: "bfloat16", "float16", "float32".
      kv_dtype: of keys and values: `dtype`, or "int8" or "float8_e4m3fn" with scales.
      window: a query sees that many keys before its position, besides the one at it; None for
        all.
      scale: scores are q·k times this.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None for as they are.
    """

    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    max_pages: int
    paged: bool
    dtype: str
    kv_dtype: str
    window: int | None
    scale: float
    soft_cap: float | None = None

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Queries of one sequence that share a key/value head: the rows of a matrix product."""
        return self.q_len * self.group

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        return self.max_pages * self.page_size

    @property
    def cost(self) -> KernelCost:
        """What a kernel is expected to take where tables are full, as far as there are pages: the
        lengths are not known."""
        seen = min(self.capacity, self.num_pages * self.page_size)
        if self.window is not None:
            seen = min(seen, self.q_len + self.window)
        tokens = min(self.batch * seen, self.num_pages * self.page_size)
        token_bytes = self.head_dim * jnp.dtype(self.kv_dtype).itemsize + 4 * self.is_quantized
        return KernelCost(
            flops=4 * self.batch * self.kv_heads * self.rows * seen * self.head_dim,
            bytes_accessed=2 * tokens * self.kv_heads * token_bytes,
        )

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values have scales."""
        return self.kv_dtype != self.dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of all sequences.

    Attributes:
      k, v: [num_pages, kv_heads, page_size, head_dim]; without pages [batch, kv_heads, max_len,
        head_dim].
      lengths: int32[batch], from 0 to as many as there is room for.
      block_tables: int32[batch, max_pages], of pages; None without. Entries past the last page of a
        sequence may hold anything.
      k_scales, v_scales: f32[num_pages, kv_heads, page_size], of keys of 8 bits: a key is
        its stored number times its scale.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array
    block_tables: jax.Array | None = None
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None
