"""The choice of tiers against brute force, and the ways in which tiers can be too small."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.errors import TierCapacityError
from hlo_passes.hardware.machine import Tier, load_machine
from hlo_passes.placing.tiers import AwayCopy, choose_tiers, off_device_tiers
from hlo_passes.plan import LiveRange
from tests.hlo_passes.toys import link, toy_machine


def machine_of(**capacities):
    """Tiers host (10 bytes a second) and cxl (5), nvme (1), of so many bytes."""
    rates = {"host": 10.0, "cxl": 5.0, "nvme": 1.0}
    far = [name for name in rates if name in capacities]
    return toy_machine(
        tiers=(
            Tier("hbm", 0, 1000),
            Tier("vmem", 1, 100),
            *(Tier(name, None, capacities[name]) for name in far),
        ),
        links=tuple(
            link(*ends, nominal_bytes_per_s=rate)
            for name, rate in [*((name, rates[name]) for name in far), ("vmem", 1000.0)]
            for ends in (("hbm", name), (name, "hbm"))
        ),
    )


def copy(name, size, start, end, idle_s):
    return AwayCopy(name, size, LiveRange(start, end), idle_s)


def price(machine, copies, tiers):
    """Nanoseconds that idle time does not cover, and in which links are busy."""
    exposed = busy = 0
    for c, tier in zip(copies, tiers, strict=True):
        seconds = 2 * c.size / machine.link("hbm", tier).bytes_per_s
        exposed += round(max(0.0, seconds - c.idle_s) * 1e9)
        busy += round(seconds * 1e9)
    return exposed, busy


def fits(machine, copies, tiers, held):
    return all(
        held.get(tier.name, 0)
        + sum(
            c.size
            for c, t in zip(copies, tiers, strict=True)
            if t == tier.name and c.away.start <= tick < c.away.end
        )
        <= tier.capacity_bytes
        for tier in machine.tiers[2:]
        if tier.name in tiers
        for tick in range(12)
    )


def test_the_fastest_tier_comes_first():
    assert choose_tiers(machine_of(host=100, cxl=100), [copy("a", 50, 0, 4, 100.0)]) == ("host",)


def test_what_is_idle_longest_for_its_bytes_goes_to_the_slowest_tier():
    copies = [copy("a", 10, 0, 9, 40.0), copy("b", 10, 2, 5, 2.0), copy("c", 10, 1, 6, 5.0)]
    assert choose_tiers(machine_of(host=10, cxl=10, nvme=10), copies) == ("nvme", "host", "cxl")


def test_one_after_the_other_share_the_place():
    copies = [copy("a", 10, 0, 3, 2.0), copy("b", 10, 3, 6, 2.0)]
    assert choose_tiers(machine_of(host=10, nvme=100), copies) == ("host", "host")


def test_greed_does_not_have_the_last_word():
    # Greedily b, the least idle, takes the host's place from both a and c.
    copies = [copy("a", 6, 0, 6, 1.3), copy("c", 4, 0, 6, 1.0), copy("b", 7, 0, 6, 1.2)]
    machine = machine_of(host=10, cxl=100)
    chosen = choose_tiers(machine, copies)
    assert chosen == ("host", "host", "cxl")
    assert price(machine, copies, chosen) < price(machine, copies, ("cxl", "cxl", "host"))


def test_what_lies_there_already_takes_its_place():
    machine, copies = machine_of(host=10, cxl=10), [copy("a", 8, 0, 3, 9.0)]
    assert choose_tiers(machine, copies, {"host": 2}) == ("host",)
    assert choose_tiers(machine, copies, {"host": 3}) == ("cxl",)


def test_nothing_to_place():
    assert choose_tiers(machine_of(), []) == ()


def test_a_tier_that_is_too_small_is_named():
    copies = [copy("a", 8, 0, 3, 9.0), copy("b", 5, 1, 4, 9.0)]
    with pytest.raises(TierCapacityError) as error:
        choose_tiers(machine_of(host=10), copies, {"host": 1})
    assert (error.value.tier, error.value.capacity) == ("host", 10)
    assert error.value.stored == {"arguments": 1, "temporaries": 13}


def test_a_machine_without_a_way_off_the_device_is_named():
    with pytest.raises(TierCapacityError, match="8 B in the tier 'host'"):
        choose_tiers(machine_of(), [copy("a", 8, 0, 3, 9.0)])


def test_the_tiers_of_the_library():
    assert [t.name for t in off_device_tiers(load_machine("v5e"))] == ["host"]
    assert [t.name for t in off_device_tiers(load_machine("cpu"))] == ["cxl", "nvme"]


COPIES = st.lists(
    st.builds(
        lambda size, start, length, idle: copy("x", size, start, start + length, idle),
        st.integers(1, 6),
        st.integers(0, 6),
        st.integers(1, 5),
        st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 12.0]),
    ),
    min_size=1,
    max_size=5,
)


@given(COPIES, st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 3))
def test_no_assignment_is_better(copies, host, cxl, nvme, taken):
    machine = machine_of(host=host, cxl=cxl, nvme=nvme)
    held = {"host": taken}
    possible = [
        price(machine, copies, tiers)
        for tiers in itertools.product(("host", "cxl", "nvme"), repeat=len(copies))
        if fits(machine, copies, tiers, held)
    ]
    if not possible:
        with pytest.raises(TierCapacityError) as error:
            choose_tiers(machine, copies, held)
        assert sum(error.value.stored.values()) > error.value.capacity
        return
    chosen = choose_tiers(machine, copies, held)
    assert fits(machine, copies, chosen, held)
    assert price(machine, copies, chosen) == min(possible)


def test_many_copies_are_placed_though_not_all_ways_are_tried():
    copies = [copy(str(k), 1 + k % 7, k % 50, k % 50 + 9, 0.1 * k) for k in range(400)]
    machine = machine_of(host=60, cxl=90, nvme=10_000)
    chosen = choose_tiers(machine, copies)
    for tier, capacity in (("host", 60), ("cxl", 90)):
        for tick in range(60):
            there = (c for c, t in zip(copies, chosen, strict=True) if t == tier)
            assert sum(c.size for c in there if c.away.start <= tick < c.away.end) <= capacity
    assert price(machine, copies, chosen) < price(machine, copies, ["nvme"] * 400)
