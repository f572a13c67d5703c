"""Training steps as trainers write them, under ``memplan.jit``: where the state is, and where its
layers are."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import memplan.api as memplan
from memplan.topologies import topology

LAYERS = 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        init, width = nn.initializers.normal(0.02), x.shape[-1]
        up = self.param("up", init, (width, 2 * width), jnp.float32)
        down = self.param("down", init, (2 * width, width), jnp.float32)
        return x + jnp.tanh(x @ up) @ down, None


class Net(nn.Module):
    """Layers whose parameters are stacked on an axis."""

    axis: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return layers(name="layers")(x, None)[0]


class NormedBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        mean = jnp.square(x).mean(-1, keepdims=True)
        return Block(name="mlp")(x * scale * jax.lax.rsqrt(mean + 1e-6), None)


class Headed(nn.Module):
    """Layers with a small parameter each, and a weight that belongs to no layer."""

    axis: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            nn.remat(NormedBlock, prevent_cse=False),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=LAYERS,
        )
        init = nn.initializers.normal(0.02)
        head = self.param("head", init, (x.shape[-1], 4 * x.shape[-1]), jnp.float32)
        return layers(name="layers")(x, None)[0] @ head


def state(net: nn.Module, width: int) -> TrainState:
    x = jnp.ones((1, width))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = net.init(jax.random.key(0), x)
    return TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)


def loss(params: Any, state: TrainState, x: jax.Array) -> jax.Array:
    return jnp.square(state.apply_fn(params, x)).mean()


def train(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(state.params, state, x)
    return state.apply_gradients(grads=gradients), value


def watched(state: TrainState, x: jax.Array) -> tuple[TrainState, tuple[jax.Array, ...]]:
    """A step that says how large the gradients were, and how large the new weights are."""
    value, gradients = jax.value_and_grad(loss)(state.params, state, x)
    new = state.apply_gradients(grads=gradients)
    return new, (value, optax.tree.norm(gradients), optax.tree.norm(new.params))


def lowered(step: Callable[..., Any], target: str, hbm: str, net: nn.Module, **options: Any) -> Any:
    shaped = jax.eval_shape(lambda: state(net, 1024))
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    machine = topology(target)
    planned = memplan.jit(step, hbm=hbm, machine=machine, donate_argnums=0, **options)
    return planned.lower(shaped, x)


@pytest.mark.slow
@pytest.mark.tpu
def test_layers_on_another_axis_are_streamed_as_those_on_the_first():
    found = {}
    for axis in (0, 1):
        shardings = topology("v5e").sharding()
        step = lowered(train, "v5e", "60MiB", Net(axis), out_shardings=shardings)
        compiled = step.compile()
        assert compiled.device_bytes <= 60 << 20
        assert compiled.followed.loops_missing == ()
        memory = compiled.memory_analysis()
        hosted = memory.host_argument_size_in_bytes, memory.host_output_size_in_bytes
        found[axis] = (compiled.device_bytes, compiled.plan.moved_bytes, *hosted)
        layers_outermost = {(2, 0, 1)} if axis else set()
        layouts = compiled.layouts
        assert {*layouts.arguments.values(), *layouts.results.values()} == layers_outermost
        assert step.left_alone == {}
    assert found[1] == found[0]
    assert found[0][2] == found[0][3] == 3 * 2 * LAYERS * 2 * 1024**2 * 4


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("axis", [0, 1])
def test_moments_that_are_asked_for_on_the_host_are_streamed(axis: int):
    shaped = jax.eval_shape(lambda: state(Net(axis), 256))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    target = topology("v5e")
    device = target.sharding()
    host = device.with_memory_kind("pinned_host")
    kept = jax.tree.map(lambda _: device, shaped)
    where = kept.replace(opt_state=jax.tree.map(lambda _: host, shaped.opt_state))

    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        moments = jax.device_put(state.opt_state, kept.opt_state)
        return train(state.replace(opt_state=moments), x)

    options: dict[str, Any] = {"machine": target, "donate_argnums": 0}
    options |= {"in_shardings": (where, device), "out_shardings": (where, device)}
    # There is room for all of it.
    compiled = memplan.jit(step, hbm="1GiB", **options).lower(shaped, x).compile()
    memory, stack = compiled.memory_analysis(), LAYERS * 2 * 256**2 * 4
    found = memory.host_argument_size_in_bytes, memory.host_output_size_in_bytes
    assert [n // stack for n in found] == [4, 4]
    assert compiled.followed.loops_missing == ()
    fetched = [stack.name for loop in compiled.streams for stack in loop.fetched]
    assert all(name.startswith("state.opt_state.") for name in fetched)


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("axis", [0, 1])
def test_norms_of_the_new_state_are_taken_along_with_it(axis: int, caplog: Any):
    # XLA:TPU makes one fusion of an update and the norm of what comes of it. It leaves the new
    # weights where the old ones lay; those of the small parameters in another shape, where they
    # are seen with their layers outermost.
    shardings = topology("v5e").sharding()
    step = lowered(watched, "v5e", "100MiB", Headed(axis), out_shardings=shardings)
    assert step.compile().device_bytes <= 100 << 20
    assert not [r for r in caplog.records if "was dropped" in r.getMessage()]


@pytest.mark.gpu
@pytest.mark.slow
def test_a_step_whose_counters_are_copies_of_one_is_planned():
    # XLA:GPU counts one loop in the zero that it copies for the others.
    compiled = lowered(watched, "h200", "400MiB", Headed(1)).compile()
    assert compiled.plan is not None
    assert compiled.device_bytes <= 400 << 20


@pytest.mark.gpu
def test_where_the_layers_cannot_be_turned_the_reason_is_that_they_are_transposed():
    reasons = lowered(train, "h200", "1GiB", Net(1)).left_alone
    assert set(reasons) == {f"state.params.params.layers.{name}" for name in ("up", "down")}
    assert all(why.startswith("read whole by transpose at") for why in reasons.values())
