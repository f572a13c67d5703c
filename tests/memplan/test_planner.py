"""Which of several plans for a program is taken."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan.api as memplan
import memplan.known as known
import memplan.planner as planner
import memplan.written as written
from hlo_passes import pipeline
from hlo_passes.errors import MemoryBudgetError, VerificationError
from memplan.candidates import Candidate, FinerChunks
from memplan.streams.hosting import Hosting
from tests.hlo_passes.toys import module_of
from tests.memplan.chains import HALF, LAYERS, activations, chain, weights


class Seen:
    """A candidate that takes so many seconds of a step, and of compute."""

    def __init__(self, depth: int, step_time_s: float, compute_s: float) -> None:
        self.hosting = SimpleNamespace(depth=depth, lagging=frozenset())
        self.step_time_s, self.compute_s = step_time_s, compute_s
        self.has_edits, self.charged_s = True, 0.0
        takes = {"step_time_s": step_time_s, "compute_s": compute_s, "recompute_s": 0.0}
        prediction = SimpleNamespace(**takes, joules=None)
        self.plan = SimpleNamespace(prediction=prediction, moved_bytes=0)

    def priced(self, prices: Any) -> Seen:
        return self

    cost_s = Candidate.cost_s
    waits_s = Candidate.waits_s
    is_faster_than = Candidate.is_faster_than
    is_hidden = Candidate.is_hidden
    is_slow = Candidate.is_slow


def chosen(monkeypatch: pytest.MonkeyPatch, seen: dict[tuple[int, float], Any]) -> Any:
    """The plan that is taken, where these, or errors, come of the rings."""

    def plan(_self: Any, everything: Any, *_: Any) -> Any:
        found = seen[everything.depth, everything.share]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(written.Written, "promise", lambda *_: None)
    monkeypatch.setattr(written.Written, "_with_stacks", plan)
    rings = [written._Ring(*ring) for ring in seen]
    monkeypatch.setattr(written.Written, "_rings", lambda *_: rings)
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    return lowered._budgeted.planner.plan(HALF, None)


def test_the_ring_that_waits_least_is_taken_whatever_its_kernels_are_said_to_take(monkeypatch):
    """XLA has said of the second ring's kernels that they take longer than a roofline has them."""
    fast, hides = Seen(2, 0.887, 0.791), Seen(2, 0.990, 0.972)
    assert chosen(monkeypatch, {(2, 1.0): fast, (2, 0.25): hides}) is hides


def test_of_rings_with_equal_compute_the_faster_is_taken(monkeypatch):
    slow, fast, same = Seen(2, 0.9, 0.7), Seen(1, 0.8, 0.7), Seen(2, 0.795, 0.7)
    assert chosen(monkeypatch, {(2, 1.0): slow, (1, 1.0): fast, (2, 0.25): same}) is fast


def test_where_xla_does_not_show_what_chunks_are_compared_with_there_are_none(monkeypatch, caplog):
    def fails(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: no schedule")

    monkeypatch.setattr(planner.Planner, "_may_be_live", fails)
    assert chosen(monkeypatch, {(2, 1.0): (slow := Seen(2, 0.9, 0.7))}) is slow
    assert "chunks were dropped: INTERNAL: no schedule" in caplog.text


def chunks_tried(series: Sequence[tuple[int, Any]], without: float = math.inf) -> int:
    """Of programs with ever smaller chunks, by aim and what came of each, how many are looked at.
    What came of it is a plan, or the bytes that were needed, where those are so many without."""
    finer = FinerChunks(without=without)
    for n, (aim, found) in enumerate(series):
        came = (None, found) if isinstance(found, int) else (found, float("inf"))
        if finer.is_over(aim, *came):
            return n + 1
    return len(series)


def test_smaller_chunks_are_looked_at_while_they_need_less_or_are_faster():
    plain, faster, slower = (Seen(2, s, 0.7) for s in (0.9, 0.8, 1.0))
    for seen in (plain, faster, slower):
        seen.has_edits = False
    assert chunks_tried([(64, plain), (32, faster), (16, slower), (8, slower)]) == 3
    # While something is moved, fewer bytes may be what helps; but not for ever.
    faster.has_edits = True
    assert chunks_tried([(64, faster), (32, slower), (16, slower), (8, slower), (4, slower)]) == 4
    # Half as large an aim, and nothing less is needed.
    assert chunks_tried([(64, 100), (32, 90), (24, 95), (16, 95), (12, 95), (8, 95)]) == 5
    assert chunks_tried([(64, 100), (32, 90), (24, 95), (16, 80), (12, 95), (8, 95)]) == 6
    # Chunks need no less than the program has without them.
    assert chunks_tried([(64, 100), (48, 99), (36, 98), (30, 97)], without=97) == 3
    assert chunks_tried([(64, 100), (48, 99), (36, 96), (30, 97)], without=97) == 4


REFUSALS = [
    VerificationError("loop ring_3", "slot 1 is written while layer 2 reads it"),
    jax.errors.JaxRuntimeError("INTERNAL: no such slice"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_ring_that_is_refused_is_dropped_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: Exception
):
    other = Seen(1, 0.9, 0.7)
    assert chosen(monkeypatch, {(2, 1.0): refusal, (1, 1.0): other}) is other
    (record,) = caplog.records
    assert record.name == "memplan"
    assert record.getMessage() == f"a plan was dropped: {refusal}"


def test_where_all_are_refused_the_first_error_is_raised(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(VerificationError) as raised:
        chosen(monkeypatch, dict(zip([(2, 1.0), (1, 1.0)], REFUSALS, strict=True)))
    assert raised.value is REFUSALS[0]


def test_a_plan_is_made_once_for_a_budget_while_nothing_is_learnt(monkeypatch: pytest.MonkeyPatch):
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    of, made = lowered._budgeted.planner, list[int]()
    plan_with = written.Written.plan_with

    def counted(self: Any, hosting: Any, budget: int, options: Any) -> Candidate:
        made.append(budget)
        return plan_with(self, hosting, budget, options)

    monkeypatch.setattr(written.Written, "plan_with", counted)
    first, once = of.plan(HALF, None), len(made)
    assert once
    assert of.plan(HALF, None).plan == first.plan
    assert len(made) == once
    of._known.seen += 1
    of.plan(HALF, None)
    assert len(made) == 2 * once
    of.plan(HALF + 1, None)
    assert len(made) > 2 * once
    of.plan(HALF, None)
    assert made[-1] == HALF


def test_what_a_program_with_rings_needs_at_least_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch,
):
    def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    asked = list[int]()
    room_within = pipeline.room_within

    def counted(module: Any, machine: Any, budget: int, **more: Any) -> pipeline.Room:
        asked.append(budget)
        return room_within(module, machine, budget, **more)

    monkeypatch.setattr(pipeline, "room_within", counted)
    lowered = memplan.jit(scanned, hbm=HALF).lower(jnp.stack(weights()), activations())
    of = lowered._budgeted.planner
    plan, once = of.plan(HALF, None).plan, len(asked)
    assert once
    of._known.seen += 1
    assert of.plan(HALF, None).plan == plan
    of.plan(HALF + 4096, None)
    assert len(asked) == once
    with pytest.raises(MemoryBudgetError):  # Which says what needs so much.
        of.plan(4096, None)
    assert len(asked) > once


@pytest.mark.parametrize("refused", [False, True])
def test_near_a_plan_only_programs_like_its_own_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, refused: bool
):
    """All are, where none of those will do."""
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    of = lowered._budgeted.planner
    near = of.plan(HALF, None)
    placings = [lowered.placing, *(copy.copy(lowered.placing) for _ in range(4))]
    programs = [written.Written(placing, of._known) for placing in placings]
    monkeypatch.setattr(of, "_recomputing", tuple(placings[1:]))
    monkeypatch.setattr(of, "_of", lambda placing: programs[placings.index(placing)])
    tried: list[list[int]] = []

    def best(_self: Any, _: Any, ways: Iterable[written.Written], *__: Any) -> Candidate:
        tried.append([programs.index(way) for way in ways])
        if refused and len(tried) == 1:
            raise refusal(HALF)
        return near

    monkeypatch.setattr(planner.Planner, "_best", best)
    monkeypatch.setattr(planner.Planner, "_ways", lambda *_: iter(programs))
    everything = [[0, 1, 2, 3, 4]] * refused
    for n, beside in enumerate([[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4]]):
        of.plan(HALF, None, near=replace(near, placing=placings[n]))
        assert tried == [beside, *everything]
        tried.clear()


def test_slots_are_tried_for_the_fastest_program_only(monkeypatch: pytest.MonkeyPatch):
    """One that computes again what scans leave is faster; of the other one ring was looked at."""
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    of = lowered._budgeted.planner
    first, again = of._as_written, written.Written(lowered.placing, of._known)
    seen = {first: Seen(2, 0.9, 0.7), again: Seen(2, 0.8, 0.7)}
    looked: list[Any] = []

    def plan(self: Any, everything: Any, *_: Any) -> Any:
        looked.append((self, everything.depth, everything.share))
        return seen[self]

    monkeypatch.setattr(written.Written, "promise", lambda *_: None)
    monkeypatch.setattr(written.Written, "_with_stacks", plan)
    ways = [written._Ring(*ring) for ring in ((2, 1.0), (1, 1.0), (2, 0.25))]
    monkeypatch.setattr(written.Written, "_rings", lambda *_: ways)
    monkeypatch.setattr(written.Written, "unplanned", lambda *_: written.Unplanned(1.0, 0))
    monkeypatch.setattr(planner.Planner, "_ways", lambda *_: (first, again))
    assert of.plan(HALF, None) is seen[again]
    assert looked == [(first, 2, 1.0), (again, 2, 1.0), (again, 1, 1.0), (again, 2, 0.25)]


def refusal(budget: int, more: int = 1) -> MemoryBudgetError:
    return MemoryBudgetError(
        budget=budget,
        least=budget + more,
        instruction="dot",
        op_name="dot",
        source_line="",
        largest=(),
        fixed=0,
    )


def test_no_ring_is_tried_with_more_layers_than_one_that_was_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    tried: list[Any] = []

    def plan(_self: Any, everything: Any, *_: Any) -> Any:
        tried.append((everything.depth, everything.share))
        raise refusal(HALF)

    monkeypatch.setattr(written.Written, "promise", lambda *_: None)
    monkeypatch.setattr(written.Written, "_with_stacks", plan)
    rings = [written._Ring(*ring) for ring in ((2, 1.0), (1, 1.0), (2, 0.25), (3, 1.0))]
    monkeypatch.setattr(written.Written, "_rings", lambda *_: rings)
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    with pytest.raises(MemoryBudgetError):
        lowered._budgeted.planner.plan(HALF, None)
    assert tried == [(2, 1.0), (1, 1.0)]


@pytest.mark.parametrize(
    ("paths", "is_refused", "planned"),
    [
        ([(4,)], False, [[(4,)]]),
        ([(4,)], True, [[(4,)], []]),
        ([], False, [[]]),
    ],
)
def test_what_layers_make_is_stored_early_where_to_hold_it_is_too_much(
    monkeypatch: pytest.MonkeyPatch, paths: list[Any], is_refused: bool, planned: list[Any]
):
    tried: list[Any] = []

    def plan(_self: Any, everything: Any, *_: Any) -> Any:
        tried.append(sorted(everything.lagging))
        if is_refused and everything.lagging:
            raise refusal(HALF)
        found = Seen(everything.depth, 2.0, 1.0)
        found.hosting = everything
        return found

    def late(_self: Any, everything: Any, *_: Any) -> Any:
        return dataclasses.replace(everything, lagging=frozenset(paths))

    rings = written._Ring(1, 1.0, lags=True), written._Ring(1, 1.0)
    monkeypatch.setattr(written.Written, "promise", lambda *_: None)
    monkeypatch.setattr(written.Written, "_rings", lambda *_: rings)
    monkeypatch.setattr(written.Written, "_with_stacks", plan)
    monkeypatch.setattr(written.Written, "_storing_late", late)
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    lowered._budgeted.planner.plan(HALF, None)
    assert tried == planned


@pytest.mark.parametrize(("more", "rings"), [(HALF, 2), (2 * HALF, 0)])
def test_rings_are_not_tried_where_not_even_the_host_has_room_enough(
    monkeypatch: pytest.MonkeyPatch, more: int, rings: int
):
    """Without rings all stacks are on the device; what is needed beyond these is not theirs."""
    tried: list[Any] = []

    def refuse(_self: Any, everything: Any, *_: Any) -> Any:
        tried.append((everything.depth, everything.share))
        raise refusal(HALF, more)

    monkeypatch.setattr(written.Written, "promise", lambda *_: None)
    for way in ("_plan_placed", "_with_stacks"):
        monkeypatch.setattr(written.Written, way, refuse)
    ways = None, written._Ring(2, 1.0), written._Ring(1, 1.0)
    monkeypatch.setattr(written.Written, "_rings", lambda *_: ways)
    lowered = memplan.jit(chain, hbm=HALF).lower(weights(), activations())
    with pytest.raises(MemoryBudgetError):
        lowered._budgeted.planner.plan(HALF, None)
    assert len(tried) == 1 + rings


def looked_at(
    monkeypatch: pytest.MonkeyPatch,
    stays: dict[int, int],
    seconds: dict[int, float],
    others: Sequence[tuple[int, float]] = (),
    planned: list[int] | None = None,
) -> Candidate:
    """The candidate for `chain` that is taken.

    Args:
      stays: by room, how many arguments are to stay with as much; where none is said, an error.
      others: numbers of arguments that could stay as well, with the seconds expected then.
      seconds: by the number of those that are on the host, of a step with 1 s of compute; else
        there is no plan.
      planned: is told of each plan that is made how many arguments are on the host.
    """

    def stay(_self: Any, hosting: Hosting, room: int, *_: Any) -> Any:
        count = next((n for least, n in stays.items() if room >= least), None)
        if count is None:
            raise refusal(room)
        found = ((count, 1.0), *others)
        return tuple((frozenset(sorted(hosting.arguments)[:n]), s) for n, s in found)

    def plan_with(_self: Any, hosting: Hosting, budget: int, *_: Any) -> Any:
        if planned is not None:
            planned.append(len(hosting.arguments))
        if len(hosting.arguments) not in seconds:
            raise refusal(budget)
        found: Any = Seen(2, seconds[len(hosting.arguments)], 1.0)
        found.hosting = hosting
        return found

    monkeypatch.setattr(written.Written, "_stay", stay)
    monkeypatch.setattr(written.Written, "plan_with", plan_with)
    lowered = memplan.jit(chain, hbm=1 << 20).lower(weights(), activations())
    assert len(lowered.placing.candidates) == LAYERS + 1
    return lowered._budgeted.planner.plan(1 << 20, None)


def test_where_there_is_no_plan_fewer_arguments_stay(monkeypatch: pytest.MonkeyPatch):
    stays = {1_000_000: 4, 500_000: 2}
    assert len(looked_at(monkeypatch, stays, {5: 1.2}).hosting.arguments) == 5


def test_where_nothing_else_is_left_none_stays(monkeypatch: pytest.MonkeyPatch):
    found = looked_at(monkeypatch, {1_000_000: 4}, {LAYERS + 1: 1.2})
    assert len(found.hosting.arguments) == LAYERS + 1


def test_what_fits_with_no_choice_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MemoryBudgetError):
        looked_at(monkeypatch, {}, {LAYERS + 1: 1.2})


def test_a_slow_plan_gives_way_to_one_that_moves_nothing(monkeypatch: pytest.MonkeyPatch):
    stays = {1_000_000: 4}
    assert not looked_at(monkeypatch, stays, {3: 1.6, 0: 1.4}).hosting.arguments
    assert len(looked_at(monkeypatch, stays, {3: 1.6, 0: 1.8}).hosting.arguments) == 3
    assert len(looked_at(monkeypatch, stays, {3: 1.6}).hosting.arguments) == 3


def test_where_a_plan_is_slower_than_expected_another_choice_is_tried(
    monkeypatch: pytest.MonkeyPatch,
):
    def kept(others: Sequence[tuple[int, float]]) -> int:
        found = looked_at(monkeypatch, {1_000_000: 4}, {3: 1.4, 4: 1.2, 5: 1.0}, others)
        return LAYERS + 1 - len(found.hosting.arguments)

    assert kept([(3, 1.1)]) == 3
    assert kept([(3, 1.3)]) == 4  # It promises too little.
    assert kept([(3, 1.1), (2, 1.1)]) == 3  # No better than what was found by then.


@pytest.mark.parametrize("moved", [{3: 1.6, 0: 1.8}, {3: 1.6}])
def test_what_moves_nothing_is_planned_once(
    monkeypatch: pytest.MonkeyPatch, moved: dict[int, float]
):
    """It is one of the choices of what stays, and what a slow plan gives way to."""
    planned: list[int] = []
    looked_at(monkeypatch, {1_000_000: 4}, moved, [(LAYERS + 1, 1.0)], planned)
    assert planned == [3, 0]


def test_a_plan_that_is_not_slow_is_taken(monkeypatch: pytest.MonkeyPatch):
    assert len(looked_at(monkeypatch, {1_000_000: 4}, {3: 1.4, 0: 1.0}).hosting.arguments) == 3


@pytest.mark.tpu
def test_only_what_every_executable_held_on_the_chip_is_left_out(monkeypatch: pytest.MonkeyPatch):
    final = module_of("""HloModule m, is_scheduled=true
ENTRY e {
  x = f32[8] parameter(0)
  ROOT y = f32[8] negate(x)
}""")
    first, second, third = ({(n,)} for n in range(3))
    held = iter([{"a": first | second, "b": first}, {"a": second | third, "c": third}])
    monkeypatch.setattr(planner, "read_module", lambda _: final)
    monkeypatch.setattr(known, "held_on_chip", lambda _: next(held))
    found = memplan.jit(chain, hbm=HALF, machine="v5e").lower(weights(), activations())
    found._budgeted.planner.learn_from(None)
    found._budgeted.planner.learn_from(None)
    of = found._budgeted.planner._known
    assert of.on_chip == {"a": second, "b": first, "c": third}
    assert of.table_bytes == 0
