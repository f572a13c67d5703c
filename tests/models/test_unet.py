"""The U-Net against a second one, in float64 numpy, one pixel at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.unet as unet
from models.unet import TINY_UNET
from tests.models.drawn import below, build, by_name, initial, losses

F32 = dataclasses.replace(TINY_UNET, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def draw_images(batch: int, size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, size, size, 3)), jnp.float32)


def conv(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """3 × 3 of one image, zeros around it."""
    height, width, _ = x.shape
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    return np.stack(
        [
            [np.einsum("abc,abcd->d", padded[i : i + 3, j : j + 3], kernel) for j in range(width)]
            for i in range(height)
        ]
    )


def group_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Of one image; consecutive channels are a group."""
    height, width, channels = x.shape
    groups = x.reshape(height * width, F32.groups, -1)
    centred = groups - groups.mean(axis=(0, 2), keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=(0, 2), keepdims=True) + 1e-6)
    return normal.reshape(height, width, channels) * scale + bias


def block(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    for n in (0, 1):
        x = conv(x, weights[f"convs.{n}.kernel"])
        x = group_norm(x, weights[f"norms.{n}.scale"], weights[f"norms.{n}.bias"])
        x = np.maximum(x, 0)
    return x


def pool(x: np.ndarray) -> np.ndarray:
    height, width, channels = x.shape
    return x.reshape(height // 2, 2, width // 2, 2, channels).max(axis=(1, 3))


def widen(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Each pixel becomes 2 × 2 of them; the kernel is stored turned by half a circle."""
    height, width, _ = x.shape
    kernel = weights["kernel"][::-1, ::-1]
    made = np.einsum("ijc,abcd->iajbd", x, kernel)
    return made.reshape(2 * height, 2 * width, -1) + weights["bias"]


def reference(params: nnx.State, image: np.ndarray) -> np.ndarray:
    weights = by_name(params)
    first = block(image, below(weights, "down.0"))
    second = block(pool(first), below(weights, "down.1"))
    x = block(pool(second), below(weights, "down.2"))
    x = np.concatenate([second, widen(x, below(weights, "widen.0"))], axis=-1)
    x = block(x, below(weights, "up.0"))
    x = np.concatenate([first, widen(x, below(weights, "widen.1"))], axis=-1)
    x = block(x, below(weights, "up.1"))
    return x @ weights["head.kernel"][0, 0] + weights["head.bias"]


def test_forward():
    graphdef, params = build(unet.UNet, F32)
    images = draw_images(2, 8)
    expected = np.stack([reference(params, np.asarray(i, np.float64)) for i in images])
    found = unet.forward(graphdef, params, images)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_every_pixel_gets_a_score_for_every_class():
    graphdef, params = initial(unet.UNet, TINY_UNET)
    logits = jax.eval_shape(functools.partial(unet.forward, graphdef), params, draw_images(2, 16))
    assert (logits.shape, logits.dtype) == ((2, 16, 16, TINY_UNET.num_classes), jnp.float32)


@pytest.mark.slow
def test_training_lowers_the_loss():
    graphdef, params = initial(unet.UNet, TINY_UNET)
    images = draw_images(2, 16)
    labels = (images[..., 0] > 0).astype(jnp.int32)
    found = losses(functools.partial(unet.loss_fn, graphdef), params, (images, labels), steps=20)
    assert np.isfinite(found).all()
    assert found[-1] < 0.5 * found[0]
