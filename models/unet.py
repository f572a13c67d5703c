"""A U-Net (Ronneberger et al., 2015, arXiv:1505.04597) that labels the pixels of an image.

    graphdef, params = nnx.split(UNet(TINY_UNET, rngs=nnx.Rngs(0)))
    logits = forward(graphdef, params, images)

    image ─► level 0 ─────────── skip ───────────► level 0 ─► logits
                └ pool ► level 1 ── skip ──► level 1 ┘ up
                            └ pool ► bottom ──── ┘ up

The first level's skip lives for nearly the whole program. Two things are of later practice:
convolutions keep the size (``SAME``), and each is followed by group normalisation (Wu & He,
2018, arXiv:1803.08494). Parameters are float32, products in `config.dtype`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """The shape of one U-Net; hashable.

    Attributes:
      channels: of an image.
      widths: channels of each level, the bottom last; the size halves from one to the next.
      groups: of group normalisation; must divide every width.
      num_classes: labels of a pixel.
      dtype: of activations and products.
    """

    channels: int = 3
    widths: tuple[int, ...]
    groups: int = 8
    num_classes: int
    dtype: DTypeLike = jnp.bfloat16


UNET = UNetConfig(widths=(64, 128, 256), num_classes=21)
"""The paper's first three levels, for the 21 classes of PASCAL VOC."""

TINY_UNET = UNetConfig(widths=(8, 16, 32), groups=4, num_classes=5)
"""Runs anywhere in well under a second."""


class ConvBlock(nnx.Module):
    """Twice: a 3 × 3 convolution, group normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, config: UNetConfig, *, rngs: nnx.Rngs):
        def conv(width: int) -> nnx.Conv:
            return nnx.Conv(
                width,
                outputs,
                (3, 3),
                use_bias=False,
                dtype=config.dtype,
                kernel_init=nnx.initializers.he_normal(),
                rngs=rngs,
            )

        def norm() -> nnx.GroupNorm:
            return nnx.GroupNorm(outputs, config.groups, dtype=config.dtype, rngs=rngs)

        self.convs = nnx.List([conv(inputs), conv(outputs)])
        self.norms = nnx.List([norm(), norm()])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, height, width, inputs] to [batch, height, width, outputs]."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.relu(norm(conv(x)))
        return x


class UNet(nnx.Module):
    """Down with a skip a level, across, and up again."""

    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        widths = config.widths
        inputs = (config.channels, *widths)
        self.down = nnx.List(
            [ConvBlock(a, b, config, rngs=rngs) for a, b in zip(inputs, widths, strict=False)]
        )
        upwards = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.widen = nnx.List(
            [
                nnx.ConvTranspose(a, b, (2, 2), strides=(2, 2), dtype=config.dtype, rngs=rngs)
                for a, b in upwards
            ]
        )
        self.up = nnx.List([ConvBlock(2 * b, b, config, rngs=rngs) for _, b in upwards])
        self.head = nnx.Conv(widths[0], config.num_classes, (1, 1), dtype=config.dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """See `forward`."""
        *levels, bottom = self.down
        x, skips = images, []
        for level in levels:
            skips.append(level(x))
            x = nnx.max_pool(skips[-1], (2, 2), strides=(2, 2))
        x = bottom(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(jnp.concatenate([skips.pop(), widen(x)], axis=-1))
        return self.head(x).astype(jnp.float32)


def forward(graphdef: nnx.GraphDef[UNet], params: nnx.State, images: jax.Array) -> jax.Array:
    """Scores of every class at every pixel.

    Args:
      graphdef, params: of `nnx.split`.
      images: [batch, height, width, channels], sides multiples of 2 ** (levels - 1).

    Returns:
      float32 logits, [batch, height, width, num_classes].
    """
    return nnx.merge(graphdef, params)(images)


def loss_fn(
    graphdef: nnx.GraphDef[UNet], params: nnx.State, batch: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Mean cross entropy, in nats per pixel, of (images, int labels [batch, height, width])."""
    images, labels = batch
    logits = forward(graphdef, params, images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
