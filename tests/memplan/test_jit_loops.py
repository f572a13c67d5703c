"""Weights that loops read whole, under ``memplan.jit``: on CPU the numbers, for TPU and GPU the
executables, whose modules are run on the CPU for the numbers, too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memplan.api as memplan
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.plan import Plan
from hlo_passes.reading.reader import read_module
from hlo_passes.verify import verify_executable
from memplan.replaying import replay
from memplan.topologies import topology
from tests.sweeps import slow_but

pytestmark = pytest.mark.usefixtures("planned_once")

TARGETS = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]
SLOW_ON_TPU = [
    pytest.param("v5e", marks=[pytest.mark.tpu, pytest.mark.slow]),
    pytest.param("h200", marks=pytest.mark.gpu),
]
SLOW_ON_GPU = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=[pytest.mark.gpu, pytest.mark.slow]),
]
COUNT, WIDTH, ROWS, TRIPS = 6, 1024, 256, 3
WEIGHT = 4 * WIDTH * WIDTH


def net(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def counted(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, TRIPS, lambda _, x: net(weights, x), x)


def test_a_budget_of_nothing_is_refused_as_any_other():
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    lowered = memplan.jit(counted, hbm=1 << 20, machine="h200").lower(
        weights, jax.ShapeDtypeStruct((8, 64), jnp.float32)
    )
    for budget in (0, -(1 << 20)):
        with pytest.raises(MemoryBudgetError):
            lowered._budgeted.planner.plan(budget, {})


def scanned(weights: list[jax.Array], x: jax.Array) -> Any:
    return lax.scan(lambda x, noise: (net(weights, x) + noise, x[0]), x, jnp.ones(TRIPS))


def until(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda s: s[0] < TRIPS, lambda s: (s[0] + 1, net(weights, s[1])), (0, x))[
        1
    ]


def prompted(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """As generation is: the prompt goes through the same weights before the loop."""
    return counted(weights, net(weights, x))


def tied(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """The first weight is also the last."""
    return lax.fori_loop(0, TRIPS, lambda _, x: net([*weights, weights[0].T], x), x)


def nested(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """A solver's steps in a loop over checkpoints."""

    def outer(_: Any, x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x[0, 0] > 2, lambda x: net(weights, x), counted(weights, x))

    return lax.fori_loop(0, 2, outer, x)


def carried(weights: list[jax.Array], x: jax.Array) -> Any:
    """jax sees that the loop hands the weights on as they are."""
    return lax.fori_loop(0, TRIPS, lambda _, s: (s[0], net(s[0], s[1])), (weights, x))[1]


def branched(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    def body(i: Any, x: jax.Array) -> jax.Array:
        return lax.cond(i % 2 == 0, lambda: net(weights[:3], x), lambda: net(weights[3:], x))

    return lax.fori_loop(0, TRIPS, body, x)


LOOPS = (counted, scanned, until, prompted, tied, nested, carried, branched)


# What the branches of a conditional read is there at once, so `branched` needs all of it.
PROGRAMS = slow_but([counted], [counted, scanned, until, prompted, tied, nested, carried])


def arguments() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), COUNT)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]
    return weights, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def shapes() -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())


def compiled_for(target: str, f: Callable[..., Any], budget: int) -> Any:
    return memplan.jit(f, hbm=budget, machine=topology(target)).lower(*shapes()).compile()


@pytest.mark.parametrize("f", slow_but([scanned, branched], LOOPS))
def test_on_cpu_what_a_loop_reads_is_there_for_all_of_it(f: Callable[..., Any]):
    with pytest.raises(MemoryBudgetError) as refused:
        compiled_for("cpu", f, COUNT * WEIGHT * 7 // 8)
    assert COUNT * WEIGHT < refused.value.least < (COUNT + 2) * WEIGHT


@pytest.mark.parametrize("f", slow_but([scanned, branched], LOOPS))
def test_numbers_on_cpu_are_those_of_jax(f: Callable[..., Any]):
    def before(of: tuple[list[jax.Array], list[jax.Array]], x: jax.Array) -> Any:
        return f(of[0], net(of[1], x))

    weights, x = arguments()
    of = weights, [w / 2 for w in weights]
    step = memplan.jit(before, hbm=(COUNT + 3) * WEIGHT)
    compiled = step.lower(*step.place(of, x)).compile()
    assert compiled.device_bytes <= (COUNT + 3) * WEIGHT
    assert compiled.plan is not None
    assert compiled.plan.transfers
    found = step(*step.place(of, x))
    expected = jax.jit(before)(of, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("f", PROGRAMS)
@pytest.mark.parametrize("target", SLOW_ON_TPU)
def test_a_budget_below_what_a_loop_reads_is_kept(target: str, f: Callable[..., Any]):
    compiled = compiled_for(target, f, COUNT * WEIGHT * 7 // 8)
    plan: Plan = compiled.plan
    assert compiled.device_bytes <= COUNT * WEIGHT * 7 // 8
    assert plan.bodies
    assert Plan.from_json(plan.to_json()) == plan
    final = read_module(compiled)
    followed = verify_executable(plan, final)
    assert not followed.loops_missing
    assert followed.loop_transfers == sum(len(b.plan.transfers) for b in plan.bodies)
    weights, x = arguments()
    found = replay(compiled, weights, x)
    expected = jax.jit(f)(weights, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_what_branches_read_is_there_at_once(target: str):
    with pytest.raises(MemoryBudgetError) as refused:
        compiled_for(target, branched, COUNT * WEIGHT * 7 // 8)
    assert "cond" in refused.value.instruction
    assert COUNT * WEIGHT < refused.value.least < (COUNT + 2) * WEIGHT


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_weights_for_which_there_is_room_stay(target: str):
    tight, wide = (compiled_for(target, counted, n * WEIGHT) for n in (5, 6))
    (body,) = wide.plan.bodies
    assert len(wide.plan.host_parameters) < len(tight.plan.host_parameters)
    assert {n for _, n in body.arguments} <= set(wide.plan.host_parameters)
    assert wide.plan.prediction.step_time_s < tight.plan.prediction.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_a_loop_reads_comes_once_where_all_of_it_has_room(target: str):
    def after(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return counted(weights[:2], net(weights[2:], x))

    assert not compiled_for(target, after, 5 * WEIGHT).plan.bodies


def by_condition(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: net(weights, x)[0, 0] > 2, lambda x: net(weights, x), x)


def in_rings(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    stack = jnp.stack(weights)
    return lax.scan(lambda x, w: (x @ w, None), x, stack)[0]


@pytest.mark.parametrize("f", [by_condition, in_rings])
def test_others_are_left_alone(f: Callable[..., Any]):
    placing = memplan.jit(f, hbm=COUNT * WEIGHT // 2).lower(*shapes()).placing
    assert not placing.streams.read_by_loops


def test_one_that_a_condition_reads_says_why():
    placing = memplan.jit(by_condition, hbm=COUNT * WEIGHT // 2).lower(*shapes()).placing
    (reason,) = set(placing.left_alone.values())
    assert "read by the condition of a loop" in reason
