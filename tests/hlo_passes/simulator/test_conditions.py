"""Steps that share memories, wait for launches and vary, against timelines drawn by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.errors import NotOnMachineError
from hlo_passes.hardware.machine import Interconnect, Machine, Tier
from hlo_passes.simulator.events import Compute, Done, Exchange, Start, Work
from hlo_passes.simulator.numbers import Draws, OneStep
from hlo_passes.simulator.timeline import (
    Conditions,
    Jitter,
    _Run,
    drawn_step_times,
    simulate,
)
from tests.hlo_passes.toys import link, toy_machine

SHARED = Conditions(is_shared=True)
LAUNCHED = Conditions(is_launched=True)

# Device memory gives 100 bytes a second; see `toys`.
FAST = toy_machine(
    links=(
        link("host", "hbm", nominal_bytes_per_s=50.0),
        link("hbm", "host", nominal_bytes_per_s=80.0),
    ),
    interconnect=Interconnect("ici", 50.0, 1.0, 0.0),
)
HOST = (Tier("hbm", 0, 10_000), Tier("vmem", 1, 100), Tier("host", 5, 100_000, 15.0))


def kernel(name: str, seconds: float, device_bytes: float = 0.0, **more: float) -> Compute:
    return Compute(name, seconds, Work(device_bytes, **more))


def bound(name: str, seconds: float) -> Compute:
    """A kernel that asks for all of device memory's bandwidth."""
    return kernel(name, seconds, 100.0 * seconds, memory_s=seconds)


def start(transfer, size, source="host", destination="hbm"):
    return Start(transfer, size, source, destination)


def computes(step):
    return [(c.begin, c.end) for c in step.computes]


def spans(step):
    return [(t.begin, t.end) for t in step.transfers]


# --- memories that are shared


def test_a_kernel_and_a_transfer_share_device_memory():
    """w asks for 50 and gets them; a is left with 50 of the 100 that it asks for."""
    step = simulate([start("w", 100), bound("a", 4.0)], FAST, SHARED)
    assert spans(step) == [(0.0, 2.0)]
    assert computes(step) == [(0.0, 5.0)]
    assert (step.step_time_s, step.compute_s, step.stall_s, step.shared_s) == (5.0, 5.0, 0.0, 1.0)
    assert step.memory_s == 4.0


def test_who_asks_for_more_than_a_half_gets_a_half():
    step = simulate([start("w", 160, "hbm", "host"), bound("a", 4.0)], FAST, SHARED)
    assert spans(step) == [(0.0, pytest.approx(3.2))]
    assert step.step_time_s == pytest.approx(5.6)


def test_where_there_is_enough_for_both_nobody_waits():
    events = [start("w", 100), kernel("a", 4.0, 200.0)]
    step = simulate(events, FAST, SHARED)
    assert step == simulate(events, FAST)
    assert step.shared_s == 0.0


def test_a_kernel_is_alone_again_when_its_transfer_has_ended():
    events = [start("w", 50), bound("a", 1.0), Done("w"), bound("b", 1.0)]
    step = simulate(events, FAST, SHARED)
    assert computes(step) == [(0.0, 1.5), (1.5, 2.5)]
    assert step.stalls == {}


def test_a_transfer_moves_on_while_one_kernel_follows_another():
    events = [start("w", 100), *(kernel(f"k{n}", 0.5, 10.0) for n in range(3)), Done("w")]
    step = simulate([*events, bound("a", 1.0)], FAST, SHARED)
    assert spans(step) == [(0.0, 2.0)]
    assert computes(step)[2:] == [(1.0, 1.5), (2.0, 3.0)]


def test_a_transfer_that_the_host_holds_back_stays_so_while_kernels_follow_each_other():
    events = [start("w", 15), start("v", 15, "hbm", "host")]
    events += [kernel(f"k{n}", 0.5) for n in range(3)]
    step = simulate([*events, Done("w")], toy_machine(tiers=HOST), SHARED)
    assert spans(step) == [(0.0, pytest.approx(2.0)), (0.0, pytest.approx(2.0))]


def test_a_transfer_shares_nothing_before_its_latency_has_passed():
    machine = replace(FAST, links=(replace(FAST.links[0], latency_s=3.0),))
    step = simulate([start("w", 100), bound("a", 4.0)], machine, SHARED)
    assert spans(step) == [(3.0, 5.0)]
    assert computes(step) == [(0.0, 5.0)]


def test_a_queue_is_still_first_in_first_out():
    step = simulate([start("w", 100), start("v", 50), bound("a", 2.0), Done("v")], FAST, SHARED)
    assert spans(step) == [(0.0, 2.0), (2.0, 3.0)]
    assert computes(step) == [(0.0, 3.5)]


def test_both_directions_of_a_link_pass_through_the_hosts_memory():
    """15 bytes a second for 10 + 10: 7.5 each until v has left, then w has 10."""
    events = [start("w", 20), start("v", 10, "hbm", "host")]
    step = simulate(events, toy_machine(tiers=HOST), SHARED)
    assert spans(step) == [(0.0, pytest.approx(7 / 3)), (0.0, pytest.approx(4 / 3))]
    assert simulate(events, toy_machine(tiers=HOST)).step_time_s == 2.0
    assert simulate(events, toy_machine(), SHARED).step_time_s == 2.0


def test_what_comes_from_behind_the_host_is_written_there_and_read():
    tiers = (*HOST, Tier("nvme", None, 10**6))
    ways = [("host", "hbm"), ("hbm", "host"), ("nvme", "host"), ("host", "nvme")]
    machine = toy_machine(tiers=tiers, links=tuple(link(*way) for way in ways)).fed_from("nvme")
    step = simulate([start("w", 30, "nvme", "hbm")], machine, SHARED)
    assert step.step_time_s == pytest.approx(4.0)


def test_a_collective_reads_what_it_sends_and_writes_what_comes():
    """It asks for 2 · 100 bytes in 2 s, as much as the kernel: half of its speed each."""
    step = simulate([Exchange("g", 100, 2.0), bound("a", 1.0), Done("g")], FAST, SHARED)
    assert computes(step) == [(0.0, 2.0)]
    assert step.collectives[0].end == pytest.approx(3.0)
    assert step.stalls == {("hbm", "ici"): pytest.approx(1.0)}


def test_copies_on_the_chip_share_with_those_from_the_host():
    """hbm→vmem asks for 90, host→hbm for 50: 50 each, and 90 for the first when w has ended."""
    more = link("hbm", "vmem", nominal_bytes_per_s=90.0)
    machine = replace(FAST, links=(*FAST.links, more), hbm_bytes_per_s=100.0)
    step = simulate([start("w", 45), start("v", 90, "hbm", "vmem")], machine, SHARED)
    # A kernel streams at what the link to the chip reaches, 90; so do all together: 45 each.
    assert spans(step) == [(0.0, pytest.approx(1.0)), (0.0, pytest.approx(1.5))]


def test_a_transfer_without_bytes_ends_where_it_begins():
    step = simulate([start("w", 0), bound("a", 1.0), Done("w")], FAST, SHARED)
    assert spans(step) == [(0.0, 0.0)]
    assert step.step_time_s == 1.0


def test_a_shared_step_refuses_what_the_other_does():
    with pytest.raises(NotOnMachineError, match="no link 'nvme->hbm'"):
        simulate([start("w", 1, "nvme")], FAST, SHARED)
    with pytest.raises(ValueError, match="'w' starts twice"):
        simulate([start("w", 1), start("w", 1)], FAST, SHARED)


# --- launches


def launching(machine: Machine) -> Machine:
    """A second a launch, a quarter for a kernel in a graph."""
    return replace(machine, launch_s=1.0, captured_launch_s=0.25)


def test_a_kernel_waits_until_it_is_launched():
    events = [kernel(n, s, launches=1) for n, s in (("a", 0.5), ("b", 3.0), ("c", 0.5))]
    step = simulate(events, launching(toy_machine()), LAUNCHED)
    assert computes(step) == [(1.0, 1.5), (2.0, 5.0), (5.0, 5.5)]
    assert (step.step_time_s, step.compute_s, step.launch_s) == (5.5, 4.0, 1.5)


def test_many_kernels_that_are_one_event_wait_for_the_last_launch():
    """Four of a second in all, launched at 1, 2, 3 and 4: the last of them ends at 4.25."""
    step = simulate([kernel("a", 1.0, launches=4)], launching(toy_machine()), LAUNCHED)
    assert (step.step_time_s, step.launch_s) == (4.25, 3.25)


def test_kernels_in_a_graph_are_launched_faster():
    head = kernel("a", 0.5, graphs=1, captured=1)
    rest = [kernel(f"k{n}", 0.125, captured=1) for n in range(2)]
    step = simulate([head, *rest], launching(toy_machine()), LAUNCHED)
    # The graph and its first kernel at 1.25, the others at 1.5 and 1.75, before they can run.
    assert computes(step) == [(1.25, 1.75), (1.75, 1.875), (1.875, 2.0)]


def test_a_copy_is_launched_too():
    events = [kernel("a", 0.5, launches=1), start("w", 10), kernel("b", 0.5, launches=1), Done("w")]
    step = simulate(events, launching(toy_machine()), LAUNCHED)
    assert computes(step) == [(1.0, 1.5), (3.0, 3.5)]
    assert spans(step) == [(1.5, 2.5)]


def test_copies_are_launched_one_after_the_other():
    """w at 0 and v at 1, b at 2 and until 3: a copy's own launch is in its latency."""
    events = [start("w", 50), start("v", 80, "hbm", "host"), kernel("b", 0.5, launches=1)]
    step = simulate(events, launching(FAST), LAUNCHED)
    assert spans(step) == [(0.0, 1.0), (1.0, 2.0)]
    assert computes(step) == [(3.0, 3.5)]


def test_transfers_move_while_the_engine_waits_for_a_launch():
    events = [start("w", 100), *(kernel(f"k{n}", 0.5, 50.0, launches=1) for n in range(2))]
    both = Conditions(is_shared=True, is_launched=True)
    step = simulate(events, launching(FAST), both)
    # The copy is launched at 1, while it starts at 0: its latency holds what that takes.
    assert spans(step) == [(0.0, 2.0)]
    assert computes(step) == [(2.0, 2.5), (3.0, 3.5)]
    assert step.transfers[0].hidden_s == 0.0


def test_without_a_machine_that_says_so_nothing_is_launched():
    events = [kernel("a", 0.5, launches=1)]
    assert simulate(events, toy_machine(), LAUNCHED).step_time_s == 0.5
    assert simulate(events, launching(toy_machine())).step_time_s == 0.5


# --- what is waited for


def test_stalls_are_told_by_what_is_waited_for():
    events = [
        start("w", 50),
        Done("w"),
        Exchange("g", 1, 1.5),
        Done("g"),
        start("v", 80, "hbm", "host"),
    ]
    step = simulate(events, FAST)
    assert step.stalls == {("host", "hbm"): 1.0, ("hbm", "ici"): 1.5, ("hbm", "host"): 1.0}
    assert step.stall_s == 3.5


# --- draws


def test_without_variation_all_steps_are_the_one():
    events = [start("w", 100), bound("a", 4.0)]
    drawn = drawn_step_times(events, FAST, SHARED, Jitter(0.0, steps=3))
    assert drawn.tolist() == [5.0, 5.0, 5.0]


def test_the_same_seed_gives_the_same_steps():
    events = [start("w", 100), bound("a", 4.0), Done("w")]
    seeds = (1, 1, 2)
    one, again, other = (
        drawn_step_times(events, FAST, SHARED, Jitter(0.1, steps=50, seed=s)) for s in seeds
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_seconds_vary_as_much_as_is_asked():
    drawn = drawn_step_times([kernel("a", 2.0)], FAST, SHARED, Jitter(0.25, steps=40_000))
    assert np.mean(drawn) == pytest.approx(2.0, rel=0.01)
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(0.25, rel=0.03)


def test_a_sum_of_many_kernels_varies_less():
    one = drawn_step_times([kernel("a", 2.0)], FAST, SHARED, Jitter(0.2, steps=20_000))
    many = kernel("a", 2.0, kernels=16)
    drawn = drawn_step_times([many], FAST, SHARED, Jitter(0.2, steps=20_000))
    assert np.std(drawn) == pytest.approx(np.std(one) / 4, rel=0.05)


def test_the_more_they_vary_the_later_is_the_last_percent():
    events = [event for n in range(20) for event in (start(n, 20), bound(f"a{n}", 0.5), Done(n))]
    slow = [
        np.percentile(drawn_step_times(events, FAST, SHARED, Jitter(v, steps=2000)), 99)
        for v in (0.0, 0.05, 0.1, 0.2, 0.4)
    ]
    assert slow == sorted(slow)
    assert slow[-1] > 1.1 * slow[0]


# --- properties


@st.composite
def programs(draw: st.DrawFn):
    events, open_transfers = [], []
    for i in range(draw(st.integers(0, 20))):
        kind = draw(st.sampled_from(["compute", "compute", "start", "exchange", "done"]))
        if kind == "compute":
            seconds = draw(st.one_of(st.floats(0, 5), st.just(0.125)))
            share = draw(st.sampled_from([0.0, 0.4, 1.0]))
            launches = draw(st.integers(0, 2))
            events.append(kernel(f"c{i}", seconds, 100 * share * seconds, launches=launches))
        elif kind == "done" and open_transfers:
            events.append(Done(open_transfers.pop(draw(st.integers(0, len(open_transfers) - 1)))))
        elif kind != "done":
            size = draw(st.integers(0, 200))
            ends = draw(st.sampled_from([("host", "hbm"), ("hbm", "host")]))
            seconds = draw(st.floats(0.01, 3))
            is_move = kind == "start"
            events.append(start(i, size, *ends) if is_move else Exchange(i, size // 4, seconds))
            open_transfers.append(i)
    return events


MACHINES = st.builds(
    lambda engines, latency, duplex, host, launch: replace(
        toy_machine(
            links=tuple(
                link(
                    *way,
                    nominal_bytes_per_s=60.0,
                    engines=engines,
                    latency_s=latency,
                    full_duplex=duplex,
                )
                for way in (("host", "hbm"), ("hbm", "host"))
            ),
            tiers=(*HOST[:2], replace(HOST[2], bytes_per_s=host)),
            interconnect=FAST.interconnect,
        ),
        launch_s=launch,
    ),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.25, 2.0]),
    st.booleans(),
    st.sampled_from([None, 40.0, 90.0]),
    st.sampled_from([None, 0.5]),
)


def plenty(machine: Machine) -> Machine:
    """With memories that have enough for all."""
    tiers = tuple(replace(tier, bytes_per_s=None) for tier in machine.tiers)
    return replace(machine, tiers=tiers, hbm_bytes_per_s=1e9)


@given(programs(), MACHINES)
def test_where_there_is_enough_for_all_it_is_the_planners_timeline(events, machine):
    shared = simulate(events, plenty(machine), SHARED)
    alone = simulate(events, plenty(machine))
    assert shared.step_time_s == pytest.approx(alone.step_time_s, abs=1e-9)
    assert shared.shared_s == pytest.approx(0.0, abs=1e-9)
    for one, other in zip(shared.transfers, alone.transfers, strict=True):
        assert (one.begin, one.end) == pytest.approx((other.begin, other.end), abs=1e-9)
    for one, other in zip(shared.computes, alone.computes, strict=True):
        assert (one.begin, one.end) == pytest.approx((other.begin, other.end), abs=1e-9)


@given(programs(), MACHINES, st.booleans())
def test_nothing_that_is_in_the_way_makes_a_step_faster(events, machine, is_launched):
    alone = simulate(events, machine, Conditions(is_launched=is_launched))
    shared = simulate(events, machine, Conditions(True, is_launched))
    assert shared.step_time_s >= alone.step_time_s - 1e-9
    assert alone.step_time_s >= simulate(events, machine).step_time_s - 1e-9
    for one, other in zip(shared.transfers, alone.transfers, strict=True):
        assert one.end >= other.end - 1e-9


@given(programs(), MACHINES)
def test_a_step_is_not_faster_than_its_launches(events, machine):
    step = simulate(events, machine, LAUNCHED)
    computes = [e for e in events if isinstance(e, Compute)]
    launches = sum(e.work.launches for e in computes)
    assert step.step_time_s >= launches * (machine.launch_s or 0.0) - 1e-9


@given(programs(), MACHINES)
def test_every_moment_is_compute_or_stall_or_a_launch(events, machine):
    step = simulate(events, machine, Conditions(True, True))
    parts = step.compute_s + step.stall_s + step.launch_s
    assert step.step_time_s == pytest.approx(parts)
    assert step.stall_s == pytest.approx(sum(step.stalls.values()))
    alone = sum(e.seconds for e in events if isinstance(e, Compute))
    assert step.compute_s == pytest.approx(alone + step.shared_s, abs=1e-9)


@given(programs(), MACHINES)
def test_no_memory_gives_more_than_it_has(events, machine):
    step = simulate(events, machine, SHARED)
    for way in ("host", "hbm"):
        moved = sum(t.size for t in step.transfers if way in (t.source, t.destination))
        moved += 2 * sum(c.size for c in step.collectives) * (way == "hbm")
        moved += sum(e.work.device_bytes for e in events if isinstance(e, Compute)) * (way == "hbm")
        capacity = 100.0 if way == "hbm" else machine.tier("host").bytes_per_s
        if capacity is not None:
            assert moved <= capacity * step.step_time_s + 1e-6


class Recorded(Draws):
    """Remembers what it has drawn."""

    def __init__(self, *args):
        super().__init__(*args)
        self.drawn = []

    def varied(self, kernels):
        self.drawn.append(super().varied(kernels))
        return self.drawn[-1]


class Again(OneStep):
    """One of the steps that were drawn."""

    def __init__(self, drawn, step):
        self._factors = iter([float(factors[step]) for factors in drawn])

    def varied(self, kernels):
        return next(self._factors)


@given(programs(), MACHINES, st.booleans(), st.booleans())
def test_each_draw_is_a_step_of_its_own(events, machine, is_shared, is_launched):
    conditions = Conditions(is_shared, is_launched)
    numbers = Recorded(4, 0.5, 7)
    many = _Run(machine, conditions, numbers)
    many.through(events)
    drawn = np.broadcast_to(many.now, (4,))
    for step in range(4):
        one = _Run(machine, conditions, Again(numbers.drawn, step))
        one.through(events)
        assert drawn[step] == pytest.approx(one.now, abs=1e-9)
