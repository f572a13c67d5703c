"""The usual way to run a pipeline, by hand, and beside plans."""

from __future__ import annotations

import pytest

from experiments.cluster_fifo import fifo
from experiments.cluster_works import MIB, served, training, two_slices
from experiments.clusters import _bound_s
from hlo_passes.cluster.presets import tpu_slice
from hlo_passes.cluster.search import orders_of, plan_cluster
from hlo_passes.cluster.work import Flow, Program, Task, Work

LINK = 45_000_000
"""Bytes that a link between two chips carries in a millisecond."""


def test_transfers_are_served_in_the_order_of_their_issue():
    """Two flows of one run, the second of which is read first: it waits all the same."""
    slices = tpu_slice("v5e:1x2", "1x2")
    programs = (
        Program("p", "tpu0", (1e-3,)),
        Program("soon", "tpu1", (5e-3,)),
        Program("late", "tpu1", (5e-3,)),
    )
    flows = Flow("a", "p", "late", 4 * LINK), Flow("b", "p", "soon", LINK)
    work = Work(programs, flows)
    delays = {"p": 0, "soon": 0, "late": 1}
    found = fifo(slices, work, orders_of(work, delays))
    assert found is not None
    # 1 ms, both transfers with 2 µs each, then both runs.
    assert found.step_time_s == pytest.approx(16.004e-3)
    assert found.held["tpu1.hbm"] == 5 * LINK
    planned = plan_cluster(slices, work)
    assert planned.step_time_s == pytest.approx(12.002e-3)


def test_what_waits_for_good_has_no_step():
    slices = tpu_slice("v5e:1x2", "1x2")
    programs = Program("p", "tpu0", (1e-3,)), Program("q", "tpu0", (1e-3,))
    work = Work(programs, (Flow("f", "p", "q", MIB),))
    p, q = Task("p", 0), Task("q", 0)
    assert fifo(slices, work, {"tpu0": [q, p]}) is None
    assert fifo(slices, work, {"tpu0": [p, q]}) is not None


@pytest.mark.parametrize("activation", [MIB, 32 * MIB])
def test_a_plan_is_between_the_bound_and_the_usual_way(activation: int):
    slices = two_slices()
    work = training(slices, 8, activation=activation)
    stages = len(slices.chips)
    delays = {p.name: stages - int(p.name[1:]) if p.name[0] == "b" else 0 for p in work.programs}
    usual = fifo(slices, work, orders_of(work, delays))
    assert usual is not None
    plan = plan_cluster(slices, work)
    inner = tuple(flow for flow in work.flows if flow.source and flow.destination)
    bound_s = _bound_s(slices, Work(work.programs, inner))
    assert bound_s <= plan.step_time_s <= usual.step_time_s


def test_programs_with_traffic_of_their_own_run_in_the_usual_way():
    slices = two_slices()
    work = served(slices)
    usual = fifo(slices, work, orders_of(work, dict.fromkeys(("prefill", "decode"), 0)))
    assert usual is not None
    least = sum(p.runs * sum(p.segments) for p in work.programs if p.name == "decode")
    assert usual.step_time_s > least
