"""The model's programs, compiled before the first request: each is `step`, and a token drawn a row.

Shapes are few: decoding steps of 1, 2, 4, .. sequences (no single one on a TPU), and chunks of
prompts: one of as many tokens as there may be in a step, or several shorter ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.serve.model import ModelConfig, Params, Pool, step
from memplan.serve.sampling import Draws, Sampling, draw

__all__ = ["Row", "Runner"]

_SHORTEST = 16
"""Tokens of a row of the narrowest chunks: shorter ones are computed as that."""


@dataclass(frozen=True)
class Row:
    """What a step does for one sequence.

    Attributes:
      tokens: that are next, 1 or more.
      start: of the sequence, in its pages already.
      pages: of its tokens so far and these, in order.
      sampling: how the token behind these is drawn.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sampling: Sampling


class Runner:
    """A model's programs.

    Args:
      config: the model's shape.
      params: its parameters.
      pages: of each layer's pool; page_size: tokens of each.
      max_len: tokens of a sequence, at most.
      max_batch: sequences of a decoding step, at most.
      chunk: tokens of prompts in one step, at most.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        pages: int,
        page_size: int,
        max_len: int,
        max_batch: int,
        chunk: int,
    ) -> None:
        self._config, self._params = config, params
        self._pages, self._page_size = pages, page_size
        self._max_pages = -(-max_len // page_size)
        self.max_batch = max_batch
        self.chunk = max(chunk, _SHORTEST)
        widths = [self.chunk]
        while widths[-1] > _SHORTEST:
            widths.append(max(widths[-1] // 4, _SHORTEST))
        self._widths = widths[::-1]
        self._programs: dict[tuple[int, int], Any] = {}

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Rows and columns of every program."""
        # XLA:TPU makes no matrix product of a single row, which then takes longer than two.
        batch = 2 if jax.default_backend() == "tpu" else 1
        while batch < self.max_batch:
            yield batch, 1
            batch *= 2
        yield self.max_batch, 1
        for width in self._widths:
            yield from dict.fromkeys(((1, width), (self.rows_of(width), width)))

    def width_of(self, tokens: int) -> int:
        """Columns of the chunks in which so many tokens of a prompt are run, all or the first."""
        return next((width for width in self._widths if width >= tokens), self.chunk)

    def rows_of(self, width: int) -> int:
        """Rows of a chunk of so many columns, at most."""
        return max(1, self.chunk // width)

    def compile(self, pools: Sequence[Pool]) -> None:
        """Compiles all programs, for pools like these."""
        run = jax.jit(partial(_run, self._config), donate_argnums=1)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pools)
        shapes = list(self.shapes())
        lowered = [run.lower(self._params, like, *self._arguments((), *shape)) for shape in shapes]
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda program: program.compile(), lowered)
            self._programs = dict(zip(shapes, compiled, strict=True))

    def run(self, pools: Sequence[Pool], rows: Sequence[Row]) -> tuple[jax.Array, list[Pool]]:
        """Runs a step: rows of one token each, or rows of a chunk.

        Args:
          pools: as of `step`; they are donated.

        Returns:
          int32[at least len(rows)], the token drawn behind each row's last one, and the pools.
          Nothing waits for it.
        """
        longest = max(len(row.tokens) for row in rows)
        width = 1 if longest == 1 else self.width_of(longest)
        batch = min(b for b, w in self._programs if w == width and b >= len(rows))
        return self._programs[batch, width](
            self._params, pools, *self._arguments(rows, batch, width)
        )

    def _arguments(self, rows: Sequence[Row], batch: int, width: int) -> tuple[Any, ...]:
        tokens = np.zeros((batch, width), np.int32)
        tables = np.zeros((batch, self._max_pages), np.int32)
        starts, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        draws = Draws(
            temperature=np.zeros(batch, np.float32),
            top_k=np.zeros(batch, np.int32),
            top_p=np.ones(batch, np.float32),
            seed=np.zeros(batch, np.uint32),
        )
        for at, row in enumerate(rows):
            tokens[at, width - len(row.tokens) :] = row.tokens
            tables[at, : len(row.pages)] = row.pages
            starts[at], counts[at] = row.start, len(row.tokens)
            draws.temperature[at] = row.sampling.temperature
            draws.top_k[at], draws.top_p[at] = row.sampling.top_k, row.sampling.top_p
            draws.seed[at] = row.sampling.seed
        return tokens, starts, counts, tables, draws


def _run(
    config: ModelConfig,
    params: Params,
    pools: Sequence[Pool],
    tokens: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    tables: jax.Array,
    draws: Draws,
) -> tuple[jax.Array, list[Pool]]:
    logits, pools = step(config, params, pools, tokens, starts, counts, tables)
    return draw(logits.astype(jnp.float32), draws, starts + counts), pools
