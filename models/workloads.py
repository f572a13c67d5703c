"""Programs to plan: a function and the shapes of its arguments, never materialised."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import models.dit as dit
import models.llama as llama
import models.moe as moe
import models.scanned as scanned
import models.unet as unet
import models.vit as vit
from models.configs import CONFIGS, MOE_CONFIGS, LlamaConfig, MoeConfig
from models.dit import DitConfig
from models.sharding import TOKENS, AnyMesh, named, placed, weight_shardings
from models.stacking import Remat
from models.training import (
    Loss,
    TrainOptions,
    TrainState,
    abstract_state,
    apply_gradients,
    gradient_step,
    init_state,
    rounded,
    train_step,
)
from models.unet import UNetConfig
from models.vit import VitConfig

type Workload = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function to compile, and its arguments as `jax.ShapeDtypeStruct`."""


def decode(model: str, *, batch: int, cache_length: int, tokens: int = 1) -> Workload:
    """A step of `models.llama.decode_step`: `tokens` new tokens for each of `batch` sequences.

    Args:
      model: a key of `models.configs.CONFIGS`, or of `MOE_CONFIGS` there.
      cache_length: tokens that the cache has room for.
      tokens: 1 to decode; more to append a chunk of a prompt.

    Returns:
      The step, a function of (params, tokens, cache) whose cache can be donated, and the
      arguments as `jax.ShapeDtypeStruct`.
    """
    graphdef, *args = _unrolled(model, batch, tokens, cache_length)
    return functools.partial(llama.decode_step, graphdef), tuple(args)


def prefill(model: str, *, batch: int, tokens: int, cache_length: int) -> Workload:
    """`models.llama.prefill`: `batch` prompts of `tokens` into a cache.

    Args:
      model: as of `decode`.
      cache_length: tokens that the cache has room for, `tokens` or more.

    Returns:
      A function of (params, tokens, cache) whose cache can be donated, and the arguments as
      `jax.ShapeDtypeStruct`.
    """
    graphdef, *args = _unrolled(model, batch, tokens, cache_length)
    return functools.partial(llama.prefill, graphdef), tuple(args)


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
    remat: Remat = "layer",
    options: TrainOptions | None = None,
    param_dtype: DTypeLike | None = None,
    mesh: AnyMesh | None = None,
) -> Workload:
    """A step of `models.training.train_step` on `batch` rows of `tokens` predictions each.

    Args:
      model: as of `decode`.
      remat: what the backward pass computes again.
      options: of the step; None for the usual ones.
      param_dtype: of the parameters, such as `jnp.float32`; None for that of the activations.
      mesh: splits everything as `models.sharding` says; None for one device.

    Returns:
      A function of (state, tokens) whose state can be donated, and the arguments as
      `jax.ShapeDtypeStruct`.
    """
    config, options = _config(model), options or TrainOptions()
    graphdef = nnx.graphdef(scanned.abstract_model(config, remat=remat, mesh=mesh))
    state = abstract_state(config, options, param_dtype=param_dtype, mesh=mesh)
    return functools.partial(train_step, graphdef, options), (state, _ids(batch, tokens + 1, mesh))


def unrolled_train(
    model: str, *, batch: int, tokens: int, options: TrainOptions | None = None
) -> Workload:
    """A step on `batch` rows of `tokens` predictions each; float32 master weights, no remat.

    Args:
      model: as of `decode`.
      options: of the step; None for the usual ones.

    Returns:
      A function of (state, batch) whose state can be donated, and the arguments as
      `jax.ShapeDtypeStruct`.
    """
    config = _config(model)
    graphdef = nnx.graphdef(_abstract_model(config))
    loss = rounded(functools.partial(moe.loss_fn, graphdef), config.dtype)
    params = nnx.state(_abstract_model(dataclasses.replace(config, dtype=jnp.float32)))
    return _train(loss, params, _ids(batch, tokens + 1, None), options)


def vit_forward(config: VitConfig, *, batch: int) -> Workload:
    """`models.vit.forward`, a function of (params, images), on `batch` images."""
    graphdef, params = nnx.split(_abstract(vit.VisionTransformer, config))
    images, _ = _labelled_images(config, batch)
    return functools.partial(vit.forward, graphdef), (params, images)


def vit_train(
    config: VitConfig,
    *,
    batch: int,
    scan: Remat | None = None,
    options: TrainOptions | None = None,
) -> Workload:
    """A step on `models.vit.loss_fn`, a function of (state, batch), on `batch` images; `scan` as of
    `models.vit.VisionTransformer`."""
    model = functools.partial(vit.VisionTransformer, scan=scan)
    graphdef, params = nnx.split(_abstract(model, config))
    loss = functools.partial(vit.loss_fn, graphdef)
    return _train(loss, params, _labelled_images(config, batch), options)


def dit_train(
    config: DitConfig,
    *,
    batch: int,
    scan: Remat | None = None,
    options: TrainOptions | None = None,
) -> Workload:
    """A step on `models.dit.loss_fn`, a function of (state, batch), on `batch` latents; `scan` as
    of `models.dit.DiffusionTransformer`."""
    model = functools.partial(dit.DiffusionTransformer, scan=scan)
    graphdef, params = nnx.split(_abstract(model, config))
    examples = jax.eval_shape(lambda: dit.empty_batch(config, batch))
    return _train(functools.partial(dit.loss_fn, graphdef), params, examples, options)


def unet_train(
    config: UNetConfig, *, batch: int, size: int, options: TrainOptions | None = None
) -> Workload:
    """A step on `models.unet.loss_fn`, a function of (state, batch), on `batch` images of
    `size` × `size` pixels."""
    graphdef, params = nnx.split(_abstract(unet.UNet, config))
    images = jax.ShapeDtypeStruct((batch, size, size, config.channels), config.dtype)
    labels = jax.ShapeDtypeStruct((batch, size, size), jnp.int32)
    return _train(functools.partial(unet.loss_fn, graphdef), params, (images, labels), options)


def update(model: str, *, options: TrainOptions | None = None) -> Workload:
    """The optimizer's part of a training step: `models.training.apply_gradients`.

    Args:
      model: as of `decode`; each weight of each layer is an array of its own.

    Returns:
      A function of (state, gradients), all of it float32, whose state can be donated, and the
      arguments as `jax.ShapeDtypeStruct`.
    """
    options = options or TrainOptions()
    params = nnx.state(_abstract_model(dataclasses.replace(_config(model), dtype=jnp.float32)))
    return functools.partial(apply_gradients, options), (_state(params, options), params)


def attention_grad(layers: int, *, batch: int, tokens: int, width: int) -> Workload:
    """Loss and gradient of plain float32 layers of attention and a feed-forward, without
    normalization: much that waits for the backward pass beside few weights.

    Args:
      width: of the residual stream, a multiple of the 8 heads.

    Returns:
      A function of (weights, x) and the arguments as `jax.ShapeDtypeStruct`.
    """

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    layer = {name: shape(width, width) for name in ("q", "k", "v", "o")}
    layer |= {"up": shape(width, 4 * width), "down": shape(4 * width, width)}
    return jax.value_and_grad(_attention_loss), ([layer] * layers, shape(batch, tokens, width))


def _attention_loss(weights: Sequence[Mapping[str, jax.Array]], x: jax.Array) -> jax.Array:
    for w in weights:
        q, k, v = (jnp.reshape(x @ w[name], (*x.shape[:2], 8, -1)) for name in "qkv")
        x = x + jnp.reshape(jax.nn.dot_product_attention(q, k, v, is_causal=True), x.shape) @ w["o"]
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def _config(model: str) -> LlamaConfig:
    return MOE_CONFIGS[model] if model in MOE_CONFIGS else CONFIGS[model]


def _abstract_model(config: LlamaConfig) -> llama.Llama:
    if isinstance(config, MoeConfig):
        return moe.abstract_model(config)
    return llama.abstract_model(config)


def _abstract[Model: nnx.Module](kind: Callable[..., Model], config: Any) -> Model:
    return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))


def _unrolled(
    model: str, batch: int, tokens: int, cache_length: int
) -> tuple[nnx.GraphDef[llama.Llama], nnx.State, jax.ShapeDtypeStruct, llama.Cache]:
    config = _config(model)
    graphdef, params = nnx.split(_abstract_model(config))
    cache = llama.abstract_cache(config, batch, cache_length)
    return graphdef, params, _ids(batch, tokens, None), cache


def _train(
    loss: Loss[Any], params: nnx.State, batch: Any, options: TrainOptions | None
) -> Workload:
    options = options or TrainOptions()
    return functools.partial(gradient_step, loss, options), (_state(params, options), batch)


def _state(params: nnx.State, options: TrainOptions) -> TrainState:
    return jax.eval_shape(lambda params: init_state(params, options), params)


def _labelled_images(
    config: VitConfig, batch: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shape = (batch, config.image_size, config.image_size, 3)
    images = jax.ShapeDtypeStruct(shape, config.dtype)
    return images, jax.ShapeDtypeStruct((batch,), jnp.int32)


def _scanned(
    model: str, batch: int, tokens: int, cache_length: int, mesh: AnyMesh | None
) -> tuple[nnx.GraphDef[scanned.ScannedLlama], nnx.State, jax.ShapeDtypeStruct, llama.Cache]:
    config = CONFIGS[model]
    graphdef, params = nnx.split(scanned.abstract_model(config, mesh=mesh))
    cache = scanned.abstract_cache(config, batch, cache_length)
    if mesh is not None:
        params = placed(params, weight_shardings(params, mesh))
        cache = placed(cache, scanned.cache_shardings(cache, mesh))
    return graphdef, params, _ids(batch, tokens, mesh), cache


def _ids(batch: int, length: int, mesh: AnyMesh | None) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else named((batch, length), TOKENS, mesh)
    return jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=sharding)
