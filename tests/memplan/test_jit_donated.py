"""Donated state of straight-line code on the host: fetched, updated, stored in its place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import memplan.api as memplan
from memplan.topologies import topology
from tests.memplan.chains import assert_same_bits, xla_total
from tests.sweeps import slow_but

TARGETS = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]
LAYERS, WIDTH = 4, 128


def adam(w: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return w - 0.01 * m / (jnp.sqrt(v) + 1e-8), m, v


def update(state: Any, gradients: Any) -> Any:
    params, mean, square = state
    new = [adam(*leaves) for leaves in zip(params, mean, square, gradients, strict=True)]
    return tuple(list(part) for part in zip(*new, strict=True))


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x * x)


def train(state: Any, x: Any) -> tuple[Any, Any]:
    value, gradients = jax.value_and_grad(loss)(state[0], x)
    return update(state, gradients), value


def fresh(width: int = WIDTH) -> Any:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(width, width)) / 16, jnp.float32) for _ in range(LAYERS)]
    return params, [jnp.zeros_like(w) for w in params], [jnp.zeros_like(w) for w in params]


def test_state_that_is_fed_back_stays_on_the_host():
    x = jnp.linspace(-1, 1, 32 * WIDTH, dtype=jnp.float32).reshape(32, WIDTH)
    total = xla_total(train, fresh(), x, donate_argnums=0)
    step = memplan.jit(train, hbm=int(0.6 * total), donate_argnums=0)
    plain = jax.jit(train)
    expected, found = fresh(), step.place(fresh(), x)[0]
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)]
    assert "pinned_host" in kinds
    for _ in range(3):
        given = jax.tree.leaves(found)
        found, value = step(found, x)  # A PlacementWarning would be an error.
        expected, wanted = plain(expected, x)
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
        assert [leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)] == kinds
        assert all(leaf.is_deleted() for leaf in given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    compiled = step.lower(fresh(), x).compile()
    assert compiled.device_bytes <= int(0.6 * total)
    assert compiled.plan is not None
    assert compiled.followed.exactly
    stores = [t for t in compiled.plan.transfers if t.kind == "evict"]
    assert len(stores) == kinds.count("pinned_host")


@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_nothing_is_deleted_where_an_argument_is_refused():
    x = jnp.linspace(-1, 1, 32 * WIDTH, dtype=jnp.float32).reshape(32, WIDTH)
    total = xla_total(train, fresh(), x, donate_argnums=0)
    step = memplan.jit(train, hbm=int(0.6 * total), donate_argnums=0)
    given, compiled = fresh(), step.lower(fresh(), x).compile()
    for refused in (x[:16], x.astype(jnp.bfloat16)):
        with pytest.raises(TypeError, match="types differ"):
            compiled(given, refused)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_what_was_not_placed_is_deleted_all_the_same():
    x = jnp.linspace(-1, 1, 32 * WIDTH, dtype=jnp.float32).reshape(32, WIDTH)
    total = xla_total(train, fresh(), x, donate_argnums=0)
    step = memplan.jit(train, hbm=int(0.6 * total), donate_argnums=0)
    given = fresh()
    found = step(given, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert not x.is_deleted()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(train(fresh(), x)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def test_why_a_stack_stays_on_cpu_although_a_result_takes_its_place():
    def update(stack: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), 0.9 * w), x, stack)

    args = jnp.ones((8, 64, 64)), jnp.ones((4, 64))
    lowered = memplan.jit(update, donate_argnums=0).lower(*args)
    assert lowered.left_alone == {
        "stack": "it is donated, and on CPU what a loop writes is the device's"
    }


def test_moments_of_scanned_layers_may_be_stored_whole_on_cpu():
    def update(weights: Any, moments: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2).sum()

        moments = 0.9 * moments + jax.grad(loss)(weights)
        return weights - 0.1 * moments, moments

    stack = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((4, 512), jnp.float32)
    placing = memplan.jit(update, donate_argnums=(0, 1)).lower(stack, stack, x).placing
    assert placing.candidates >= {0, 1}
    assert not {0, 1} & placing.streams.stacks.keys()


def test_a_single_result_is_stored():
    def decay(m: Any, x: Any) -> Any:
        return 0.9 * m + jnp.tanh(x @ x).sum()

    m, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH)) / WIDTH
    expected = jax.jit(decay)(m, x)
    step = memplan.jit(decay, hbm=4 * m.nbytes, donate_argnums=0)
    assert_same_bits(step(jnp.copy(m), x), expected)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_what_no_result_replaces_stays():
    def total(m: Any, x: Any) -> Any:
        return (m * x).sum()

    m = jnp.ones((WIDTH, WIDTH))
    lowered = memplan.jit(total, hbm="1GiB", donate_argnums=0).lower(m, m)
    assert lowered.placing.left_alone == {"m": "it is donated, and no result takes its place"}
    assert 0 not in lowered.placing.candidates


def test_what_is_returned_as_it_was_given_stays():
    def same(m: Any, x: Any) -> tuple[Any, Any]:
        return m, m * x

    m = jnp.ones((WIDTH, WIDTH))
    lowered = memplan.jit(same, hbm="1GiB", donate_argnums=0).lower(m, m)
    assert 0 not in lowered.placing.candidates


def test_the_result_with_the_same_path_takes_the_place():
    def swapped(opt: Any, params: Any) -> tuple[Any, Any]:
        return {"params": params["w"] * 2}, {"opt": opt["w"] + 1}

    a = {"w": jnp.ones((WIDTH, WIDTH))}
    lowered = memplan.jit(swapped, hbm="1GiB", donate_argnums=(0, 1)).lower(a, a)
    assert sorted(lowered.placing.lowering.places.items()) == [(0, 0), (1, 1)]


@pytest.mark.tpu
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_result_that_is_divided_or_laid_out_otherwise_takes_no_place():
    mesh = topology("v5e:2x2").mesh((4,), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    m = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=rows)

    def places(asked: Any) -> Any:
        options: dict[str, Any] = {"machine": "v5e:2x2", "hbm": "1GiB", "donate_argnums": 0}
        step = memplan.jit(lambda m: 0.9 * m, out_shardings=asked, **options)
        return step.lower(m).placing.lowering.places

    assert places(None) == places(rows) == {0: 0}
    assert places(whole) == places(Format(Layout((1, 0)), rows)) == {}


@pytest.mark.tpu
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_what_is_asked_for_in_two_memories_is_no_pair():
    device = topology("v5e").sharding()
    host = device.with_memory_kind("pinned_host")
    m = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)

    def asked(given: Any, returned: Any) -> Any:
        options: dict[str, Any] = {"machine": "v5e", "hbm": "1GiB", "donate_argnums": 0}
        options |= {"in_shardings": given, "out_shardings": returned}
        lowering = memplan.jit(lambda m: 0.9 * m, **options).lower(m).placing.lowering
        return dict(lowering.places), set(lowering.on_host)

    assert asked(None, None) == asked(device, None) == asked(device, device) == ({0: 0}, set())
    assert asked(host, None) == asked(None, host) == asked(host, host) == ({0: 0}, {0})
    assert asked(device, host) == ({}, set())
    assert asked(host, device) == ({}, {0})


@pytest.mark.parametrize("name", TARGETS)
def test_optimizer_state_takes_its_place_on_the_host(name: str):
    leaf = jax.ShapeDtypeStruct((1536, 1536), jnp.float32)
    params = [leaf] * LAYERS
    size = 4 * 1536 * 1536
    step = memplan.jit(update, hbm=11 * size, machine=name, donate_argnums=0)
    compiled = step.lower((params, params, params), params).compile()
    assert compiled.device_bytes <= 11 * size
    assert compiled.followed is not None
    assert compiled.followed.exactly
    memory = compiled.memory_analysis()
    stored = sum(t.size for t in compiled.plan.transfers if t.kind == "evict")
    assert memory.host_alias_size_in_bytes == stored > 0
    assert memory.host_temp_size_in_bytes == 0


def brought(state: Any, gradients: Any) -> Any:
    """As trainers write it whose state is on the host."""
    params, *moments = state
    return update((params, *jax.device_put(moments, jax.memory.Space.Device)), gradients)


@pytest.mark.parametrize("hbm", slow_but([1 << 10], [11, 1 << 10]))
@pytest.mark.parametrize("step", [update, brought])
@pytest.mark.parametrize("name", TARGETS)
def test_state_that_is_asked_for_on_the_host_is_there_and_back(name: str, step: Any, hbm: int):
    leaf = jax.ShapeDtypeStruct((1536, 1536), jnp.float32)
    params, size = [leaf] * LAYERS, 4 * 1536 * 1536
    device = topology(name).sharding()
    host = device.with_memory_kind("pinned_host")
    where = device, host, host
    options: dict[str, Any] = {"in_shardings": (where, device), "out_shardings": where}
    planned = memplan.jit(step, hbm=hbm * size, machine=name, donate_argnums=0, **options)
    compiled = planned.lower((params, params, params), params).compile()
    memory = compiled.memory_analysis()
    assert compiled.device_bytes <= hbm * size
    assert compiled.followed.exactly
    moments = 2 * LAYERS * size
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes >= moments
    assert memory.host_argument_size_in_bytes >= moments
    assert memory.host_temp_size_in_bytes == 0
    if hbm > 11:  # The others stay where there is room.
        assert memory.host_argument_size_in_bytes == moments


@pytest.mark.tpu
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_what_is_asked_for_on_the_host_is_there_also_where_nothing_takes_its_place():
    def total(m: Any, x: Any) -> Any:
        return jnp.tanh(m @ x)[:8]

    m = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    device = topology("v5e").sharding()
    host = device.with_memory_kind("pinned_host")
    options: dict[str, Any] = {"donate_argnums": 0, "in_shardings": (host, device)}
    lowered = memplan.jit(total, hbm="1GiB", machine="v5e", **options).lower(m, m)
    memory = lowered.compile().memory_analysis()
    assert memory.host_argument_size_in_bytes == 4 * 1024 * 1024
    assert memory.argument_size_in_bytes == 4 * 1024 * 1024
    assert lowered.left_alone == {}
