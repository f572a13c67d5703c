"""Windows of a plan, and the chain of one chip."""

from __future__ import annotations

from itertools import pairwise

import pytest

from experiments.cluster_works import chips_of, served, training, two_slices
from hlo_passes.chains.chain import Copy, Execute, SpaceKind
from hlo_passes.chains.check import check as check_chain
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.presets import tpu_slice
from hlo_passes.cluster.projection import chain_of
from hlo_passes.cluster.search import plan_cluster
from hlo_passes.cluster.windows import text, windows
from hlo_passes.cluster.work import Flow, Program, Work
from hlo_passes.errors import ClusterError

SLICES = two_slices()
PLANS = {
    "training": plan_cluster(SLICES, training(SLICES)),
    "serving": plan_cluster(SLICES, served(SLICES)),
}
EACH = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


@EACH
def test_windows_tile_the_step_and_hold_all_of_it(plan: ClusterPlan):
    made = windows(plan)
    assert made[0].begin == 0
    assert all(a.end == b.begin for a, b in pairwise(made))
    assert made[-1].end == round(plan.step_time_s * 1e9)
    computed = sum(of.ns for window in made for of in window.computing)
    assert computed == sum(t.span.end - t.span.begin for t in plan.timed if not t.span.wires)
    moved = sum(of.bytes for window in made for of in window.moving)
    copied = sum(
        t.descriptor.action.bytes for t in plan.timed if isinstance(t.descriptor.action, Copy)
    )
    collected = sum(
        plan.collective_bytes.get(plan.chain.segments[t.descriptor.action.segment].name, 0)
        for t in plan.timed
        if isinstance(t.descriptor.action, Execute)
    )
    assert moved == copied + collected
    waits = sum(len(d.waits) for d in plan.chain.descriptors)
    assert sum(len(window.awaited) for window in made) == waits
    assert all(len(window.computing) <= len(SLICES.chips) for window in made)


def test_windows_as_text():
    slices = tpu_slice("v5e:1x2", "1x2")
    programs = Program("p", "tpu0", (1e-3,), 2), Program("q", "tpu1", (2e-3,), 2)
    plan = plan_cluster(slices, Work(programs, (Flow("f", "p", "q", 45 << 20),)))
    way = "tpu0.hbm->tpu0-ici, tpu0-ici->tpu1-ici, tpu1-ici->tpu1.hbm"
    first, second = (f"f[{n}] at tpu0.hbm -> f[{n}] at tpu1.hbm" for n in range(2))
    assert (
        text(windows(plan))
        == f"""\
window 0, 0.000 to 1.000 ms
  computes  p#0 on tpu0, 1 ms
  awaits    {first}', for p#0
window 1, 1.000 to 2.051 ms
  computes  p#1 on tpu0, 1 ms
  moves     45.0 MiB: {first}, over {way}
  awaits    {second}', for p#1
  awaits    p#0, for {first}
  awaits    q#0', for {first}
window 2, 2.051 to 4.051 ms
  computes  q#0 on tpu1, 2 ms
  moves     45.0 MiB: {second}, over {way}
  awaits    {first}, for q#0
  awaits    p#1, for {second}
  awaits    q#1', for {second}
  releases  f[0] at tpu0.hbm
  releases  f[1] at tpu0.hbm
window 3, 4.051 to 6.051 ms
  computes  q#1 on tpu1, 2 ms
  awaits    {second}, for q#1
  releases  f[0] at tpu1.hbm
  releases  f[1] at tpu1.hbm
"""
    )


@EACH
def test_each_chip_has_a_chain_of_its_own(plan: ClusterPlan):
    for node in chips_of(SLICES)[:2]:
        chain = chain_of(plan, node)
        check_chain(chain)
        names = {
            chain.segments[d.action.segment].name
            for d in chain.descriptors
            if isinstance(d.action, Execute)
        }
        ran = {
            plan.chain.segments[t.descriptor.action.segment].name
            for t in plan.timed
            if isinstance(t.descriptor.action, Execute)
            and plan.chain.streams[t.descriptor.stream].name in (node, f"{node} fabric")
        }
        assert names == ran
        assert {s.tier for s in chain.spaces if s.kind == SpaceKind.ARENA} == {f"{node}.hbm"}


def test_a_chip_of_many_has_its_share():
    wide = tpu_slice("v5e:2x4", "1x2")
    programs = (
        Program("p", "tpu0", (1e-3,), 3, memory_bytes=1000),
        Program("q", "tpu1", (1e-3,), 3),
    )
    plan = plan_cluster(wide, Work(programs, (Flow("f", "p", "q", 4096),)))
    chain = chain_of(plan, "tpu0")
    arena = next(space for space in chain.spaces if space.kind == SpaceKind.ARENA)
    whole = next(space for space in plan.chain.spaces if space.name == arena.name)
    assert (whole.bytes, arena.bytes) == (4 * arena.bytes, arena.bytes)
    assert {d.action.bytes for d in chain.descriptors if isinstance(d.action, Copy)} == {1024}


@pytest.mark.parametrize("node", ["a-host", "a0-ici", "nobody"])
def test_only_chips_that_do_something_have_one(node: str):
    with pytest.raises(ClusterError):
        chain_of(PLANS["training"], node)


def test_what_takes_no_time_is_one_window():
    plan = plan_cluster(tpu_slice("v5e:1x1"), Work((Program("p", "tpu", (0.0,), 2),)))
    (window,) = windows(plan)
    assert [of.name for of in window.computing] == ["p#0", "p#1"]
