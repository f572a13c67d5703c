"""What plans are best for: which are taken, and how one changes at run time."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import memplan
from hlo_passes.errors import JitterError, NoEnergyError, ObjectiveError, StalePlanError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.hardware.rates import KernelRate
from hlo_passes.placing.prices import FREE, Prices, traffic_prices
from hlo_passes.plan import Plan, Transfer
from hlo_passes.rewrite import inject
from memplan.objectives import Objective
from memplan.planner import Planner
from tests.hlo_passes.simulator.test_energy import MACHINE
from tests.hlo_passes.toys import module_of, plan_of
from tests.memplan.chains import HALF, activations, chain, weights
from tests.memplan.test_planner import refusal

MODULE = module_of("HloModule m\nENTRY e { ROOT x = f32[8] parameter(0) }")
FULL = traffic_prices(MACHINE)


def plan(step_s: float, moved: int, joules: float = 1.0) -> Plan:
    made = plan_of(MODULE, [])
    transfer = Transfer(0, "x", "host", "hbm", moved, 0, 0, 1)
    prediction = replace(made.prediction, step_time_s=step_s, joules=joules)
    return replace(made, transfers=(transfer,), prediction=prediction)


class Planning:
    """A planner: 1 s more for each 100 bytes fewer, the more of them the higher the prices.

    Attributes:
      strengths: of the prices that it was asked for, relative to those of the fewest bytes.
    """

    def __init__(self) -> None:
        self.strengths: list[float] = []

    def __call__(self, prices: Prices) -> Plan:
        strength = prices.byte_s / FULL.byte_s
        self.strengths.append(strength)
        fewer = 0 if strength < 1e-3 else 200 if strength < 0.05 else 400 if strength < 1 else 900
        return plan(10 + fewer / 100, 1000 - fewer)

    def best(self, objective: Objective) -> Plan:
        return objective.best(MACHINE, self, lambda plan: plan)


def test_the_fastest_needs_one_plan_and_the_fewest_bytes_two():
    planning = Planning()
    assert planning.best(Objective()).moved_bytes == 1000
    assert planning.strengths == [0]
    planning = Planning()
    assert planning.best(Objective("traffic")).moved_bytes == 100
    assert planning.strengths == [0, 1]


@pytest.mark.parametrize(
    ("bound", "moved"),
    [
        ({"slower": 1.0}, 100),
        ({"slower": 0.5}, 600),
        ({"latency_s": 12.5}, 800),
        ({"latency_s": 12.5, "slower": 0.5}, 800),
        ({"slower": 0.0}, 1000),
    ],
)
def test_the_fewest_bytes_with_which_a_step_keeps_its_bound(bound: dict[str, float], moved: int):
    planning = Planning()
    found = planning.best(Objective("traffic", **bound))  # pyright: ignore[reportArgumentType]
    assert found.moved_bytes == moved
    assert len(planning.strengths) <= 5


def test_the_fastest_step_with_no_more_bytes_than_that():
    planning = Planning()
    assert planning.best(Objective("latency", traffic_bytes=850)).moved_bytes == 800
    assert Planning().best(Objective("latency", traffic_bytes=1000)).moved_bytes == 1000


def test_a_bound_that_no_plan_keeps_is_an_error_that_says_what_was_found():
    with pytest.raises(ObjectiveError, match=r"latency_s=9.0.*at most 9 s, found 19 s.*hbm="):
        Planning().best(Objective("traffic", latency_s=9.0))
    with pytest.raises(ObjectiveError, match=r"at most 50 B moved, found 100 B"):
        Planning().best(Objective("latency", traffic_bytes=50))


def test_no_plan_is_worse_in_what_it_is_for_than_the_fastest():
    """Packing decides more than prices do, now and then."""

    def unlucky(prices: Prices) -> Plan:
        return plan(10, 700, 5.0) if prices else plan(8, 600, 4.0)

    for objective in ("traffic", "energy"):
        best = Objective(objective).best(MACHINE, unlucky, lambda plan: plan)
        assert (best.moved_bytes, best.prediction.joules) == (600, 4.0)


def test_where_only_the_fastest_is_packed_it_is_taken():
    def tight(prices: Prices) -> Plan:
        if prices:
            raise refusal(1, 1)
        return plan(8, 600)

    assert Objective("traffic").best(MACHINE, tight, lambda plan: plan).moved_bytes == 600


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("speed", r"objective='speed': expected 'latency', 'energy', 'traffic', or a memplan.Obj"),
        ("throughput", r"calls do not overlap, and .* is that for 'latency'"),
        (3, r"objective=3: expected"),
    ],
)
def test_what_is_no_objective_is_refused(given: Any, said: str):
    with pytest.raises(ObjectiveError, match=said):
        memplan.jit(chain, objective=given)


@pytest.mark.parametrize("bound", [{"slower": -0.1}, {"latency_s": 0.0}, {"joules": "1"}])
def test_bounds_are_numbers_of_what_can_be(bound: dict[str, Any]):
    with pytest.raises(ObjectiveError, match="expected a number of at least 0"):
        Objective("traffic", **bound)


def test_joules_on_a_machine_that_does_not_know_them_are_an_error_at_the_first_call():
    step = memplan.jit(chain, hbm=HALF, objective="energy")
    with pytest.raises(NoEnergyError, match="memplan calibrate"):
        step(weights(), activations())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens of the plans that are compiled."""
    found: list[str] = []
    compile_with = inject.compile_with

    def counted(platform: str, stablehlo: Any, token: str, *args: Any) -> Any:
        found.append(token)
        return compile_with(platform, stablehlo, token, *args)

    monkeypatch.setattr(inject, "compile_with", counted)
    return found


@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_an_objective_changes_between_calls_and_nothing_is_made_twice(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
):
    planned: list[Objective] = []
    best = Objective.best

    def counted(self: Objective, *args: Any) -> Any:
        planned.append(self)
        return best(self, *args)

    monkeypatch.setattr(Objective, "best", counted)
    step = memplan.jit(chain, hbm=HALF)
    args = weights(), activations()
    expected = jax.jit(chain)(*args)
    assert step.objective == Objective("latency")
    np.testing.assert_array_equal(step(*args), expected)
    first, plans = len(compiled), len(planned)
    step.objective = "traffic"
    np.testing.assert_array_equal(step(*args), expected)
    both = len(compiled)
    assert both > first
    assert {*planned[plans:]} >= {Objective("traffic")}
    plans = len(planned)
    for objective in ("latency", "traffic", "latency"):
        step.objective = objective
        np.testing.assert_array_equal(step(*args), expected)
    assert (len(compiled), len(planned)) == (both, plans)
    lowered = [step.lower(*args)]
    step.objective = Objective("traffic")  # The same, however it is said.
    lowered.append(step.lower(*args))
    assert lowered[0] is not lowered[1]
    assert [p.plan().preparation.objective for p in lowered] == ["latency", "traffic"]
    with pytest.raises(ObjectiveError):
        step.objective = "speed"
    assert step.objective == Objective("traffic")


def test_a_plan_that_was_kept_for_another_objective_is_not_taken(tmp_path: Path):
    args = weights(), activations()
    path = tmp_path / "step.plan"
    bound = Objective("traffic", slower=0.5)
    memplan.jit(chain, hbm=HALF, objective=bound).plan(*args).save(path)
    assert Plan.load(path).preparation.objective == "traffic, slower=0.5"  # pyright: ignore
    # Who asks for none takes what it is best for.
    assert memplan.jit(chain, plan=path).plan(*args) == Plan.load(path)
    assert memplan.jit(chain, plan=path, objective=bound).plan(*args) == Plan.load(path)
    with pytest.raises(
        StalePlanError, match=r"made for objective=traffic, slower=0\.5, asked for is l"
    ):
        memplan.jit(chain, plan=path, objective="latency").plan(*args)
    with pytest.warns(memplan.PlanWarning, match="asked for is traffic"):
        again = memplan.jit(chain, plan=path, hbm=HALF, objective="traffic").plan(*args)
    assert again.preparation.objective == "traffic"


def test_candidates_are_compared_by_what_they_are_charged(monkeypatch: pytest.MonkeyPatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    planner: Planner = lowered._budgeted.planner
    candidate = planner.plan(HALF, None)
    assert candidate.prices == FREE
    assert candidate.charged_s == 0
    dear = candidate.priced(Prices(byte_s=1.0, joule_s=2.0)).with_again(0.5, 3.0)
    assert dear.charged_s == pytest.approx(candidate.plan.moved_bytes + 6.0)
    assert dear.cost_s == pytest.approx(candidate.step_time_s + dear.charged_s)
    assert candidate.is_faster_than(dear)
    assert not dear.is_faster_than(candidate)


def test_how_steps_vary_is_part_of_a_plan_that_is_kept(tmp_path: Path):
    args = weights(), activations()
    path = tmp_path / "step.plan"
    made = memplan.jit(chain, hbm=HALF, jitter=0.1).plan(*args)
    assert made.preparation is not None
    assert made.preparation.jitter == 0.1
    assert made.prediction.p99_s is not None
    made.save(path)
    assert memplan.jit(chain, plan=path).plan(*args) == made
    with pytest.raises(StalePlanError, match=r"made for jitter=0\.1, asked for is 0\.2"):
        memplan.jit(chain, plan=path, jitter=0.2).plan(*args)


@pytest.mark.parametrize("jitter", [-0.1, "5 %", True, float("nan")])
def test_what_is_no_variation_is_refused(jitter: Any):
    with pytest.raises(JitterError, match=r"jitter=.*no variation\. Expected the standard dev"):
        memplan.jit(chain, jitter=jitter)


def test_variation_is_that_of_a_machine_that_was_measured():
    measured = replace(
        load_machine("cpu-cxl"),
        kernels=tuple(KernelRate(f"dot {n}", byte_s=1e-9, spread=n / 100) for n in (1, 5, 20)),
    )
    assert measured.variation == pytest.approx(0.05 / 0.6745)
    step = memplan.jit(chain, hbm=HALF, machine=measured, jitter="measured")
    preparation = step.plan(weights(), activations()).preparation
    assert preparation is not None
    assert preparation.jitter == measured.variation
    with pytest.raises(JitterError, match=r"the file of cpu-cxl has no spreads.*calibrate"):
        memplan.jit(chain, hbm=HALF, jitter="measured").lower(weights(), activations())
