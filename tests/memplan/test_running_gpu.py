"""Programs of XLA:GPU whose weights a runtime brings: compiled anywhere, run where a GPU is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from hlo_passes.chains.lowering import arena_bytes
from hlo_passes.errors import NotExecutableError
from memplan import disk

LAYERS, WIDTH = 12, 1024
BUDGET = "30MiB"  # Of 48 MiB of weights.


def forward(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def layers(seed=0):
    random = np.random.default_rng(seed)
    return [
        {
            "w": random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5,
            "b": np.ones(WIDTH, np.float32),
        }
        for _ in range(LAYERS)
    ]


def in_runtime(step):
    """The function that `runtime` compiles, for shapes."""
    own = step._function
    options = replace(own.options, in_runtime=True)
    return type(step)(own.fun, options=options, jit_options=own.jit_options)


@pytest.mark.slow
@pytest.mark.gpu
def test_gates_are_in_the_executable_and_the_arena_in_the_budget():
    shapes = jax.eval_shape(layers)
    step = memplan.jit(forward, hbm=BUDGET, machine="h200")
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    compiled = in_runtime(step).lower(shapes, x).compile()
    assert compiled.device_bytes <= 30 << 20
    plan = compiled.plan
    analysis = compiled.memory_analysis()
    own = sum(s.size for s in jax.tree.leaves(shapes)) * 4 - sum(
        p.size for p in plan.placements if p.buffer in compiled.streamed
    )
    within = analysis.temp_size_in_bytes + analysis.output_size_in_bytes + x.size * 4
    assert compiled.device_bytes == own + within + arena_bytes(plan)
    text = compiled.as_text()
    assert text.count('custom_call_target="memplan.gate"') == 2 * len(plan.transfers)
    # What is brought from outside, XLA finds on the device.
    assert "copy-start" not in text
    assert "S(5)" not in text
    with pytest.raises(NotExecutableError):
        step.runtime(shapes, x)


@pytest.mark.gpu
def test_arrays_that_are_dead_at_once_have_gates_in_a_row():
    def gated(params, x):
        for layer in params:
            x = x + (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
        return x

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    shapes = [dict.fromkeys(("gate", "up", "down"), weight) for _ in range(6)]
    step = memplan.jit(gated, hbm="16MiB", machine="h200")
    x = jax.ShapeDtypeStruct((1, WIDTH), jnp.bfloat16)
    compiled = in_runtime(step).lower(shapes, x).compile()
    ends = [t.end for t in compiled.plan.transfers]
    assert len(set(ends)) < len(ends)
    assert compiled.followed.exactly


def steps(run, given, x, count):
    for _ in range(count):
        run(given, x)


@pytest.fixture
def gpu(accelerator):
    if accelerator.platform != "gpu":
        pytest.skip("needs a GPU")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("where", ["file", "memory", "host", "tiers"])
def test_results_are_those_of_jax(where, tmp_path):
    params = given = layers()
    x = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    tiers = ("device", f"disk:{tmp_path / 'tier'}") if where == "tiers" else ("device", "host")
    step = memplan.jit(forward, hbm=BUDGET, tiers=tiers)
    if where == "file":
        disk.save(tmp_path / "params.safetensors", params)
        given = disk.load(tmp_path / "params.safetensors", like=params)
    if where == "host":
        host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        given = jax.device_put(params, host)
    expected = jax.jit(forward)
    with step.runtime(given, x, log=1000) as run:
        assert run.compiled.streamed
        for k in range(4):
            result = run(given, x + k)
            assert {d.platform for d in result.devices()} == {"gpu"}
            np.testing.assert_allclose(result, expected(params, x + k), atol=1e-5)
        assert run.compiled.device_bytes <= 30 << 20


@pytest.mark.usefixtures("gpu")
def test_a_file_that_ends_early_is_an_error(tmp_path):
    params = layers()
    path = tmp_path / "params.safetensors"
    disk.save(path, params)
    given = disk.load(path, like=params)
    x = jnp.ones((4, WIDTH))
    with memplan.jit(forward, hbm=BUDGET).runtime(given, x) as run:
        run(given, x)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 20 * WIDTH * WIDTH)
        with pytest.raises(OSError, match="the file ends there"):
            steps(run, given, x, 3)
