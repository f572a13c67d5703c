"""Models with fused attention compute what they compute with plain attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from models import dit, llama, scanned, training, vit
from models.attending import fused_attention
from models.configs import TINY
from models.sharding import weight_shardings

CONFIG = dataclasses.replace(TINY, dtype=jnp.float32)
FUSED = dataclasses.replace(CONFIG, attention="fused")


def tokens(batch: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (batch, 16), 0, CONFIG.vocab_size)


@pytest.mark.parametrize("model", [llama.Llama, scanned.ScannedLlama])
def test_decoders(model: Any) -> None:
    plain, fused = (
        llama.forward(*nnx.split(model(config, rngs=nnx.Rngs(0))), tokens())
        for config in (CONFIG, FUSED)
    )
    np.testing.assert_allclose(fused, plain, atol=1e-5)


def test_a_prompt_then_tokens() -> None:
    found = []
    for config in (CONFIG, FUSED):
        graphdef, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
        cache = llama.init_cache(config, batch=2, max_len=24)
        logits, cache = llama.prefill(graphdef, params, tokens(), cache)
        token = jnp.argmax(logits, axis=-1)
        found.append(llama.decode_step(graphdef, params, token, cache)[0])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def test_gradients() -> None:
    found = []
    for config in (CONFIG, FUSED):
        graphdef, params = nnx.split(scanned.ScannedLlama(config, rngs=nnx.Rngs(0)))
        gradient = jax.grad(lambda p, g=graphdef: training.loss_fn(g, p, tokens()))(params)
        found.append(jax.tree.leaves(gradient))
    for some, other in zip(*found, strict=True):
        np.testing.assert_allclose(some, other, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_decoders_on_a_mesh(shape: tuple[int, int]) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("fsdp", "model"))
    expected = llama.forward(*nnx.split(scanned.ScannedLlama(CONFIG, rngs=nnx.Rngs(0))), tokens())
    graphdef, params = nnx.split(scanned.ScannedLlama(FUSED, rngs=nnx.Rngs(0), mesh=mesh))
    placed = jax.device_put(params, weight_shardings(params, mesh))
    found = jax.jit(llama.forward, static_argnums=0)(graphdef, placed, tokens())
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_fewer_key_heads_than_devices_are_repeated() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 8, heads, 16))) for heads in (4, 2, 2))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("fsdp", "model"))
    split = jax.jit(lambda q, k, v: fused_attention(q, k, v, mesh))(q, k, v)
    np.testing.assert_allclose(split, fused_attention(q, k, v, None), atol=1e-6)


def test_vision_transformer() -> None:
    images = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    config = vit.TINY_VIT
    plain, fused = (
        vit.forward(
            *nnx.split(
                vit.VisionTransformer(dataclasses.replace(config, attention=kind), rngs=nnx.Rngs(0))
            ),
            images[:, : config.image_size, : config.image_size],
        )
        for kind in ("plain", "fused")
    )
    np.testing.assert_allclose(fused, plain, atol=2e-2)


def test_diffusion_transformer() -> None:
    batch = dit.empty_batch(dit.TINY_DIT, 2)
    found = []
    for kind in ("plain", "fused"):
        config = dataclasses.replace(dit.TINY_DIT, attention=kind, dtype=jnp.float32)
        graphdef, params = nnx.split(dit.DiffusionTransformer(config, rngs=nnx.Rngs(0)))
        # Gates start at zero: what attention computes would not be seen.
        params = jax.tree.map(lambda x: x + 0.01 * jnp.ones_like(x), params)
        found.append(dit.loss_fn(graphdef, params, batch))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
