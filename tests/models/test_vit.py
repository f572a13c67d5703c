"""The Vision Transformer against a second one, in float64 numpy, one image at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.vit as vit
from models.stacking import Remat
from models.vit import TINY_VIT, VIT_B16
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
)

F32 = dataclasses.replace(TINY_VIT, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def draw_images(batch: int) -> jax.Array:
    size = F32.image_size
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, size, size, 3)), jnp.float32)


def reference(params: nnx.State, image: np.ndarray) -> np.ndarray:
    weights = by_name(params)
    x = linear(read_patches(image, F32.patch_size), weights, "embedding") + weights["positions"]
    for n in range(F32.num_layers):
        layer = below(weights, f"layers.{n}")
        normal = layer_norm(x, layer["attention_norm.scale"], layer["attention_norm.bias"])
        x = x + self_attention(normal, below(layer, "attention"))
        normal = layer_norm(x, layer["mlp_norm.scale"], layer["mlp_norm.bias"])
        x = x + mlp(normal, below(layer, "mlp"))
    x = layer_norm(x, weights["final_norm.scale"], weights["final_norm.bias"])
    return linear(x.mean(axis=0), weights, "head")


def test_forward():
    graphdef, params = build(vit.VisionTransformer, F32)
    images = draw_images(2)
    expected = np.stack([reference(params, np.asarray(i, np.float64)) for i in images])
    found = vit.forward(graphdef, params, images)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_scanned_layers_have_the_unrolled_gradients(remat: Remat):
    graphdef, params = build(vit.VisionTransformer, F32)
    scanned = nnx.graphdef(
        nnx.eval_shape(lambda: vit.VisionTransformer(F32, rngs=nnx.Rngs(0), scan=remat))
    )
    assert_same_when_scanned(
        vit.loss_fn, graphdef, scanned, params, (draw_images(2), jnp.arange(2))
    )


def test_bfloat16_stays_near_float32_and_scores_in_float32():
    graphdef, params = build(vit.VisionTransformer, TINY_VIT)
    expected = vit.forward(build(vit.VisionTransformer, F32)[0], params, draw_images(2))
    logits = vit.forward(graphdef, params, draw_images(2))
    assert logits.dtype == jnp.float32
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 0 < error < 20 * 2**-9


@pytest.mark.slow
def test_training_lowers_the_loss():
    graphdef, params = nnx.split(vit.VisionTransformer(TINY_VIT, rngs=nnx.Rngs(0)))
    batch = draw_images(8), jnp.arange(8)
    found = losses(functools.partial(vit.loss_fn, graphdef), params, batch)
    # The head starts at zero.
    assert found[0] == pytest.approx(np.log(TINY_VIT.num_classes), rel=1e-6)
    assert found[-1] < 0.5 * found[0]


def test_vit_b16_has_the_published_number_of_parameters():
    """86,567,656 of the paper's, less a class token and its position."""
    params = nnx.state(nnx.eval_shape(lambda: vit.VisionTransformer(VIT_B16, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 86_567_656 - 2 * 768
