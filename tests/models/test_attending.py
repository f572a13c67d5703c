"""Models with fused attention compute what they compute with plain attention."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from models import dit, llama, moe, scanned, training, vit
from models.attending import cached_attention, fused_attention
from models.configs import TINY, TINY_MOE
from models.sharding import weight_shardings
from tests.models.drawn import initial, jitted

CONFIG = dataclasses.replace(TINY, num_layers=2, dtype=jnp.float32)
FUSED = dataclasses.replace(CONFIG, attention="fused")


def tokens(batch: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (batch, 16), 0, CONFIG.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("model", [llama.Llama, scanned.ScannedLlama])
def test_decoders(model: Any) -> None:
    plain, fused = (
        jitted(llama.forward)(*initial(model, config), tokens()) for config in (CONFIG, FUSED)
    )
    np.testing.assert_allclose(fused, plain, atol=1e-5)


MODELS = [
    pytest.param(llama.Llama, llama.init_cache, CONFIG, id="unrolled"),
    pytest.param(scanned.ScannedLlama, scanned.init_cache, CONFIG, id="scanned"),
    pytest.param(
        moe.MoeLlama,
        llama.init_cache,
        # With room for every choice: how much there is depends on how long a sequence is.
        dataclasses.replace(TINY_MOE, dtype=jnp.float32, capacity_factor=4.0),
        id="experts",
    ),
]


def by_token(cache: llama.Cache) -> list[jax.Array]:
    """Keys and values, in the layout of plain attention."""
    leaves = jax.tree.leaves((cache.keys, cache.values))
    return leaves if cache.layout == "by_token" else [leaf.swapaxes(-2, -3) for leaf in leaves]


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(("model", "init_cache", "config"), MODELS)
def test_a_prompt_then_tokens(model: Any, init_cache: Any, config: Any, at_once: int) -> None:
    prompt, rest = tokens()[:, :10], tokens()[:, 10:]
    fused = dataclasses.replace(config, attention="fused")
    (graphdef, params), (plain, _) = (initial(model, c) for c in (fused, config))
    whole = jitted(llama.forward)(graphdef, params, tokens())
    step = jitted(llama.decode_step)
    logits, cache = jitted(llama.prefill)(graphdef, params, prompt, init_cache(fused, 2, 24))
    _, expected = jitted(llama.prefill)(plain, params, prompt, init_cache(config, 2, 24))
    np.testing.assert_allclose(logits[:, 0], whole[:, 9], atol=1e-5)
    for t in range(0, 6, at_once):
        chunk = rest[:, t : t + at_once]
        logits, cache = step(graphdef, params, chunk, cache)
        plain_logits, expected = step(plain, params, chunk, expected)
        np.testing.assert_allclose(logits, plain_logits, atol=1e-5)
        np.testing.assert_allclose(logits[:, 0], whole[:, 9 + t + at_once], atol=1e-5)
    assert cache.position == 16
    for some, other in zip(by_token(cache), by_token(expected), strict=True):
        np.testing.assert_allclose(some, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("function", [llama.prefill, llama.decode_step])
@pytest.mark.parametrize("module", [llama, scanned])
def test_a_donated_cache_is_updated_in_place(module: Any, function: Any) -> None:
    graphdef, params = nnx.split(module.abstract_model(FUSED))
    cache = module.abstract_cache(FUSED, batch=2, max_len=32)
    assert (cache.batch, cache.max_len) == (2, 32)
    step = jax.jit(partial(function, graphdef), donate_argnames="cache")
    token = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    memory = step.lower(params, token, cache).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 2 * 32 * FUSED.cache_bytes_per_token


@pytest.mark.parametrize("function", [llama.prefill, llama.decode_step])
@pytest.mark.parametrize(("model", "other"), [(CONFIG, FUSED), (FUSED, CONFIG)])
def test_a_cache_is_that_of_its_attention(model: Any, other: Any, function: Any) -> None:
    graphdef, params = nnx.split(llama.abstract_model(model))
    cache = llama.abstract_cache(other, batch=2, max_len=32)
    sentence = (
        f"a cache {other.cache_layout} does not fit attention='{model.attention}', whose cache "
        f"is {model.cache_layout}: build it with init_cache"
    )
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(partial(function, graphdef), params, tokens(), cache)


@pytest.mark.slow
def test_gradients() -> None:
    found = []
    for config in (CONFIG, FUSED):
        graphdef, params = initial(scanned.ScannedLlama, config)
        gradient = jax.jit(jax.grad(lambda p, g=graphdef: training.loss_fn(g, p, tokens())))(params)
        found.append(jax.tree.leaves(gradient))
    for some, other in zip(*found, strict=True):
        np.testing.assert_allclose(some, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_decoders_on_a_mesh(shape: tuple[int, int]) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("fsdp", "model"))
    expected = jitted(llama.forward)(*initial(scanned.ScannedLlama, CONFIG), tokens())
    graphdef, params = initial(partial(scanned.ScannedLlama, mesh=mesh), FUSED)
    placed = jax.device_put(params, weight_shardings(params, mesh))
    found = jax.jit(llama.forward, static_argnums=0)(graphdef, placed, tokens())
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
# Key/value heads that the devices of "model" share, and a prompt that those of "fsdp" share.
@pytest.mark.parametrize(("shape", "batch"), [((2, 2), 2), ((1, 4), 2), ((2, 2), 1)])
def test_decoding_on_a_mesh(shape: tuple[int, int], batch: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("fsdp", "model"))
    found = []
    for config, split in ((CONFIG, None), (FUSED, mesh)):
        graphdef, params = initial(partial(scanned.ScannedLlama, mesh=split), config)
        cache = scanned.init_cache(config, batch, 24)
        if split is not None:
            params = jax.device_put(params, weight_shardings(params, mesh))
            cache = jax.device_put(cache, scanned.cache_shardings(cache, mesh))
        first, cache = jax.jit(llama.prefill, static_argnums=0)(
            graphdef, params, tokens(batch)[:, :-1], cache
        )
        second, _ = jitted(llama.decode_step)(graphdef, params, tokens(batch)[:, -1:], cache)
        found.append((first, second))
    for some, other in zip(*found, strict=True):
        np.testing.assert_allclose(some, other, atol=1e-5)


def test_a_mesh_that_heads_do_not_fit_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("fsdp", "model"))
    q, k = jnp.ones((2, 1, 12, 16)), jnp.ones((2, 3, 8, 16))
    with pytest.raises(ValueError, match="shard_map"):
        cached_attention(q, k, k, jnp.int32(8), mesh)


def test_fewer_key_heads_than_devices_are_repeated() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 8, heads, 16))) for heads in (4, 2, 2))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("fsdp", "model"))
    split = jax.jit(lambda q, k, v: fused_attention(q, k, v, mesh))(q, k, v)
    np.testing.assert_allclose(split, fused_attention(q, k, v, None), atol=1e-6)


@pytest.mark.slow
def test_vision_transformer() -> None:
    images = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    config = vit.TINY_VIT
    plain, fused = (
        jitted(vit.forward)(
            *initial(vit.VisionTransformer, dataclasses.replace(config, attention=kind)),
            images[:, : config.image_size, : config.image_size],
        )
        for kind in ("plain", "fused")
    )
    np.testing.assert_allclose(fused, plain, atol=2e-2)


@pytest.mark.slow
def test_diffusion_transformer() -> None:
    batch = dit.empty_batch(dit.TINY_DIT, 2)
    found = []
    for kind in ("plain", "fused"):
        config = dataclasses.replace(dit.TINY_DIT, attention=kind, dtype=jnp.float32)
        graphdef, params = initial(dit.DiffusionTransformer, config)
        # Gates start at zero: what attention computes would not be seen.
        params = jax.tree.map(lambda x: x + 0.01 * jnp.ones_like(x), params)
        found.append(jitted(dit.loss_fn)(graphdef, params, batch))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
