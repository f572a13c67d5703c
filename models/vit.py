"""A Vision Transformer (Dosovitskiy et al., 2020, arXiv:2010.11929) in Flax NNX.

    graphdef, params = nnx.split(VisionTransformer(TINY_VIT, rngs=nnx.Rngs(0)))
    logits = forward(graphdef, params, images)

Blocks stand one after the other, so that each weight is an argument of its own, or are stacked
and scanned. As in "Better
plain ViT baselines" (Beyer et al., 2022, arXiv:2205.01580) the head reads the mean of all
patches, not a class token. Parameters are float32; products are computed in `config.dtype`,
normalisation statistics, softmax of the head and loss in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from models.configs import AttentionKind
from models.stacking import Remat, build_layers, through_layers
from pallas_kernels.attention.api import attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig:
    """The shape of one Vision Transformer; hashable.

    Attributes:
      image_size: of a side, in pixels; a multiple of `patch_size`.
      patch_size: of a side.
      num_layers, embed_dim, mlp_dim, num_heads: of the encoder.
      num_classes: width of the head.
      dtype: of activations and products.
      attention: see `AttentionKind`.
    """

    image_size: int = 224
    patch_size: int = 16
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_classes: int = 1000
    dtype: DTypeLike = jnp.bfloat16
    attention: AttentionKind = "plain"

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


VIT_B16 = VitConfig(num_layers=12, embed_dim=768, mlp_dim=3072, num_heads=12)
"""ViT-Base of 16 × 16 patches (table 1 of the paper)."""

VIT_B16_4L = dataclasses.replace(VIT_B16, num_layers=4)
"""A third of the depth, which compiles in a third of the time."""

TINY_VIT = VitConfig(
    image_size=16,
    patch_size=4,
    num_layers=2,
    embed_dim=32,
    mlp_dim=64,
    num_heads=2,
    num_classes=10,
)
"""Runs anywhere in well under a second."""


def patches(images: jax.Array, size: int) -> jax.Array:
    """`images` [batch, height, width, channels] as rows of pixels of one patch each:
    [batch, height / size * width / size, size * size * channels], in reading order."""
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // size, size, width // size, size, channels)
    return grid.swapaxes(2, 3).reshape(batch, -1, size * size * channels)


def dense(inputs: int, outputs: int, dtype: DTypeLike, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection with Xavier-uniform weights and biases of zero."""
    init = nnx.initializers.xavier_uniform()
    return nnx.Linear(inputs, outputs, dtype=dtype, kernel_init=init, rngs=rngs)


def _fused(query: jax.Array, key: jax.Array, value: jax.Array, **unused: Any) -> jax.Array:
    # Nothing else is given where there is no mask and no dropout.
    return attention(query, key, value)


def self_attention(
    embed_dim: int, num_heads: int, dtype: DTypeLike, kind: AttentionKind, *, rngs: nnx.Rngs
) -> nnx.MultiHeadAttention:
    """Attention of a sequence [batch, len, embed_dim] to all of itself."""
    return nnx.MultiHeadAttention(
        num_heads,
        embed_dim,
        dtype=dtype,
        kernel_init=nnx.initializers.xavier_uniform(),
        decode=False,
        attention_fn=_fused if kind == "fused" else nnx.dot_product_attention,
        rngs=rngs,
    )


class Mlp(nnx.Module):
    """`down(gelu(up(x)))`, with GELU in its tanh form (Hendrycks & Gimpel, 2016)."""

    def __init__(self, embed_dim: int, mlp_dim: int, dtype: DTypeLike, *, rngs: nnx.Rngs):
        self.up = dense(embed_dim, mlp_dim, dtype, rngs=rngs)
        self.down = dense(mlp_dim, embed_dim, dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, len, embed_dim] to the same."""
        return self.down(jax.nn.gelu(self.up(x)))


class EncoderBlock(nnx.Module):
    """Attention, then the MLP, each on a normalised residual stream."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        embed, dtype = config.embed_dim, config.dtype
        self.attention_norm = nnx.LayerNorm(embed, dtype=dtype, rngs=rngs)
        self.attention = self_attention(embed, config.num_heads, dtype, config.attention, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(embed, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(embed, config.mlp_dim, dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, len, embed_dim] to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nnx.Module):
    """Patches, an encoder, and a linear head on the mean; the head starts at zero.

    Args:
      scan: as of `models.stacking.build_layers`.
    """

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs, scan: Remat | None = None):
        self.config = config
        self.scan: Remat | None = scan
        pixels = 3 * config.patch_size**2
        self.embedding = dense(pixels, config.embed_dim, config.dtype, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        shape = (config.num_patches, config.embed_dim)
        self.positions = nnx.Param(init(rngs.params(), shape, jnp.float32))
        block = functools.partial(EncoderBlock, config)
        self.layers = build_layers(block, config.num_layers, rngs=rngs, scan=scan)
        self.final_norm = nnx.LayerNorm(config.embed_dim, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(
            config.embed_dim, config.num_classes, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """See `forward`."""
        x = self.embedding(patches(images, self.config.patch_size))
        x = x + self.positions[...].astype(x.dtype)
        x = through_layers(self.layers, x, scan=self.scan)
        return self.head(jnp.mean(self.final_norm(x), axis=1, dtype=jnp.float32))


def forward(
    graphdef: nnx.GraphDef[VisionTransformer], params: nnx.State, images: jax.Array
) -> jax.Array:
    """Scores of every class.

    Args:
      graphdef, params: of `nnx.split`.
      images: [batch, image_size, image_size, 3].

    Returns:
      float32 logits, [batch, num_classes].
    """
    return nnx.merge(graphdef, params)(images)


def loss_fn(
    graphdef: nnx.GraphDef[VisionTransformer],
    params: nnx.State,
    batch: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Mean cross entropy, in nats, of (images as of `forward`, int labels [batch])."""
    images, labels = batch
    logits = forward(graphdef, params, images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
