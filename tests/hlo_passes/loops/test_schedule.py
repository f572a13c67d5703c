"""Loop bodies reach the bound of the link or of the compute, in the memory of their slots."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops.order import droppable_copies
from hlo_passes.loops.rewrite import rewrite_loops
from hlo_passes.loops.schedule import schedule_loops
from hlo_passes.memory.usage import memory_usage
from hlo_passes.plan import LoopSchedule
from hlo_passes.simulator.timeline import scheduled_step
from hlo_passes.verify import verify_equivalent, verify_loops
from tests.hlo_passes.rings import SLOT_BYTES, TRIPS, Ring, ring_machine
from tests.hlo_passes.toys import module_of

SLOW, FAST = 10.0, 100.0
RINGS = [
    Ring(slots, stores, copied, eager)
    for slots in (2, 3, 4)
    for stores in (False, True)
    for copied in (False, True)
    for eager in (False, True)
]


def of_lines(lines: list[str]) -> Module:
    """A scheduled module whose entry these are."""
    return module_of("\n".join(["HloModule m, is_scheduled=true", "ENTRY %main {", *lines, "}"]))


def scheduled(ring: Ring, machine: Machine) -> tuple[Module, tuple[LoopSchedule, ...], Module]:
    module = ring.module()
    loops = schedule_loops(module, machine)
    rewritten = rewrite_loops(module, loops, machine)
    verify_equivalent(module, rewritten)
    verify_loops(rewritten, loops)
    return module, loops, rewritten


def body_of(loops: tuple[LoopSchedule, ...]) -> LoopSchedule:
    return next(loop for loop in loops if loop.computation == "body")


@pytest.mark.parametrize("ring", RINGS)
def test_a_slow_link_never_stands_still(ring: Ring):
    machine = ring_machine(SLOW)
    module, _, rewritten = scheduled(ring, machine)
    before, after = scheduled_step(module, machine), scheduled_step(rewritten, machine)
    # What the entry fetches first finds one cheap instruction to hide behind.
    assert after.step_time_s <= max(after.link_s.values()) + 10.0
    assert after.step_time_s < before.step_time_s
    assert after.moved_bytes == before.moved_bytes


@pytest.mark.parametrize("ring", RINGS)
def test_a_fast_link_hides_behind_compute(ring: Ring):
    machine = ring_machine(FAST)
    _, _, rewritten = scheduled(ring, machine)
    after = scheduled_step(rewritten, machine)
    prologue = (ring.slots - 1) * SLOT_BYTES / FAST
    assert after.stall_s <= prologue


@pytest.mark.parametrize("ring", [r for r in RINGS if not r.stores])
def test_no_more_than_the_slots_are_held(ring: Ring):
    machine = ring_machine(SLOW)
    _, _, rewritten = scheduled(ring, machine)
    scalars = 64
    assert memory_usage(rewritten, "tpu").lower_bound_bytes <= ring.slots * SLOT_BYTES + scalars


def test_the_record_of_a_ring():
    module, loops, _ = scheduled(Ring(copied=True), ring_machine(SLOW))
    body = body_of(loops)
    assert (body.loop, body.trip_count, body.executions, body.depth) == ("loop", TRIPS, TRIPS, 1)
    assert body.dropped_copies == ("copy1",)
    assert body.is_resequenced
    assert body.moved_bytes == TRIPS * 2 * SLOT_BYTES
    internal, carried = body.transfers
    assert [t.start_name for t in body.transfers] == ["f0.start", "f1.start"]
    assert [t.done_name for t in body.transfers] == ["f0.done", "f1.done"]
    assert (internal.source, internal.destination, internal.kind) == ("host", "hbm", "prefetch")
    assert (internal.start_after, internal.done_after) == ("", "y0")
    # The slot's old weight is read by y0; what is fetched is handed on.
    assert (carried.start_after, carried.done_after) == ("y0", "y1")
    assert carried.end == body.ticks
    entry = next(loop for loop in loops if loop.depth == 0)
    assert (entry.computation, entry.loop, entry.trip_count) == ("main", "", None)
    assert [c.name for c in droppable_copies(module, {})] == []


def test_stores_wait_for_each_other_and_for_the_end():
    _, loops, _ = scheduled(Ring(stores=True), ring_machine(FAST))
    stores = [t for t in body_of(loops).transfers if t.kind == "evict"]
    assert [t.source for t in stores] == ["hbm", "hbm"]
    first, second = stores
    assert first.start <= first.done <= second.start <= second.done


@pytest.mark.parametrize("ring", RINGS)
def test_issue_order_is_that_of_the_starts(ring: Ring):
    for bytes_per_s in (SLOW, FAST):
        _, loops, _ = scheduled(ring, ring_machine(bytes_per_s))
        for loop in loops:
            assert [t.id for t in loop.transfers] == list(range(len(loop.transfers)))
            assert all(a.start <= b.start for a, b in pairwise(loop.transfers))
            assert all(t.start <= t.done <= t.end <= loop.ticks for t in loop.transfers)


def test_an_order_that_is_as_good_stays():
    machine = ring_machine(FAST)
    _, loops, rewritten = scheduled(Ring(slots=2), machine)
    again = schedule_loops(rewritten, machine)
    assert [loop.is_resequenced for loop in loops] == [True, True]
    assert [loop.is_resequenced for loop in again] == [False, False]
    for one, two in zip(loops, again, strict=True):
        assert {(t.start_name, t.done_after) for t in one.transfers} == {
            (t.start_name, t.done_after) for t in two.transfers
        }
    kept = rewrite_loops(rewritten, again, machine)
    assert [i.name for i in kept.instructions.values()] == [
        i.name for i in rewritten.instructions.values()
    ]


def test_the_nearest_deadline_goes_first_though_its_index_comes_a_little_later():
    ring = Ring()
    later, sooner = ring.fetch("later", "stack", "zero"), ring.fetch("sooner", "stack", "index")
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    lines = [
        "  %x = f32[8,8]{1,0} parameter(0)",
        f"  %stack = {ring.stack} parameter(1)",
        "  %k = s32[] parameter(2)",
        "  %zero = s32[] constant(0)",
        *later,
        "  %index = s32[] add(%k, %k)",
        *sooner,
        f"  %y0 = f32[8,8]{{1,0}} dot(%x, %x), {product}",
        "  %v = f32[8,8]{1,0} bitcast(%sooner.done)",
        f"  %y1 = f32[8,8]{{1,0}} dot(%y0, %v), {product}",
        "  %w = f32[8,8]{1,0} bitcast(%later.done)",
        f"  ROOT %y2 = f32[8,8]{{1,0}} dot(%y1, %w), {product}",
    ]
    machine = ring_machine(SLOW)
    module = of_lines(lines)
    (entry,) = schedule_loops(module, machine)
    assert [t.start_name for t in entry.transfers] == ["sooner.start", "later.start"]
    assert [t.done_after for t in entry.transfers] == ["y0", "y1"]


@pytest.mark.parametrize(("filled", "mark"), [("value", "y0"), ("k", "fill")])
def test_a_transfer_is_not_known_by_what_only_fills_memory(filled: str, mark: str):
    # XLA:TPU moves that to its reader afterwards; what reads an argument it leaves alone.
    ring = Ring()
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    lines = [
        "  %x = f32[8,8]{1,0} parameter(0)",
        f"  %stack = {ring.stack} parameter(1)",
        "  %k = f32[] parameter(2)",
        "  %zero = s32[] constant(0)",
        "  %value = f32[] constant(0)",
        f"  %y0 = f32[8,8]{{1,0}} dot(%x, %x), {product}",
        f"  %fill = f32[32,32]{{1,0}} broadcast(%{filled}), dimensions={{}}",
        *ring.fetch("f", "stack", "zero"),
        "  %w = f32[8,8]{1,0} bitcast(%f.done)",
        f"  %y1 = f32[8,8]{{1,0}} dot(%y0, %w), {product}",
        "  ROOT %r = (f32[8,8]{1,0}, f32[32,32]{1,0}) tuple(%y1, %fill)",
    ]
    module = of_lines(lines)
    (entry,) = schedule_loops(module, ring_machine(SLOW))
    assert [t.done_after for t in entry.transfers] == [mark]


def test_transfers_that_are_in_flight_at_once_by_control_edges_stay_in_xla_s_order():
    ring = Ring()
    (start, done), (late, later) = (ring.fetch(name, "stack", "zero") for name in "ab")
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    lines = [
        "  %x = f32[8,8]{1,0} parameter(0)",
        f"  %stack = {ring.stack} parameter(1)",
        "  %zero = s32[] constant(0)",
        start,
        f"{late}, control-predecessors={{%a.start}}",
        f"{done}, control-predecessors={{%b.start}}",
        later,
        "  %v = f32[8,8]{1,0} bitcast(%a.done)",
        f"  %y0 = f32[8,8]{{1,0}} dot(%x, %v), {product}",
        "  %w = f32[8,8]{1,0} bitcast(%b.done)",
        f"  ROOT %y1 = f32[8,8]{{1,0}} dot(%y0, %w), {product}",
    ]
    machine = ring_machine(SLOW)
    module = of_lines(lines)
    (entry,) = schedule_loops(module, machine)
    assert not entry.is_resequenced
    assert [t.start_name for t in entry.transfers] == ["a.start", "b.start"]
    names = [i.name for i in module.entry.instructions]
    kept = rewrite_loops(module, (entry,), machine)
    assert [i.name for i in kept.entry.instructions] == names


def test_no_transfers_no_loops():
    machine = ring_machine(FAST)
    text = Ring().text().replace("S(5)", "S(0)")
    module = Ring().module()
    assert schedule_loops(module, machine)
    plain = module_of(text)
    assert schedule_loops(plain, machine) == ()
    assert rewrite_loops(plain, (), machine) is plain


def test_a_fetch_does_not_stand_across_another_loop():
    ring = Ring()
    start, done = ring.fetch("late", "stack.0", "zero")
    text = (
        ring.text()
        .replace("  ROOT %loop = ", f"{start}\n  %loop = ")
        .replace(
            "body=%body\n}",
            "body=%body\n"
            + "\n".join(
                [
                    done,
                    "  %w = f32[8,8]{1,0} bitcast(%late.done)",
                    "  %y = f32[8,8]{1,0} get-tuple-element(%loop), index=1",
                    "  ROOT %z = f32[8,8]{1,0} add(%y, %w)",
                    "}",
                ]
            ),
        )
        .replace(f") -> {ring.state} {{\n  %x.0", ") -> f32[8,8] {\n  %x.0")
    )
    machine = ring_machine(FAST)
    module = module_of(text)
    loops = schedule_loops(module, machine)
    rewritten = rewrite_loops(module, loops, machine)
    names = [i.name for i in rewritten.entry.instructions]
    assert names.index("loop") < names.index("late.start")
