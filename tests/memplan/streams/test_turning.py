"""Stacks with their layers on another axis than the leading one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from memplan.streams.turning import as_it_was, as_turned, turn_stacks


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w), None


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(lax.scan(layer, x, jnp.moveaxis(w, 1, 0))[0]).sum()


def momentum(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
    gradient = jax.grad(loss)(w, x)
    norm = jnp.sqrt(jnp.square(gradient).sum())
    m = jnp.where(norm > 1, gradient / norm, gradient) + 0.9 * m
    return w - 0.1 * m, m, norm


def whole(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
    """Reads the stack in a way that has nothing to do with its layers, too."""
    new, m, _ = momentum(w, m, x)
    return new, m, (w.reshape(-1)[:8], jnp.cumsum(m, axis=0), m.sum(axis=2))


def leading(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
    return lax.scan(layer, x, w)[0], m.T


def inputs() -> tuple[jax.Array, ...]:
    w, m, x = (jax.random.normal(jax.random.key(n), (4, 4, 4)) for n in range(3))
    return w[:, :3], m[:, :3], x[0]


@pytest.mark.parametrize("program", [momentum, whole])
def test_the_program_of_turned_arrays_has_the_same_numbers(program: Any):
    args = inputs()
    closed = jax.make_jaxpr(program)(*args)
    found = turn_stacks(closed.jaxpr)
    assert found.arguments == found.results == {0: (1, 0, 2), 1: (1, 0, 2)}
    given = [as_turned(a, found.arguments.get(n)) for n, a in enumerate(args)]
    made = jaxpr_as_fun(closed.replace(jaxpr=found.jaxpr))(*given)
    made = [as_it_was(r, found.results.get(k)) for k, r in enumerate(made)]
    for a, b in zip(made, jax.tree.leaves(program(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_is_transposed_between_the_loops():
    found = turn_stacks(jax.make_jaxpr(momentum)(*inputs()).jaxpr)
    assert "transpose" not in {eqn.primitive.name for eqn in found.jaxpr.eqns}


def test_layers_on_the_leading_axis_are_left_alone():
    w, m, x = inputs()
    jaxpr = jax.make_jaxpr(leading)(jnp.moveaxis(w, 1, 0), m, x).jaxpr
    found = turn_stacks(jaxpr)
    assert found.jaxpr is jaxpr
    assert not found.arguments
    assert not found.results
