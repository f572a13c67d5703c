"""Programs to plan: a function and the shapes of its arguments, never materialised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import models.llama as llama
import models.scanned as scanned
from models.configs import CONFIGS
from models.sharding import CACHE, TOKENS, AnyMesh, named, placed, weight_shardings
from models.training import TrainOptions, abstract_state, train_step

type Workload = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function to compile, and its arguments as `jax.ShapeDtypeStruct`."""


def decode(model: str, *, batch: int, cache_length: int, tokens: int = 1) -> Workload:
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


def scanned_decode(
    model: str, *, batch: int, cache_length: int, tokens: int = 1, mesh: AnyMesh | None = None
) -> Workload:
    """`decode` with the layers scanned; with a mesh, split over it as `models.sharding` says."""
    graphdef, *args = _scanned(model, batch, tokens, cache_length, mesh)
    return functools.partial(llama.decode_step, graphdef), tuple(args)


def scanned_prefill(
    model: str, *, batch: int, tokens: int, cache_length: int, mesh: AnyMesh | None = None
) -> Workload:
    """`models.llama.prefill`, the layers scanned: `batch` prompts of `tokens` into a cache.

    Args:
      model: a key of `models.configs.CONFIGS`.
      cache_length: tokens that the cache has room for, `tokens` or more.
      mesh: splits everything as `models.sharding` says; None for one device.

    Returns:
      A function of (params, tokens, cache) whose cache can be donated, and the arguments as
      `jax.ShapeDtypeStruct`.
    """
    graphdef, *args = _scanned(model, batch, tokens, cache_length, mesh)
    return functools.partial(llama.prefill, graphdef), tuple(args)


def train(
    model: str,
    *,
    batch: int,
    tokens: int,
    remat: scanned.Remat = "layer",
    options: TrainOptions | None = None,
    param_dtype: DTypeLike | None = None,
    mesh: AnyMesh | None = None,
) -> Workload:
    """A step of `models.training.train_step` on `batch` rows of `tokens` predictions each.

    Args:
      model: a key of `models.configs.CONFIGS`.
      remat: what the backward pass computes again.
      options: of the step; None for the usual ones.
      param_dtype: of the parameters, such as `jnp.float32`; None for that of the activations.
      mesh: splits everything as `models.sharding` says; None for one device.

    Returns:
      A function of (state, tokens) whose state can be donated, and the arguments as
      `jax.ShapeDtypeStruct`.
    """
    config, options = CONFIGS[model], options or TrainOptions()
    graphdef = nnx.graphdef(scanned.abstract_model(config, remat=remat, mesh=mesh))
    state = abstract_state(config, options, param_dtype=param_dtype, mesh=mesh)
    return functools.partial(train_step, graphdef, options), (state, _ids(batch, tokens + 1, mesh))


def _scanned(
    model: str, batch: int, tokens: int, cache_length: int, mesh: AnyMesh | None
) -> tuple[nnx.GraphDef[scanned.ScannedLlama], nnx.State, jax.ShapeDtypeStruct, llama.Cache]:
    config = CONFIGS[model]
    graphdef, params = nnx.split(scanned.abstract_model(config, mesh=mesh))
    cache = scanned.abstract_cache(config, batch, cache_length)
    if mesh is not None:
        params = placed(params, weight_shardings(params, mesh))
        cache = placed(cache, jax.tree.map(lambda leaf: named(leaf.shape, CACHE, mesh), cache))
    return graphdef, params, _ids(batch, tokens, mesh), cache


def _ids(batch: int, length: int, mesh: AnyMesh | None) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else named((batch, length), TOKENS, mesh)
    return jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=sharding)
