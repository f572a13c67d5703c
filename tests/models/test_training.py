"""Training steps: against AdamW written down in numpy, and against one another."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.llama as llama
import models.scanned as scanned
from models.configs import TINY, LlamaConfig
from models.stacking import Remat, stack_params, unstack_params
from models.training import (
    TrainOptions,
    TrainState,
    abstract_state,
    gradient_step,
    init_state,
    rounded,
    train_step,
)
from tests.models.drawn import initial
from tests.sweeps import slow_but

CONFIG = dataclasses.replace(TINY, num_layers=2, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def build(
    config: LlamaConfig, remat: Remat = "none"
) -> tuple[nnx.GraphDef[scanned.ScannedLlama], nnx.State]:
    return initial(functools.partial(scanned.ScannedLlama, remat=remat), config)


@functools.cache
def step(
    options: TrainOptions, config: LlamaConfig = CONFIG, remat: Remat = "none"
) -> Callable[..., Any]:
    return jax.jit(functools.partial(train_step, build(config, remat)[0], options))


def draw_tokens(batch: int, length: int) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(CONFIG.vocab_size, size=(batch, length)), jnp.int32)


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-6, np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", slow_but([0.5], [None, 0.5]))
def test_two_steps_are_those_of_the_paper(clip_norm: float | None):
    """Algorithm 2 of arXiv:1711.05101, on gradients of the unrolled model."""
    options = TrainOptions(learning_rate=0.01, clip_norm=clip_norm)
    graphdef = nnx.graphdef(llama.abstract_model(CONFIG))
    loss_of = jax.jit(functools.partial(llama.loss_fn, graphdef))
    gradient_of = jax.jit(jax.grad(loss_of))
    _, params = build(CONFIG)
    tokens = draw_tokens(2, 9)

    state = init_state(params, options)
    weights = leaves(params)
    first = second = [np.zeros_like(weight) for weight in weights]
    for t in (1, 2):
        unstacked = unstack_params(state.params)
        gradients = leaves(stack_params(gradient_of(unstacked, tokens)))
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
        state, metrics = step(options)(state, tokens)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)
        assert float(metrics["loss"]) == pytest.approx(float(loss_of(unstacked, tokens)), rel=1e-5)

        if clip_norm is not None:
            assert norm > clip_norm
            gradients = [g * clip_norm / norm for g in gradients]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.95 * v + 0.05 * g**2 for v, g in zip(second, gradients, strict=True)]
        weights = [
            w - 0.01 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + 0.1 * w)
            for w, m, v in zip(weights, first, second, strict=True)
        ]
        # A step is 0.01 wide: this is a hundredth of one, where gradients are near zero.
        for a, b in zip(leaves(state.params), weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", slow_but([jnp.float32], [jnp.bfloat16, jnp.float32]))
def test_training_lowers_the_loss(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    options = TrainOptions(learning_rate=0.01)
    state = init_state(build(config, "layer")[1], options)
    tokens = draw_tokens(4, 9)
    losses = []
    for _ in range(10):
        state, metrics = step(options, config, "layer")(state, tokens)
        losses.append(float(metrics["loss"]))
    # An untrained model knows nothing; one that has seen the rows ten times knows them.
    assert losses[0] == pytest.approx(np.log(config.vocab_size), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_microbatches_add_up_to_the_batch():
    _, params = build(CONFIG)
    tokens = draw_tokens(4, 9)
    found, expected = (
        step(options)(init_state(params, options), tokens)
        for options in (TrainOptions(microbatches=2), TrainOptions())
    )
    assert_close(found[1], expected[1], 1e-5)
    assert_close(found[0].optimizer, expected[0].optimizer, 1e-4)


@pytest.mark.slow
def test_microbatches_must_divide_the_batch():
    options = TrainOptions(microbatches=3)
    state = abstract_state(CONFIG, options)
    with pytest.raises(ValueError, match="3 microbatches do not divide a batch of 4"):
        jax.eval_shape(step(options), state, jax.ShapeDtypeStruct((4, 9), jnp.int32))


@pytest.mark.slow
def test_remat_changes_no_number():
    _, params = build(CONFIG)
    tokens, options = draw_tokens(2, 9), TrainOptions()
    found = step(options, CONFIG, "layer")(init_state(params, options), tokens)
    expected = step(options)(init_state(params, options), tokens)
    assert_close(found[1], expected[1], 1e-5)
    assert_close(found[0].optimizer, expected[0].optimizer, 1e-4)


@pytest.mark.slow
def test_unrolled_layers_are_trained_as_stacked_ones_are():
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    # What plain descent takes off a weight is its gradient.
    options = TrainOptions(algorithm="sgd", clip_norm=None, learning_rate=1.0)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), build(config)[1])
    tokens = draw_tokens(2, 9)
    expected, metrics = step(options, config)(init_state(wide, options), tokens)

    graphdef = nnx.graphdef(llama.abstract_model(config))
    loss = rounded(functools.partial(llama.loss_fn, graphdef), config.dtype)
    unrolled = init_state(unstack_params(wide), options)
    found, own = jax.jit(functools.partial(gradient_step, loss, options))(unrolled, tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.params)} == {jnp.dtype(jnp.float32)}
    # Both round to bfloat16 at the same places, up to what XLA fuses.
    assert_close(own, metrics, 0.01)
    stacked = stack_params(found.params)
    taken_off, wanted = (
        jax.tree.map(jnp.subtract, wide, params) for params in (stacked, expected.params)
    )
    assert_close(taken_off, wanted, 0.02)


def test_microbatches_split_every_array_of_a_batch():
    params = nnx.State({"w": jnp.ones(3)})
    batch = {"x": jnp.arange(12.0).reshape(4, 3), "y": jnp.arange(4.0)}

    def loss(params: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
        (w,) = jax.tree.leaves(params)
        return jnp.mean(jnp.square(batch["x"] @ w - batch["y"]))

    (whole, expected), (parts, found) = (
        gradient_step(loss, options, init_state(params, options), batch)
        for options in (TrainOptions(), TrainOptions(microbatches=2))
    )
    assert_close(found, expected, 1e-5)
    assert_close(parts.params, whole.params, 1e-5)


@pytest.mark.slow
def test_wide_parameters_are_rounded_where_they_are_used():
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    _, narrow = build(config)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    tokens, options = draw_tokens(2, 9), TrainOptions()
    expected = step(options, config)(init_state(narrow, options), tokens)
    found = step(options, config)(init_state(wide, options), tokens)
    np.testing.assert_array_equal(found[1]["loss"], expected[1]["loss"])
    assert {leaf.dtype for leaf in jax.tree.leaves(found[0].params)} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_abstract_state_is_what_a_built_one_is(clip_norm: float | None, param_dtype):
    options = TrainOptions(clip_norm=clip_norm)
    config = dataclasses.replace(TINY, dtype=param_dtype)
    state = init_state(build(config)[1], options)
    abstract = abstract_state(TINY, options, param_dtype=param_dtype)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, abstract)


def test_a_state_is_parameters_and_two_float32_moments():
    state = abstract_state(TINY, TrainOptions())
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.dtype == jnp.float32]
    assert sum(leaf.size for leaf in moments) == 2 * TINY.param_count
    paths = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    }
    assert "params.layers.mlp.gate.value" in paths
    assert any(path.endswith(".nu.layers.mlp.gate.value") for path in paths)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_gives_a_state_like_the_one_it_takes(microbatches: int):
    options = TrainOptions(microbatches=microbatches)
    state = abstract_state(TINY, options)
    tokens = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    after, metrics = jax.eval_shape(step(options, TINY), state, tokens)
    assert isinstance(after, TrainState)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    assert {(m.shape, m.dtype) for m in metrics.values()} == {((), jnp.dtype(jnp.float32))}


@pytest.mark.slow
def test_a_donated_state_is_updated_in_place():
    options = TrainOptions()
    state = abstract_state(TINY, options)
    donating = jax.jit(
        functools.partial(train_step, build(TINY)[0], options), donate_argnames="state"
    )
    lowered = donating.lower(state, jax.ShapeDtypeStruct((2, 9), jnp.int32))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= TINY.param_bytes + 2 * 4 * TINY.param_count
