"""Scanned layers under ``memplan.jit``: on CPU the numbers, for TPU and GPU the executables."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memplan.api as memplan
import memplan.candidates as candidates
import memplan.written as written
from hlo_passes import pipeline
from hlo_passes.analysis.host_compute import host_compute
from hlo_passes.errors import HostComputeError, MemoryBudgetError
from hlo_passes.ir import Module
from hlo_passes.plan import Plan
from hlo_passes.rewrite import inject
from memplan.candidates import Candidate
from memplan.placing import Placing
from memplan.streams.hosting import Hosting
from memplan.topologies import topology
from tests.memplan.chains import (
    HALF,
    WEIGHT_BYTES,
    activations,
    assert_same_bits,
    chain,
    weights,
    xla_total,
)
from tests.memplan.test_planner import refusal
from tests.sweeps import slow_but

pytestmark = pytest.mark.usefixtures("planned_once", "planned_as_written")

TARGETS = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]

OF_FOUR = [
    pytest.param("v5e:2x2", marks=pytest.mark.tpu),
    pytest.param("h200:4", marks=pytest.mark.gpu),
]

SLOW_ON_GPU = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=[pytest.mark.gpu, pytest.mark.slow]),
]
LAYERS = 8


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w), None


def forward(weights: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(layer, x, weights)[0]


def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(forward(weights, x)).mean()


def descend(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(weights, x)
    return weights - 0.1 * gradient, value


def by_index(weights: jax.Array, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, len(weights), lambda i, x: layer(x, weights[i])[0], x)


def parts(weights: jax.Array, x: jax.Array) -> jax.Array:
    def add(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
        return total + forward(weights, part).sum(), None

    return lax.scan(add, jnp.zeros(()), jnp.stack([x, -x, x / 2]))[0]


def arguments(width: int, rows: int) -> tuple[jax.Array, jax.Array]:
    key, other = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(key, (LAYERS, width, width)) / width**0.5
    return weights, jax.random.normal(other, (rows, width))


def shapes(width: int, rows: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    return (
        jax.ShapeDtypeStruct((LAYERS, width, width), dtype),
        jax.ShapeDtypeStruct((rows, width), dtype),
    )


@pytest.mark.parametrize(
    ("program", "spared"),
    [(forward, 0.5), (by_index, 0.5), (parts, 0.5), (jax.grad(loss), 0.25)],
    ids=["forward", "by_index", "parts", "gradient"],
)
def test_the_numbers_of_plain_jit_within_a_budget(program: Any, spared: float):
    args = arguments(128, 16)
    total = xla_total(program, *args)
    step = memplan.jit(program, hbm=total - int(spared * args[0].nbytes))
    compiled = step.lower(*args).compile()
    assert compiled.hosting.arguments == {0}
    found, expected = step(*step.place(*args)), jax.jit(program)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def with_dropout(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes a key with each slice of the weights, and gives back another."""

    def dropped(x: jax.Array, taken: Any) -> tuple[jax.Array, Any]:
        w, key = taken
        here, later = jax.random.split(key)
        return jnp.tanh(x @ w) * jax.random.bernoulli(here, 0.9, x.shape), later

    keys = jax.random.split(jax.random.key(0), len(weights))
    x, keys = lax.scan(dropped, x, (weights, keys))
    return x, jax.random.key_data(keys)


def test_keys_beside_the_weights():
    args = arguments(128, 16)
    total = xla_total(with_dropout, *args)
    step = memplan.jit(with_dropout, hbm=total - args[0].nbytes // 2)
    assert step.lower(*args).compile().hosting.arguments == {0}
    assert_same_bits(step(*step.place(*args)), jax.jit(with_dropout)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_keys_are_not_moved(target: str):
    weights, x = shapes(256, 16, jnp.float32)
    lowered = memplan.jit(with_dropout, hbm="1MiB", machine=topology(target)).lower(weights, x)
    compiled = lowered.compile()
    assert compiled.hosting.arguments == {0}
    assert not compiled.hosting.results


def test_keys_that_one_loop_leaves_for_another_stay():
    def twice(weights: jax.Array, x: jax.Array) -> jax.Array:
        def split(key: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            key, later = jax.random.split(key)
            return key, (later, w * 2)

        def take(x: jax.Array, made: Any) -> tuple[jax.Array, None]:
            key, w = made
            return jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.9, x.shape), None

        _, made = lax.scan(split, jax.random.key(0), weights)
        return lax.scan(take, x, made)[0]

    (residual,) = memplan.jit(twice).lower(*shapes(64, 8)).placing.streams.residuals(0)
    assert residual.number == 1  # The weights, not the keys.


def with_activations(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.scan(lambda x, w: (layer(x, w)[0], x), x, weights)


@pytest.mark.parametrize("kind", slow_but([AxisType.Explicit], [AxisType.Explicit, AxisType.Auto]))
@pytest.mark.parametrize("program", [with_activations, jax.grad(loss)], ids=["made", "gradient"])
def test_the_mesh_is_named_in_the_types_or_not(program: Any, kind: AxisType):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    weights, x = arguments(128, 16)
    weights = jax.device_put(weights, NamedSharding(mesh, P()))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    step = memplan.jit(program, hbm=xla_total(program, weights, x) - weights.nbytes // 4)
    assert step.lower(weights, x).compile().hosting.arguments == {0}
    found, expected = step(*step.place(weights, x)), jax.jit(program)(weights, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("kind", slow_but([AxisType.Explicit], [AxisType.Explicit, AxisType.Auto]))
def test_residuals_on_a_mesh_that_is_named_in_the_types(kind: AxisType):
    mesh = Mesh(np.array(topology("v5e:2x2").devices), ("data",), axis_types=(kind,))
    specs = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    args = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)
        for s, sharding in zip(shapes(1024, 4 * 4096), specs, strict=True)
    ]
    step = memplan.jit(descend, hbm="48MiB", machine="v5e:2x2", donate_argnums=0)
    compiled = step.lower(*args).compile()
    assert compiled.hosting.arguments == {0}
    assert compiled.hosting.results
    assert compiled.device_bytes <= 48 << 20


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_weights_that_stay_are_updated_in_place(target: str):
    weights, x = shapes(1024, 4096)
    step = memplan.jit(descend, hbm="56MiB", machine=topology(target), donate_argnums=0)
    compiled = step.lower(weights, x).compile()
    assert 0 not in compiled.hosting.arguments
    assert compiled.hosting.results
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == memory.argument_size_in_bytes == 2 * weights.size


@pytest.mark.parametrize("target", SLOW_ON_GPU)
@pytest.mark.parametrize("program", [forward, by_index])
def test_two_slots_hide_the_weights_of_all_layers(program: Any, target: str):
    # As many rows as keep either device busy for longer than a layer's weights travel.
    layers, width, rows = 48, 4096, 32768
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    step = memplan.jit(program, hbm="1.5GiB", machine=topology(target))
    compiled = step.lower(weights, x).compile()
    assert 0 in compiled.hosting.arguments
    assert compiled.hosting.depth == 2
    assert compiled.followed.exactly
    assert compiled.plan.prediction.stall_s < 0.05 * compiled.plan.prediction.compute_s


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_a_training_step_streams_weights_residuals_and_the_update(target: str):
    weights, x = shapes(1024, 4096)
    step = memplan.jit(descend, hbm="48MiB", machine=topology(target), donate_argnums=0)
    compiled = step.lower(weights, x).compile()
    assert compiled.hosting.arguments == {0}
    assert compiled.hosting.results  # What the forward pass leaves.
    memory = compiled.memory_analysis()
    assert memory.host_output_size_in_bytes >= 2 * LAYERS * 1024**2
    assert compiled.device_bytes <= 48 << 20
    kinds = {t.kind for schedule in compiled.plan.loops for t in schedule.transfers}
    assert kinds == {"prefetch", "evict"}
    # The weights come in for either pass and go out once; what a layer reads and what it makes
    # goes out and comes in. The gradients stay where they are made. Where it is stored late, the
    # first iteration has nothing to store yet but what is written over.
    moved = 2 * LAYERS * (3 * 1024 * 1024 + 4 * 4096 * 1024)
    assert compiled.plan.moved_bytes == moved + 2 * 4096 * 1024 * len(compiled.hosting.lagging)


def momentum(state: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
    weights, m = state
    kept = jax.checkpoint(layer)
    gradient = jax.grad(lambda w: jnp.square(lax.scan(kept, x, w)[0]).mean())(weights)
    m = 0.9 * m + gradient
    return weights - 0.1 * m, m


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_out_shardings_leave_it_to_the_plan_in_which_memory_donated_state_is(target: str):
    machine = topology(target)
    weights, x = shapes(1024, 512)
    options: dict[str, Any] = {"machine": machine, "hbm": "24MiB", "donate_argnums": 0}
    free = memplan.jit(momentum, **options).lower((weights, weights), x).compile()
    bound = memplan.jit(momentum, out_shardings=machine.sharding(), **options)
    compiled = bound.lower((weights, weights), x).compile()
    assert compiled.hosting == free.hosting
    assert {0, 1} <= compiled.hosting.arguments
    assert compiled.device_bytes == free.device_bytes <= 24 << 20
    assert compiled.memory_analysis().host_output_size_in_bytes == 2 * 2 * weights.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "hbm"),
    [
        pytest.param("v5e", "18MiB", marks=pytest.mark.tpu),
        pytest.param("h200", "24MiB", marks=pytest.mark.gpu),
    ],
)
def test_microbatches_around_layers(target: str, hbm: str):
    step = memplan.jit(parts, hbm=hbm, machine=topology(target), offload=("weights",))
    compiled = step.lower(*shapes(1024, 1024)).compile()
    assert 0 in compiled.hosting.arguments
    assert compiled.followed.exactly
    assert compiled.plan.moved_bytes >= 3 * 2 * LAYERS * 1024**2


@pytest.mark.tpu
def test_the_option_that_rings_need_is_set_for_them_only():
    ringed = memplan.jit(forward, hbm="24MiB", machine="v5e").lower(*shapes(1024, 2048))
    assert ringed.placing.ring_options == {"xla_tpu_pipeline_memory_host_transfers": "false"}


@pytest.mark.tpu
def test_stacks_that_the_tpu_cannot_slice_are_left_alone():
    def scaled(scales: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, s: (x * s, None), x, scales)[0]

    scales = jax.ShapeDtypeStruct((16, 1 << 20), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.bfloat16)
    lowered = memplan.jit(scaled, hbm="40MiB", machine="v5e").lower(scales, x)
    assert "inside the tiles" in lowered.left_alone["scales"]
    assert lowered.compile().device_bytes <= 40 << 20


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("dtype", slow_but([jnp.float64], [jnp.complex64, jnp.float64]))
def test_the_tpu_makes_two_of_numbers_of_64_bits(dtype: Any):
    with jax.enable_x64(True):
        weights, x = shapes(256, 16, dtype)
        lowered = memplan.jit(forward, hbm="2.2MiB", machine="v5e").lower(weights, x)
        assert "makes two arrays" in lowered.left_alone["weights"]
        with pytest.raises(MemoryBudgetError, match="makes two arrays"):
            lowered.compile()


@pytest.mark.tpu
def test_numbers_of_64_bits_beside_what_is_streamed():
    def summed(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, _ = layer(x, w)
            return x, x.astype(jnp.float64)

        return lax.scan(body, x, weights)

    with jax.enable_x64(True):
        step = memplan.jit(summed, hbm="2MiB", machine="v5e")
        compiled = step.lower(*shapes(256, 16, jnp.float32)).compile()
    assert compiled.hosting.arguments == {0}
    assert compiled.device_bytes <= 2 << 20


@pytest.mark.tpu
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_stacks_that_do_not_lie_in_rows_on_a_mesh(kind: AxisType):
    """Heads of 64: the axis that is sharded is another one of the rows that a ring sees."""
    mesh = Mesh(np.array(topology("v5e:2x2").devices), ("heads",), axis_types=(kind,))
    sharding = NamedSharding(mesh, P(None, None, "heads"))
    weights = jax.ShapeDtypeStruct((LAYERS, 1024, 16, 64), jnp.bfloat16, sharding=sharding)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def heads(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return x + 1, w * 2

        return lax.scan(body, x, weights)

    step = memplan.jit(heads, hbm="3MiB", machine="v5e:2x2", donate_argnums=0)
    compiled = step.lower(weights, x).compile()
    assert compiled.hosting.arguments == {0}
    assert compiled.device_bytes <= 3 << 20


def scheduled(placing: Placing, hosting: Hosting) -> Module:
    program, platform = placing.placed(hosting), placing.lowering.target.platform
    return inject.capture(platform, program.stablehlo, program.compiler(None))


@pytest.mark.parametrize("target", OF_FOUR)
def test_residuals_on_the_host_are_divided_as_what_is_left_is(target: str):
    """A batch over devices: of what each layer leaves a host has its devices' parts."""
    where = topology(target)
    mesh = where.mesh((4,), ("batch",))
    weights, _ = shapes(1024, 64)
    x = jax.ShapeDtypeStruct((8192, 1024), weights.dtype, sharding=NamedSharding(mesh, P("batch")))

    def gradients(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: forward(w, x).astype(jnp.float32).sum())(weights)

    placing = memplan.jit(gradients, machine=where).lower(weights, x).placing
    hosting = placing.everything(2, 1.0)
    assert hosting.results
    module = scheduled(placing, hosting)
    empty = [i for i in module.entry.instructions if i.custom_call_target == "AllocateBuffer"]
    on_host = {tuple(i.shape.dimensions) for i in empty if i.shape.memory_space == 5}
    assert on_host == {(LAYERS, 8192 // 4, 1024)}


@pytest.mark.parametrize("target", OF_FOUR)
def test_what_layers_leave_is_divided_on_the_device_as_it_lies_on_the_host(target: str):
    """Where a layer leaves it divided otherwise, XLA would divide the stack anew, on the host."""
    where = topology(target)
    mesh = where.mesh((4,), ("rows",))
    divided = NamedSharding(mesh, P(None, "rows"))  # Of a stack its rows, of a slice its columns.
    weights = jax.ShapeDtypeStruct((LAYERS, 1024, 512), jnp.float32, sharding=divided)
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(mesh, P()))

    def update(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.sin(x @ w @ w.T), lax.with_sharding_constraint(w / 2, divided)

        x, weights = lax.scan(layer, x, weights)
        return weights, x

    step = memplan.jit(update, machine=where, donate_argnums=0, out_shardings=(divided, None))
    placing = step.lower(weights, x).placing
    hosting = placing.everything(2, 1.0)
    module = scheduled(placing, hosting)
    assert placing.streams.returned(hosting)
    assert not host_compute(module)


def test_a_program_of_which_a_part_would_run_on_the_host_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(written, "host_compute", lambda module: module.entry.instructions[:4])
    args = jnp.ones((LAYERS, 64, 64)), jnp.ones((8, 64))
    lowered = memplan.jit(forward, hbm=6 * 64 * 64 * 4).lower(*args)
    with pytest.raises(HostComputeError, match=r"would compute %.* and 1 more there"):
        lowered.plan()
    assert "was dropped" in caplog.text


@pytest.mark.tpu
def test_loops_beside_which_less_is_live_store_late():
    """An update, after what layers work on is gone; and the plan says so when it is followed."""
    weights = jax.ShapeDtypeStruct((LAYERS, 512, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((16384, 512), jnp.float32)

    def step(weights: jax.Array, moments: jax.Array, x: jax.Array) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jnp.sin(x @ w)
            return y, y.sum(0)

        def update(_: None, arrays: tuple[jax.Array, ...]) -> Any:
            w, moment, sums = arrays
            moment = 0.9 * moment + sums
            return None, (w - moment, moment)

        x, sums = lax.scan(layer, x, weights)
        sums /= jnp.abs(sums).max()
        _, (weights, moments) = lax.scan(update, None, (weights, moments, sums))
        return weights, moments, x.sum()

    planned = memplan.jit(step, machine="v5e", donate_argnums=(0, 1))
    lowered = planned.lower(weights, weights, x)
    way = lowered._budgeted.planner._as_written
    everything = lowered.placing.everything(1, 1.0)
    late = way._storing_late(everything, 1 << 30, None)
    scans = lowered.placing.streams.scans
    assert late.lagging == {max(scans)}
    assert len(way._room(everything, 1 << 30, None).roomy) == 1  # Of two loops.
    plans = [way.plan_with(hosting, 1 << 30, None).plan for hosting in (everything, late)]
    early_s, late_s = (plan.prediction.step_time_s for plan in plans)
    assert late_s < 0.9 * early_s
    again = Plan.from_json(plans[1].to_json())
    followed = memplan.jit(step, machine="v5e", donate_argnums=(0, 1), plan=again)
    assert followed.lower(weights, weights, x).compile().followed.exactly


@pytest.mark.tpu
def test_as_many_stacks_stay_as_there_is_room_for():
    """Of few layers a slot is much of a stack, and is not there where most is live."""
    weights = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)

    def step(state: tuple[jax.Array, ...], x: jax.Array) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(x @ w), None

        def update(_: None, arrays: tuple[jax.Array, ...]) -> Any:
            gradient, w, *moments = arrays
            moments = [0.9 * moment + gradient for moment in moments]
            return None, (w - sum(moments), *moments)

        gradients = jax.grad(lambda w: lax.scan(layer, x, w)[0].sum())(state[0])
        gradients /= jnp.abs(gradients).max()
        return lax.scan(update, None, (gradients, *state))[1]

    lowered = memplan.jit(step, machine="v5e", donate_argnums=0).lower((weights,) * 4, x)
    way = lowered._budgeted.planner._as_written
    everything = lowered.placing.everything(1, 1.0)
    stack, budget = 4 << 22, 1 << 30
    budget += 5 * stack // 2 - way._room(everything, budget, None).bytes
    way.plan_for(budget, None)
    chosen = way._with_stacks(everything, budget, None, lambda hosting: hosting)
    assert len(everything.arguments - chosen.arguments) == 2
    assert 0 <= way._room(chosen, budget, None).bytes < stack


@pytest.mark.tpu
def test_stacks_of_nothing():
    weights, x = shapes(256, 16, jnp.float32)
    nothing = jax.ShapeDtypeStruct((0, 256, 256), jnp.float32)
    step = memplan.jit(lambda w, n, x: forward(w, x) + forward(n, x), hbm="1MiB", machine="v5e")
    assert step.lower(weights, nothing, x).compile().hosting.arguments == {0}


@pytest.mark.tpu
def test_a_stack_that_cannot_be_sliced_beside_one_that_can():
    def normed(weights: jax.Array, scales: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x * w[1] @ w[0]), None), x, (weights, scales))[0]

    weights, x = shapes(1024, 64)
    scales = jax.ShapeDtypeStruct((LAYERS, 1024), jnp.bfloat16)
    lowered = memplan.jit(normed, hbm="8MiB", machine="v5e").lower(weights, scales, x)
    assert set(lowered.left_alone) == {"scales"}
    executable = lowered.placing.placed(Hosting(frozenset({0, 1}))).compiler(None)()
    memory = executable.memory_analysis()
    assert memory.host_argument_size_in_bytes >= 2 * (weights.size + scales.size)
    assert memory.temp_size_in_bytes < weights.size


def test_why_a_stack_stays_is_said_once():
    def forward(weights: jax.Array, x: jax.Array) -> jax.Array:
        scanned = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
        return scanned + sum(jnp.sum(weights * n) for n in (1.0, 2.0))

    weights, x = shapes(64, 8)
    reason = memplan.jit(forward, hbm="1GiB").lower(weights, x).left_alone["weights"]
    assert reason.count("read whole by mul") == 1


def test_where_no_ring_fits_stacks_stay_and_other_weights_are_streamed(
    monkeypatch: pytest.MonkeyPatch,
):
    def both(stack: jax.Array, dense: list[jax.Array], x: jax.Array) -> jax.Array:
        return chain(dense, forward(stack, x))

    stack = jnp.stack(weights(LAYERS))
    args = stack, weights(), activations()
    budget = xla_total(both, *args) - 2 * WEIGHT_BYTES
    with pytest.raises(MemoryBudgetError) as refused:
        memplan.jit(both, hbm=1).lower(*args).plan()

    def refuse(*_: Any) -> None:
        raise refused.value

    monkeypatch.setattr(written.Written, "_with_stacks", refuse)
    step = memplan.jit(both, hbm=budget)
    compiled = step.lower(*args).compile()
    assert compiled.device_bytes <= budget
    assert compiled.plan.transfers
    assert 0 not in compiled.hosting.arguments
    assert_same_bits(step(*step.place(*args)), jax.jit(both)(*args))


@pytest.mark.parametrize(("slow", "is_ringed"), [(1e9, False), (0.0, True)])
def test_stacks_that_are_small_stay_if_the_rest_is_fast_enough(
    monkeypatch: pytest.MonkeyPatch, slow: float, is_ringed: bool
):
    def both(stack: jax.Array, dense: list[jax.Array], x: jax.Array) -> jax.Array:
        return chain(dense, forward(stack, x))

    args = jnp.stack(weights(1)), weights(6), activations()
    ringed: list[int] = []
    with_stacks = written.Written._with_stacks

    def watched(self: written.Written, everything: Hosting, *rest: Any) -> Any:
        ringed.append(everything.depth)
        return with_stacks(self, everything, *rest)

    monkeypatch.setattr(written.Written, "_with_stacks", watched)
    monkeypatch.setattr(candidates, "_SLOW", slow)
    budget = xla_total(both, *args) - 2 * WEIGHT_BYTES
    assert budget >= 2 * WEIGHT_BYTES
    plan = memplan.jit(both, hbm=budget).lower(*args).plan()
    assert plan.transfers
    assert bool(ringed) == is_ringed


@pytest.mark.parametrize("rings", [(1, 2), (2, 1)])
def test_rings_that_need_more_than_the_budget_are_not_planned(
    monkeypatch: pytest.MonkeyPatch, rings: tuple[int, ...]
):
    room = written.Written._room

    def room_with_one_slot(self: written.Written, everything: Hosting, *rest: Any) -> pipeline.Room:
        if everything.depth > 1:
            raise refusal(HALF)
        return room(self, everything, *rest)

    plan_placed, found = written.Written._plan_placed, set[int]()

    def watched(self: written.Written, hosting: Hosting, *rest: Any) -> Candidate:
        found.add(hosting.depth)
        return plan_placed(self, hosting, *rest)

    monkeypatch.setattr(written, "_RINGS", tuple(written._Ring(slots, 1.0) for slots in rings))
    monkeypatch.setattr(written, "_SMALL_STACKS", 0.0)
    monkeypatch.setattr(Candidate, "is_hidden", False)
    monkeypatch.setattr(written.Written, "_room", room_with_one_slot)
    monkeypatch.setattr(written.Written, "_plan_placed", watched)
    args = arguments(256, 8)
    memplan.jit(forward, hbm=xla_total(forward, *args)).lower(*args).plan()
    assert found == {1}


def test_where_all_stacks_stay_the_program_is_planned_once_for_all_rings(
    monkeypatch: pytest.MonkeyPatch,
):
    planned: list[tuple[written.Written, Hosting]] = []
    plan_with_fewer = written.Written._plan_with_fewer

    def watched(self: written.Written, hosting: Hosting, *rest: Any) -> Candidate:
        planned.append((self, hosting))
        return plan_with_fewer(self, hosting, *rest)

    def kept(_: Any, everything: Hosting, *_rest: Any) -> frozenset[Any]:
        return everything.arguments | everything.results

    monkeypatch.setattr(written, "choose_kept", kept)
    monkeypatch.setattr(candidates, "_SLOW", 0.0)
    monkeypatch.setattr(Candidate, "is_hidden", False)
    monkeypatch.setattr(written.Written, "_plan_with_fewer", watched)
    args = arguments(256, 8)
    memplan.jit(forward, hbm=2 * xla_total(forward, *args)).lower(*args).plan()
    assert planned
    assert len(set(planned)) == len(planned)
    assert {hosting.depth for _, hosting in planned} == {written._RINGS[0][0]}


@pytest.mark.gpu
def test_with_nothing_on_the_host_the_program_is_as_it_was_written():
    def update(weights: jax.Array, gradient: jax.Array) -> jax.Array:
        return weights - 0.1 * gradient

    array = jax.ShapeDtypeStruct((LAYERS, 512, 512), jnp.float32)
    placing = memplan.jit(update, donate_argnums=0, machine="h200").lower(array, array).placing
    streamed = placing.placed(placing.everything(2, 1.0))
    assert "stablehlo.while" in streamed.lowered.as_text()
    assert "stablehlo.while" not in placing.placed(Hosting(frozenset())).lowered.as_text()
