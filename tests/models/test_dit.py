"""The diffusion transformer against a second one, in float64 numpy, one latent at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.dit as dit
from models.dit import DIT_B2, TINY_DIT, DiffusionBatch
from models.stacking import Remat
from tests.models.drawn import (
    assert_same_when_scanned,
    below,
    build,
    by_name,
    layer_norm,
    linear,
    losses,
    mlp,
    read_patches,
    self_attention,
    silu,
)

F32 = dataclasses.replace(TINY_DIT, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def draw_batch(batch: int) -> DiffusionBatch:
    rng = np.random.default_rng(1)
    shape = (batch, F32.latent_size, F32.latent_size, F32.channels)
    latents, noise = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    steps = jnp.asarray(rng.integers(1000, size=batch), jnp.int32)
    return DiffusionBatch(latents, noise, steps, jnp.arange(batch) % (F32.num_classes + 1))


def waves(position: float, width: int) -> np.ndarray:
    angles = [position / 10_000 ** (i / (width // 2)) for i in range(width // 2)]
    return np.concatenate([np.cos(angles), np.sin(angles)])


def reference(params: nnx.State, latent: np.ndarray, step: int, label: int) -> np.ndarray:
    weights, size = by_name(params), F32.patch_size
    side, half = F32.latent_size // size, F32.embed_dim // 2
    x = linear(read_patches(latent, size), weights, "embedding")
    for n in range(side * side):
        x[n] += np.concatenate([waves(n // side, half), waves(n % side, half)])
    c = linear(silu(linear(waves(step, 256), weights, "step_in")), weights, "step_out")
    c = silu(c + weights["classes.embedding"][label])
    for n in range(F32.num_layers):
        layer = below(weights, f"layers.{n}")
        shift, scale, gate, shift2, scale2, gate2 = linear(c, layer, "modulation").reshape(6, -1)
        normal = layer_norm(x) * (1 + scale) + shift
        x = x + gate * self_attention(normal, below(layer, "attention"))
        normal = layer_norm(x) * (1 + scale2) + shift2
        x = x + gate2 * mlp(normal, below(layer, "mlp"))
    shift, scale = linear(c, weights, "final_modulation").reshape(2, -1)
    x = linear(layer_norm(x) * (1 + scale) + shift, weights, "output")
    latent = np.zeros_like(latent)
    for n, patch in enumerate(x):
        top, left = n // side * size, n % side * size
        latent[top : top + size, left : left + size] = patch.reshape(size, size, -1)
    return latent


@pytest.mark.slow
def test_forward():
    graphdef, params = build(dit.DiffusionTransformer, F32)
    batch = draw_batch(3)
    found = dit.forward(graphdef, params, batch.latents, batch.steps, batch.labels)
    for n in range(3):
        latent = np.asarray(batch.latents[n], np.float64)
        expected = reference(params, latent, int(batch.steps[n]), int(batch.labels[n]))
        # A thousand radians in float32 are off by a ten-thousandth.
        np.testing.assert_allclose(found[n], expected, rtol=0, atol=1e-3 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_scanned_layers_have_the_unrolled_gradients(remat: Remat):
    graphdef, params = build(dit.DiffusionTransformer, F32)
    scanned = nnx.graphdef(
        nnx.eval_shape(lambda: dit.DiffusionTransformer(F32, rngs=nnx.Rngs(0), scan=remat))
    )
    assert_same_when_scanned(dit.loss_fn, graphdef, scanned, params, draw_batch(3))


@pytest.mark.slow
def test_at_the_start_blocks_are_the_identity_and_the_model_answers_zero():
    model = dit.DiffusionTransformer(F32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(2, 16, F32.embed_dim)), jnp.float32)
    condition = jnp.asarray(rng.normal(size=(2, F32.embed_dim)), jnp.float32)
    for block in model.layers:
        np.testing.assert_array_equal(block(x, condition), x)
    batch = draw_batch(2)
    answer = model(batch.latents, batch.steps, batch.labels)
    assert answer.dtype == jnp.float32
    np.testing.assert_array_equal(answer, jnp.zeros_like(batch.latents))


@pytest.mark.parametrize("step", [0, 500, 999])
def test_noised_latents_have_the_variance_of_the_schedule(step: int):
    zeros, ones = jnp.zeros((1, 2, 2, 1)), jnp.ones((1, 2, 2, 1))
    at = jnp.full(1, step), jnp.zeros(1, jnp.int32)
    kept = np.prod([1 - (1e-4 + (0.02 - 1e-4) * t / 999) for t in range(step + 1)])
    latent = dit.noised(DiffusionBatch(ones, zeros, *at))
    noise = dit.noised(DiffusionBatch(zeros, ones, *at))
    np.testing.assert_allclose(latent, np.full(ones.shape, np.sqrt(kept)), rtol=1e-4)
    np.testing.assert_allclose(noise, np.full(ones.shape, np.sqrt(1 - kept)), rtol=1e-4)


@pytest.mark.slow
def test_training_lowers_the_loss():
    graphdef, params = nnx.split(dit.DiffusionTransformer(TINY_DIT, rngs=nnx.Rngs(0)))
    batch = draw_batch(8)
    found = losses(functools.partial(dit.loss_fn, graphdef), params, batch, steps=30)
    assert found[0] == pytest.approx(float(jnp.mean(batch.noise**2)), rel=1e-5)
    assert found[-1] < 0.8 * found[0]


def test_dit_b2_has_the_published_number_of_parameters():
    """130 million, of which the learnt variance would be another 12,304."""
    params = nnx.state(nnx.eval_shape(lambda: dit.DiffusionTransformer(DIT_B2, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == pytest.approx(130e6, rel=0.01)
