"""Which token comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is drawn, and where it ends.

    Attributes:
      max_tokens: of the answer, at least 1.
      temperature: logits are divided by it; 0 for the largest.
      top_k: as many of the largest are drawn from; 0 for all.
      top_p: of those, the largest whose probabilities reach this sum.
      seed: what is drawn is a function of it, of a token's position and of the logits.
      stop: the answer ends before the first of these.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


class Draws(NamedTuple):
    """Of each row, arrays of jax or NumPy: float32[B] temperatures and top_p, int32[B] top_k,
    uint32[B] seeds."""

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any


def draw(logits: jax.Array, draws: Draws, positions: jax.Array) -> jax.Array:
    """Draws a token a row.

    Args:
      logits: float32[B, vocab_size].
      positions: int32[B], of the tokens that are drawn. A row's randomness depends on its seed and
        its position alone, not on the rows beside it.

    Returns:
      int32[B].
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn() -> jax.Array:
        cooled = logits / jnp.where(draws.temperature > 0, draws.temperature, 1)[:, None]
        order = jnp.argsort(-cooled, axis=-1)
        ordered = jnp.take_along_axis(cooled, order, axis=-1)
        rank = jnp.arange(logits.shape[-1])
        top_k = jnp.where(draws.top_k > 0, draws.top_k, logits.shape[-1])
        ordered = jnp.where(rank < top_k[:, None], ordered, -jnp.inf)
        chances = jax.nn.softmax(ordered, axis=-1)
        # Those before a token: the one with which the sum is reached is among them.
        before = jnp.cumsum(chances, axis=-1) - chances
        ordered = jnp.where((before < draws.top_p[:, None]) | (rank == 0), ordered, -jnp.inf)
        keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))
        chosen = jax.vmap(jax.random.categorical)(keys(draws.seed, positions), ordered)
        token = jnp.take_along_axis(order, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)
        return jnp.where(draws.temperature > 0, token, greedy)

    return lax.cond(jnp.any(draws.temperature > 0), drawn, lambda: greedy)
