"""Schedules of loops go through a plan, JSON and back into the module; strangers do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hlo_passes.errors import LoopMismatchError, PlanFormatError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.ir import Learned
from hlo_passes.loops.rewrite import LOOP_TRANSFER_ATTRIBUTE, rewrite_loops
from hlo_passes.loops.schedule import schedule_loops
from hlo_passes.pipeline import plan_module, rewrite_module
from hlo_passes.plan import LoopSchedule, Plan
from hlo_passes.verify import verify_executable
from tests.hlo_passes.rings import SLOT_BYTES, TRIPS, Ring, ring_machine

MACHINE = ring_machine(10.0)
RING = Ring(stores=True, copied=True)
MODULE = RING.module()
LOOPS = schedule_loops(MODULE, MACHINE)


@pytest.mark.parametrize("name", ["v5e", "h200"])
def test_a_plan_of_loops(name: str):
    machine = load_machine(name)
    plan = plan_module(MODULE, machine, 1 << 30)
    assert [loop.computation for loop in plan.loops] == ["body", "main"]
    assert plan.transfers == ()
    assert plan.moved_bytes == (RING.layers + TRIPS * 2) * SLOT_BYTES
    assert plan.prediction.lower_bound_s <= plan.prediction.step_time_s
    assert plan.prediction.link_s > 0
    rewritten = rewrite_module(MODULE, plan, machine)
    assert rewritten.fingerprint == plan.module_fingerprint
    assert verify_executable(plan, rewritten).exactly
    assert Plan.from_json(plan.to_json()) == plan


def test_a_loop_record_of_another_kind():
    plan = plan_module(MODULE, load_machine("v5e"), 1 << 30)
    text = plan.to_json().replace('"executions": 3', '"executions": "often"')
    with pytest.raises(PlanFormatError, match=r"plan\.loops\[0\]\.executions.*'often'"):
        Plan.from_json(text)


def test_what_xla_estimates_goes_with_the_module():
    lent = MODULE.with_learned(Learned({"f0.done": 7}))
    assert rewrite_loops(lent, LOOPS, MACHINE).learned == lent.learned


def test_both_halves_are_tagged():
    rewritten = rewrite_loops(MODULE, LOOPS, MACHINE)
    tags = {
        i.name: i.proto.frontend_attributes.map[LOOP_TRANSFER_ATTRIBUTE]
        for i in rewritten.instructions.values()
        if LOOP_TRANSFER_ATTRIBUTE in i.proto.frontend_attributes.map
    }
    assert tags["f0.start"] == tags["f0.done"]
    assert len(tags) == 2 * sum(len(loop.transfers) for loop in LOOPS)
    assert not any(
        LOOP_TRANSFER_ATTRIBUTE in i.proto.frontend_attributes.map
        for i in MODULE.instructions.values()
    )


def changed(**changes: Any) -> tuple[LoopSchedule, ...]:
    return tuple(replace(loop, **changes) if loop.depth else loop for loop in LOOPS)


@pytest.mark.parametrize(
    ("loops", "sentence"),
    [
        (changed(computation="elsewhere"), "%elsewhere does not fit.*no such one"),
        (changed(dropped_copies=("y0",)), "not all of y0 are copies"),
        (changed(transfers=()), "its transfers are others"),
        (changed(ticks=1), "ticks, expected 1"),
    ],
)
def test_a_schedule_of_another_module(loops: tuple[LoopSchedule, ...], sentence: str):
    with pytest.raises(LoopMismatchError, match=sentence):
        rewrite_loops(MODULE, loops, MACHINE)
