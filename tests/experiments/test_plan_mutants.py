"""The replay on bytes sees what is wrong with a plan, and mutants that the checker accepts it does
not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from experiments import plan_mutants
from experiments.plan_mutants import Planned, judged
from experiments.plan_replay import first_fault
from hlo_passes import pipeline
from hlo_passes.errors import VerificationError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.memory.usage import memory_usage
from hlo_passes.plan import Plan
from hlo_passes.verify import verify_plan
from tests import corpus
from tests.hlo_passes.streamed import (
    SIZE,
    STEPS,
    Streamed,
    entry,
    slot_of,
    streamed_plan,
    with_slot,
    with_transfer,
)
from tests.hlo_passes.toys import toy_machine

BRANCH = """
%NAME {
  %s = (f32[64]{0}) parameter(0)
  %g = f32[64]{0} get-tuple-element(%s), index=0
  %n = f32[64]{0} reverse(%g), dimensions={0}
  %m = f32[64]{0} reverse(%n), dimensions={0}
  ROOT %o = (f32[64]{0}) tuple(%m)
}""".strip()

PLANS = ("mlp_offloaded.v5e", "mlp_grad.h200", "conditional.cpu", "residuals_offloaded.v5e")


def planned(name: str, share: float) -> Planned:
    module, machine = corpus.read(name), load_machine(name.rpartition(".")[2])
    total = memory_usage(module, machine.platform).total_bytes
    budget = max(int(share * total), total - pipeline.room_within(module, machine, total).bytes)
    plan = pipeline.plan_module(module, machine, budget)
    return plan_mutants.planned(name, module, machine, plan)


def fault(plan: Plan) -> str:
    return first_fault(Streamed(STEPS).module(), plan)


def test_a_right_plan_has_no_fault():
    assert not fault(streamed_plan())


@pytest.mark.parametrize("n", range(len(streamed_plan().fences)))
def test_every_fence_is_missed(n: int):
    plan = streamed_plan()
    fences = plan.fences[:n] + plan.fences[n + 1 :]
    gone = plan.fences[n]
    expected = "which is not there" if gone.reason == "reuse" else "reads w"
    assert expected in fault(replace(plan, fences=fences))


def test_bytes_that_are_given_twice_are_missed():
    plan = streamed_plan()
    a, b = slot_of(plan, "w0#0"), slot_of(plan, "w1#1")
    for offset in (b.offset, b.offset - SIZE // 2):
        there = with_slot(plan, a, replace(a, offset=offset))
        assert "something is written where w0 is coming" in fault(there)


def test_a_small_allocation_is_written_past():
    plan = streamed_plan()
    arena, *others = plan.allocations
    small = replace(plan, allocations=(replace(arena, size=arena.size - 1), *others))
    assert f"of arena are written, it has {arena.size - 1}" in fault(small)


def test_a_short_transfer_leaves_the_rest_unwritten():
    plan = streamed_plan()
    assert "reads w0#0" in fault(with_transfer(plan, replace(plan.transfers[0], size=SIZE - 1)))


def test_what_comes_late_is_missed():
    plan = streamed_plan()
    late = with_transfer(plan, replace(plan.transfers[1], done=2, end=3))
    assert "w1 is read at tick 1, and nothing brings it" in fault(late)


def test_what_is_brought_from_elsewhere_is_missed():
    plan = streamed_plan()
    t = plan.transfers[0]
    assert "is in host, not in cxl" in fault(with_transfer(plan, replace(t, source="cxl")))
    assert "is brought to cxl" in fault(with_transfer(plan, replace(t, destination="cxl")))


def test_a_fence_that_waits_for_itself_is_seen():
    plan = streamed_plan()
    data = next(f for f in plan.fences if f.reason == "data")
    backwards = replace(data, before=data.after, after=data.before)
    assert "waits for itself" in fault(replace(plan, fences=(*plan.fences, backwards)))


def test_copies_in_host_memory_have_bytes_of_their_own():
    program = planned("mlp_grad.h200", 0.0)
    plan = program.plan
    assert not first_fault(program.edited, plan)
    away = [s for s in plan.slots if s.allocation == "host_temp"]
    a, b = next((a, b) for a in away for b in away if a.offset + a.size == b.offset)
    assert a.live_range.overlaps(b.live_range)
    moved = with_slot(plan, a, replace(a, offset=a.offset + a.size // 2))
    assert f"where {a.buffer.partition('#')[0]} is coming" in first_fault(program.edited, moved)


def test_what_dies_elsewhere_is_no_workspace():
    """Of the conditional's operands only the predicate dies there."""
    module = entry(
        """
        %x = f32[64]{0} parameter(0)
        %p = pred[] parameter(1)
        %q = pred[] not(%p)
        %t = (f32[64]{0}) tuple(%x)
        %c = (f32[64]{0}) conditional(%q, %t, %t), true_computation=%one, false_computation=%two
        ROOT %r = f32[64]{0} get-tuple-element(%c), index=0
        """,
        *(BRANCH.replace("NAME", name) for name in ("one", "two")),
    )
    machine = toy_machine(platform="gpu")
    plan = pipeline.plan_module(module, machine, 10**5)
    assert not first_fault(module, plan)
    (workspace,) = (s for s in plan.slots if s.buffer == "c")
    small = with_slot(plan, workspace, replace(workspace, size=workspace.size - 1))
    assert "what c runs needs" in first_fault(module, small)
    with pytest.raises(VerificationError, match="what %c runs needs 256 bytes at tick 2"):
        verify_plan(module, small, machine)


@pytest.mark.parametrize("name", PLANS)
def test_what_the_checker_accepts_has_no_fault(name: str):
    found = [*judged(planned(name, 0.75), 60, random.Random(name))]
    outcomes = [outcome for _, outcome, _ in found]
    assert outcomes.count("rejected") > 25
    assert not [what for _, outcome, what in found if outcome == "told apart"]


def test_a_checker_that_accepts_everything_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_mutants, "verify_plan", lambda *_: None)
    monkeypatch.setattr(pipeline, "rewrite_module", lambda *_: None)
    program = planned("mlp_offloaded.v5e", 0.75)
    found = [*judged(program, 60, random.Random(0))]
    assert [outcome for _, outcome, _ in found].count("told apart") > 20
