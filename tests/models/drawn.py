"""What the tests of the models draw and run: weights that matter, and a few steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.stacking import stack_params, unstack_params
from models.training import Loss, TrainOptions, gradient_step, init_state


def build[Model: nnx.Module](
    kind: Callable[..., Model], config: Any
) -> tuple[nnx.GraphDef[Model], nnx.State]:
    """A model whose every parameter, norm scales and biases too, is drawn wide enough to matter."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return graphdef, jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype), params
    )


@functools.cache
def initial[Model: nnx.Module](
    kind: Callable[..., Model], config: Any
) -> tuple[nnx.GraphDef[Model], nnx.State]:
    """A model as training begins with it."""
    return nnx.split(nnx.jit(lambda: kind(config, rngs=nnx.Rngs(0)))())


def by_name(params: nnx.State) -> dict[str, np.ndarray]:
    """The parameters in float64, by their path with dots."""
    return {
        ".".join(map(str, path)): np.asarray(variable[...], np.float64)
        for path, variable in nnx.to_flat_state(params)
    }


def below(weights: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Those whose path starts with `prefix` and a dot, without it."""
    return {
        name.removeprefix(f"{prefix}."): weight
        for name, weight in weights.items()
        if name.startswith(f"{prefix}.")
    }


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of (graphdef, ...) as one program, which compiles in less time than its parts."""
    return jax.jit(function, static_argnums=0)


def losses(loss: Loss[Any], params: nnx.State, batch: Any, steps: int = 10) -> list[float]:
    """The loss before each of some steps on one batch."""
    options = TrainOptions(learning_rate=0.01)
    step = jax.jit(functools.partial(gradient_step, loss, options))
    state, found = init_state(params, options), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def assert_same_when_scanned(
    loss: Callable[..., jax.Array],
    graphdef: nnx.GraphDef[Any],
    scanned: nnx.GraphDef[Any],
    params: nnx.State,
    batch: Any,
) -> None:
    """The loss and its gradients are those of the model with its layers stacked, and scanned."""
    of = jitted(jax.value_and_grad(loss, argnums=1))
    loss_found, found = of(scanned, stack_params(params), batch)
    loss_expected, expected = of(graphdef, params, batch)
    np.testing.assert_allclose(loss_found, loss_expected, rtol=1e-4)
    # Some are zero but for rounding, as those of the biases of keys are.
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest),
        unstack_params(found),
        expected,
    )


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    """In its tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(x: np.ndarray, scale: Any = 1.0, bias: Any = 0.0) -> np.ndarray:
    """Over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6) * scale + bias


def self_attention(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Of one sequence [len, embed_dim], head by head."""
    heads = []
    for head in range(weights["query.kernel"].shape[1]):
        query, key, value = (
            x @ weights[f"{kind}.kernel"][:, head] + weights[f"{kind}.bias"][head]
            for kind in ("query", "key", "value")
        )
        attended = softmax(query @ key.T / np.sqrt(query.shape[-1])) @ value
        heads.append(attended @ weights["out.kernel"][head])
    return sum(heads) + weights["out.bias"]


def linear(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]


def mlp(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    return linear(gelu(linear(x, weights, "up")), weights, "down")


def read_patches(image: np.ndarray, size: int) -> np.ndarray:
    """The patches of one image in reading order, each as a row of pixels."""
    height, width, _ = image.shape
    return np.stack(
        [
            image[top : top + size, left : left + size].ravel()
            for top in range(0, height, size)
            for left in range(0, width, size)
        ]
    )
