"""The scanned decoder against the unrolled one: the same weights, stacked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.llama as llama
import models.moe as moe
import models.scanned as scanned
from models.configs import CONFIGS, TINY, TINY_MOE, LlamaConfig
from models.stacking import Remat, stack_params, unstack_params
from tests.models import drawn

CONFIG = dataclasses.replace(TINY, num_layers=2, dtype=jnp.float32)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)

forward = jax.jit(llama.forward, static_argnums=0)
prefill = jax.jit(llama.prefill, static_argnums=0)
decode_step = jax.jit(llama.decode_step, static_argnums=0)
gradient = jax.jit(jax.grad(llama.loss_fn, argnums=1), static_argnums=0)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def build(config: LlamaConfig) -> tuple[nnx.GraphDef[llama.Llama], nnx.State]:
    """An unrolled model whose every parameter, norm scales too, is drawn wide enough to matter."""
    graphdef, params = nnx.split(llama.abstract_model(config))
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype)

    return graphdef, jax.tree.map(draw, params)


def graphdef_of(config: LlamaConfig, **options) -> nnx.GraphDef[scanned.ScannedLlama]:
    return nnx.split(scanned.abstract_model(config, **options))[0]


def draw_tokens(config: LlamaConfig, batch: int, length: int) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(config.vocab_size, size=(batch, length)), jnp.int32)


def stack_cache(cache: llama.Cache) -> llama.Cache:
    return llama.Cache(jnp.stack(cache.keys), jnp.stack(cache.values), cache.position)


def assert_close(found, expected) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        found,
        expected,
    )


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["head", "tied"])
def test_forward_equals_the_unrolled_one(config: LlamaConfig):
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=2, length=6)
    found = forward(graphdef_of(config), stack_params(params), tokens)
    assert_close(found, forward(graphdef, params, tokens))


@pytest.mark.slow
def test_prefill_then_decode_equals_the_unrolled_one():
    graphdef, params = build(CONFIG)
    scanned_graphdef, stacked = graphdef_of(CONFIG), stack_params(params)
    tokens = draw_tokens(CONFIG, batch=2, length=9)

    expected = prefill(graphdef, params, tokens[:, :5], llama.init_cache(CONFIG, 2, 12))
    found = prefill(scanned_graphdef, stacked, tokens[:, :5], scanned.init_cache(CONFIG, 2, 12))
    for t in range(5, 9):
        assert_close(found[0], expected[0])
        assert_close(found[1], stack_cache(expected[1]))
        expected = decode_step(graphdef, params, tokens[:, t : t + 1], expected[1])
        found = decode_step(scanned_graphdef, stacked, tokens[:, t : t + 1], found[1])
    assert_close(found[0], expected[0])
    assert int(found[1].position) == 9


def test_prefill_forgets_what_the_cache_held():
    _, params = build(CONFIG)
    graphdef, stacked = graphdef_of(CONFIG), stack_params(params)
    tokens = draw_tokens(CONFIG, batch=1, length=4)
    empty = scanned.init_cache(CONFIG, batch=1, max_len=8)
    _, used = prefill(graphdef, stacked, tokens[:, ::-1], empty)
    fresh_logits, fresh = prefill(graphdef, stacked, tokens[:, :2], empty)
    again_logits, again = prefill(graphdef, stacked, tokens[:, :2], used)
    np.testing.assert_array_equal(again_logits, fresh_logits)

    # The tail still holds the old prompt; the next step must not see it.
    expected, _ = decode_step(graphdef, stacked, tokens[:, 2:3], fresh)
    logits, _ = decode_step(graphdef, stacked, tokens[:, 2:3], again)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["head", "tied"])
def test_gradients_equal_the_unrolled_ones(config: LlamaConfig, remat: Remat):
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=2, length=6)
    expected = gradient(graphdef, params, tokens)
    found = gradient(graphdef_of(config, remat=remat), stack_params(params), tokens)
    assert_close(unstack_params(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_experts_have_the_unrolled_loss_and_gradients(remat: Remat):
    config = dataclasses.replace(TINY_MOE, dtype=jnp.float32, balance_weight=1.0)
    graphdef, params = drawn.build(moe.MoeLlama, config)
    tokens = draw_tokens(config, batch=2, length=6)
    of = jax.jit(jax.value_and_grad(moe.loss_fn, argnums=1), static_argnums=0)
    loss, gradients = of(graphdef, params, tokens)
    found = of(graphdef_of(config, remat=remat), stack_params(params), tokens)
    assert_close((found[0], unstack_params(found[1])), (loss, gradients))
    # The balance is part of it.
    assert float(loss) > float(jax.jit(llama.loss_fn, static_argnums=0)(graphdef, params, tokens))


def test_unstacking_undoes_stacking():
    _, params = build(CONFIG)
    again = unstack_params(stack_params(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_parameters_are_named_by_what_they_are():
    names = [
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(scanned.abstract_params(TINY))
    ]
    assert names == [
        "embedding",
        "final_norm",
        "head",
        "layers.attention.key",
        "layers.attention.output",
        "layers.attention.query",
        "layers.attention.value",
        "layers.attention_norm",
        "layers.mlp.down",
        "layers.mlp.gate",
        "layers.mlp.up",
        "layers.mlp_norm",
    ]


@pytest.mark.slow
def test_a_built_model_is_what_the_abstract_one_says():
    graphdef, params = nnx.split(scanned.ScannedLlama(CONFIG, rngs=nnx.Rngs(0)))
    abstract_graphdef, abstract = nnx.split(scanned.abstract_model(CONFIG))
    assert graphdef == abstract_graphdef
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert jax.tree.map(jax.typeof, params) == jax.tree.map(jax.typeof, abstract)
    # Every layer draws its own.
    gate = np.asarray(params.raw_mapping["layers"]["mlp"]["gate"][...])
    assert np.std(gate) == pytest.approx(0.02, rel=0.05)
    assert not np.allclose(gate[0], gate[1])


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["head", "tied"])
def test_stacked_params_are_what_the_abstract_model_says(config: LlamaConfig):
    _, params = build(config)
    stacked, abstract = stack_params(params), scanned.abstract_params(config)
    assert jax.tree.structure(stacked) == jax.tree.structure(abstract)
    assert jax.tree.map(jax.typeof, stacked) == jax.tree.map(jax.typeof, abstract)


def test_an_abstract_cache_is_what_a_built_one_is():
    cache = scanned.init_cache(TINY, batch=2, max_len=8)
    abstract = scanned.abstract_cache(TINY, batch=2, max_len=8)
    assert jax.tree.map(jax.typeof, cache) == jax.tree.map(jax.typeof, abstract)
    assert (abstract.batch, abstract.max_len) == (2, 8)


@pytest.mark.parametrize("name", CONFIGS)
def test_stacking_neither_adds_nor_drops_a_byte(name: str):
    config = CONFIGS[name]
    leaves = jax.tree.leaves(scanned.abstract_params(config))
    assert config.param_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    cache = scanned.abstract_cache(config, batch=3, max_len=10)
    held = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((cache.keys, cache.values))
    )
    assert held == 3 * 10 * config.cache_bytes_per_token


def test_the_program_is_as_long_for_80_layers_as_for_2():
    def length(num_layers: int) -> int:
        config = dataclasses.replace(TINY, num_layers=num_layers)
        graphdef, params = nnx.split(scanned.abstract_model(config))
        cache = scanned.abstract_cache(config, batch=1, max_len=8)
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        step = jax.jit(functools.partial(llama.decode_step, graphdef))
        return step.lower(params, tokens, cache).as_text().count("\n")

    assert length(80) == length(2)


@pytest.mark.parametrize("function", [llama.prefill, llama.decode_step])
def test_a_donated_cache_is_updated_in_place(function):
    graphdef, params = nnx.split(scanned.abstract_model(TINY))
    cache = scanned.abstract_cache(TINY, batch=2, max_len=32)
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    step = jax.jit(functools.partial(function, graphdef), donate_argnames="cache")
    memory = step.lower(params, tokens, cache).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 2 * 32 * TINY.cache_bytes_per_token


@pytest.mark.parametrize("function", [llama.prefill, llama.decode_step])
def test_tokens_must_fit_the_cache(function):
    graphdef, params = nnx.split(scanned.abstract_model(TINY))
    cache = scanned.abstract_cache(TINY, batch=2, max_len=4)
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    with pytest.raises(ValueError, match="do not fit a cache for 2 sequences of at most 4 tokens"):
        jax.eval_shape(functools.partial(function, graphdef), params, tokens, cache)
