"""No simulated schedule beats the bound, and on simple cases one reaches it."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.errors import NotOnMachineError
from hlo_passes.simulator.bounds import Demand, lower_bound_s
from hlo_passes.simulator.timeline import Compute, Done, Start, simulate
from tests.hlo_passes.toys import link, toy_machine


def fetch(size, deadline, end=None):
    return Demand(size, "host", "hbm", deadline, deadline + 1 if end is None else end)


def test_without_transfers_it_is_the_compute():
    assert lower_bound_s([1.0, 2.0], [], toy_machine()) == 3.0


def test_bytes_needed_at_a_tick_come_before_the_compute_that_follows():
    # 20 bytes take 2 s; tick 1 and 2 follow.
    assert lower_bound_s([1.0, 2.0, 3.0], [fetch(20, 1)], toy_machine()) == 2.0 + 2.0 + 3.0


def test_every_tick_is_a_candidate():
    # Tick 1 waits until 1 s, tick 2 until 9 s.
    demands = [fetch(10, 1), fetch(80, 2)]
    assert lower_bound_s([1.0, 1.0, 1.0], demands, toy_machine()) == 9.0 + 1.0


def test_latency_is_paid_once():
    machine = toy_machine(links=(link("host", "hbm", latency_s=0.5),))
    assert lower_bound_s([1.0, 1.0], [fetch(10, 0), fetch(10, 0)], machine) == 2.5 + 2.0


def test_directions_of_a_full_duplex_link_do_not_add_up():
    demands = [fetch(20, 0), Demand(30, "hbm", "host", 2, 2)]
    assert lower_bound_s([0.1, 0.1], demands, toy_machine()) == pytest.approx(3.0)


def test_engines_share_the_work_but_not_one_transfer():
    machine = toy_machine(links=(link("host", "hbm", engines=2),))
    assert lower_bound_s([1.0], [fetch(10, 0), fetch(10, 0)], machine) == 1.0 + 1.0
    assert lower_bound_s([1.0], [fetch(10, 0)], machine) == 1.0 + 1.0


def test_the_link_cannot_run_ahead_of_the_memory():
    # One slot of 20 bytes: the second weight crosses (2 s) only after tick 0 (5 s) is done.
    demands = [fetch(20, 0), fetch(20, 1)]
    ticks = [5.0, 1.0]
    assert lower_bound_s(ticks, demands, toy_machine()) == 2.0 + 5.0 + 1.0
    assert lower_bound_s(ticks, demands, toy_machine(), [20, 20]) == 2.0 + 5.0 + 2.0 + 1.0


def test_half_a_slot_more_hides_half_a_transfer():
    demands = [fetch(20, 0), fetch(20, 1)]
    bound = lower_bound_s([5.0, 1.0], demands, toy_machine(), [30, 30])
    assert bound == 2.0 + 5.0 + 1.0 + 1.0


def test_what_stays_on_the_device_does_not_go():
    # The first weight is read again at tick 2, so its 20 bytes never make room.
    demands = [fetch(20, 0, end=3), fetch(20, 2)]
    bound = lower_bound_s([5.0, 5.0, 1.0], demands, toy_machine(), [30, 30, 40])
    assert bound == 2.0 + 5.0 + 5.0 + 1.0 + 1.0


def test_evictions_need_no_room_on_the_device():
    demands = [Demand(20, "hbm", "host", 2, 2)]
    assert lower_bound_s([1.0, 1.0], demands, toy_machine(), [0, 0]) == 2.0


def test_what_is_resident_need_not_move():
    demands = [fetch(20, 0), fetch(20, 1)]
    assert lower_bound_s([1.0, 1.0], demands, toy_machine(), resident=40) == 2.0
    assert lower_bound_s([1.0, 1.0], demands, toy_machine(), resident=10) == 3.0 + 1.0


def test_a_demand_needs_a_link():
    with pytest.raises(NotOnMachineError, match="no link 'nvme->hbm'"):
        lower_bound_s([1.0], [Demand(1, "nvme", "hbm", 0, 1)], toy_machine())


SECONDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=8)
WAYS = st.sampled_from([("host", "hbm"), ("hbm", "host")])


@st.composite
def schedules(draw: st.DrawFn):
    """Ticks, and transfers as (size, source, destination, start, done, end)."""
    ticks = draw(SECONDS)
    transfers = []
    for _ in range(draw(st.integers(0, 8))):
        begin, done = sorted(draw(st.tuples(*[st.integers(0, len(ticks))] * 2)))
        end = draw(st.integers(min(done + 1, len(ticks)), len(ticks)))
        transfers.append((draw(st.integers(0, 40)), *draw(WAYS), begin, done, end))
    return ticks, transfers


def machine(engines, latency_s, full_duplex):
    return toy_machine(
        links=tuple(
            link(*way, engines=engines, latency_s=latency_s, full_duplex=full_duplex)
            for way in (("host", "hbm"), ("hbm", "host"))
        )
    )


MACHINES = st.builds(machine, st.integers(1, 3), st.sampled_from([0.0, 0.25, 2.0]), st.booleans())


def simulated_s(ticks, transfers, machine, order):
    """The step time when, at each tick, transfers start in the given order."""
    events = []
    for tick in range(len(ticks) + 1):
        for i in order:
            size, source, destination, begin, _, _ = transfers[i]
            if begin == tick:
                events.append(Start(i, size, source, destination))
        events += [Done(i) for i, t in enumerate(transfers) if t[4] == tick]
        events += [Compute(f"c{tick}", s) for s in ticks[tick : tick + 1]]
    return simulate(events, machine).step_time_s


def room_taken(ticks, transfers):
    """Bytes that the transfers to the device hold at each tick."""
    return [
        sum(t[0] for t in transfers if t[2] == "hbm" and t[3] <= tick and tick < t[5])
        for tick in range(len(ticks))
    ]


@given(schedules(), MACHINES, st.data())
def test_no_schedule_beats_the_bound(schedule, machine, data):
    ticks, transfers = schedule
    order = data.draw(st.permutations(range(len(transfers))))
    demands = [
        Demand(size, source, destination, done, end)
        for size, source, destination, _, done, end in transfers
    ]
    took = simulated_s(ticks, transfers, machine, order)
    assert lower_bound_s(ticks, demands, machine) <= took + 1e-9
    # The schedule is one of those that fit into the room that it takes.
    headroom = room_taken(ticks, transfers)
    assert lower_bound_s(ticks, demands, machine, headroom) <= took + 1e-9


@given(schedules(), MACHINES, st.data())
def test_no_choice_of_residents_beats_the_bound(schedule, machine, data):
    ticks, transfers = schedule
    transfers = [t for t in transfers if t[2] == "hbm"]
    kept = data.draw(st.integers(0, len(transfers)))
    demands = [Demand(*t[:3], *t[4:]) for t in transfers]
    moved = transfers[kept:]
    took = simulated_s(ticks, moved, machine, range(len(moved)))
    resident = sum(t[0] for t in transfers[:kept])
    headroom = [resident + taken for taken in room_taken(ticks, moved)]
    assert lower_bound_s(ticks, demands, machine, headroom, min(headroom)) <= took + 1e-9


@given(schedules(), MACHINES)
def test_less_room_only_raises_it(schedule, machine):
    ticks, transfers = schedule
    demands = [Demand(*t[:3], *t[4:]) for t in transfers]
    bound = lower_bound_s(ticks, demands, machine)
    assert bound <= lower_bound_s(ticks, demands, machine, [0] * len(ticks)) + 1e-9
    assert bound >= sum(ticks) - 1e-9


@given(SECONDS, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=8))
def test_on_one_link_with_room_for_all_the_bound_is_reached(ticks, wanted):
    # Everything queued at once, in the order of use, is optimal (Jackson 1955).
    wanted = sorted((min(tick, len(ticks) - 1), size) for size, tick in wanted)
    transfers = [(size, "host", "hbm", 0, tick, len(ticks)) for tick, size in wanted]
    demands = [fetch(size, tick) for tick, size in wanted]
    took = simulated_s(ticks, transfers, toy_machine(), range(len(transfers)))
    assert lower_bound_s(ticks, demands, toy_machine()) == pytest.approx(took)


@given(st.integers(1, 4), st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=8))
def test_a_ring_of_equal_slots_reaches_the_bound(slots, ticks):
    # Weight t, of 20 bytes, is read at tick t and starts where weight t - slots has ended.
    n = len(ticks)
    transfers = [(20, "host", "hbm", max(0, tick - slots + 1), tick, tick + 1) for tick in range(n)]
    demands = [fetch(20, tick) for tick in range(n)]
    took = simulated_s(ticks, transfers, toy_machine(), range(n))
    bound = lower_bound_s(ticks, demands, toy_machine(), [20 * slots] * n)
    assert bound == pytest.approx(took)
    assert bound >= max(sum(ticks), 2.0 * n, *accumulate(ticks)) - 1e-9
