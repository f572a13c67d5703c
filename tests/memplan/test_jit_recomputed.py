"""What the forward pass leaves for the backward pass is computed again where that is faster."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memplan
from memplan.api import Compiled
from memplan.placing import Placing
from memplan.topologies import topology
from tests.memplan.test_jit_scanned import shapes

pytestmark = pytest.mark.usefixtures("planned_once")

TARGETS = [
    pytest.param("v5e", marks=[pytest.mark.tpu, pytest.mark.slow]),
    pytest.param("h200", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    """Leaves four arrays of the size of x, of which a product and x are enough."""
    h = x @ w
    return x + jnp.tanh(h) * jax.nn.sigmoid(h), None


def descend(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(layer, x, weights)[0]).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def within(hbm: str, target: str, **options: Any) -> Compiled:
    step = memplan.jit(descend, hbm=hbm, machine=topology(target), donate_argnums=0, **options)
    return step.lower(*shapes(1024, 4096)).compile()


def recomputed(compiled: Compiled) -> str:
    assert compiled.plan is not None
    assert compiled.plan.preparation is not None
    return compiled.plan.preparation.recomputed


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_it_is_done_where_it_is_faster(target: str, monkeypatch: pytest.MonkeyPatch):
    again = within("64MiB", target)
    assert recomputed(again) != "nothing"
    assert "recomputed in loops" in repr(again)
    assert again.device_bytes <= 64 << 20
    assert again.plan is not None
    prediction = again.plan.prediction
    # Part of how much longer a step takes than that of the program as it is written.
    assert prediction.recompute_s

    monkeypatch.setattr(Placing, "recomputing", lambda self: ())
    written = within("64MiB", target)
    assert written.plan is not None
    assert again.plan.moved_bytes < written.plan.moved_bytes
    assert prediction.step_time_s < written.plan.prediction.step_time_s


@pytest.mark.tpu
@pytest.mark.slow
def test_a_saved_plan_says_so(tmp_path: Path):
    again = within("64MiB", "v5e")
    assert again.plan is not None
    again.plan.save(tmp_path / "step.plan")
    followed = memplan.jit(
        descend, plan=tmp_path / "step.plan", machine=topology("v5e"), donate_argnums=0
    )
    compiled = followed.lower(*shapes(1024, 4096)).compile()
    assert compiled.device_bytes == again.device_bytes
    assert compiled.plan == again.plan


@pytest.mark.tpu
def test_where_nothing_waits_nothing_is_computed_again():
    compiled = within("1GiB", "v5e")
    assert compiled.plan is None


def test_numbers_are_those_of_jax():
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(4, 64, 64)) / 8, jnp.float32)
    x = jnp.asarray(rng.normal(size=(2048, 64)), jnp.float32)
    own = jax.jit(descend).lower(weights, x).compile().memory_analysis()
    assert own is not None
    total = own.argument_size_in_bytes + own.output_size_in_bytes + own.temp_size_in_bytes
    step = memplan.jit(descend, hbm=int(0.6 * total))
    compiled = step.lower(weights, x).compile()
    assert recomputed(compiled) != "nothing"
    for found, expected in zip(step(weights, x), jax.jit(descend)(weights, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
