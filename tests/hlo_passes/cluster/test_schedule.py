"""What is placed on the clock: who goes first, what is shared, how much is in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.cluster_works import MIB, chips_of, served, training, two_slices
from hlo_passes.chains.chain import Copy, Execute, SpaceKind
from hlo_passes.cluster.calendar import Calendar, first_free
from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.plan import ClusterPlan, Timed
from hlo_passes.cluster.presets import gpu_nodes, tpu_slice, workstation
from hlo_passes.cluster.rings import rings_within
from hlo_passes.cluster.search import plan_cluster
from hlo_passes.cluster.work import Flow, Program, State, Traffic, Work
from hlo_passes.errors import ClusterError

GB = 10**9


def order(plan: ClusterPlan, node: str) -> list[str]:
    return [
        plan.chain.segments[t.descriptor.action.segment].name
        for t in plan.timed
        if isinstance(t.descriptor.action, Execute)
        and plan.chain.streams[t.descriptor.stream].name == node
    ]


def copies(plan: ClusterPlan, name: str) -> list[Timed]:
    return [
        t
        for t in plan.timed
        if isinstance(t.descriptor.action, Copy)
        and plan.chain.slots[t.descriptor.action.source].name.startswith(name)
    ]


def test_a_calendar_finds_gaps_that_are_long_enough():
    calendar = Calendar(10)
    calendar.take(10, 20, 6)
    calendar.take(25, 40, 10)
    assert calendar.free_from(0, 10, 5) == 0
    assert calendar.free_from(0, 11, 5) == 40  # Before 10, or from 20 to 25, is too short.
    assert calendar.free_from(0, 11, 4) == 0
    assert calendar.free_from(12, 5, 5) == 20
    assert calendar.free_from(12, 6, 5) == 40


def test_all_calendars_have_to_be_free():
    one, other = Calendar(1), Calendar(1)
    one.take(0, 10, 1)
    other.take(12, 20, 1)
    assert first_free([one, other], 0, 2, [1, 1]) == 10
    assert first_free([one, other], 0, 3, [1, 1]) == 20


def test_one_chip_takes_what_its_segments_take():
    slices = tpu_slice("v5e:2x2")
    plan = plan_cluster(slices, Work((Program("p", "tpu", (1e-3, 2e-3), 3),)))
    assert plan.step_time_s == pytest.approx(9e-3)
    assert order(plan, "tpu") == [f"p#{run}.{k}" for run in range(3) for k in range(2)]


def test_a_transfer_takes_its_latencies_and_its_narrowest_wire():
    slices = tpu_slice("v5e:1x2", "1x2")
    programs = Program("p", "tpu0", (1e-3,)), Program("q", "tpu1", (1e-3,))
    plan = plan_cluster(slices, Work(programs, (Flow("f", "p", "q", 45 * 10**6),)))
    (copy,) = copies(plan, "f")
    # A link of 45 GB/s; half a step to the fabric, a step between parts, half a step back.
    assert copy.span.end - copy.span.begin == 1_000_000 + 2_000
    assert plan.step_time_s == pytest.approx(3.002e-3)


def test_what_is_read_first_goes_first():
    """Two flows of one run are ready at once; the second's reader is next, the first's later."""
    slices = tpu_slice("v5e:1x2", "1x2")
    programs = (
        Program("p", "tpu0", (1e-3,)),
        Program("soon", "tpu1", (5e-3,)),
        Program("late", "tpu1", (5e-3,)),
    )
    flows = Flow("a", "p", "late", 45 * 10**6), Flow("b", "p", "soon", 45 * 10**6)
    plan = plan_cluster(slices, Work(programs, flows))
    names = [
        plan.chain.slots[t.descriptor.action.source].name[0]
        for t in plan.timed
        if isinstance(t.descriptor.action, Copy)
    ]
    in_order = order(plan, "tpu1")
    assert names == (["b", "a"] if in_order[0] == "soon#0" else ["a", "b"])
    assert plan.step_time_s == pytest.approx(12.002e-3, rel=1e-3)


def two_senders(cluster: Cluster, a: str, b: str, c: str, d: str) -> ClusterPlan:
    programs = tuple(Program(f"on-{node}", node, (1e-3,)) for node in (a, b, c, d))
    flows = Flow("x", f"on-{a}", f"on-{c}", 400 * MIB), Flow("y", f"on-{b}", f"on-{d}", 400 * MIB)
    return plan_cluster(cluster, Work(programs, flows))


def test_a_shared_nic_is_used_by_one_after_the_other():
    one, each = (gpu_nodes("h200", nodes=2, gpus=2, parts=2, one_nic=n) for n in (True, False))
    ends = "gpu0-0", "gpu0-1", "gpu1-0", "gpu1-1"
    shared, own = two_senders(one, *ends), two_senders(each, *ends)
    for plan, is_shared in ((shared, True), (own, False)):
        (x,), (y,) = copies(plan, "x"), copies(plan, "y")
        assert any(wire.endswith("->network") for wire in x.span.wires)
        overlap = min(x.span.end, y.span.end) - max(x.span.begin, y.span.begin)
        assert (overlap <= 0) == is_shared
    assert shared.step_time_s > own.step_time_s


def test_both_kinds_of_gpu_of_a_workstation_meet_in_memory():
    plan = plan_cluster(
        workstation("h200", "a100"),
        Work(
            (Program("p", "gpu0", (1e-3,), 4), Program("q", "gpu1", (2e-3,), 4)),
            (Flow("f", "p", "q", MIB),),
        ),
    )
    assert len(copies(plan, "f")) == 8  # Up to the host, and down again.
    assert order(plan, "gpu1") == [f"q#{n}" for n in range(4)]


def test_flows_go_into_the_gaps_of_a_programs_own_transfers():
    """A run fetches its weights in its second half. What is sent to its chip meanwhile comes before
    or after, and the run waits for nothing."""
    cluster = workstation("h200", "h200")
    fetch = Traffic("fetch", "host", "hbm", "w", 50 * MIB, 1, 2, 3)
    programs = (
        Program("p", "gpu0", (1e-3,), 4),
        Program("q", "gpu1", (1e-3, 1.2e-3, 1e-3), 8, traffic=(fetch,)),
    )
    flows = (Flow("f", "p", "q", 60 * MIB, stride=2, lag=2), Flow("t", "q", "q", 4, lag=1))
    plan = plan_cluster(cluster, Work(programs, flows))
    runs = [t.span for t in plan.timed if plan.chain.streams[t.descriptor.stream].name == "gpu1"]
    assert plan.step_time_s == pytest.approx(8 * 3.2e-3, rel=1e-6)
    assert len(runs) == 24


def test_more_in_flight_is_never_slower_and_takes_more_memory():
    slices = two_slices()
    steps: list[float] = []
    held: list[int] = []
    for count in (1, 2, 4):
        work = training(slices, 8)
        flows = tuple(replace(f, in_flight=count) if f.source else f for f in work.flows)
        plan = plan_cluster(slices, replace(work, flows=flows))
        steps.append(plan.step_time_s)
        held.append(sum(s.bytes for s in plan.chain.spaces if s.kind == SpaceKind.ARENA))
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.5 * steps[2]
    assert held == sorted(held)


def test_rings_keep_to_memory():
    slices = two_slices()
    work = training(slices, 64, saved=512 * MIB, memory=4 << 30)
    rings = rings_within(slices, work)[0]
    capacity = slices.chips[0].tiers[0].capacity_bytes
    assert 2 <= rings["saved0"].slots[0] <= (capacity - (4 << 30)) // (512 * MIB)
    assert rings["act0"].slots == (64, 64) or rings["act0"].slots[0] >= 2
    plan = plan_cluster(slices, work)
    for node in chips_of(slices):
        held = sum(s.bytes for s in plan.chain.spaces if s.tier == f"{node}.hbm")
        assert held <= capacity


def test_what_waits_for_good_is_refused():
    """The reader of the first late flow needs a run that has no slot before that is read."""
    slices = tpu_slice("v5e:1x2", "1x2")
    programs = Program("p", "tpu0", (1e-3,), 5), Program("q", "tpu1", (1e-3,), 5)
    late, now = Flow("late", "p", "q", MIB, lag=2, in_flight=1), Flow("now", "p", "q", MIB)
    plan_cluster(slices, Work(programs, (replace(late, in_flight=3), now)))
    with pytest.raises(ClusterError, match=r"waits for a slot for good\. Give a flow more of them"):
        plan_cluster(slices, Work(programs, (late, now)))


def test_the_same_work_has_the_same_plan():
    slices = two_slices()
    for work in (training(slices), served(slices)):
        assert plan_cluster(slices, work) == plan_cluster(slices, work)


def test_a_thousand_chips_are_one_node():
    small, large = tpu_slice("v5e:4x4"), tpu_slice("v5p:16x8x8")
    assert large.chips[0].count == 1024
    plans = [
        plan_cluster(of, Work((Program("p", "tpu", (1e-3,) * 5, 4),))) for of in (small, large)
    ]
    assert len(plans[0].clock) == len(plans[1].clock)


@pytest.mark.parametrize("listed", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_a_chain_on_one_node_with_a_slot_each_has_an_order_however_it_is_listed(listed: list[int]):
    programs = [Program(name, "tpu", (1e-3,), 3) for name in "pqr"]
    flows = Flow("f", "p", "q", MIB, in_flight=1), Flow("g", "q", "r", MIB, in_flight=1)
    work = Work(tuple(programs[k] for k in listed), flows)
    assert plan_cluster(tpu_slice("v5e:1x1"), work).step_time_s == pytest.approx(9e-3)


def test_a_run_takes_the_slot_that_it_has_read_before():
    """Its first segment reads what the run before has left, its second writes that."""
    work = Work(
        (Program("p", "tpu", (1e-3, 1e-3), 3),), (Flow("f", "p", "p", MIB, lag=1, in_flight=1),)
    )
    assert plan_cluster(tpu_slice("v5e:1x1"), work).step_time_s == pytest.approx(6e-3)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_who_shares_a_state_takes_turns_as_listed(names: str):
    gradient, update = names
    programs = (
        Program(gradient, "tpu", (1e-3,), 4, reads=("w", "g"), writes=("g",)),
        Program(update, "tpu", (1e-3,), 2, reads=("w", "g"), writes=("w", "g")),
    )
    states = State("w", "tpu", 8), State("g", "tpu", 8)
    slices = tpu_slice("v5e:1x1")
    plan = plan_cluster(slices, Work(programs, (), states))
    a, b = ([f"{name}#{n}" for n in range(4)] for name in names)
    assert order(plan, "tpu") == [a[0], a[1], b[0], a[2], a[3], b[1]]
    plan = plan_cluster(slices, Work(programs[::-1], (), states))
    assert order(plan, "tpu") == [b[0], a[0], a[1], b[1], a[2], a[3]]


def test_a_flow_goes_before_how_those_who_share_a_state_are_listed():
    programs = (
        Program("late", "tpu", (1e-3,), 2, reads=("s",)),
        Program("soon", "tpu", (1e-3,), 2, writes=("s",)),
    )
    work = Work(programs, (Flow("f", "soon", "late", 8),), (State("s", "tpu", 8),))
    plan = plan_cluster(tpu_slice("v5e:1x1"), work)
    assert order(plan, "tpu") == ["soon#0", "late#0", "soon#1", "late#1"]


def test_a_medium_whose_directions_differ_is_shared_by_time():
    """A drive that is read twice as fast as it is written does one of them at a time."""
    chip = {"name": "gpu", "machine": "h200", "host": "host", "attached": "pcie"}
    tiers = [{"name": name, "capacity_bytes": 1 << 40} for name in ("dram", "ssd")]
    wires = [
        {
            "source": source,
            "destination": destination,
            "nominal_bytes_per_s": rate,
            "efficiency": 1,
            "latency_s": 0,
            "full_duplex": False,
        }
        for source, destination, rate in (("pcie", "host.ssd", 5e9), ("host.ssd", "pcie", 10e9))
    ]
    traffic = (
        Traffic("out", "hbm", "ssd", "o", 5 * 10**6, 1, 2, 3),
        Traffic("in", "ssd", "hbm", "i", 10 * 10**6, 1, 2, 3),
    )
    work = Work((Program("p", "gpu", (1e-3, 0.0, 1e-3), traffic=traffic),))
    for listed in (wires, wires[::-1]):
        cluster = Cluster.from_dict(
            {
                "name": "drive",
                "chips": [chip],
                "hosts": [{"name": "host", "tiers": tiers}],
                "switches": [{"name": "pcie"}],
                "wires": listed,
            }
        )
        # Both transfers take a millisecond each, and the latency of the chip's own link.
        step_s = plan_cluster(cluster, work).step_time_s
        assert step_s == pytest.approx(4e-3, rel=0.02)
