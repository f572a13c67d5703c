"""Mixtures of experts against one token at a time in numpy, and against the dense decoder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.llama as llama
import models.moe as moe
from models.configs import MOE_CONFIGS, TINY, TINY_MOE, MoeConfig
from tests.models.drawn import build, by_name, jitted, losses, silu, softmax

F32 = dataclasses.replace(TINY_MOE, dtype=jnp.float32)
ROOMY = dataclasses.replace(F32, capacity_factor=4.0)
TIGHT = dataclasses.replace(F32, capacity_factor=0.75)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def draw_tokens(batch: int, length: int) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(F32.vocab_size, size=(batch, length)), jnp.int32)


def reference(config: MoeConfig, params: nnx.State, x: np.ndarray) -> tuple[np.ndarray, int]:
    """Token by token, choice by choice; and how many choices found no room."""
    weights = by_name(params)
    y, missed = np.zeros_like(x), 0
    for b, sequence in enumerate(x):
        room = dict.fromkeys(range(config.num_experts), config.capacity(len(sequence)))
        for t, token in enumerate(sequence):
            scores = token @ weights["router"]
            best = np.argsort(-scores)[: config.experts_per_token]
            for expert, share in zip(best, softmax(scores[best]), strict=True):
                if not room[expert]:
                    missed += 1
                    continue
                room[expert] -= 1
                gate, up, down = (weights[name][expert] for name in ("gate", "up", "down"))
                y[b, t] += share * ((silu(token @ gate) * (token @ up)) @ down)
    return y, missed


@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_tokens_go_to_their_best_experts_while_there_is_room(config: MoeConfig):
    graphdef, params = build(moe.MoeMlp, config)
    x = draw(2, 12, config.embed_dim)
    expected, missed = reference(config, params, np.asarray(x, np.float64))
    assert (missed > 0) == (config is TIGHT)
    found = nnx.merge(graphdef, params)(x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_one_expert_is_the_dense_decoder():
    dense = dataclasses.replace(TINY, num_layers=2, dtype=jnp.float32)
    one = dataclasses.replace(
        F32, num_experts=1, experts_per_token=1, capacity_factor=1.0, mlp_dim=dense.mlp_dim
    )
    graphdef, params = build(moe.MoeLlama, one)

    def without_experts(path, leaf):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return leaf[0] if names[-1] in ("gate", "up", "down") else leaf

    plain = jax.tree.map_with_path(without_experts, params.raw_mapping)
    for layer in plain["layers"].values():
        del layer["mlp"]["router"]
    tokens = draw_tokens(2, 9)
    found = jitted(llama.forward)(graphdef, params, tokens)
    expected = jitted(llama.forward)(
        nnx.graphdef(llama.abstract_model(dense)), nnx.State(plain), tokens
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_later_tokens_do_not_change_earlier_ones_even_without_room():
    graphdef, params = build(moe.MoeMlp, TIGHT)
    layer = jax.jit(lambda x: nnx.merge(graphdef, params)(x))
    x = draw(1, 12, TIGHT.embed_dim)
    np.testing.assert_array_equal(layer(x)[:, :8], layer(x.at[:, 8:].multiply(-1))[:, :8])


@pytest.mark.slow
def test_decoding_continues_a_prompt():
    graphdef, params = build(moe.MoeLlama, ROOMY)
    tokens = draw_tokens(2, 6)
    expected = jitted(llama.forward)(graphdef, params, tokens)
    cache = llama.init_cache(ROOMY, batch=2, max_len=8)
    logits, cache = jitted(llama.prefill)(graphdef, params, tokens[:, :5], cache)
    np.testing.assert_allclose(logits[:, 0], expected[:, 4], rtol=1e-4, atol=1e-4)
    logits, _ = jitted(llama.decode_step)(graphdef, params, tokens[:, 5:], cache)
    np.testing.assert_allclose(logits[:, 0], expected[:, 5], rtol=1e-4, atol=1e-4)


def test_balance_is_one_when_even_and_the_number_of_experts_when_all_agree():
    even = jnp.asarray([[[0, 1], [2, 3]]])
    assert float(moe.balance_loss(jnp.zeros((1, 2, 4)), even)) == pytest.approx(1)
    sure = jnp.broadcast_to(jnp.asarray([50.0, 0, 0, 0]), (1, 2, 4))
    assert float(moe.balance_loss(sure, jnp.zeros((1, 2, 1), jnp.int32))) == pytest.approx(4)


@pytest.mark.slow
def test_the_loss_is_cross_entropy_and_balance():
    tokens = draw_tokens(2, 9)

    def loss(weight: float) -> float:
        config = dataclasses.replace(F32, balance_weight=weight)
        return float(jitted(moe.loss_fn)(*build(moe.MoeLlama, config), tokens))

    graphdef, params = build(moe.MoeLlama, F32)
    cross_entropy = float(jitted(llama.loss_fn)(graphdef, params, tokens))
    assert loss(0.0) == pytest.approx(cross_entropy, rel=1e-6)
    # Drawn at random, the experts of a layer are neither even nor all the same.
    assert 1 < loss(1.0) - cross_entropy < F32.num_experts


@pytest.mark.slow
def test_every_weight_of_every_expert_is_trained():
    graphdef, params = build(moe.MoeLlama, ROOMY)
    gradients = jax.jit(jax.grad(functools.partial(moe.loss_fn, graphdef)))(
        params, draw_tokens(4, 33)
    )
    for name, gradient in by_name(gradients).items():
        assert np.isfinite(gradient).all(), name
        experts = gradient if gradient.ndim == 3 and ".mlp." in name else gradient[None]
        assert all(np.abs(expert).max() > 0 for expert in experts), name


@pytest.mark.slow
def test_training_lowers_the_loss():
    graphdef, params = nnx.split(moe.MoeLlama(F32, rngs=nnx.Rngs(0)))
    found = losses(functools.partial(moe.loss_fn, graphdef), params, draw_tokens(4, 9))
    balance = F32.balance_weight
    assert found[0] == pytest.approx(np.log(F32.vocab_size) + balance, rel=0.05)
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("name", MOE_CONFIGS)
def test_counts_are_those_of_the_built_model(name: str):
    config = MOE_CONFIGS[name]
    leaves = jax.tree.leaves(nnx.state(moe.abstract_model(config)))
    assert config.param_count == sum(leaf.size for leaf in leaves)


def test_mixtral_has_the_published_number_of_parameters():
    assert MOE_CONFIGS["mixtral-8x7b"].param_count == 46_702_792_704


def test_a_token_cannot_have_more_experts_than_there_are():
    with pytest.raises(ValueError, match="experts_per_token=5 of num_experts=4"):
        dataclasses.replace(TINY_MOE, experts_per_token=5)
