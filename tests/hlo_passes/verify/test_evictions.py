"""What leaves the device and comes back: each thing that can be wrong with it, by itself."""

from __future__ import annotations

from dataclasses import replace

from hlo_passes.ir import Module
from hlo_passes.plan import (
    Allocation,
    Edits,
    Event,
    Eviction,
    Fence,
    LiveRange,
    Placement,
    Plan,
    Prediction,
    Refetch,
    Slot,
    Transfer,
)
from hlo_passes.proto import hlo_pb2
from hlo_passes.rewrite.edits import apply
from hlo_passes.rewrite.transfers import rewrite
from hlo_passes.verify import verify_executable, verify_plan
from tests.hlo_passes.streamed import (
    SIZE,
    entry,
    rejection,
    slot_of,
    verify_rewrite,
    with_slot,
    with_transfer,
)

ORIGINAL = entry(
    """
    %x = f32[64]{0} parameter(0)
    %a = f32[64]{0} negate(%x)
    %b = f32[64]{0} cosine(%a)
    %c = f32[64]{0} sine(%b)
    %d = f32[64]{0} cosine(%c)
    %e = f32[64]{0} add(%d, %a)
    ROOT %r = f32[64]{0} add(%e, %x)
    """
)

MODULE = apply(ORIGINAL, Edits(evictions=(Eviction("a", "b", (Refetch("e", ("e",)),)),)))
"""Ticks: a 0, b 1, c 2, d 3, e 4, r 5."""

OUT = Transfer(0, "a", "hbm", "host", SIZE, 1, 3, 4, "evict")
BACK = Transfer(1, "a", "host", "hbm", SIZE, 3, 4, 5)
SLOTS = (
    Slot("a", "arena", 0, SIZE, LiveRange(0, 3)),
    Slot("b", "arena", SIZE, SIZE, LiveRange(1, 3)),
    Slot("c", "arena", 2 * SIZE, SIZE, LiveRange(2, 4)),
    Slot("d", "arena", SIZE, SIZE, LiveRange(3, 5)),
    Slot("a#1", "arena", 0, SIZE, LiveRange(3, 5)),
    Slot("e", "arena", 2 * SIZE, SIZE, LiveRange(4, 6)),
    Slot("a#0", "host_temp", 0, SIZE, LiveRange(1, 4)),
)
FENCES = (
    Fence(Event("done", 0), Event("compute", 3), "reuse"),
    Fence(Event("done", 0), Event("start", 1), "data"),
    Fence(Event("compute", 1), Event("start", 1), "reuse"),
    Fence(Event("done", 1), Event("compute", 4), "data"),
)


def plan_for(module: Module = MODULE) -> Plan:
    """The copy comes back where it was: the fetch starts at the tick of the eviction's done."""
    last = len(
        [i for i in module.entry.instructions if i.opcode not in ("copy-start", "copy-done")]
    )
    apart = (
        Slot("x", "arguments", 0, SIZE, LiveRange(0, last - 1)),
        Slot("r", "outputs", 0, SIZE, LiveRange(last - 2, last - 1)),
    )
    sizes = {"arena": 3 * SIZE, "arguments": SIZE, "outputs": SIZE, "host_temp": SIZE}
    return Plan(
        module_fingerprint=module.fingerprint,
        machine="toy",
        budget_bytes=5 * SIZE,
        placements=(Placement(0, "x", "hbm", SIZE),),
        allocations=tuple(
            Allocation(n, "host" if n == "host_temp" else "hbm", size) for n, size in sizes.items()
        ),
        slots=(*SLOTS, *apart),
        transfers=(OUT, BACK),
        fences=FENCES,
        prediction=Prediction(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0),
    )


def without_fence(plan: Plan, n: int) -> Plan:
    return replace(plan, fences=plan.fences[:n] + plan.fences[n + 1 :])


def test_an_eviction_is_accepted_and_written_back():
    plan = plan_for()
    verify_plan(MODULE, plan)
    rewritten = rewrite(MODULE, plan, "copies")
    verify_rewrite(MODULE, plan, rewritten)
    assert verify_executable(plan, rewritten).exactly


def test_says_which_fence_an_eviction_needs():
    assert rejection(without_fence(plan_for(), 0), MODULE) == (
        "plan rejected: no fence makes compute wait for the eviction of %a, transfer 0 (tick 3, "
        "%d = f32[64] cosine). Add the reuse fence done:0 -> compute:3."
    )
    assert rejection(without_fence(plan_for(), 1), MODULE) == (
        "plan rejected: no fence makes transfer 1 wait until %a is in host memory (tick 3). Add "
        "the data fence done:0 -> start:1."
    )
    assert "Add the reuse fence compute:1 -> start:1." in rejection(
        without_fence(plan_for(), 2), MODULE
    )


def test_says_in_which_order_the_ticks_of_an_eviction_stand():
    early = with_transfer(plan_for(), replace(OUT, start=0))
    assert "expected 1 <= start <= done <= end < 6, found start 0, done 3, end 4" in rejection(
        early, MODULE
    )
    too_soon = with_transfer(plan_for(), replace(BACK, start=2))
    assert "expected 3 <= start <= done < end <= 6, found start 2, done 4, end 5" in rejection(
        too_soon, MODULE
    )


def test_a_copy_is_kept_until_it_is_fetched():
    longer = with_transfer(plan_for(), replace(OUT, end=5))
    assert "keeps %a in host until tick 5, the last fetch of it is done at tick 4" in rejection(
        longer, MODULE
    )
    plan = plan_for()
    slot = slot_of(plan, "a#0")
    verify_plan(MODULE, with_slot(plan, slot, replace(slot, live_range=LiveRange(1, 5))))
    short = with_slot(plan, slot, replace(slot, live_range=LiveRange(1, 3)))
    assert "expected ticks [1, 4), found ticks [1, 3)" in rejection(short, MODULE)


def test_bytes_are_held_until_the_eviction_is_done():
    plan = plan_for()
    slot = slot_of(plan, "a")
    short = with_slot(plan, slot, replace(slot, live_range=LiveRange(0, 2)))
    assert "expected ticks [0, 3), found ticks [0, 2)" in rejection(short, MODULE)
    # What it reads is not written over before it is done: not even by its last reader.
    over = tuple(
        replace(s, offset=0) if s.buffer == "b" else s for s in plan.slots if s.buffer != "d"
    )
    assert "the slots of %a and %b overlap" in rejection(
        replace(plan, slots=(*over, slot_of(plan, "d"))), MODULE
    )


def test_a_value_may_leave_and_come_back_at_one_tick():
    """Its place on the host is then needed for that tick."""
    module = apply(ORIGINAL, Edits(evictions=(Eviction("d", "d", (Refetch("e", ("e",)),)),)))
    slots = [
        Slot(name, "arena", k * SIZE, SIZE, LiveRange(start, end))
        for k, (name, start, end) in enumerate(
            (("a", 0, 5), ("b", 1, 3), ("c", 2, 4), ("d", 3, 4), ("d#1", 4, 5), ("e", 4, 6))
        )
    ]
    base = plan_for(module)
    plan = replace(
        base,
        budget_bytes=8 * SIZE,
        allocations=(Allocation("arena", "hbm", 6 * SIZE), *base.allocations[1:]),
        slots=(*slots, Slot("d#0", "host_temp", 0, SIZE, LiveRange(4, 5)), *base.slots[-2:]),
        transfers=(
            Transfer(0, "d", "hbm", "host", SIZE, 4, 4, 4, "evict"),
            Transfer(1, "d", "host", "hbm", SIZE, 4, 4, 5),
        ),
        fences=(
            Fence(Event("done", 0), Event("compute", 4), "reuse"),
            Fence(Event("done", 0), Event("start", 1), "data"),
            Fence(Event("done", 1), Event("compute", 4), "data"),
        ),
    )
    verify_plan(module, plan)
    slot = slot_of(plan, "d#0")
    nowhere = with_slot(plan, slot, replace(slot, live_range=LiveRange(4, 4)))
    assert "256 bytes during ticks [4, 4) hold nothing" in rejection(nowhere, module)


TWICE = apply(
    entry(
        """
        %x = f32[64]{0} parameter(0)
        %a = f32[64]{0} negate(%x)
        %b = f32[64]{0} cosine(%x)
        %c = f32[64]{0} add(%x, %a)
        %d = f32[64]{0} sine(%c)
        %e = f32[64]{0} add(%d, %b)
        ROOT %r = f32[64]{0} add(%e, %x)
        """
    ),
    Edits(
        evictions=(
            Eviction("a", "a", (Refetch("c", ("c",)),)),
            Eviction("b", "b", (Refetch("e", ("e",)),)),
        )
    ),
)


def one_place_on_the_host(out: int) -> Plan:
    """b leaves at tick `out`, to where a's copy was, which is back at tick 2."""
    transfers = (
        Transfer(0, "a", "hbm", "host", SIZE, 1, 1, 2, "evict"),
        Transfer(1, "a", "host", "hbm", SIZE, 1, 2, 3),
        Transfer(2, "b", "hbm", "host", SIZE, out, 3, 4, "evict"),
        Transfer(3, "b", "host", "hbm", SIZE, 3, 4, 5),
    )
    lives = {"a": (0, 1), "b": (1, 3), "c": (2, 4), "d": (3, 5), "e": (4, 6)}
    lives |= {"a#1": (1, 3), "b#3": (3, 5)}
    slots = [
        Slot(name, "arena", k * SIZE, SIZE, LiveRange(*live))
        for k, (name, live) in enumerate(lives.items())
    ]
    slots.append(Slot("a#0", "host_temp", 0, SIZE, LiveRange(1, 2)))
    slots.append(Slot("b#2", "host_temp", 0, SIZE, LiveRange(out, 4)))
    fences: list[Fence] = []
    for out_id, back_id in ((0, 1), (2, 3)):
        done, back = Event("done", out_id), Event("done", back_id)
        fences.append(Fence(done, Event("compute", transfers[out_id].done), "reuse"))
        fences.append(Fence(done, Event("start", back_id), "data"))
        fences.append(Fence(back, Event("compute", transfers[back_id].done), "data"))
    base = plan_for(TWICE)
    return replace(
        base,
        budget_bytes=9 * SIZE,
        allocations=(Allocation("arena", "hbm", 7 * SIZE), *base.allocations[1:]),
        slots=(*slots, *base.slots[-2:]),
        transfers=transfers,
        fences=tuple(fences),
    )


def test_a_place_on_the_host_is_free_when_what_was_there_is_back():
    verify_plan(TWICE, one_place_on_the_host(3))
    assert rejection(one_place_on_the_host(2), TWICE) == (
        "plan rejected: transfer 2 of %b may overwrite %a#0 while transfer 1 still reads it (tick "
        "2). Start it when transfer 1 is done, at tick 2."
    )


UPDATED = apply(
    entry(
        """
        %x = f32[64]{0} parameter(0)
        %zero = s32[] constant(0)
        %a = f32[64]{0} negate(%x)
        %u = f32[64]{0} dynamic-update-slice(%a, %x, %zero)
        %c = f32[64]{0} sine(%u)
        %d = f32[64]{0} cosine(%c)
        ROOT %r = f32[64]{0} add(%d, %a)
        """
    ),
    Edits(evictions=(Eviction("a", "a", (Refetch("r", ("r",)),)),)),
)


def test_nothing_writes_over_what_is_on_its_way_out():
    def plan(done: int) -> Plan:
        lives = {"a": (1, 4), "c": (3, 5), "d": (4, 6), "a#1": (4, 6)}
        slots = [
            Slot(name, "arena", k * SIZE, SIZE, LiveRange(*live))
            for k, (name, live) in enumerate(lives.items())
        ]
        slots.append(Slot("a#0", "host_temp", 0, SIZE, LiveRange(2, 5)))
        base = plan_for(UPDATED)
        out = replace(OUT, start=2, done=done, end=5)
        fences = (
            Fence(Event("done", 0), Event("compute", done), "reuse"),
            Fence(Event("done", 0), Event("start", 1), "data"),
            Fence(Event("done", 1), Event("compute", 5), "data"),
        )
        return replace(
            base,
            budget_bytes=7 * SIZE,
            allocations=(Allocation("arena", "hbm", 5 * SIZE), *base.allocations[1:]),
            slots=(*slots, *base.slots[-2:]),
            transfers=(out, replace(BACK, start=4, done=5, end=6)),
            fences=fences,
        )

    verify_plan(UPDATED, plan(2))
    assert rejection(plan(3), UPDATED) == (
        "plan rejected: %u writes over %a at tick 2, while transfer 0 takes it away until tick 3 "
        "(%u = f32[64] dynamic-update-slice). Be done with the eviction before."
    )


def test_what_an_eviction_reads_is_not_written_over_by_choice():
    """b has no slot: it lies where a lay, if that is free."""
    plan = plan_for()
    slots = tuple(s for s in plan.slots if s.buffer not in ("b", "a"))
    a = Slot("a", "arena", 0, SIZE, LiveRange(0, 3))
    in_time = with_transfer(plan, replace(OUT, done=1))
    fences = (replace(FENCES[0], after=Event("compute", 1)), *FENCES[1:3])
    fences += (Fence(Event("compute", 2), Event("start", 1), "reuse"), FENCES[3])
    verify_plan(MODULE, replace(in_time, slots=(*slots, a), fences=fences))
    late = replace(plan, slots=(*slots, a))
    assert "%b has no slot" in rejection(late, MODULE)


# ── What the module says ─────────────────────────────────────────────────────────────────


def changed(change_name: str, attribute: str = "", operand: str = "") -> Module:
    """The module with another operand of an instruction, or marked, or not."""
    proto = MODULE.to_proto()
    named = {i.name: i for c in proto.computations for i in c.instructions}
    if operand:
        named[change_name].operand_ids[0] = named[operand].id
    if attribute:
        named[change_name].frontend_attributes.map["memplan.evict"] = attribute
    return Module(hlo_pb2.HloModuleProto.FromString(proto.SerializeToString()))


def test_a_marked_pair_takes_a_result_away_or_brings_it_back():
    wrong = changed("a.evict-start", operand="x")
    assert "%a.evict-done is marked as an eviction, but copies %x from memory space 0 to 5" in (
        rejection(plan_for(wrong), wrong)
    )


def test_what_is_on_the_host_is_read_by_copies():
    wrong = changed("e", operand="a.evict-done")
    assert "%e reads %a in host memory" in rejection(plan_for(wrong), wrong)


def test_a_pair_that_is_not_marked_is_compute():
    """The copies that a program makes itself are scheduled with its loops' transfers."""
    proto = MODULE.to_proto()
    for c in proto.computations:
        for i in c.instructions:
            i.frontend_attributes.Clear()
    unmarked = Module(proto)
    plan = replace(plan_for(), module_fingerprint=unmarked.fingerprint)
    assert "transfer 0 (evict) of %a: expected the prefetch of an argument" in rejection(
        plan, unmarked
    )
    lives = {"a": (0, 4), "b": (1, 5), "c": (4, 6), "d": (5, 9), "a.refetch0-start{0}": (6, 9)}
    slots = [
        Slot(name, "arena", k * SIZE, SIZE, LiveRange(*live))
        for k, (name, live) in enumerate((*lives.items(), ("e", (8, 10))))
    ]
    apart = (
        Slot("x", "arguments", 0, SIZE, LiveRange(0, 10)),
        Slot("r", "outputs", 0, SIZE, LiveRange(9, 10)),
    )
    verify_plan(
        unmarked,
        replace(
            plan,
            budget_bytes=9 * SIZE,
            allocations=(Allocation("arena", "hbm", 7 * SIZE), *plan.allocations[1:]),
            slots=(*slots, *apart),
            transfers=(),
            fences=(),
        ),
    )
