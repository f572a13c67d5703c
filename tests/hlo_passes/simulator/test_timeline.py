"""The simulator against timelines drawn by hand, and the builders that feed it."""

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.errors import MalformedModuleError, NotOnMachineError
from hlo_passes.hardware.machine import Interconnect
from hlo_passes.plan import Transfer
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.timeline import (
    Compute,
    Done,
    Exchange,
    Start,
    plan_events,
    schedule_events,
    simulate,
)
from tests.hlo_passes.toys import link, module_of, toy_machine

WIRED = toy_machine(interconnect=Interconnect("ici", 20.0, 0.5, 0.25))
"""10 bytes a second between devices, 0.25 s a step of a ring."""


def start(transfer, size, source="host", destination="hbm"):
    return Start(transfer, size, source, destination)


def overlap(timeline):
    """The part of the moved bytes that compute hides; 1 when none moved."""
    return timeline.overlapped_bytes / timeline.moved_bytes if timeline.moved_bytes else 1.0


def spans(timeline):
    return [(t.begin, t.end) for t in timeline.transfers]


def test_a_transfer_behind_enough_compute_costs_nothing():
    events = [start("w", 20), Compute("a", 3.0), Done("w"), Compute("b", 1.0)]
    step = simulate(events, toy_machine())
    assert (step.step_time_s, step.compute_s, step.stall_s) == (4.0, 4.0, 0.0)
    assert spans(step) == [(0.0, 2.0)]
    assert overlap(step) == 1.0
    assert step.link_s == {("host", "hbm"): 2.0}


def test_a_done_waits_for_what_compute_does_not_hide():
    events = [start("w", 20), Compute("a", 0.5), Done("w"), Compute("b", 1.0)]
    step = simulate(events, toy_machine())
    assert (step.step_time_s, step.stall_s) == (3.0, 1.5)
    assert [(c.name, c.begin, c.end) for c in step.computes] == [("a", 0.0, 0.5), ("b", 2.0, 3.0)]
    assert step.transfers[0].waited == 1.5
    assert step.overlapped_bytes == pytest.approx(5.0)


def test_a_link_moves_its_queue_first_in_first_out():
    events = [start("w", 20), start("v", 10), Done("v"), Done("w")]
    step = simulate(events, toy_machine())
    assert spans(step) == [(0.0, 2.0), (2.0, 3.0)]
    assert [t.waited for t in step.transfers] == [0.0, 3.0]
    assert overlap(step) == 0.0


def test_two_engines_move_two_transfers_at_once():
    events = [start("w", 20), start("v", 10), start("u", 10), Done("u")]
    step = simulate(events, toy_machine(links=(link("host", "hbm", engines=2),)))
    assert spans(step) == [(0.0, 2.0), (0.0, 1.0), (1.0, 2.0)]
    assert step.link_s == {("host", "hbm"): 2.0}


@pytest.mark.parametrize(("full_duplex", "end"), [(True, 2.0), (False, 4.0)])
def test_only_a_full_duplex_link_carries_both_directions_at_once(full_duplex, end):
    ways = [("host", "hbm"), ("hbm", "host")]
    machine = toy_machine(links=tuple(link(*way, full_duplex=full_duplex) for way in ways))
    step = simulate([start("w", 20), start("v", 20, "hbm", "host")], machine)
    assert step.step_time_s == end


def test_the_latency_of_a_queued_transfer_is_hidden():
    machine = toy_machine(links=(link("host", "hbm", latency_s=0.5),))
    step = simulate([start("w", 20), start("v", 10)], machine)
    assert spans(step) == [(0.5, 2.5), (2.5, 3.5)]


def test_the_step_lasts_until_the_last_transfer_has_ended():
    step = simulate([Compute("a", 1.0), start("w", 20, "hbm", "host")], toy_machine())
    assert (step.step_time_s, step.stall_s) == (3.0, 2.0)


def test_one_direction_can_be_looked_at_alone():
    events = [start("w", 20), start("v", 10, "hbm", "host"), Compute("a", 1.0)]
    step = simulate(events, toy_machine())
    assert overlap(step.between("hbm", "host")) == 1.0
    assert overlap(step.between("host", "hbm")) == 0.5


def test_a_step_without_transfers_hides_all_of_them():
    step = simulate([Compute("a", 1.0)], toy_machine())
    assert (overlap(step), step.link_s, step.stall_s) == (1.0, {}, 0.0)


def test_a_transfer_needs_a_link():
    with pytest.raises(NotOnMachineError, match="no link 'nvme->hbm'"):
        simulate([start("w", 1, "nvme")], toy_machine())


def test_a_done_needs_a_start():
    with pytest.raises(ValueError, match="'w' is waited for before it starts"):
        simulate([Done("w")], toy_machine())


def test_a_transfer_starts_once():
    with pytest.raises(ValueError, match="'w' starts twice"):
        simulate([start("w", 1), start("w", 1)], toy_machine())


def test_collectives_queue_on_the_interconnect_and_nowhere_else():
    events = [
        start("w", 20),
        Exchange("g", 10, 1.5),
        Exchange("r", 5, 1.0),
        Compute("a", 1.0),
        Done("r"),
    ]
    step = simulate(events, WIRED)
    assert [(c.begin, c.end, c.waited) for c in step.collectives] == [(0, 1.5, 0), (1.5, 2.5, 1.5)]
    assert [(c.source, c.destination) for c in step.collectives] == [("hbm", "ici")] * 2
    assert spans(step) == [(0.0, 2.0)]
    assert (step.step_time_s, step.interconnect_s) == (2.5, 2.5)
    # What crosses to other devices is no transfer between tiers.
    assert step.moved_bytes == 20
    assert step.link_s == {("host", "hbm"): 2.0}


def test_a_collective_needs_an_interconnect():
    with pytest.raises(NotOnMachineError, match="no link 'interconnect'"):
        simulate([Exchange("g", 10, 1.5)], toy_machine())


@st.composite
def programs(draw: st.DrawFn):
    """Events in a legal order, with transfers both ways."""
    events, open_transfers = [], []
    for i in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["compute", "start", "done"]))
        if kind == "compute":
            events.append(Compute(f"c{i}", draw(st.floats(0, 5))))
        elif kind == "start":
            ends = draw(st.sampled_from([("host", "hbm"), ("hbm", "host")]))
            events.append(Start(i, draw(st.integers(0, 50)), *ends))
            open_transfers.append(i)
        elif open_transfers:
            events.append(Done(open_transfers.pop(draw(st.integers(0, len(open_transfers) - 1)))))
    return events


MACHINES = st.builds(
    lambda engines, latency, duplex: toy_machine(
        links=tuple(
            link(*way, engines=engines, latency_s=latency, full_duplex=duplex)
            for way in (("host", "hbm"), ("hbm", "host"))
        )
    ),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.25, 2.0]),
    st.booleans(),
)


@given(programs(), MACHINES)
def test_every_moment_is_compute_or_stall(events, machine):
    step = simulate(events, machine)
    assert step.step_time_s == pytest.approx(step.compute_s + step.stall_s)
    assert step.compute_s == pytest.approx(sum(e.seconds for e in events if type(e) is Compute))
    edge = 0.0
    for span in step.computes:
        assert span.begin >= edge
        edge = span.end


@given(programs(), MACHINES)
def test_transfers_keep_to_their_link(events, machine):
    step = simulate(events, machine)
    for t in step.transfers:
        used = machine.link(t.source, t.destination)
        assert t.begin >= t.issue + used.latency_s
        assert t.end - t.begin == pytest.approx(t.size / used.bytes_per_s)
        assert t.end <= step.step_time_s
        together = [
            u
            for u in step.transfers
            if u.begin <= t.begin < u.end and (not used.full_duplex or u.source == t.source)
        ]
        assert len(together) <= used.engines


@given(programs(), MACHINES)
def test_what_is_hidden_is_what_lies_under_compute(events, machine):
    step = simulate(events, machine)
    for t in step.transfers:
        under = sum(max(0.0, min(t.end, c.end) - max(t.begin, c.begin)) for c in step.computes)
        assert t.hidden_s == pytest.approx(under, abs=1e-9)
        assert -1e-6 <= t.overlapped_bytes <= t.size + 1e-6


@given(programs(), MACHINES)
def test_nothing_is_computed_before_it_is_waited_for(events, machine):
    step = simulate(events, machine)
    ends = {t.transfer: t.end for t in step.transfers}
    begins = {c.name: c.begin for c in step.computes}
    needed = 0.0
    for event in events:
        if type(event) is Done:
            needed = max(needed, ends[event.transfer])
        elif type(event) is Compute:
            assert begins[event.name] >= needed


def test_its_work_grows_with_the_events():
    """Counted in lines that run, which are the same on every machine."""

    def lines(loops: int) -> int:
        events = []
        for i in range(loops):
            events += [start(i, 10), Compute("a", 0.5), Done(i), Compute("b", 0.1)]
        found = 0

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal found
            found += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            step = simulate(events, toy_machine())
        finally:
            sys.settrace(before)
        assert overlap(step) == pytest.approx(0.5)
        return found

    assert lines(1_000) < 4.1 * lines(250)


def test_at_a_tick_a_plan_evicts_then_fetches_then_computes():
    transfers = [
        Transfer(0, "v", "host", "hbm", 10, start=0, done=1, end=2),
        Transfer(1, "w", "host", "hbm", 20, start=1, done=1, end=2),
        Transfer(2, "x", "hbm", "host", 30, start=1, done=1, end=2, kind="evict"),
        Transfer(3, "y", "hbm", "host", 40, start=1, done=2, end=2, kind="evict"),
    ]
    assert list(plan_events([1.0, 2.0], transfers)) == [
        Start(0, 10, "host", "hbm"),
        Compute("c0", 1.0),
        Start(2, 30, "hbm", "host"),
        Start(3, 40, "hbm", "host"),
        Done(2),
        Start(1, 20, "host", "hbm"),
        Done(0),
        Done(1),
        Compute("c1", 2.0),
        Done(3),
    ]


def events_of(text, machine=None):
    machine = machine or toy_machine()
    module = module_of(text)
    return list(schedule_events(module, instruction_costs(module, machine), machine))


COPY = """HloModule m, is_scheduled=true
ENTRY e {
  w = f32[25]{0:S(5)} parameter(0)
  x = f32[25]{0} parameter(1)
  s = (f32[25]{0}, f32[25]{0:S(5)}, u32[]) copy-start(w)
  n = f32[25]{0} negate(x)
  d = f32[25]{0} copy-done(s)
  ROOT a = f32[25]{0} add(n, d)
}
"""


def test_a_schedule_starts_and_waits_where_its_copies_do():
    assert events_of(COPY) == [
        Start("s", 100, "host", "hbm"),
        Compute("n", 2.0),
        Done("s"),
        Compute("a", 3.0),
    ]


def test_an_unscheduled_module_has_no_events():
    with pytest.raises(MalformedModuleError, match="it is not scheduled"):
        events_of(COPY.replace(", is_scheduled=true", ""))


LOOP = """HloModule m, is_scheduled=true

%wrapped (p: f32[3,25], i: s32[], j: s32[]) -> f32[1,25] {
  %p = f32[3,25]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %j = s32[] parameter(2)
  ROOT %sl = f32[1,25]{1,0} dynamic-slice(%p, %i, %j), dynamic_slice_sizes={1,25}
}

%body (state: (s32[], f32[3,25])) -> (s32[], f32[3,25]) {
  %state = (s32[], f32[3,25]{1,0:S(5)}) parameter(0)
  %k = s32[] get-tuple-element(%state), index=0
  %ws = f32[3,25]{1,0:S(5)} get-tuple-element(%state), index=1
  %zero = s32[] constant(0)
  %start = ((f32[3,25]{1,0:S(5)}, s32[], s32[]), f32[1,25]{1,0}, u32[])
      async-start(%ws, %k, %zero), calls=%wrapped
  %done = f32[1,25]{1,0} async-done(%start)
  %neg = f32[1,25]{1,0} negate(%done)
  %one = s32[] constant(1)
  %next = s32[] add(%k, %one)
  ROOT %out = (s32[], f32[3,25]{1,0:S(5)}) tuple(%next, %ws)
}

%condition (state.1: (s32[], f32[3,25])) -> pred[] {
  %state.1 = (s32[], f32[3,25]{1,0:S(5)}) parameter(0)
  %k.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%k.1, %limit), direction=LT
}

ENTRY %main (w: f32[3,25]) -> (s32[], f32[3,25]) {
  %w = f32[3,25]{1,0:S(5)} parameter(0)
  %z = s32[] constant(0)
  %init = (s32[], f32[3,25]{1,0:S(5)}) tuple(%z, %w)
  ROOT %loop = (s32[], f32[3,25]{1,0:S(5)}) while(%init), condition=%condition, body=%body
}
"""


def test_a_loop_that_moves_bytes_is_repeated():
    events = events_of(LOOP)
    assert [e for e in events if type(e) is Start] == [
        Start(f"start#{i}", 100, "host", "hbm") for i in range(3)
    ]
    assert [e.name for e in events if type(e) is Compute][:4] == [
        "less#0",
        "neg#0",
        "next#0",
        "less#1",
    ]


def test_a_loop_that_moves_none_is_one_compute():
    (event,) = events_of(LOOP.replace("S(5)", "S(0)"))
    assert isinstance(event, Compute)
    assert event.name == "loop"


def test_a_synchronous_read_of_host_memory_is_waited_for_at_once():
    events = events_of("""HloModule m, is_scheduled=true
ENTRY e {
  w = f32[25]{0:S(5)} parameter(0)
  ROOT c = f32[25]{0} copy(w)
}
""")
    assert events == [Start("c", 100, "host", "hbm"), Done("c")]


@pytest.mark.parametrize(("engine", "ends"), [(0, ("host", "hbm")), (1, ("hbm", "host"))])
def test_on_cpu_a_pair_of_custom_calls_moves_its_operand(engine, ends):
    config = f'backend_config="{{engine = {engine} : i64, transfer_id = 1 : i64}}"'
    events = events_of(f"""HloModule m, is_scheduled=true
ENTRY e {{
  w = f32[25]{{0}} parameter(0)
  s = f32[25]{{0}} custom-call(w), custom_call_target="memplan.copy_start", {config}
  ROOT d = f32[25]{{0}} custom-call(s, w), custom_call_target="memplan.copy_done", {config}
}}
""")
    assert events == [Start("s", 100, *ends), Done("s")]


GATHER = """HloModule m, is_scheduled=true
ENTRY e {
  w = f32[25]{0} parameter(0)
  s = (f32[25]{0}, f32[100]{0}) all-gather-start(w), dimensions={0}, replica_groups={{0,1,2,3}}
  n = f32[25]{0} negate(w)
  ROOT d = f32[100]{0} all-gather-done(s)
}
"""


def test_an_asynchronous_collective_starts_and_waits_where_its_halves_do():
    found = events_of(GATHER, WIRED)
    # 300 bytes in three steps, and what it reads and writes in device memory.
    assert found == [
        Exchange("s", 300, 30.75),
        Compute("s", 5.0),
        Compute("n", 2.0),
        Done("s"),
    ]
    assert simulate(found, WIRED).step_time_s == 30.75


def test_without_an_interconnect_a_collective_is_compute():
    assert events_of(GATHER) == [Compute("s", 5.0), Compute("n", 2.0)]


def test_a_loop_with_an_asynchronous_collective_is_repeated():
    text = LOOP.replace("S(5)", "S(0)")
    text = text.replace(
        "%neg = f32[1,25]{1,0} negate(%done)",
        "%g = (f32[1,25]{1,0}, f32[2,25]{1,0}) all-gather-start(%done), dimensions={0}, "
        "replica_groups={{0,1}}\n  %gd = f32[2,25]{1,0} all-gather-done(%g)",
    )
    found = events_of(text, WIRED)
    assert [e.transfer for e in found if type(e) is Exchange] == ["g#0", "g#1", "g#2"]
    assert [e.transfer for e in found if type(e) is Done] == ["g#0", "g#1", "g#2"]
