"""Training steps of which a policy says what the backward pass computes again.

    fun, args = llama_step(jax.checkpoint_policies.nothing_saveable)

Each layer is a `jax.checkpoint` of its own, as large codebases have it, or none where there is
no policy: then jax saves what the derivative reads, and XLA what it likes. Residuals carry
names, so that policies can say of each whether it stays, goes to the host, or is computed
again:

    layer_in ─► query, key, value ─► context ─► attended ─► gate, up ─► the next layer_in

In a vision transformer only ``layer_in`` has a name; products are known as such.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import models.llama as llama
import models.vit as vit
from models.configs import LLAMA2_7B, LlamaConfig
from models.training import Loss, TrainOptions, gradient_step, init_state
from models.vit import VIT_B16_4L, VitConfig
from models.workloads import Workload

type Policy = Callable[..., Any]
"""What ``jax.checkpoint(policy=...)`` takes."""

LLAMA = dataclasses.replace(
    LLAMA2_7B, num_layers=6, embed_dim=2048, mlp_dim=5504, num_heads=16, num_kv_heads=16
)
"""Half as wide as 7B: 435 M parameters."""

BATCH, LENGTH = 32, 512

IMAGES = 256


class NamedBlock(llama.Block):
    """`llama.Block` on sequences that start here, with names on what it leaves behind."""

    mlp: llama.Mlp

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        mask: jax.Array,
        past: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """See `llama.Block`; `past` must be None."""
        x = checkpoint_name(x, "layer_in")
        normal = llama.rms_norm(x, self.attention_norm[...], self.norm_eps)
        query, key, value = (
            checkpoint_name(jnp.einsum("bte,ehd->bthd", normal, weight[...]), name)
            for name, weight in (
                ("query", self.attention.query),
                ("key", self.attention.key),
                ("value", self.attention.value),
            )
        )
        query, key = llama.apply_rope(query, rotation), llama.apply_rope(key, rotation)
        context = checkpoint_name(llama.grouped_attention(query, key, value, mask), "context")
        x = x + jnp.einsum("bthd,hde->bte", context, self.attention.output[...])
        x = checkpoint_name(x, "attended")
        normal = llama.rms_norm(x, self.mlp_norm[...], self.norm_eps)
        gate = checkpoint_name(normal @ self.mlp.gate[...], "gate")
        up = checkpoint_name(normal @ self.mlp.up[...], "up")
        return x + (jax.nn.silu(gate) * up) @ self.mlp.down[...], (key, value)


class PolicyLlama(llama.Llama):
    """`llama.Llama` for training, each layer behind a `jax.checkpoint`.

    Args:
      policy: of each; None for no `jax.checkpoint` at all.
    """

    block_type = NamedBlock

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, policy: Policy | None):
        super().__init__(config, rngs=rngs)
        self.policy = policy

    def hidden(
        self, tokens: jax.Array, past: llama.Cache | None = None
    ) -> tuple[jax.Array, llama.Cache]:
        """See `llama.Decoder.hidden`; `past` must be None, and the cache that comes is empty."""
        length = tokens.shape[1]
        start = jnp.zeros((), jnp.int32)
        x, rotation, mask = self.start(tokens, start, length)
        for layer in self.layers:
            x = _apply(layer, x, self.policy, lambda layer, x: layer(x, rotation, mask, None)[0])
        return x, llama.Cache((), (), start + length)


class PolicyVit(vit.VisionTransformer):
    """`vit.VisionTransformer`, likewise."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs, policy: Policy | None):
        super().__init__(config, rngs=rngs)
        self.policy = policy

    def __call__(self, images: jax.Array) -> jax.Array:
        """See `vit.VisionTransformer`."""
        x = self.embedding(vit.patches(images, self.config.patch_size))
        x = x + self.positions[...].astype(x.dtype)
        for layer in self.layers:
            x = _apply(
                layer, x, self.policy, lambda layer, x: layer(checkpoint_name(x, "layer_in"))
            )
        return self.head(jnp.mean(self.final_norm(x), axis=1, dtype=jnp.float32))


def _apply(
    layer: nnx.Module,
    x: jax.Array,
    policy: Policy | None,
    call: Callable[[Any, jax.Array], jax.Array],
) -> jax.Array:
    """`call` of a layer on `x`, behind a `jax.checkpoint` if there is a policy."""
    graphdef, weights = nnx.split(layer)

    def body(weights: nnx.State, x: jax.Array) -> jax.Array:
        return call(nnx.merge(graphdef, weights), x)

    return (body if policy is None else jax.checkpoint(body, policy=policy))(weights, x)


def llama_step(
    policy: Policy | None,
    *,
    config: LlamaConfig = LLAMA,
    batch: int = BATCH,
    length: int = LENGTH,
) -> Workload:
    """A step of plain descent on the cross entropy of `batch` rows of `length` predictions.

    Returns:
      A function of (state, batch) whose state can be donated, and the arguments as
      `jax.ShapeDtypeStruct`.
    """
    model = nnx.eval_shape(lambda: PolicyLlama(config, rngs=nnx.Rngs(0), policy=policy))
    graphdef, params = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    # The norm of all gradients would keep the first one's memory until the last is there.
    options = TrainOptions(algorithm="sgd", clip_norm=None)
    return _step(functools.partial(llama.loss_fn, graphdef), params, tokens, options)


def vit_step(
    policy: Policy | None, *, config: VitConfig = VIT_B16_4L, batch: int = IMAGES
) -> Workload:
    """A step of AdamW on the cross entropy of `batch` images; returns as `llama_step`."""

    def make() -> vit.VisionTransformer:
        return PolicyVit(config, rngs=nnx.Rngs(0), policy=policy)

    graphdef, params = nnx.split(nnx.eval_shape(make))
    shape = (batch, config.image_size, config.image_size, 3)
    examples = (
        jax.ShapeDtypeStruct(shape, config.dtype),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    return _step(functools.partial(vit.loss_fn, graphdef), params, examples, TrainOptions())


def _step(loss: Loss[Any], params: nnx.State, batch: Any, options: TrainOptions) -> Workload:
    state = jax.eval_shape(lambda params: init_state(params, options), params)
    return functools.partial(gradient_step, loss, options), (state, batch)


class Step(NamedTuple):
    """A step to compile.

    Attributes:
      make: of a policy for each layer, or None.
      policies: the keys of `experiments.policies.POLICIES` that concern it.
    """

    title: str
    make: Callable[[Policy | None], Workload]
    policies: tuple[str, ...]


STEPS: Mapping[str, Step] = {
    "llama": Step(
        f"Llama of {LLAMA.num_layers} layers half as wide as 7B, {BATCH} × {LENGTH} tokens, SGD",
        llama_step,
        (
            "nothing_saveable",
            "dots_with_no_batch_dims_saveable",
            "dots_saveable",
            "everything_saveable",
            "offload layer_in",
            "offload layer_in, attended",
            "offload layer_in, save attention",
            "offload attention",
            "offload gate, up",
            "offload all dots",
        ),
    ),
    "vit": Step(
        f"ViT-B/16 of {VIT_B16_4L.num_layers} layers, {IMAGES} images, AdamW",
        vit_step,
        (
            "nothing_saveable",
            "dots_with_no_batch_dims_saveable",
            "dots_saveable",
            "offload layer_in",
            "offload all dots",
        ),
    ),
}
"""Every step by the name that command lines use."""
