"""What programs say of places, and do without."""

from typing import Any

import jax
import jax.numpy as jnp

from hlo_passes.equations import name
from memplan.streams.programs import without_puts

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


def puts(step: Any, is_there: Any) -> Any:
    """The program without what is needless, and how many operands each put of it has."""
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    jaxpr = jax.make_jaxpr(step)(x, x).jaxpr
    found = without_puts(jaxpr, is_there)
    return jaxpr, found, [len(e.invars) for e in found.eqns if name(e) == "device_put"]


def test_arguments_are_not_put_to_where_they_are():
    def step(x: Any, y: Any) -> Any:
        a, b, c = jax.device_put((x, y, x + y), DEVICE)
        return a * b + c, jax.device_put(y, DEVICE)

    jaxpr, found, left = puts(step, lambda n, place: place == DEVICE)
    assert left == [1]  # That of the sum, which is no argument.
    assert found.outvars[1] is jaxpr.invars[1]
    _, found, left = puts(step, lambda n, place: n == 0)
    assert left == [2, 1]


def test_other_puts_stay():
    def step(x: Any, y: Any) -> Any:
        return jax.device_put(x, HOST), jax.device_put(x * y, DEVICE)

    jaxpr, found, left = puts(step, lambda n, place: place == DEVICE)
    assert found is jaxpr
    assert left == [1, 1]
