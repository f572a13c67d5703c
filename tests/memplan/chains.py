"""Small programs that stream their weights, and what plain jax makes of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memplan.api as memplan

WIDTH, LAYERS = 64, 6
WEIGHT_BYTES = 4 * WIDTH * WIDTH

HALF = LAYERS * WEIGHT_BYTES // 2 + 16 * 1024
"""Bytes that hold half of the weights of `chain`, and its activations."""


def chain(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def weights(layers: int = LAYERS) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32) for _ in range(layers)]


def activations(rows: int = 8) -> jax.Array:
    return jnp.linspace(-1, 1, rows * WIDTH, dtype=jnp.float32).reshape(rows, WIDTH)


def device_total(compiled: Any) -> int:
    """Arguments + outputs + temporaries − aliased bytes, as XLA reports them."""
    m = compiled.memory_analysis()
    total = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return total - m.alias_size_in_bytes


def xla_total(fun: Callable[..., Any], *args: Any, **jit_options: Any) -> int:
    """`device_total` of what plain ``jax.jit`` compiles."""
    return device_total(jax.jit(fun, **jit_options).lower(*args).compile())


def halved(fun: Callable[..., Any], *args: Any, share: float = 0.6, **jit_options: Any) -> Any:
    """`fun` within a share of what XLA takes for it by itself."""
    return memplan.jit(fun, hbm=int(xla_total(fun, *args, **jit_options) * share), **jit_options)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
