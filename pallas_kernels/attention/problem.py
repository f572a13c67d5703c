"""What attention is asked to compute: everything that is known before any number is.

keys  0 1 2 3 4 5 6 7 8 9
q 0   x x                       Band(left=2, right=1): query i sees the keys from
q 1   x x x                     i - left to i + right, those that there are.
q 2   x x x x
q 3     x x x x                 causal            right = 0
q 4       x x x x               sliding window    left = window - 1
q 5         x x x x             everything        left = right = None
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Band:
    """Which keys each query sees, by position.

    Query i stands at key position i + `offset` and sees the keys from `left` before that to
    `right` after it. What holds for ints holds for traced scalars and arrays: kernels use it
    with both.

    Attributes:
      left, right: in keys, None without a limit.
      offset: position of the first query among the keys.
    """

    left: int | None = None
    right: int | None = None
    offset: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.left is None and self.right is None

    def pairs(self, queries: int, keys: int) -> int:
        """How many pairs of a query and a key see each other, of so many of each."""
        at = np.arange(queries) + self.offset
        first = 0 if self.left is None else np.clip(at - self.left, 0, keys)
        stop = keys if self.right is None else np.clip(at + self.right + 1, 0, keys)
        return int(np.maximum(np.broadcast_to(stop - first, at.shape), 0).sum())


@dataclass(frozen=True)
class Problem:
    """Shapes, types and options of one call, hashable.

    Attributes:
      batch: sequences.
      q_len, kv_len: tokens of each.
      q_heads, kv_heads: the former a multiple of the latter: query heads h * group to
        (h + 1) * group - 1 share key/value head h.
      head_dim: width of a head.
      dtype: of queries, keys, values and the output: "bfloat16", "float16", "float32".
      band: which keys a query sees.
      scale: scores are q·k times this.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None for as they are.
      segments: whether queries only see keys of their own segment.
      lse: whether the log-sum-exp of the scores is asked for, too.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    band: Band
    scale: float
    soft_cap: float | None = None
    segments: bool = False
    lse: bool = False

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return self.q_heads // self.kv_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Which segment each token belongs to; tokens see each other within one.

    Attributes:
      q: int32[batch, q_len].
      kv: int32[batch, kv_len].
    """

    q: jax.Array
    kv: jax.Array
