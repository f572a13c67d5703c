"""A loop's body as a program of its own: there and back, planned, and what the checker refuses."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hlo_passes import pipeline
from hlo_passes.analysis.host_copies import host_copies
from hlo_passes.errors import MemoryBudgetError, VerificationError
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.ir import Module
from hlo_passes.loops.bodies import copies_of_bodies, fetching_bodies, with_body
from hlo_passes.loops.body_plans import Bodies
from hlo_passes.loops.host_transfers import host_transfers
from hlo_passes.placing.prices import FREE
from hlo_passes.placing.problem import pose
from hlo_passes.proto import hlo_pb2
from hlo_passes.rewrite import inject
from hlo_passes.verify import verify_equivalent
from memplan.api import jit
from memplan.topologies import topology
from tests.hlo_passes.looped import FAST, SIZE, SLOW, fetching
from tests.hlo_passes.toys import least_budget

TARGETS = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]
COUNT, WIDTH = 4, 1024


def loop(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    def body(_: int, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    return lax.fori_loop(0, 3, body, x)


def loop_with_an_unread_element(
    weights: list[jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What an iteration leaves for the caller alone stands before what the next one reads."""

    def body(_: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, norm = state[1:]
        for w in weights:
            x = jnp.tanh(x @ w)
        return x[::2], x, norm + jnp.sum(x, axis=0)

    return lax.fori_loop(0, 3, body, (x[::2], x, jnp.zeros(x.shape[1])))


def captured(target: str, *, inside: bool, function: Callable[..., object] = loop) -> Module:
    """The module with all weights on the host, which the loop brings in each iteration, or the
    entry before it."""
    x = jax.ShapeDtypeStruct((128, WIDTH), jnp.float32)
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    placing = jit(function, hbm=1 << 40, machine=topology(target)).lower([w] * COUNT, x).placing
    hosting = placing.everything(2, 1.0)
    if inside:
        hosting = replace(hosting, inside=frozenset(range(COUNT)))
    program = placing.placed(hosting)
    platform = placing.lowering.target.platform
    return inject.capture(platform, program.stablehlo, program.compiler(placing.ring_options))


@pytest.mark.parametrize("target", TARGETS)
def test_a_body_is_a_program_and_a_body_again(target: str):
    module = captured(target, inside=True)
    (body,) = fetching_bodies(module)
    assert sorted(body.arguments.values()) == list(range(COUNT))
    assert {c.parameter.parameter_number for c in host_copies(body.program)} == {*body.arguments}
    again = with_body(module, body, body.program)
    verify_equivalent(module, again)
    names = [[i.name for i in m.instructions.values()] for m in (module, again)]
    assert sorted(names[0]) == sorted(names[1])


@pytest.mark.parametrize("target", TARGETS)
def test_elements_that_a_body_does_not_read_are_no_parameters(target: str):
    module = captured(target, inside=True, function=loop_with_an_unread_element)
    (body,) = fetching_bodies(module)
    program = body.program
    parameters = program.entry.parameters
    assert len(parameters) < len(body.computation.parameters[0].shape.tuple_shapes)
    assert [p.parameter_number for p in parameters] == list(range(len(parameters)))
    for alias in program.input_output_aliases:
        given = parameters[alias.parameter].shape
        assert given.dimensions == program.entry.root.shape.at(alias.output_index).dimensions
    verify_equivalent(module, with_body(module, body, program))
    machine = load_machine(target)
    plan = pipeline.plan_module(module, machine, least_budget(module, machine))
    verify_equivalent(module, pipeline.rewrite_module(module, plan, machine))


@pytest.mark.parametrize("target", TARGETS)
def test_its_transfers_are_no_other_pass_s(target: str):
    module = captured(target, inside=True)
    assert len(copies_of_bodies(module)) == COUNT
    assert not host_transfers(module, load_machine(target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_loop_that_brings_nothing_is_left_alone(target: str):
    module = captured(target, inside=False)
    assert not fetching_bodies(module)
    machine = load_machine(target)
    found = Bodies(module, machine, None, lambda of: pose(of, machine, ()), FREE)
    assert found.streamed is module


@pytest.mark.parametrize("target", TARGETS)
def test_the_least_of_a_body_is_one_weight_at_a_time(target: str):
    module, machine = captured(target, inside=True), load_machine(target)
    least, all_at_once = (
        least_budget(m, machine) for m in (module, captured(target, inside=False))
    )
    assert all_at_once - least > 4 * WIDTH * WIDTH
    plan = pipeline.plan_module(module, machine, least)
    verify_equivalent(module, pipeline.rewrite_module(module, plan, machine))


@pytest.mark.parametrize("target", TARGETS)
def test_a_fetch_behind_its_reader_is_refused(target: str):
    module, machine = captured(target, inside=True), load_machine(target)
    plan = pipeline.plan_module(module, machine, 1 << 34)
    (planned,) = plan.bodies
    first, *others = planned.plan.transfers
    late = replace(first, start=first.end, done=first.end, end=first.end + 1)
    broken = replace(planned, plan=replace(planned.plan, transfers=(late, *others)))
    with pytest.raises(VerificationError, match="is scheduled before what it needs"):
        pipeline.rewrite_module(module, replace(plan, bodies=(broken,)), machine)


@pytest.mark.parametrize("target", TARGETS)
def test_another_weight_than_the_reader_s_is_refused(target: str):
    module = captured(target, inside=True)
    (body,) = fetching_bodies(module)
    proto = hlo_pb2.HloModuleProto.FromString(module.to_bytes())
    written = next(c for c in proto.computations if c.id == body.computation.id)
    first, *_, last = [i for i in written.instructions if i.id in copies_of_bodies(module)]
    last.operand_ids[:] = first.operand_ids
    changed = Module(proto)
    with pytest.raises(VerificationError):
        verify_equivalent(module, changed)


@pytest.mark.parametrize("plan", [pipeline.plan_module, pipeline.choose_stay])
def test_slots_with_which_no_body_can_do_are_said(plan: Callable[..., object]):
    """One instruction reads two weights."""
    module = fetching([[0, 1]])
    with pytest.raises(MemoryBudgetError, match="with slots=1") as refused:
        plan(module, FAST, 1 << 20, slots=1)
    error = refused.value
    assert (error.budget, error.slots, error.instruction) == (1 << 20, 1, "y0.0")
    assert least_budget(module, FAST, slots=1) == error.least
    for budget, slots in ((error.least, None), (1 << 20, 2)):
        assert pipeline.plan_module(module, FAST, budget, slots=slots).bodies


@pytest.mark.parametrize("machine", [SLOW, FAST], ids=["slow link", "fast link"])
def test_what_stays_is_the_same_whatever_was_planned_before(machine: Machine):
    loops = [[0], [1], [2]], [[3], [4], [5]]
    budget = least_budget(fetching(*loops), machine) + 4 * SIZE
    stays = pipeline.choose_stay(fetching(*loops), machine, budget)
    plan = pipeline.plan_module(fetching(*loops), machine, budget)
    for other in (budget - 2 * SIZE, 1 << 20):
        module = fetching(*loops)
        assert len(pipeline.plan_module(module, machine, other).bodies) == 2
        assert pipeline.choose_stay(module, machine, budget) == stays
        assert pipeline.plan_module(module, machine, budget) == plan
