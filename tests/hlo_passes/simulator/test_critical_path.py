"""The path through a step against drawings, and the engine that holds it."""

import itertools

import pytest
from hypothesis import given

from hlo_passes.hardware.machine import Interconnect, Tier
from hlo_passes.simulator.critical_path import binding, critical_path
from hlo_passes.simulator.timeline import Compute, Done, Exchange, Start, simulate
from tests.hlo_passes.simulator.test_timeline import MACHINES, programs
from tests.hlo_passes.toys import link, toy_machine


def fetch(name, size):
    return Start(name, size, "host", "hbm")


def path_of(events, machine=None):
    def name(span):
        return getattr(span, "name", None) or span.transfer

    step = simulate(events, machine or toy_machine())
    return [(name(s.by), s.begin, s.end) for s in critical_path(step)]


def bound(events, machine=None):
    machine = machine or toy_machine()
    return binding(simulate(events, machine), machine)


def test_hidden_transfers_are_not_on_the_path():
    events = [fetch("w", 10), Compute("a", 3.0), Done("w"), Compute("b", 1.0)]
    assert path_of(events) == [("a", 0.0, 3.0), ("b", 3.0, 4.0)]
    held = bound(events)
    assert (held.engine, held.seconds, held.shares) == (
        "compute",
        {"compute": 4.0},
        {"compute": 1.0},
    )


def test_the_path_follows_a_queue_to_its_first_start():
    events = [
        fetch("v", 10),
        fetch("w", 20),
        Compute("a", 0.5),
        Done("w"),
        Compute("b", 1.0),
    ]
    assert path_of(events) == [("v", 0.0, 1.0), ("w", 1.0, 3.0), ("b", 3.0, 4.0)]
    held = bound(events)
    assert (held.engine, held.seconds) == ("link in", {"link in": 3.0, "compute": 1.0})
    assert list(held.shares.items()) == [("link in", 0.75), ("compute", 0.25)]


def test_a_fetch_that_starts_late_is_memory_s():
    events = [
        Compute("a", 1.0),
        fetch("v", 10),
        fetch("w", 20),
        Compute("b", 0.5),
        Done("w"),
        Compute("c", 0.5),
    ]
    assert path_of(events) == [
        ("a", 0.0, 1.0),
        ("v", 1.0, 2.0),
        ("w", 2.0, 4.0),
        ("c", 4.0, 4.5),
    ]
    held = bound(events)
    assert (held.engine, held.at, held.transfer) == ("memory", "a", "v")
    assert held.seconds == {"compute": 1.5, "memory": 3.0}


def test_a_late_fetch_is_named_even_where_compute_holds_the_step():
    held = bound([Compute("a", 5.0), fetch("v", 10), Done("v")])
    assert (held.engine, held.at, held.transfer) == ("compute", "a", "v")


def test_what_leaves_last_is_waited_for():
    held = bound([Compute("a", 1.0), Start("o", 50, "hbm", "host")])
    assert (held.engine, held.seconds) == ("link out", {"compute": 1.0, "link out": 5.0})


def test_the_other_engines():
    machine = toy_machine(
        interconnect=Interconnect("ici", 1.0, 1.0, 0.0),
        tiers=(Tier("hbm", 0, 100), Tier("vmem", 1, 100), Tier("host", 5, 100)),
        links=(link("host", "hbm"), link("hbm", "host"), link("hbm", "vmem")),
    )
    assert bound([Exchange("g", 9, 2.0), Done("g")], machine).engine == "interconnect"
    copy = [Start("c", 10, "hbm", "vmem"), Done("c")]
    assert bound(copy, machine).engine == "on-chip copies"


def test_a_latency_is_the_transfer_s():
    machine = toy_machine(links=(link("host", "hbm", latency_s=0.5),))
    assert path_of([fetch("w", 10), Done("w")], machine) == [("w", 0.0, 1.5)]


def test_nothing_happens():
    assert path_of([]) == []
    assert (bound([]).engine, bound([]).shares) == ("compute", {"compute": 1.0})


@given(programs(), MACHINES)
def test_the_path_is_the_step_without_gaps(events, machine):
    step = simulate(events, machine)
    path = critical_path(step)
    if not step.step_time_s:
        assert not path
        return
    assert (path[0].begin, path[-1].end) == (0.0, step.step_time_s)
    assert all(a.end == b.begin for a, b in itertools.pairwise(path))
    held = binding(step, machine)
    assert sum(held.seconds.values()) == pytest.approx(step.step_time_s)
    assert held.seconds[held.engine] == max(held.seconds.values())
