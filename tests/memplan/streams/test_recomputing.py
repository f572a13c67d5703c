"""What a scan leaves for another one is computed again there, with the same numbers; what is read
otherwise stays."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Jaxpr, check_jaxpr

from memplan.streams.counted import count_loops
from memplan.streams.programs import inline_calls
from memplan.streams.recomputing import recompute_residuals
from models.configs import TINY
from models.scanned import ScannedLlama
from models.training import TrainOptions, init_state, train_step
from tests.memplan.streams.test_slicing import compare, interpret, said, scans

LAYERS, WIDTH = 3, 4

type Which = Literal["elementwise", "everything"]


def array(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


WEIGHTS = array(0, LAYERS, WIDTH, WIDTH), array(1, LAYERS, WIDTH, WIDTH)
X = array(2, 2, WIDTH)


def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    up, down = weights
    return x + jnp.sin(jnp.exp(-jnp.square(x)) @ up) @ down, None


def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.square(lax.scan(layer, x, weights)[0]).sum()


def recomputed(fun: Callable[..., Any], what: Which, *args: Any) -> Jaxpr:
    """Compares with `fun`, to the bit where each operation runs by itself."""
    original, leaves = inline_calls(jax.make_jaxpr(fun)(*args)), jax.tree.leaves(args)
    again = recompute_residuals(original, what)
    check_jaxpr(again)
    assert again is not original
    compare(interpret(again, leaves), interpret(original, leaves), exact=True)
    return again


def left_alone(fun: Callable[..., Any], what: Which, *args: Any) -> bool:
    original = inline_calls(jax.make_jaxpr(fun)(*args))
    return recompute_residuals(original, what) is original


def leaves_behind(jaxpr: Jaxpr) -> list[tuple[int, ...]]:
    """The shapes of what the first scan leaves for others, a layer's."""
    first = next(iter(scans(jaxpr)))
    stacks = first.outvars[said(first).carried :]
    return [v.aval.shape[1:] for v in stacks]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("what", "left"), [("elementwise", 2), ("everything", 1)])
def test_less_is_left_for_the_backward_pass(what: Which, left: int):
    """A layer leaves its input and a product, or its input only; before the product, its
    operand and what the derivatives of exp, square and sin need were left beside them."""
    found = leaves_behind(recomputed(jax.grad(loss), what, WEIGHTS, X))
    assert found == [(2, WIDTH)] * left
    assert len(leaves_behind(inline_calls(jax.make_jaxpr(jax.grad(loss))(WEIGHTS, X)))) > 2


@pytest.mark.parametrize("what", ["elementwise", "everything"])
def test_what_is_recomputed_once_is_not_found_again(what: Which):
    again = recomputed(jax.grad(loss), what, WEIGHTS, X)
    assert recompute_residuals(again, what) is again


def test_weights_are_taken_apart_once():
    """The backward pass reads them for its own products as well."""
    again = recomputed(jax.grad(loss), "everything", WEIGHTS, X)
    _, backward = scans(again)
    stacks = backward.invars[said(backward).first_stack :]
    assert len(stacks) == len(set(stacks)) == 3


def test_reversed_layers():
    def backwards(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(layer, x, weights, reverse=True)[0]).sum()

    recomputed(jax.grad(backwards), "everything", WEIGHTS, X)


def test_inside_a_loop():
    def parts(weights: Any, x: jax.Array) -> Any:
        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part)), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, weights), jnp.stack([x, -x]))[0]

    recomputed(parts, "everything", WEIGHTS, X)


@pytest.mark.slow
def test_a_model_is_trained_as_before():
    options = TrainOptions()
    graphdef, params = nnx.split(ScannedLlama(TINY, rngs=nnx.Rngs(0)))
    state, tokens = init_state(params, options), jnp.zeros((2, 8), jnp.int32)
    step = functools.partial(train_step, graphdef, options)
    recomputed(step, "elementwise", state, tokens)


@pytest.mark.parametrize("what", ["elementwise", "everything"])
def test_what_checkpoint_left_out_stays_as_it_is(what: Which):
    def checkpointed(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(jax.checkpoint(layer), x, weights)[0]).sum()

    assert left_alone(jax.grad(checkpointed), what, WEIGHTS, X)


def test_a_product_is_no_elementwise_work():
    def products(weights: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x @ w[0] @ w[1], None), x, weights)[0].sum()

    assert left_alone(jax.grad(products), "elementwise", WEIGHTS, X)
    recomputed(jax.grad(products), "everything", WEIGHTS, X)


def pair(x: jax.Array, read: Callable[[jax.Array], Any]) -> Any:
    """A scan that leaves a stack, and what reads it."""
    last, left = lax.scan(lambda x, _: (jnp.sin(x), jnp.cos(x * 2)), x, None, length=LAYERS)
    return last, read(left)


def taken(left: jax.Array) -> jax.Array:
    return lax.scan(lambda y, c: (y * c, None), jnp.ones((2, WIDTH)), left)[0]


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda left: (taken(left), left), id="returned"),
        pytest.param(lambda left: (taken(left), left.sum()), id="read-whole"),
        pytest.param(lambda left: taken(left[:2]), id="another-length"),
        pytest.param(
            lambda left: lax.fori_loop(0, 3, lambda _, y: y + left[0], X), id="by-no-scan"
        ),
    ],
)
def test_what_is_read_otherwise_stays(read: Callable[[jax.Array], Any]):
    assert left_alone(lambda x: pair(x, read), "everything", X)


def test_where_nothing_is_saved_all_stays():
    """What the layer was given is as large as what it leaves."""
    assert left_alone(lambda x: pair(x, taken), "everything", X)


def test_effects_happen_once():
    def printed(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, Any]:
            jax.debug.print("{}", x.sum())
            return jnp.sin(x), (jnp.cos(x), jnp.exp(x), jnp.tanh(x))

        x, left = lax.scan(body, x, None, length=LAYERS)
        return lax.scan(lambda y, c: (y * c[0] * c[1] * c[2], None), x, left)[0]

    assert left_alone(printed, "everything", X)


def test_a_loop_that_counts_is_a_scan_first():
    def indexed(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(i: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sin(x @ weights[i])

        return lax.fori_loop(0, LAYERS, body, x).sum()

    original = inline_calls(count_loops(jax.make_jaxpr(jax.grad(indexed))(WEIGHTS[0], X)))
    assert recompute_residuals(original, "everything") is not original
