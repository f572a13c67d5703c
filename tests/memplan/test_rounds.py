"""Rounds of planning and compiling: what XLA reports of one decides what the next asks for."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan.api as memplan
import memplan.budgeted as budgeted
import memplan.executable as executable
import memplan.planner as planner
import memplan.rounds as rounds
from hlo_passes.errors import MemoryBudgetError, PlanMismatchError
from hlo_passes.ir import Module
from hlo_passes.rewrite import inject
from memplan.candidates import Candidate
from tests.memplan.chains import HALF, activations, chain, weights, xla_total


def no_plan(budget: int, least: int) -> MemoryBudgetError:
    return MemoryBudgetError(
        budget=budget,
        least=least,
        instruction="dot",
        op_name="dot",
        source_line="",
        largest=(),
        fixed=0,
    )


def test_more_than_planned_takes_another_round(monkeypatch: pytest.MonkeyPatch):
    reported = iter([HALF + 1000, HALF])
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: next(reported))
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert len(compiled.rounds) == 2
    assert f"XLA reports {HALF + 1000}" in compiled.rounds[0]
    assert compiled.plan.prediction.total_bytes <= HALF - 1000


def test_a_module_that_xla_schedules_otherwise_is_planned_anew(monkeypatch: pytest.MonkeyPatch):
    plan, compile_planned = planner.Planner.plan, budgeted.Budgeted._compile_planned
    planned: list[Candidate] = []
    tried: list[Candidate] = []

    def watched(self: planner.Planner, *args: Any, **options: Any) -> Candidate:
        planned.append(plan(self, *args, **options))
        return planned[-1]

    def refuses_once(self: budgeted.Budgeted, of: list[Candidate], *rest: Any) -> Any:
        tried.extend(of)
        if len(tried) == 1:
            raise PlanMismatchError("module", "one", "another")
        return compile_planned(self, of, *rest)

    monkeypatch.setattr(planner.Planner, "plan", watched)
    monkeypatch.setattr(budgeted.Budgeted, "_compile_planned", refuses_once)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert [id(c) for c in tried] == [id(c) for c in planned]
    assert len(tried) == 2
    assert compiled.plan is planned[1].plan


@pytest.mark.parametrize("replans", [False, True])
def test_what_xla_never_schedules_in_the_same_way_is_planned_at_hand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, replans: bool
):
    """Each capture shows an instruction with another name than the compilation has."""
    capture, planned_at = inject.capture, planner.Planner.planned_at
    at_hand: list[Candidate] = []

    def otherwise(platform: str, stablehlo: Any, compiler: Any) -> Module:
        proto = capture(platform, stablehlo, compiler).to_proto()
        (entry,) = (c for c in proto.computations if c.id == proto.entry_computation_id)
        entry.instructions[-1].name += ".otherwise"
        return Module(proto)

    def planned(self: planner.Planner, *args: Any) -> Candidate:
        if not replans:
            raise no_plan(HALF, HALF + 1)
        at_hand.append(planned_at(self, *args))
        return at_hand[-1]

    monkeypatch.setattr(inject, "capture", otherwise)
    monkeypatch.setattr(planner.Planner, "planned_at", planned)
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    if not replans:
        with pytest.raises(PlanMismatchError):
            lowered.compile()
        return
    with caplog.at_level("INFO", "memplan"):
        compiled = lowered.compile()
    assert "XLA scheduled the module otherwise than before" in caplog.messages
    assert compiled.plan is at_hand[-1].plan
    assert compiled.device_bytes <= HALF
    args = jax.device_get((weights(), activations()))
    np.testing.assert_array_equal(compiled(*args), jax.jit(chain)(*args))


def test_only_what_xla_schedules_otherwise_it_shows_anew(monkeypatch: pytest.MonkeyPatch):
    compile_planned, capture = budgeted.Budgeted._compile_planned, inject.capture
    shown: list[str] = []
    counts: list[int] = []

    def watched(platform: str, stablehlo: Any, compiler: Any) -> Any:
        shown.append(str(stablehlo))
        return capture(platform, stablehlo, compiler)

    def refuses_once(self: budgeted.Budgeted, of: list[Candidate], *rest: Any) -> Any:
        counts.append(len(shown))
        if len(counts) == 1:
            assert of[0].placing.splits
            raise PlanMismatchError("module", "one", "another")
        return compile_planned(self, of, *rest)

    def function(x: Any) -> Any:
        return jnp.sort(jnp.exp(x[:, None] * x), 1)[:, 0]

    x = jnp.ones(1024)
    monkeypatch.setattr(inject, "capture", watched)
    monkeypatch.setattr(budgeted.Budgeted, "_compile_planned", refuses_once)
    compiled = memplan.jit(function, hbm="1MiB").lower(x).compile()
    assert compiled.splits
    before, after = counts
    assert 0 < after - before < before
    assert set(shown[before:]) <= set(shown[:before])


def test_what_does_not_fit_the_device_takes_another_round(monkeypatch: pytest.MonkeyPatch):
    compile_planned = budgeted.Budgeted._compile_planned
    tried: list[Candidate] = []

    def exhausted_once(self: budgeted.Budgeted, of: list[Candidate], *rest: Any) -> Any:
        tried.extend(of)
        if len(tried) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in hbm.")
        return compile_planned(self, of, *rest)

    monkeypatch.setattr(budgeted.Budgeted, "_compile_planned", exhausted_once)
    monkeypatch.setattr(budgeted, "_IDLE", 1.0)
    capacity = mock.PropertyMock(return_value=HALF)
    monkeypatch.setattr(executable.Target, "capacity_bytes", capacity)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert len(compiled.rounds) == len(tried) == 2
    assert tried[1].predicted_bytes < tried[0].predicted_bytes
    assert compiled.device_bytes <= HALF


def test_each_round_leaves_more_free(monkeypatch: pytest.MonkeyPatch):
    """Whatever is asked for, plans take the same, and XLA exceeds it twice."""
    plan = planner.Planner.plan
    asked: list[int] = []

    def watched(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        asked.append(budget)
        return marked(plan(self, HALF - len(asked), options))

    monkeypatch.setattr(planner.Planner, "plan", watched)
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (len(asked) < 3))
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    overhead = HALF + 1 - compiled.plan.prediction.total_bytes
    assert asked == [HALF, HALF - 2 * overhead, HALF - 4 * overhead]


def knows_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on TPU, where nothing fits that is drawn."""
    monkeypatch.setattr(planner.Planner, "knows_chip", True)
    monkeypatch.setattr(planner.Planner, "drawn_bytes", lambda *_: (2 * HALF,))


def marked(candidate: Candidate) -> Candidate:
    """The same, as if a plan for another budget did something else."""
    mark = {"within": str(candidate.plan.budget_bytes)}
    plan = dataclasses.replace(candidate.plan, compiler_options=mark)
    return dataclasses.replace(candidate, plan=plan)


def slowed(candidate: Candidate, factor: float) -> Candidate:
    """The same, whose step is said to take longer."""
    candidate = marked(candidate)
    prediction = candidate.plan.prediction
    prediction = dataclasses.replace(prediction, step_time_s=factor * prediction.step_time_s)
    plan = dataclasses.replace(candidate.plan, prediction=prediction)
    return dataclasses.replace(candidate, plan=plan)


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_faster_plan_that_counts_what_is_on_the_chip_comes_first(
    monkeypatch: pytest.MonkeyPatch, is_faster: bool
):
    plan = planner.Planner.plan
    asked: list[bool] = []
    steps: list[float] = []

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append(counts_chip)
        found = slowed(
            plan(self, HALF, options, counts_chip=counts_chip), 1 if counts_chip == is_faster else 2
        )
        steps.append(found.step_time_s)
        return found

    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF)
    monkeypatch.setattr(budgeted.Budgeted, "_as_xla_has_it", lambda *_: None)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert asked[:2] == [False, True]
    assert compiled.plan.prediction.step_time_s == pytest.approx(min(steps))


def test_the_surer_plan_is_there_where_the_faster_one_fails(monkeypatch: pytest.MonkeyPatch):
    plan = planner.Planner.plan
    asked: list[bool] = []

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append(counts_chip)
        if len(asked) > 2:
            raise no_plan(budget, HALF)
        return slowed(
            plan(self, HALF - len(asked), options, counts_chip=counts_chip), 1 if counts_chip else 2
        )

    compilations = itertools.count()
    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "explained", lambda *_: HALF)
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (next(compilations) == 0))
    monkeypatch.setattr(budgeted.Budgeted, "_as_xla_has_it", lambda *_: None)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert asked[:2] == [False, True]
    assert compiled.plan.budget_bytes == HALF - 1
    assert len(compiled.rounds) == 2


@pytest.mark.parametrize("exceeds", [1, 2])
@pytest.mark.parametrize(("explained", "left"), [(HALF - 99, 100), (0, None)])
def test_what_is_explained_by_what_is_on_the_chip_is_not_left_free(
    monkeypatch: pytest.MonkeyPatch, explained: int, left: int | None, exceeds: int
):
    """Nor more than the plan was exceeded, where less is predicted than before."""
    plan = planner.Planner.plan
    asked: list[int] = []

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        if counts_chip:
            raise no_plan(budget, HALF)
        asked.append(budget)
        return marked(plan(self, HALF - len(asked), options, counts_chip=counts_chip))

    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "explained", lambda *_: explained)
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (len(asked) <= exceeds))
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    exceeded = HALF + 1 - compiled.plan.prediction.total_bytes
    assert exceeded > 100
    free = exceeded if left is None else left
    assert asked == [HALF, HALF - 2 * free, HALF - 4 * free][: exceeds + 1]


def test_the_next_one_fits_as_often_as_it_has_to_where_the_chip_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
):
    """And is held to what XLA took of the one before beyond all that was drawn of it."""
    plan = planner.Planner.plan
    asked: list[tuple[int, bool]] = []
    compilations = itertools.count(1)
    all_drawn = iter(
        [
            (2 * HALF,),
            (HALF + 1,) * 10,
            (HALF + 1,) * 6 + (HALF,) * 4,
            (HALF - 97,) * 10,
            (HALF - 97,) * 2 + (HALF - 98,) * 8,
        ]
    )

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append((budget, counts_chip))
        found = plan(self, HALF - len(asked), options, counts_chip=counts_chip)
        return slowed(found, 1 if counts_chip else 2)

    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "explained", lambda *_: HALF)
    monkeypatch.setattr(planner.Planner, "drawn_bytes", lambda *_: next(all_drawn))
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (next(compilations) < 3) * 99)
    monkeypatch.setattr(budgeted.Budgeted, "_as_xla_has_it", lambda *_: None)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    shares = [(int(HALF * share), True) for share in (1.0, 0.97, 0.94, 0.91)]
    assert asked == [(HALF, False), (HALF, True), *shares]
    assert len(compiled.rounds) == 3
    assert compiled.plan.budget_bytes == HALF - 6


def test_a_plan_for_as_much_less_as_was_drawn_too_much_is_next(monkeypatch: pytest.MonkeyPatch):
    plan = planner.Planner.plan
    asked: list[tuple[int, bool]] = []
    compilations = itertools.count(1)
    too_much = int(HALF * 0.07)
    all_drawn = iter([(2 * HALF,), (HALF + too_much,), (HALF,)])

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append((budget, counts_chip))
        found = plan(self, HALF - len(asked), options, counts_chip=counts_chip)
        return slowed(found, 2 if counts_chip else 1)

    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "explained", lambda *_: HALF)
    monkeypatch.setattr(planner.Planner, "drawn_bytes", lambda *_: next(all_drawn))
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (next(compilations) < 2))
    monkeypatch.setattr(budgeted.Budgeted, "_as_xla_has_it", lambda *_: None)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    shares = [(int(HALF * share), True) for share in (1.0, 0.91)]
    assert asked == [(HALF, False), (HALF, True), *shares]
    assert compiled.plan.budget_bytes == HALF - 4


@pytest.mark.parametrize(("slower", "first"), [(1.04, False), (1.06, True)])
def test_one_that_is_hardly_slower_and_fits_comes_first(
    monkeypatch: pytest.MonkeyPatch, slower: float, first: bool
):
    plan = planner.Planner.plan
    asked: list[bool] = []

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append(counts_chip)
        found = plan(self, HALF - len(asked), options, counts_chip=counts_chip)
        return slowed(found, 1 if counts_chip else slower)

    drawn = {False: (HALF,), True: (HALF + 1,)}
    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "drawn_bytes", lambda _, c, __: drawn[c.counts_chip])
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF)
    monkeypatch.setattr(budgeted.Budgeted, "_as_xla_has_it", lambda *_: None)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert asked == [False, True]
    assert (compiled.plan.budget_bytes == HALF - 2) == first


def test_of_plans_that_were_drawn_before_the_fastest_that_fits_is_next(
    monkeypatch: pytest.MonkeyPatch,
):
    plan = planner.Planner.plan
    asked: list[int] = []
    compilations = itertools.count(1)
    none = (2 * HALF,)
    all_drawn = iter([none, (HALF + 1,) * 5 + (HALF - 1,) * 5, (HALF,) * 10])

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append(budget)
        found = plan(self, HALF - len(asked), options, counts_chip=counts_chip)
        return slowed(found, len(asked) if counts_chip else 9)

    monkeypatch.setattr(rounds, "_CHANCES", (0.6, 0.5))
    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "explained", lambda *_: HALF)
    monkeypatch.setattr(planner.Planner, "drawn_bytes", lambda *_: next(all_drawn))
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (next(compilations) < 3))
    monkeypatch.setattr(budgeted.Budgeted, "_as_xla_has_it", lambda *_: None)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert len(asked) == 4
    assert compiled.plan.budget_bytes == HALF - 3


def test_what_was_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch):
    plan = planner.Planner.plan
    asked: list[bool] = []
    compilations = itertools.count(1)

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append(counts_chip)
        room = HALF if counts_chip else HALF - len(asked)
        return slowed(plan(self, room, options, counts_chip=counts_chip), 1 if counts_chip else 2)

    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "explained", lambda *_: HALF)
    monkeypatch.setattr(planner.Planner, "drawn_bytes", lambda *_: (HALF,))
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (next(compilations) < 2))
    monkeypatch.setattr(budgeted.Budgeted, "_as_xla_has_it", lambda *_: None)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert asked == [False, True, *[True] * len(rounds._SHARES), False]
    assert len(compiled.rounds) == 2


def test_where_what_is_on_the_chip_cannot_be_left_out_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    plan = planner.Planner.plan
    asked: list[bool] = []
    compilations = itertools.count(1)

    def watched(
        self: planner.Planner, budget: int, options: Any, *, counts_chip: bool = False, **_: Any
    ) -> Candidate:
        asked.append(counts_chip)
        if not counts_chip and len(asked) > 1:
            raise no_plan(budget, HALF)
        return marked(plan(self, HALF - len(asked), options, counts_chip=counts_chip))

    monkeypatch.setattr(planner.Planner, "plan", watched)
    knows_the_chip(monkeypatch)
    monkeypatch.setattr(planner.Planner, "explained", lambda *_: HALF - 99)
    monkeypatch.setattr(rounds, "_CHANCES", ())
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (next(compilations) < 2))
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert asked == [False, True, False, False, True]
    assert compiled.plan.budget_bytes == HALF - 5


def test_where_there_is_no_room_for_all_caution_half_of_it_is_left_free(
    monkeypatch: pytest.MonkeyPatch,
):
    plan = planner.Planner.plan
    asked: list[int] = []
    compilations = itertools.count(1)

    def watched(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        asked.append(budget)
        if len(asked) == 3:
            raise no_plan(budget, HALF)
        return marked(plan(self, HALF - len(asked), options))

    monkeypatch.setattr(planner.Planner, "plan", watched)
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: HALF + (next(compilations) < 3))
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    overhead = HALF + 1 - compiled.plan.prediction.total_bytes
    assert asked == [HALF, *(HALF - n * overhead for n in (2, 4, 2))]


def test_where_nothing_leaves_as_much_free_the_least_is_tried(monkeypatch: pytest.MonkeyPatch):
    plan, least = planner.Planner.plan, int(0.9 * HALF)
    reported = iter([int(1.5 * HALF), HALF])

    def refuses(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        if budget < least:
            raise no_plan(budget, least)
        return marked(plan(self, budget, options))

    monkeypatch.setattr(planner.Planner, "plan", refuses)
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: next(reported))
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert compiled.plan.budget_bytes == least
    assert len(compiled.rounds) == 2


@pytest.mark.parametrize(
    ("predicted_s", "then_s", "reported", "compilations", "is_taken"),
    [
        (0.9, 0.9, HALF, 2, True),
        (0.96, 0.9, HALF, 1, False),
        (0.9, 1.0, HALF, 2, False),
        (0.9, 0.9, HALF + 1, 2, False),
    ],
)
def test_what_the_first_executable_says_is_planned_with(
    monkeypatch: pytest.MonkeyPatch,
    predicted_s: float,
    then_s: float,
    reported: int,
    compilations: int,
    is_taken: bool,
):
    """The first plan is said to take half a second, and its executable takes one."""
    plan = planner.Planner.plan
    steps, totals, found_s = iter([0.5, predicted_s]), iter([HALF, reported]), iter([1.0, then_s])
    asked: list[int] = []

    def watched(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        asked.append(budget)
        found = plan(self, HALF - len(asked), options)
        return slowed(found, next(steps) / found.step_time_s)

    monkeypatch.setattr(planner.Planner, "plan", watched)
    monkeypatch.setattr(planner.Planner, "can_be_told", True)
    monkeypatch.setattr(planner.Planner, "seconds", lambda *_: next(found_s))
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: next(totals))
    monkeypatch.setattr(budgeted, "_IDLE", 1.0)
    compiled = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert asked == [HALF, HALF]
    assert len(compiled.rounds) == compilations
    assert compiled.plan.budget_bytes == HALF - 1 - is_taken


def test_where_the_first_executable_takes_as_long_as_predicted_there_is_no_other_plan(
    monkeypatch: pytest.MonkeyPatch,
):
    plan = planner.Planner.plan
    asked: list[int] = []

    def watched(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        asked.append(budget)
        found = plan(self, budget, options)
        return slowed(found, 1 / found.step_time_s)

    monkeypatch.setattr(planner.Planner, "plan", watched)
    monkeypatch.setattr(planner.Planner, "can_be_told", True)
    monkeypatch.setattr(planner.Planner, "seconds", lambda *_: 1.04)
    memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert asked == [HALF]


def reporting(monkeypatch: pytest.MonkeyPatch, *parts: float) -> Any:
    """`chain` within HALF, where XLA reports these parts of what it is."""
    left = iter(parts)
    exact = executable.device_bytes
    monkeypatch.setattr(budgeted, "device_bytes", lambda *of: int(exact(*of) * next(left)))
    return memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()


def test_what_xla_takes_less_than_planned_is_used(monkeypatch: pytest.MonkeyPatch):
    before = memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    compiled = reporting(monkeypatch, 0.6, 0.6, 0.6)
    assert len(before.rounds) == 1
    assert len(compiled.rounds) > 1
    assert compiled.plan.moved_bytes < before.plan.moved_bytes
    assert compiled.plan.prediction.total_bytes > HALF
    assert compiled.device_bytes * 0.6 <= HALF


def test_a_plan_that_keeps_to_the_budget_is_not_given_up_for_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    compiled = reporting(monkeypatch, 0.6, 1.1, 1.1)
    assert len(compiled.rounds) == 3
    assert compiled.plan.prediction.total_bytes <= HALF


def test_where_one_ends_above_the_budget_the_next_asks_for_less(monkeypatch: pytest.MonkeyPatch):
    compiled = reporting(monkeypatch, 0.6, 1.1, 0.8)
    planned = [int(said.split()[1]) for said in compiled.rounds]
    assert planned[0] <= HALF < planned[2] < planned[1]
    assert compiled.plan.prediction.total_bytes == planned[2]


def test_where_little_is_left_idle_there_is_no_other_round(monkeypatch: pytest.MonkeyPatch):
    assert len(reporting(monkeypatch, 0.97).rounds) == 1


def test_where_no_step_waits_there_is_no_other_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budgeted, "WAITS", 1e9)
    assert len(reporting(monkeypatch, 0.6).rounds) == 1


def refusing(monkeypatch: pytest.MonkeyPatch, part: float, named: int = HALF) -> None:
    """The planner refuses less than HALF, and XLA reports this part of what it is.

    Args:
      named: the least that refusals name, at least.
    """
    plan, exact = planner.Planner.plan, executable.device_bytes

    def fails(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        if budget < HALF:
            raise no_plan(budget, max(budget + 1, named))
        return marked(plan(self, budget, options))

    monkeypatch.setattr(planner.Planner, "plan", fails)
    monkeypatch.setattr(budgeted, "device_bytes", lambda *of: int(exact(*of) * part))


@pytest.mark.parametrize("named", [HALF, HALF * 7 // 8])
def test_what_the_planner_refuses_is_kept_where_xla_takes_less(
    monkeypatch: pytest.MonkeyPatch, named: int
):
    """Also where the planner refuses the least that it names."""
    refusing(monkeypatch, 0.6, named)
    monkeypatch.setattr(budgeted.Budgeted, "_slack", lambda *_: HALF)
    budget = int(HALF * 0.7)
    compiled = memplan.jit(chain, hbm=budget).lower(weights(), activations()).compile()
    assert compiled.device_bytes * 0.6 <= budget


def test_what_the_planner_refuses_is_not_compiled_where_xla_cannot_take_so_much_less(
    monkeypatch: pytest.MonkeyPatch,
):
    refusing(monkeypatch, 0.6)
    monkeypatch.setattr(inject, "compile_with", lambda *_: pytest.fail("it was compiled"))
    lowered = memplan.jit(chain, hbm=int(HALF * 0.7)).lower(weights(), activations())
    with pytest.raises(MemoryBudgetError) as raised:
        lowered.compile()
    assert raised.value.least == HALF


def test_the_least_is_what_xla_takes_where_that_works(monkeypatch: pytest.MonkeyPatch):
    refusing(monkeypatch, 0.6)
    monkeypatch.setattr(budgeted.Budgeted, "_slack", lambda *_: HALF)
    args = weights(), activations()
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm=HALF // 4).lower(*args).compile()
    least = raised.value.least_budget()
    assert HALF // 2 < least < HALF * 0.7
    found = memplan.jit(chain, hbm=least).lower(*args).compile()
    assert int(found.device_bytes * 0.6) <= least


def test_rounds_that_never_end_within_the_budget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budgeted, "_FINER_OPTIONS", {})
    reported = itertools.chain([HALF + 30, HALF + 20], itertools.repeat(HALF + 10))
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: next(reported))
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    error = raised.value
    assert (error.budget, error.least) == (HALF, HALF + 10)
    assert error.instruction
    assert error.largest


def test_the_least_that_is_planned_for_is_looked_for_below_the_planners(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of the ways that it tries it names the least of one."""
    plan = planner.Planner.plan
    failed: list[int] = []

    def fails(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        if budget < HALF:
            failed.append(budget)
            raise no_plan(budget, 3 * HALF)
        return marked(plan(self, budget, options))

    monkeypatch.setattr(planner.Planner, "plan", fails)
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm=HALF // 2).lower(weights(), activations()).compile()
    assert failed
    # Four times halved: 5/2 of HALF lie between the two, of which a sixteenth is left.
    assert HALF <= raised.value.least_budget() <= HALF + 5 * HALF // 32 + 1


def test_no_more_is_asked_for_than_xla_takes_without_a_plan(monkeypatch: pytest.MonkeyPatch):
    def within(self: budgeted.Budgeted, budget: int, options: Any) -> Any:
        raise no_plan(budget, budget + 1)

    monkeypatch.setattr(budgeted.Budgeted, "_compile_within", within)
    args = weights(), activations()
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm=HALF).lower(*args).compile()
    assert raised.value.least_budget() == xla_total(chain, *args)


def test_nor_is_more_named_where_what_is_compiled_for_the_least_takes_more(
    monkeypatch: pytest.MonkeyPatch,
):
    args = weights(), activations()
    takes = xla_total(chain, *args)
    budget = takes - 1000

    def within(self: budgeted.Budgeted, room: int, options: Any) -> Any:
        raise no_plan(room, budget + 500 if room == budget else 2 * takes)

    monkeypatch.setattr(budgeted.Budgeted, "_compile_within", within)
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm=budget).lower(*args).compile()
    assert raised.value.least == takes


def test_the_least_is_that_of_whatever_could_stay(monkeypatch: pytest.MonkeyPatch):
    """With less room other arguments are to stay, and what then fails may need more."""
    monkeypatch.setattr(budgeted, "_FINER_OPTIONS", {})
    plan = planner.Planner.plan
    asked: list[int] = []

    def fails(self: planner.Planner, budget: int, options: Any, **_: Any) -> Candidate:
        asked.append(budget)
        if len(asked) in (2, 3):
            raise no_plan(budget, HALF + (0 if len(asked) == 2 else 5000))
        return marked(plan(self, budget, options))

    monkeypatch.setattr(planner.Planner, "plan", fails)
    reported = itertools.chain([HALF + 1000], itertools.repeat(HALF + 11_000))
    monkeypatch.setattr(budgeted, "device_bytes", lambda *_: next(reported))
    with pytest.raises(MemoryBudgetError) as raised:
        memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    assert len(asked) == 3
    assert raised.value.least == HALF + asked[0] - asked[2]


class Scripted:
    """A planner that knows the chip. Of each kind it has one plan, of 100 bytes."""

    knows_chip = True

    def __init__(
        self, steps: dict[bool, float], drawn: dict[bool, int], hidden: bool = False
    ) -> None:
        self.asked: list[bool] = []
        self._steps, self._drawn, self._hidden = steps, drawn, hidden

    def plan(self, budget: int, _: Any, *, counts_chip: bool = False, near: Any = None) -> Any:
        self.asked.append(counts_chip)
        step = self._steps[counts_chip]
        return SimpleNamespace(
            plan=SimpleNamespace(fingerprint=f"{counts_chip} {budget}"),
            counts_chip=counts_chip,
            predicted_bytes=100,
            step_time_s=step,
            cost_s=step,
            waits_s=step,
            is_hidden=self._hidden,
            is_faster_than=lambda other: step < 0.99 * other.step_time_s,
        )

    def drawn_bytes(self, candidate: Any, _: Any) -> tuple[int, ...]:
        return (self._drawn[candidate.counts_chip],)


def scripted(planned: Scripted) -> Any:
    return rounds.Rounds(planned, 100, {}, lambda: None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("drawn", "asked"), [(100, [False]), (101, [False, True])])
def test_what_takes_no_longer_and_fits_is_not_held_against_another(drawn: int, asked: list[bool]):
    planned = Scripted({False: 1.0, True: 1.0}, {False: drawn, True: 101}, hidden=True)
    assert not scripted(planned).first()[0].counts_chip
    assert planned.asked == asked


@pytest.mark.parametrize("fastest", [False, True])
def test_of_those_that_fit_the_fastest_is_first(fastest: bool):
    steps = {fastest: 1.0, not fastest: 1.02}
    planned = Scripted(steps, {False: 100, True: 100})
    assert scripted(planned).first()[0].counts_chip == fastest


def test_of_those_that_were_drawn_the_fastest_that_fits_is_next():
    planned = Scripted({False: 1.0, True: 2.0}, {False: 120, True: 100})
    tried = scripted(planned)
    plans = iter(tried)
    tried.seen.append(rounds.Seen(next(plans), 101, 0))
    planned._drawn[False] = 100
    slower, faster = (planned.plan(50, {}, counts_chip=kind) for kind in (True, False))
    assert tried._fits(slower, 1.0)
    assert tried._fits(faster, 1.0)
    assert next(plans) is faster


def test_what_was_made_for_another_module_is_not_handed_out_again():
    """Nothing was seen of a plan: XLA had scheduled another module."""
    planned = Scripted({False: 1.0, True: 2.0}, {False: 100, True: 100})
    tried = scripted(planned)
    plans = iter(tried)
    tried.seen.append(rounds.Seen(next(plans), 100, 0))
    first, again = next(plans), next(plans)
    assert again is not first
    assert again.plan.fingerprint == first.plan.fingerprint


def test_a_report_is_aimed_at_by_those_of_plans_of_the_kind():
    planned = Scripted({False: 1.0, True: 1.0}, {})
    of = {kind: planned.plan(0, {}, counts_chip=kind) for kind in (False, True)}
    seen = [rounds.Seen(of[False], 200, 0), rounds.Seen(of[True], 120, 0)]
    assert rounds.aimed_at(1000, seen, counts_chip=True) == 975 + 100 - 120
    assert rounds.aimed_at(1000, seen, counts_chip=False) == 975 + 100 - 200
    assert rounds.aimed_at(1000, [], counts_chip=True) == 975


def kept_of(name: str, total: int, moves: bool = False) -> budgeted._Kept:
    """An executable of a program in chunks: a plan that waits, and more than the chip beside it."""
    memory = SimpleNamespace(temp_size_in_bytes=1 << 40)
    executable: Any = SimpleNamespace(name=name, memory_analysis=lambda: memory)
    candidate: Any = SimpleNamespace(
        name=name,
        placing=SimpleNamespace(splits=("chunks",)),
        plan=SimpleNamespace(budget_bytes=HALF, prediction=SimpleNamespace(slowdown=2.0)),
        has_edits=moves,
        predicted_bytes=total,
    )
    return budgeted._Kept(executable, candidate, total, (), {})


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("way", "tried", "seconds", "is_kept"),
    [
        # By executable: bytes, and seconds of a step; what is there takes HALF, and 1 s.
        ("larger", [HALF], [0.9], "0"),
        ("larger", [HALF], [1.1], "kept"),
        ("larger", [HALF + 1, HALF], [0.5, 0.9], "1"),
        ("finer", [HALF], [0.9], "0"),
        ("finer", [HALF, HALF], [0.9, 0.8], "1"),
        ("finer", [HALF, HALF], [0.99, 0.9], "1"),
        ("finer", [HALF, HALF], [1.1, 1.2], "kept"),
        ("finer", [HALF + 1, HALF], [0.5, 0.9], "1"),
    ],
)
def test_other_chunks_are_kept_where_their_executable_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    tried: list[int],
    seconds: list[float],
    is_kept: str,
):
    lowered = memplan.jit(chain, hbm=HALF, machine="v5e").lower(weights(), activations())
    of, kept = lowered._budgeted, kept_of("kept", HALF)
    takes = {"kept": 1.0} | dict(zip(map(str, range(9)), seconds, strict=False))
    found = (kept_of(str(n), total) for n, total in enumerate(tried))

    def beside(*_: Any) -> budgeted._Tried | None:
        other = next(found, None)
        if other is None:
            return None
        assert other.candidate is not None
        return budgeted._Tried(other.candidate, other.executable, other.total, None, None)

    monkeypatch.setattr(of, "_try_beside", beside)
    monkeypatch.setattr(of, "_seconds", lambda kept: takes[kept.executable.name])
    after: Any = getattr(of, f"_with_{way}_chunks")(kept, HALF)
    assert after.executable.name == is_kept


@pytest.mark.tpu
def test_finer_chunks_of_what_is_too_large_are_taken_while_they_take_less(
    monkeypatch: pytest.MonkeyPatch,
):
    lowered = memplan.jit(chain, hbm=HALF, machine="v5e").lower(weights(), activations())
    others = kept_of("0", HALF + 1, moves=True), kept_of("1", HALF + 3)
    of, found = lowered._budgeted, iter(others)

    def beside(*_: Any) -> Any:
        other: Any = next(found)
        return budgeted._Tried(other.candidate, other.executable, other.total, None, None)

    monkeypatch.setattr(of, "_try_beside", beside)
    monkeypatch.setattr(of, "_seconds", lambda _: 1.0)
    after: Any = of._with_finer_chunks(kept_of("kept", HALF + 2), HALF)
    assert (after.executable.name, after.total) == ("0", HALF + 1)
