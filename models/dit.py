"""A diffusion transformer, DiT with adaLN-Zero (Peebles & Xie, 2022, arXiv:2212.09748).

    graphdef, params = nnx.split(DiffusionTransformer(TINY_DIT, rngs=nnx.Rngs(0)))
    loss = loss_fn(graphdef, params, batch)

The time step and the class condition every block: from their embedding c a linear layer makes
shifts, scales and gates,

    x ── norm ── · (1 + scale) + shift ── attention or MLP ── · gate ──► + x

and that layer starts at zero, so that every block is the identity then (section 3.2). The
model predicts the noise that was added, in patches of the latent (the paper's learnt variance
is left out). Blocks stand one after the other, or are stacked and scanned; parameters are
float32, products in `config.dtype`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.configs import AttentionKind
from models.stacking import Remat, build_layers, through_layers
from models.vit import Mlp, dense, patches, self_attention

_FREQUENCIES = 256
"""Width of the sinusoidal embedding of a time step, in the paper's code."""

_STEPS = 1000
"""Of the diffusion, with a linear schedule of variances (Ho et al., 2020, arXiv:2006.11239)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DitConfig:
    """The shape of one diffusion transformer; hashable.

    Attributes:
      latent_size: of a side of the latent, a multiple of `patch_size`.
      channels: of the latent.
      patch_size: of a side.
      num_layers, embed_dim, num_heads: of the transformer; its MLPs are four times as wide.
      num_classes: one more is for no class at all (classifier-free guidance).
      dtype: of activations and products.
      attention: see `AttentionKind`.
    """

    latent_size: int = 32
    channels: int = 4
    patch_size: int = 2
    num_layers: int
    embed_dim: int
    num_heads: int
    num_classes: int = 1000
    dtype: DTypeLike = jnp.bfloat16
    attention: AttentionKind = "plain"


DIT_B2 = DitConfig(num_layers=12, embed_dim=768, num_heads=12)
"""DiT-B/2 on latents of 256 × 256 images (table 1 of the paper)."""

DIT_B2_4L = dataclasses.replace(DIT_B2, num_layers=4)
"""A third of the depth, which compiles in a third of the time."""

TINY_DIT = DitConfig(latent_size=8, num_layers=2, embed_dim=32, num_heads=2, num_classes=10)
"""Runs anywhere in well under a second."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionBatch:
    """What a training step draws: latents, and how each is to be noised.

    Attributes:
      latents, noise: float32 [batch, latent_size, latent_size, channels].
      steps: int [batch], in 0 .. 999.
      labels: int [batch]; `num_classes` where the class is dropped.
    """

    latents: jax.Array
    noise: jax.Array
    steps: jax.Array
    labels: jax.Array


def empty_batch(config: DitConfig, batch: int) -> DiffusionBatch:
    """`batch` examples, all zero."""
    shape = (batch, config.latent_size, config.latent_size, config.channels)
    latents, numbers = jnp.zeros(shape), jnp.zeros(batch, jnp.int32)
    return DiffusionBatch(latents, latents, numbers, numbers)


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Cosines, then sines, of float `positions` [...] at `width / 2` frequencies from 1 down
    to 1/10,000 (exclusive), geometrically: float32 [..., width]."""
    frequencies = 10_000.0 ** (-jnp.arange(width // 2, dtype=jnp.float32) / (width // 2))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def grid_positions(side: int, width: int) -> jax.Array:
    """Fixed embeddings of `side * side` patches, half of `width` for either coordinate."""
    row, column = jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij")
    halves = [sinusoids(axis.reshape(-1), width // 2) for axis in (row, column)]
    return jnp.concatenate(halves, axis=-1)


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """`x` [batch, len, embed_dim], scaled and shifted by one [batch, embed_dim] an example."""
    return x * (1 + scale[:, None]) + shift[:, None]


def _plain_norm(width: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, dtype=dtype, use_bias=False, use_scale=False, rngs=rngs)


def _zeros(inputs: int, outputs: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.zeros
    return nnx.Linear(inputs, outputs, dtype=dtype, kernel_init=init, rngs=rngs)


class DitBlock(nnx.Module):
    """Attention and MLP, each modulated and gated by the condition."""

    def __init__(self, config: DitConfig, *, rngs: nnx.Rngs):
        embed, dtype = config.embed_dim, config.dtype
        self.modulation = _zeros(embed, 6 * embed, dtype, rngs)
        self.attention_norm = _plain_norm(embed, dtype, rngs)
        self.attention = self_attention(embed, config.num_heads, dtype, config.attention, rngs=rngs)
        self.mlp_norm = _plain_norm(embed, dtype, rngs)
        self.mlp = Mlp(embed, 4 * embed, dtype, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """`x` [batch, len, embed_dim] to the same, given `condition` [batch, embed_dim]."""
        made = jnp.split(self.modulation(jax.nn.silu(condition)), 6, axis=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = made
        mixed = self.attention(modulate(self.attention_norm(x), shift, scale))
        x = x + gate[:, None] * mixed
        expanded = self.mlp(modulate(self.mlp_norm(x), mlp_shift, mlp_scale))
        return x + mlp_gate[:, None] * expanded


class DiffusionTransformer(nnx.Module):
    """The denoiser; as built it answers zero.

    Args:
      scan: as of `models.stacking.build_layers`.
    """

    def __init__(self, config: DitConfig, *, rngs: nnx.Rngs, scan: Remat | None = None):
        self.config = config
        self.scan: Remat | None = scan
        embed, dtype = config.embed_dim, config.dtype
        pixels = config.channels * config.patch_size**2
        normal = nnx.initializers.normal(0.02)
        self.embedding = dense(pixels, embed, dtype, rngs=rngs)
        self.step_in = nnx.Linear(_FREQUENCIES, embed, dtype=dtype, kernel_init=normal, rngs=rngs)
        self.step_out = nnx.Linear(embed, embed, dtype=dtype, kernel_init=normal, rngs=rngs)
        self.classes = nnx.Embed(
            config.num_classes + 1, embed, dtype=dtype, embedding_init=normal, rngs=rngs
        )
        block = functools.partial(DitBlock, config)
        self.layers = build_layers(block, config.num_layers, rngs=rngs, scan=scan)
        self.final_modulation = _zeros(embed, 2 * embed, dtype, rngs)
        self.final_norm = _plain_norm(embed, dtype, rngs)
        self.output = _zeros(embed, pixels, dtype, rngs)

    def __call__(self, latents: jax.Array, steps: jax.Array, labels: jax.Array) -> jax.Array:
        """See `forward`."""
        config = self.config
        side = config.latent_size // config.patch_size
        x = self.embedding(patches(latents, config.patch_size))
        x = x + grid_positions(side, config.embed_dim).astype(x.dtype)
        condition = self.step_out(jax.nn.silu(self.step_in(sinusoids(steps, _FREQUENCIES))))
        condition = condition + self.classes(labels)
        x = through_layers(self.layers, x, condition, scan=self.scan)
        shift, scale = jnp.split(self.final_modulation(jax.nn.silu(condition)), 2, axis=-1)
        x = self.output(modulate(self.final_norm(x), shift, scale))
        return self._unpatched(x).astype(jnp.float32)

    def _unpatched(self, x: jax.Array) -> jax.Array:
        """`models.vit.patches` undone."""
        size, channels = self.config.patch_size, self.config.channels
        side = self.config.latent_size // size
        grid = x.reshape(x.shape[0], side, side, size, size, channels)
        return grid.swapaxes(2, 3).reshape(x.shape[0], side * size, side * size, channels)


def forward(
    graphdef: nnx.GraphDef[DiffusionTransformer],
    params: nnx.State,
    latents: jax.Array,
    steps: jax.Array,
    labels: jax.Array,
) -> jax.Array:
    """The noise in noised `latents`: float32, of their shape.

    Args:
      graphdef, params: of `nnx.split`.
      latents, steps, labels: as of `DiffusionBatch`.
    """
    return nnx.merge(graphdef, params)(latents, steps, labels)


def noised(batch: DiffusionBatch) -> jax.Array:
    """The batch's latents after its steps of diffusion (arXiv:2006.11239, equation 4)."""
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, _STEPS))[batch.steps][:, None, None, None]
    return jnp.sqrt(kept) * batch.latents + jnp.sqrt(1 - kept) * batch.noise


def loss_fn(
    graphdef: nnx.GraphDef[DiffusionTransformer], params: nnx.State, batch: DiffusionBatch
) -> jax.Array:
    """Mean squared error of the predicted noise (arXiv:2006.11239, equation 14)."""
    predicted = forward(graphdef, params, noised(batch), batch.steps, batch.labels)
    return jnp.mean(jnp.square(predicted - batch.noise))
