"""The checker of clusters: what is right it accepts, what is wrong it refuses and says why."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from experiments.cluster_mutants import KINDS, judged, plans
from experiments.cluster_replay import first_fault
from hlo_passes.cluster.check import check
from hlo_passes.cluster.plan import ClusterPlan
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
