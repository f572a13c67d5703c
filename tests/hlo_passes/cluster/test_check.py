"""The checker of clusters: what is right it accepts, what is wrong it refuses and says why."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.cluster_mutants import KINDS, judged, plans
from experiments.cluster_replay import first_fault
from experiments.cluster_works import two_slices
from hlo_passes.chains.chain import SpaceKind
from hlo_passes.cluster.check import check
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.search import plan_cluster
from hlo_passes.cluster.work import Flow, Program, State, Work
from hlo_passes.errors import ClusterCheckError, ClusterFileError

PLANS = plans()


@pytest.mark.parametrize("name", [*PLANS])
def test_what_was_planned_is_right(name: str):
    check(PLANS[name])
    assert first_fault(PLANS[name], random.Random(0)) == ""


@pytest.mark.parametrize("name", [*PLANS])
def test_a_plan_is_written_and_read(name: str):
    plan = PLANS[name]
    assert ClusterPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_what_is_no_plan_is_refused(tmp_path):
    data = PLANS["training"].to_dict()
    for change, message in (
        ({"version": 9}, "version: expected 1, found 9"),
        ({"clock": [[0, 1, [], 0]]}, "spans, one a copy or execution, found 1"),
        ({"clock": [[2, 1, [], 0]]}, "clock: expected a list of"),
        ({"chain": ["chain 1", "nonsense"]}, "chain: expected a descriptor chain"),
        ({"extra": 1}, "extra: expected no such key"),
    ):
        with pytest.raises(ClusterFileError, match=message):
            ClusterPlan.from_dict({**data, **change})
    with pytest.raises(ClusterFileError, match="a readable file"):
        ClusterPlan.load(tmp_path / "absent")


@pytest.mark.parametrize("name", [*PLANS])
def test_no_mutant_is_missed(name: str):
    outcomes = Counter[str]()
    for kind, outcome, why in judged(PLANS[name], 120, random.Random(1)):
        assert outcome != "missed", f"{kind}: {why}"
        outcomes[outcome] += 1
    assert outcomes["rejected"] > 80


def test_every_kind_of_mutant_is_rejected_for_its_own_reason():
    reasons = {
        "a fence dropped": "after|begins at",
        "never happens": "never runs|reads|out of order|left",
        "takes less time": "takes less|moves .* in",
        "a wire used twice at once": "are taken of|begins at|waits",
        "a wrong route": "where no wire|comes to|are taken of|moves",
        "another rate": "moves|are taken of",
        "less memory than taken": "are taken",
        "two runs swapped": "which belongs on|out of order|reads|after|written",
    }
    for kind, reason in reasons.items():
        found = [
            why
            for plan in PLANS.values()
            for _, outcome, why in judged(plan, 4, random.Random(2), [kind])
            if outcome == "rejected"
        ]
        assert found, kind
        for why in found:
            assert re.search(reason, why), (kind, why)
    assert reasons.keys() <= KINDS.keys()


def test_a_release_too_early_is_seen():
    plan = PLANS["training"]
    rejected = [
        why
        for kind, outcome, why in judged(plan, 40, random.Random(3), ["two releases swapped"])
        if outcome == "rejected"
    ]
    assert any("left" in why for why in rejected)


def test_the_clock_has_as_many_spans_as_there_is_to_do():
    plan = PLANS["training"]
    with pytest.raises(ClusterCheckError, match="not one span for each"):
        check(replace(plan, clock=plan.clock[:-1]))


def test_a_clock_of_a_file_has_numbers_of_its_kind():
    for span in ([0, 1, [], True], [False, 1, [], 0], [0, 1, ["x"], -1], [0, 1.0, [], 0]):
        with pytest.raises(ClusterFileError, match="clock: expected a list of"):
            ClusterPlan.from_dict({**PLANS["training"].to_dict(), "clock": [span]})


def test_bytes_do_not_move_backwards():
    plan = PLANS["training"]
    k = next(k for k, span in enumerate(plan.clock) if span.wires)
    span = plan.clock[k]._replace(bytes_per_s=-plan.clock[k].bytes_per_s)
    with pytest.raises(ClusterCheckError, match="bytes a second"):
        check(replace(plan, clock=(*plan.clock[:k], span, *plan.clock[k + 1 :])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda work: replace(work, programs=()), "at least one"),
        (lambda work: replace(work, programs=work.programs * 2), "each once|names that differ"),
        (lambda work: replace(work, states=work.states[1:]), "expected a state of a0"),
        (lambda work: replace(work, flows=(Flow("f", "x", "y", 8),)), "no program 'x'"),
        (
            lambda work: replace(
                work, programs=(replace(work.programs[0], segments=(-1.0,)), *work.programs[1:])
            ),
            "segments: expected",
        ),
        (
            lambda work: replace(
                work, programs=(replace(work.programs[0], segments=(math.nan,)), *work.programs[1:])
            ),
            "segments: expected",
        ),
        (
            lambda work: replace(
                work, programs=(replace(work.programs[0], runs=True), *work.programs[1:])
            ),
            "runs: expected",
        ),
    ],
)
def test_work_that_is_none_has_no_right_plan(change: Callable[[Work], Work], message: str):
    plan = PLANS["training"]
    with pytest.raises(ClusterCheckError, match=message):
        check(replace(plan, work=change(plan.work)))


def test_a_flow_has_no_more_slots_than_it_may():
    plan = PLANS["training"]
    held = sum(slot.name.startswith("saved0[") for slot in plan.chain.slots)
    assert held > 1
    for count in (held, held - 1):
        flows = tuple(
            replace(f, in_flight=count) if f.name == "saved0" else f for f in plan.work.flows
        )
        changed = replace(plan, work=replace(plan.work, flows=flows))
        if count == held:
            check(changed)
        else:
            with pytest.raises(ClusterCheckError, match=f"'saved0' is in {held} slots of a0.hbm"):
                check(changed)


def test_what_is_bound_lies_under_its_own_name():
    plan = PLANS["training"]
    swapped = {"x#0": "x#1", "x#1": "x#0"}
    spaces = tuple(replace(s, name=swapped.get(s.name, s.name)) for s in plan.chain.spaces)
    with pytest.raises(ClusterCheckError, match="'x#0' is not all of 'x#1', which is bound"):
        check(replace(plan, chain=replace(plan.chain, spaces=spaces)))


def test_a_plan_opens_no_files():
    plan = PLANS["training"]
    spaces = tuple(
        replace(s, kind=SpaceKind.FILE, path="/etc/hostname") if s.name == "w0" else s
        for s in plan.chain.spaces
    )
    with pytest.raises(ClusterCheckError, match="'w0' is a file"):
        check(replace(plan, chain=replace(plan.chain, spaces=spaces)))


def test_a_state_is_read_at_its_turn():
    """One program reads what another writes; their runs change places, and nothing else."""
    programs = (
        Program("reads", "a0", (1e-3,), reads=("s",)),
        Program("writes", "a0", (1e-3,), writes=("s",)),
    )
    plan = plan_cluster(two_slices(), Work(programs, (), (State("s", "a0", 8),)))
    other = replace(plan, work=replace(plan.work, programs=programs[::-1]))
    check(plan)
    assert first_fault(plan, random.Random(0)) == ""
    assert "reads ['s@0']" in first_fault(other, random.Random(0))
    with pytest.raises(ClusterCheckError, match="reads s, and should read s#writes#0"):
        check(other)
