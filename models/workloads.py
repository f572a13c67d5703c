"""Programs to plan: a function and the shapes of its arguments, never materialised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import models.llama as llama
from models.configs import CONFIGS


def decode(
    model: str, *, batch: int, cache_length: int, tokens: int = 1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of `models.llama.decode_step`: `tokens` new tokens for each of `batch` sequences.

    Args:
      model: a key of `models.configs.CONFIGS`.
      cache_length: tokens that the cache has room for.
      tokens: 1 to decode; more to append a chunk of a prompt.

    Returns:
      The step, a function of (params, tokens, cache) whose cache can be donated, and the
      arguments as `jax.ShapeDtypeStruct`.
    """
    config = CONFIGS[model]
    graphdef, params = nnx.split(llama.abstract_model(config))
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    cache = llama.abstract_cache(config, batch, cache_length)
    return functools.partial(llama.decode_step, graphdef), (params, ids, cache)
