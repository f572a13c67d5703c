"""What ``hbm=`` means: XLA's own report is within it, or an error names one that works."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_passes.fitting.fit as fitting
import hlo_passes.xla as xla
import memplan.api as memplan
from hlo_passes.errors import (
    BudgetSyntaxError,
    MemoryBudgetError,
    OffloadPatternError,
    OffloadSyntaxError,
    PlanMismatchError,
    SlotsError,
    UnknownMachineError,
)
from hlo_passes.hardware.machine import load_machine
from hlo_passes.pipeline import rewrite_module
from hlo_passes.units import format_bytes
from memplan.topologies import topology
from tests.memplan.chains import (
    HALF,
    LAYERS,
    WEIGHT_BYTES,
    WIDTH,
    activations,
    assert_same_bits,
    chain,
    device_total,
    weights,
    xla_total,
)

TARGETS = [
    "cpu",
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]
SLOW_ON_GPU = [
    *TARGETS[:2],
    pytest.param("h200", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def machine_of(target: str) -> str | None:
    return None if target == "cpu" else target


def wide(layers: int = 4, width: int = 2048) -> tuple[list[Any], Any]:
    """Abstract arguments of `chain`: weights of 16 MiB each."""
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return [weight] * layers, jax.ShapeDtypeStruct((8, width), jnp.float32)


@pytest.mark.parametrize("target", TARGETS)
def test_xla_reports_no_more_than_the_budget(target: str):
    compiled = memplan.jit(chain, hbm="48MiB", machine=machine_of(target)).lower(*wide()).compile()
    assert compiled.plan.transfers
    assert compiled.device_bytes <= 48 << 20
    on_cpu = compiled.hosted_bytes
    assert device_total(compiled) - on_cpu == compiled.device_bytes
    assert bool(on_cpu) == (target == "cpu")


@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_the_least_budget_of_the_error_works(target: str):
    machine = machine_of(target)
    lowered = memplan.jit(chain, hbm="1MiB", machine=machine).lower(*wide())
    with pytest.raises(MemoryBudgetError) as raised:
        lowered.compile()
    least = raised.value.least_budget()
    # At least one weight must be on the device; two would be a lot.
    assert 16 << 20 < least < 32 << 20
    compiled = memplan.jit(chain, hbm=least, machine=machine).lower(*wide()).compile()
    assert compiled.device_bytes <= least


def test_the_error_says_what_needs_the_memory():
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm="16KiB")(weights(), activations())
    error = raised.value
    assert error.budget == 16 * 1024
    assert error.source_line.startswith(chain.__code__.co_filename)
    assert error.largest[0].size == WEIGHT_BYTES
    sentence = str(error)
    for part in (
        "no plan keeps to hbm=16384 (16.0 KiB); ",
        f"the planner's estimate of the least is hbm={error.least} ({format_bytes(error.least)}); "
        "error.least_budget() compiles until one works\n",
        f"tightest at: dot_general (%{error.instruction}), {error.source_line}\n",
        "live there, 20.0 KiB at once: weights.0 16.0 KiB, ",
    ):
        assert part in sentence


@pytest.mark.parametrize("budget", [1, WEIGHT_BYTES, 2 * WEIGHT_BYTES])
def test_the_least_budget_works_with_donation_and_uneven_sizes(budget: int):
    def update(layers: Any, head: jax.Array, cache: jax.Array) -> Any:
        y = chain(layers, cache)
        return cache + y, y @ head

    args = weights(), jnp.ones((WIDTH, 3 * WIDTH)), activations()
    step = memplan.jit(update, hbm=budget, donate_argnums=2)
    with pytest.raises(MemoryBudgetError) as raised:
        step.lower(*args).compile()
    least = raised.value.least_budget()
    found = memplan.jit(update, hbm=least, donate_argnums=2)
    assert found.lower(*args).compile().device_bytes <= least
    assert_same_bits(found(*found.place(*args)), jax.jit(update)(*args[:2], activations()))


def scanned(stacked: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]


@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_a_budget_that_needs_scanned_layers_streamed(target: str):
    stacked = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    budget = 3 * 4 * 512 * 512
    compiled = memplan.jit(scanned, hbm=budget, machine=machine_of(target)).lower(stacked, x)
    compiled = compiled.compile()
    assert compiled.device_bytes <= budget
    assert compiled.hosting.arguments == {0}


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_scanned_layers_that_cannot_be_streamed(target: str):
    def shuffled(stacked: Any, order: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, i: (jnp.tanh(x @ stacked[i]), None), x, order)[0]

    stacked = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32)
    order = jax.ShapeDtypeStruct((6,), jnp.int32)
    x = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    step = memplan.jit(shuffled, hbm=3 * 4 * 512 * 512, machine=machine_of(target))
    with pytest.raises(
        MemoryBudgetError, match=r"stacked: indexed by data at .*budget\.py"
    ) as caught:
        step.lower(stacked, order, x).compile()
    least = caught.value.least_budget()
    found = memplan.jit(shuffled, hbm=least, machine=machine_of(target))
    assert found.lower(stacked, order, x).compile().device_bytes <= least


def test_scanned_layers_that_may_stay():
    def both(stacked: Any, layers: Any, x: Any) -> Any:
        return chain(layers, scanned(stacked, x))

    args = jnp.stack(weights(2)), weights(), activations()
    budget = int(0.75 * xla_total(both, *args))
    step = memplan.jit(both, hbm=budget)
    assert_same_bits(step(*step.place(*args)), jax.jit(both)(*args))
    compiled = step.lower(*args).compile()
    assert compiled.plan.transfers
    assert compiled.device_bytes <= budget


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_that_only_hands_its_argument_back(target: str):
    array = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    step = memplan.jit(lambda w: w, hbm=1 << 16, machine=machine_of(target))
    with pytest.raises(MemoryBudgetError, match="no plan keeps to hbm=65536"):
        step.lower(array).compile()


def test_a_sort_of_what_an_output_is_written_over():
    def ranks(layers: Any, x: Any) -> Any:
        return jnp.argsort(chain(layers, x), axis=-1)

    step = memplan.jit(ranks, hbm=HALF)
    args = weights(), activations()
    assert step.lower(*args).compile().plan.transfers
    assert_same_bits(step(*step.place(*args)), jax.jit(ranks)(*args))


@pytest.mark.tpu
def test_four_bit_weights_that_fit_are_left_alone():
    def step(weights: Any, x: Any) -> Any:
        return chain([w.astype(jnp.float32) for w in weights], x)

    weight = jax.ShapeDtypeStruct((1024, 1024), jnp.int4)
    args = [weight] * 6, jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    compiled = memplan.jit(step, hbm=4 << 20, machine="v5e").lower(*args).compile()
    assert compiled.device_bytes <= 4 << 20
    assert compiled.plan is None


def test_no_plan_takes_more_than_the_device_has():
    here = topology("cpu")
    device, *others = here.machine.tiers
    device = dataclasses.replace(device, capacity_bytes=HALF)
    machine = dataclasses.replace(here.machine, tiers=(device, *others))
    here = dataclasses.replace(here, machine=machine)
    lowered = memplan.jit(chain, hbm="1TiB", machine=here).lower(weights(), activations())
    assert lowered.plan().prediction.total_bytes <= HALF


def test_of_many_arguments_that_stay_the_error_names_some():
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm=1).lower(weights(), activations()).plan()
    left_alone = {f"w{n}": "read whole" for n in range(5)}
    left_alone |= {f"v{n}": f"reason {n}" for n in range(4)}
    error = raised.value.asked_for(1, 2, left_alone)
    named = "w0, w1, w2 and 2 more: read whole; v0: reason 0; v1: reason 1; and 2 more, in"
    assert f"stays on the device as a whole: {named} `left_alone`" in str(error)
    assert error.left_alone == left_alone


def test_what_packing_takes_is_not_needed_at_once(monkeypatch: pytest.MonkeyPatch):
    least_budget = fitting.least_budget

    def packed(*args: Any) -> Any:
        least, tick, posed = least_budget(*args)
        return least + 512, tick, posed

    def raised() -> MemoryBudgetError:
        with pytest.raises(MemoryBudgetError) as error:
            memplan.jit(chain, hbm=1).lower(weights(), activations()).plan()
        return error.value

    before = raised()
    monkeypatch.setattr(fitting, "least_budget", packed)
    assert raised().least == before.least + 512
    assert raised().needed == before.needed <= before.least


@pytest.mark.tpu
def test_small_temporaries_and_tables_are_named_where_they_are_much():
    shapes = jax.eval_shape(lambda: (weights(), activations()))
    with pytest.raises(MemoryBudgetError, match="of small temporaries and XLA's tables") as raised:
        memplan.jit(chain, hbm=1, machine="v5e").lower(*shapes).plan()
    error = raised.value
    assert 0 < error.small < error.needed


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_why_arguments_stay_that_no_loop_reads():
    donated = memplan.jit(chain, hbm=HALF, donate_argnums=0)
    with pytest.raises(MemoryBudgetError, match=r"weights\.0, .* more: it is donated"):
        donated.lower(weights(), activations()).plan()
    offered = memplan.jit(chain, hbm=HALF, offload=["weights.0"]).lower(weights(), activations())
    assert set(offered.left_alone) == {"x", *(f"weights.{n}" for n in range(1, len(weights())))}
    with pytest.raises(MemoryBudgetError, match="no pattern of offload= names it"):
        offered.plan()


def test_nothing_is_said_of_loops_that_are_not_the_users():
    def descend(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    args = (
        jax.ShapeDtypeStruct((4096, 4096), jnp.float32),
        jax.ShapeDtypeStruct((8, 4096), jnp.float32),
    )
    lowered = memplan.jit(descend).lower(*args)
    assert 0 in lowered.placing.streams.sources
    assert lowered.left_alone == {}


# --- what XLA:CPU makes one library call of -------------------------------------------------


@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_products_that_a_sum_ends_are_planned_one_by_one_on_cpu():
    def loss(layers: Any, x: jax.Array) -> jax.Array:
        return chain(layers, x).sum()

    args = [jnp.full((512, 512), 1 / 512)] * 12, jnp.ones((8, 512))
    step = memplan.jit(loss, hbm="4MiB")
    compiled = step.lower(*args).compile()
    assert compiled.plan is not None
    assert len(compiled.plan.transfers) > 1
    assert not compiled.is_jax_own
    np.testing.assert_allclose(step(*args), jax.jit(loss)(*args), rtol=1e-5)
    assert "xla_cpu_experimental_ynn_fusion_type" in compiled.plan.compiler_options
    # What the user says counts.
    said = {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    }
    with pytest.raises(MemoryBudgetError):
        memplan.jit(loss, hbm="4MiB", compiler_options=said).lower(*args).compile()


# --- a budget between two that work ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.gpu
def test_what_packing_takes_is_left_free_for_it():
    """Two thirds of the weights stay where packing takes none of the rest."""
    shapes = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 16
    lowered = memplan.jit(chain, machine="h200").lower(shapes, shapes[0])
    most = lowered.resident().prediction.total_bytes
    with pytest.raises(MemoryBudgetError) as raised:
        lowered.within(1)
    least = raised.value.least
    moved = [lowered.within(least + (most - least) * k // 8).moved_bytes for k in range(9)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0


# --- nothing to plan ------------------------------------------------------------------------


@pytest.fixture
def no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        pytest.fail("a compiler hook was registered")

    monkeypatch.setattr(xla, "register_hook", refuse)


@pytest.mark.parametrize("budget", [None, "1GiB", "xla's"])
@pytest.mark.usefixtures("no_hook")
def test_where_everything_fits_nothing_is_planned(budget: Any):
    args = weights(), activations()
    step = memplan.jit(chain, hbm=xla_total(chain, *args) if budget == "xla's" else budget)
    compiled = step.lower(*args).compile()
    assert compiled.plan is None
    assert compiled.followed is None
    assert compiled.rounds == ()
    assert_same_bits(step(*args), jax.jit(chain)(*args))


@pytest.mark.usefixtures("no_hook")
def test_calling_where_everything_fits_compiles_once(caplog: pytest.LogCaptureFixture):
    def unseen(layers: Any, x: jax.Array) -> jax.Array:
        return chain(layers, x)

    step = memplan.jit(unseen, hbm="1GiB")
    args = weights(), activations()
    with jax.log_compiles():
        for _ in range(3):
            step(*args)
    finished = "Finished XLA compilation of jit(unseen)"
    assert sum(finished in message for message in caplog.messages) == 1


# --- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["12 GB", "-1", "0", "", "GiB", "1XB", 0, -5, 1.5, True, b"1"])
def test_budgets_that_cannot_be_read(budget: Any):
    with pytest.raises(BudgetSyntaxError, match="12GiB"):
        memplan.jit(chain, hbm=budget)
    with pytest.raises(BudgetSyntaxError, match="12GiB"):
        memplan.jit(hbm=budget)


def test_any_integer_is_one():
    args = weights(), activations()
    plan = memplan.jit(chain, hbm=HALF, slots=2).plan(*args)
    of_numpy: Any = {"hbm": np.int64(HALF), "slots": np.uint8(2)}
    assert memplan.jit(chain, **of_numpy).plan(*args) == plan


def test_a_machine_that_does_not_exist():
    with pytest.raises(UnknownMachineError, match="Did you mean"):
        memplan.jit(chain, machine="tpu-v5x")
    with pytest.raises(UnknownMachineError, match="no machine"):
        memplan.jit(machine="abacus:2x2")


@pytest.mark.parametrize("machine", [5, b"v5e", ["v5e"], jax.devices()[0]])
def test_what_names_no_machine(machine: Any):
    with pytest.raises(UnknownMachineError, match=r"no machine .* Known: a100,"):
        memplan.jit(chain, machine=machine)


@pytest.mark.parametrize("offload", [5, [5], b"x", ["weights.*", None]])
def test_what_is_no_pattern(offload: Any):
    with pytest.raises(OffloadSyntaxError, match="expected a pattern of argument paths"):
        memplan.jit(chain, offload=offload)


def test_an_option_that_does_not_exist():
    for given in ((), (chain,)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'memory'"):
            memplan.jit(*given, hbm="1GiB", memory="1GiB")


@pytest.mark.parametrize("slots", [0, -1, 1.0, True, "2"])
def test_slots_that_no_ring_has(slots: Any):
    with pytest.raises(SlotsError, match="at least 1"):
        memplan.jit(chain, slots=slots)


def test_slots_limit_what_is_on_the_device_at_once():
    args = weights(), activations()
    plan = memplan.jit(chain, hbm=HALF, slots=1).plan(*args)
    ranges = sorted((t.start, t.end) for t in plan.transfers)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def test_offload_patterns_choose_what_may_move():
    args = weights(), activations()
    plan = memplan.jit(chain, hbm=HALF, offload=["weights.[0-4]"]).plan(*args)
    moved = {plan.labels[t.buffer] for t in plan.transfers}
    assert moved
    assert "weights.5" not in moved
    with pytest.raises(MemoryBudgetError):
        memplan.jit(chain, hbm=HALF, offload="x").plan(*args)


@pytest.mark.parametrize(
    ("ours", "jaxs"),
    [("params.w.3", "params['w'][3]"), ("params.w.*", "params['w'][*]"), ("rest.1", "rest[1]")],
)
def test_offload_patterns_in_either_spelling(ours: str, jaxs: str):
    def step(params: Any, x: Any, *rest: Any) -> Any:
        return chain([*params["w"], *rest], x)

    def movable(pattern: str) -> frozenset[int]:
        args = {"w": weights()}, activations(), *weights()
        return memplan.jit(step, offload=pattern).lower(*args).placing.candidates

    assert movable(ours) == movable(jaxs)
    assert len(movable(ours)) == (LAYERS if "*" in ours else 1)


@pytest.mark.parametrize("budget", [HALF, "1GiB"])
def test_offload_patterns_that_match_nothing(budget: Any):
    step = memplan.jit(chain, hbm=budget, offload=("weights.*", "param.*", "q"))
    with pytest.raises(OffloadPatternError) as raised:
        step(weights(), activations())
    assert str(raised.value) == (
        "offload: no argument matches 'param.*', 'q'. The arguments are 'weights.0', "
        f"'weights.1', 'weights.2', 'weights.3', 'weights.4' and {LAYERS - 4} more; "
        "'*' matches any part of a path."
    )


def test_a_plan_for_another_module():
    plan = memplan.jit(chain, hbm=HALF).plan(weights(), activations())
    machine = load_machine(plan.machine)
    other = memplan.jit(chain, hbm=HALF).lower(weights(), activations(4)).compile().module
    with pytest.raises(PlanMismatchError, match=plan.module_fingerprint):
        rewrite_module(other, plan, machine)


def many_small(x: Any, scales: list[Any]) -> Any:
    for scale in scales:
        x = jax.numpy.tanh(x @ x) * scale
    return jax.numpy.cumsum(x, 0)


@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_a_plan_is_made_for_what_xla_takes_by_itself(target: str):
    """XLA:TPU holds all temporaries of so small a program in VMEM, and the planner cannot know."""
    shape = jax.ShapeDtypeStruct
    x, scales = shape((256, 256), jax.numpy.float32), [shape((), jax.numpy.float32)] * 12
    machine = machine_of(target)
    own = memplan.jit(many_small, machine=machine).lower(x, scales).compile()
    assert own.plan is None
    lowered = memplan.jit(many_small, hbm=own.device_bytes, machine=machine).lower(x, scales)
    assert lowered.plan().moved_bytes == 0
    compiled = lowered.compile()
    assert compiled.plan is None
    assert compiled.device_bytes == own.device_bytes


@pytest.mark.slow
def test_what_a_function_closes_over_is_counted_and_said():
    weights = [jnp.full((512, 512), n, jnp.float32) for n in range(4)]

    def closing(x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    x = jax.ShapeDtypeStruct((128, 512), jnp.float32)
    compiled = memplan.jit(closing, machine="cpu").lower(x).compile()
    memory = compiled.memory_analysis()
    counted = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert compiled.device_bytes == counted + memory.temp_size_in_bytes + (4 << 20)
    assert "4.0 MiB of it arrays that the function closes over" in repr(compiled)

    with pytest.raises(MemoryBudgetError, match="MiB of arrays that the function closes") as e:
        memplan.jit(closing, machine="cpu", hbm="4MiB").lower(x).compile()
    assert e.value.budget == 4 << 20
    least = e.value.least_budget()
    found = memplan.jit(closing, machine="cpu", hbm=least).lower(x).compile()
    assert 4 << 20 < found.device_bytes <= least

    inner = jax.jit(lambda x: x @ weights[0])
    called = memplan.jit(lambda x: inner(inner(x)), machine="cpu").lower(x).compile()
    assert "1.0 MiB of it arrays" in repr(called)
