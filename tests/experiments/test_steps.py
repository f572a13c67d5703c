"""Policies change where residuals are and what is computed again, and no number."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend import core

from experiments.policies import POLICIES
from experiments.steps import llama_step, vit_step
from hlo_passes.equations import programs
from models import llama, vit
from models.configs import TINY
from models.training import TrainOptions, gradient_step, init_state
from models.vit import TINY_VIT
from models.workloads import vit_train
from tests.sweeps import slow_but

BATCH, LENGTH = 2, 8


@pytest.fixture(scope="module")
def inputs() -> tuple[Any, jax.Array]:
    """A state and tokens to train on."""
    params = nnx.state(llama.Llama(TINY, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, TINY.vocab_size)
    return init_state(params, TrainOptions(algorithm="sgd", clip_norm=None)), tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", slow_but(["offload layer_in"], ["none", "nothing_saveable", "offload layer_in"])
)
def test_a_step_is_that_of_the_plain_model(policy: str, inputs: tuple[Any, jax.Array]):
    fun, _ = llama_step(POLICIES[policy], config=TINY, batch=BATCH, length=LENGTH)
    loss = functools.partial(llama.loss_fn, nnx.graphdef(llama.abstract_model(TINY)))
    options = TrainOptions(algorithm="sgd", clip_norm=None)
    expected, plain = jax.jit(functools.partial(gradient_step, loss, options))(*inputs)
    found, metrics = jax.jit(fun)(*inputs)
    # bfloat16 rounds where fusions end, and these end elsewhere.
    assert float(metrics["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-3)
    assert float(metrics["grad_norm"]) == pytest.approx(float(plain["grad_norm"]), rel=1e-2)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("policy", "residuals"),
    [
        ("none", 0),
        ("nothing_saveable", 0),
        ("offload layer_in", 1),
        ("offload layer_in, save attention", 1),
        ("offload layer_in, attended", 2),
        ("offload attention", 4),
        ("offload gate, up", 2),
        # query, key, value, output, gate, up; nothing reads what comes down.
        ("offload all dots", 6),
    ],
)
def test_as_many_residuals_go_to_the_host_as_are_named(policy: str, residuals: int):
    fun, args = llama_step(POLICIES[policy], config=TINY, batch=BATCH, length=LENGTH)
    jaxpr = jax.make_jaxpr(fun)(*args)
    spaces = list(_put(jaxpr.jaxpr))
    assert spaces.count(jax.memory.Space.Host) == residuals * TINY.num_layers
    assert spaces.count(jax.memory.Space.Device) == residuals * TINY.num_layers


@pytest.mark.parametrize(
    ("policy", "residuals"),
    # query, key, value, output, up; nothing reads what comes down.
    [("none", 0), ("offload layer_in", 1), ("offload all dots", 5)],
)
def test_a_vision_transformer_offloads_likewise(policy: str, residuals: int):
    fun, args = vit_step(POLICIES[policy], config=TINY_VIT, batch=BATCH)
    spaces = list(_put(jax.make_jaxpr(fun)(*args).jaxpr))
    assert spaces.count(jax.memory.Space.Host) == residuals * TINY_VIT.num_layers


@pytest.mark.slow
def test_a_vision_transformer_is_that_of_the_plain_model():
    params = nnx.state(vit.VisionTransformer(TINY_VIT, rngs=nnx.Rngs(0)))
    images = jax.random.normal(jax.random.key(1), (BATCH, 16, 16, 3), TINY_VIT.dtype)
    examples = (images, jnp.arange(BATCH))
    state = init_state(params, TrainOptions())
    plain, _ = vit_train(TINY_VIT, batch=BATCH)
    fun, _ = vit_step(POLICIES["nothing_saveable"], config=TINY_VIT, batch=BATCH)
    _, expected = jax.jit(plain)(state, examples)
    _, found = jax.jit(fun)(state, examples)
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-3)
    assert float(found["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-2)


def _put(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """The memories that a program puts arrays into, recomputed layers included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            yield from eqn.params["devices"]
        for program in programs(eqn):
            yield from _put(program.jaxpr)
