"""The checker accepts right plans, and rejects every way to get them wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hlo_passes.errors import PlanMismatchError, VerificationError
from hlo_passes.hardware.machine import Machine, Tier
from hlo_passes.plan import (
    Allocation,
    Event,
    Fence,
    LiveRange,
    Plan,
    Slot,
)
from hlo_passes.verify import verify_plan
from tests.hlo_passes.streamed import (
    SIZE,
    STEPS,
    Streamed,
    rejection,
    slot_of,
    streamed,
    streamed_plan,
    with_slot,
    with_transfer,
)
from tests.hlo_passes.toys import module_of


@given(st.one_of(streamed(), streamed(cpu=True)), st.randoms(use_true_random=False))
def test_a_right_plan_is_accepted(program: Streamed, choose: random.Random):
    verify_plan(program.module(), program.plan(choose))


def late_start(plan: Plan, pick: random.Random) -> Plan:
    t = pick.choice(plan.transfers)
    return with_transfer(plan, replace(t, start=t.done + 1, end=max(t.end, t.done + 2)))


def late_done(plan: Plan, pick: random.Random) -> Plan:
    t = pick.choice(plan.transfers)
    return with_transfer(plan, replace(t, done=t.done + 1, end=t.end + 1))


def early_start(plan: Plan, pick: random.Random) -> Plan:
    """Into the bytes' earlier holder; the order of issue is kept."""
    reuses = {f.after.index: f.before.index for f in plan.fences if f.reason == "reuse"}
    movable = [
        t
        for t in plan.transfers
        if t.id in reuses and (t.id == 0 or plan.transfers[t.id - 1].start <= reuses[t.id])
    ]
    assume(movable)
    t = pick.choice(movable)
    return with_transfer(plan, replace(t, start=reuses[t.id]))


def early_end(plan: Plan, pick: random.Random) -> Plan:
    longer = [t for t in plan.transfers if t.end - 1 > t.done]
    assume(longer)
    t = pick.choice(longer)
    return with_transfer(plan, replace(t, end=t.end - 1))


def dropped_fence(plan: Plan, pick: random.Random) -> Plan:
    dropped = pick.randrange(len(plan.fences))
    return replace(plan, fences=plan.fences[:dropped] + plan.fences[dropped + 1 :])


def early_reuse_fence(plan: Plan, pick: random.Random) -> Plan:
    reuses = [f for f in plan.fences if f.reason == "reuse" and f.before.index > 0]
    assume(reuses)
    f = pick.choice(reuses)
    weaker = replace(f, before=Event("compute", f.before.index - 1))
    return replace(plan, fences=tuple(weaker if g is f else g for g in plan.fences))


def late_data_fence(plan: Plan, pick: random.Random) -> Plan:
    end = slot_of(plan, "x").live_range.end
    datas = [f for f in plan.fences if f.reason == "data" and f.after.index + 1 < end]
    assume(datas)
    f = pick.choice(datas)
    weaker = replace(f, after=Event("compute", f.after.index + 1))
    return replace(plan, fences=tuple(weaker if g is f else g for g in plan.fences))


def backward_fence(plan: Plan, pick: random.Random) -> Plan:
    f = pick.choice(plan.fences)
    return replace(plan, fences=(*plan.fences, Fence(f.after, f.before, f.reason)))


def shared_slot(plan: Plan, pick: random.Random) -> Plan:
    copies = [s for s in plan.slots if "#" in s.buffer]
    pairs = [
        (a, b)
        for a in copies
        for b in copies
        if a.buffer < b.buffer and a.live_range.overlaps(b.live_range)
    ]
    assume(pairs)
    a, b = pick.choice(pairs)
    return with_slot(plan, b, replace(b, offset=a.offset))


def half_shared_slot(plan: Plan, pick: random.Random) -> Plan:
    """Half of the slot hangs over a neighbour that is live at the time."""
    copies = [s for s in plan.slots if "#" in s.buffer]
    pairs = [
        (a, b)
        for a in copies
        for b in plan.slots
        if b.allocation == "arena"
        and a.live_range.overlaps(b.live_range)
        and b.offset == a.offset + SIZE
    ]
    assume(pairs)
    a, _ = pick.choice(pairs)
    return with_slot(plan, a, replace(a, offset=a.offset + SIZE // 2))


def slot_in_other_tier(plan: Plan, pick: random.Random) -> Plan:
    s = pick.choice(plan.slots)
    moved = replace(s, allocation="elsewhere", offset=0)
    host = Allocation("elsewhere", "host", SIZE)
    return replace(with_slot(plan, s, moved), allocations=(*plan.allocations, host))


def transfer_to_other_tier(plan: Plan, pick: random.Random) -> Plan:
    return with_transfer(plan, replace(pick.choice(plan.transfers), destination="vmem"))


def transfer_from_other_tier(plan: Plan, pick: random.Random) -> Plan:
    return with_transfer(plan, replace(pick.choice(plan.transfers), source="nvme"))


def missing_fetch(plan: Plan, pick: random.Random) -> Plan:
    """One transfer is gone, without a trace: the others are numbered anew."""
    gone = pick.choice(plan.transfers)

    def number(i: int) -> int:
        return i - (i > gone.id)

    def event(e: Event) -> Event:
        return e if e.kind == "compute" else Event(e.kind, number(e.index))

    transfers = [t for t in plan.transfers if t is not gone]
    names = {f"{t.buffer}#{t.id}": f"{t.buffer}#{number(t.id)}" for t in transfers}
    halves = {Event("start", gone.id), Event("done", gone.id)}
    return replace(
        plan,
        transfers=tuple(replace(t, id=number(t.id)) for t in transfers),
        slots=tuple(
            replace(s, buffer=names.get(s.buffer, s.buffer))
            for s in plan.slots
            if s.buffer != f"{gone.buffer}#{gone.id}"
        ),
        fences=tuple(
            Fence(event(f.before), event(f.after), f.reason)
            for f in plan.fences
            if not {f.before, f.after} & halves
        ),
    )


def useless_fetch(plan: Plan, pick: random.Random) -> Plan:
    """A second copy that comes later serves every use, so that the first serves none."""
    t = pick.choice(plan.transfers)
    assume(t.end - t.done == 1)
    k = len(plan.transfers)
    late = replace(t, id=k, start=max(t.done, plan.transfers[-1].start))
    assume(late.start <= late.done)
    slot = slot_of(plan, f"{t.buffer}#{t.id}")
    arena = plan.allocations[0]
    own = Slot(f"{t.buffer}#{k}", "arena", arena.size, SIZE, LiveRange(late.start, late.end))
    return replace(
        plan,
        transfers=(*plan.transfers, late),
        slots=(*plan.slots, own),
        allocations=(replace(arena, size=arena.size + slot.size), *plan.allocations[1:]),
        budget_bytes=plan.budget_bytes + SIZE,
        fences=(*plan.fences, Fence(Event("done", k), Event("compute", t.done), "data")),
    )


def shrunk_slot(plan: Plan, pick: random.Random) -> Plan:
    s = pick.choice(plan.slots)
    return with_slot(plan, s, replace(s, size=s.size - 1))


def shrunk_allocation(plan: Plan, pick: random.Random) -> Plan:
    a = pick.choice(plan.allocations)
    smaller = replace(a, size=a.size - 1)
    return replace(plan, allocations=tuple(smaller if b is a else b for b in plan.allocations))


def missing_argument_slot(plan: Plan, pick: random.Random) -> Plan:
    return replace(plan, slots=tuple(s for s in plan.slots if s.buffer != "x"))


def missing_copy_slot(plan: Plan, pick: random.Random) -> Plan:
    gone = pick.choice([s for s in plan.slots if "#" in s.buffer])
    return replace(plan, slots=tuple(s for s in plan.slots if s is not gone))


def short_slot(plan: Plan, pick: random.Random) -> Plan:
    longer = [s for s in plan.slots if s.live_range.end - s.live_range.start > 1]
    assume(longer)
    s = pick.choice(longer)
    shorter = LiveRange(s.live_range.start, s.live_range.end - 1)
    return with_slot(plan, s, replace(s, live_range=shorter))


def slot_in_no_allocation(plan: Plan, pick: random.Random) -> Plan:
    s = pick.choice(plan.slots)
    return with_slot(plan, s, replace(s, allocation="attic"))


def wrong_size(plan: Plan, pick: random.Random) -> Plan:
    return with_transfer(plan, replace(pick.choice(plan.transfers), size=SIZE // 2))


def small_budget(plan: Plan, pick: random.Random) -> Plan:
    return replace(plan, budget_bytes=plan.budget_bytes - pick.randint(1, SIZE))


def wrong_placement(plan: Plan, pick: random.Random) -> Plan:
    gone = pick.randrange(len(plan.placements))
    return replace(plan, placements=plan.placements[:gone] + plan.placements[gone + 1 :])


def wrong_number(plan: Plan, pick: random.Random) -> Plan:
    t = pick.choice(plan.transfers)
    changed = replace(t, id=t.id + 1)
    return replace(plan, transfers=tuple(changed if u is t else u for u in plan.transfers))


def evicting(plan: Plan, pick: random.Random) -> Plan:
    return with_transfer(plan, replace(pick.choice(plan.transfers), kind="evict"))


MUTATIONS = (
    late_start,
    late_done,
    early_start,
    early_end,
    dropped_fence,
    early_reuse_fence,
    late_data_fence,
    backward_fence,
    shared_slot,
    half_shared_slot,
    slot_in_other_tier,
    transfer_to_other_tier,
    transfer_from_other_tier,
    missing_fetch,
    useless_fetch,
    shrunk_slot,
    shrunk_allocation,
    missing_argument_slot,
    missing_copy_slot,
    short_slot,
    slot_in_no_allocation,
    wrong_size,
    small_budget,
    wrong_placement,
    wrong_number,
    evicting,
)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@settings(max_examples=40)
@given(
    program=st.one_of(streamed(), streamed(cpu=True)),
    choose=st.randoms(use_true_random=False),
    pick=st.randoms(use_true_random=False),
)
def test_a_wrong_plan_is_rejected(
    mutate: Callable[[Plan, random.Random], Plan],
    program: Streamed,
    choose: random.Random,
    pick: random.Random,
):
    wrong = mutate(program.plan(choose), pick)
    with pytest.raises(VerificationError):
        verify_plan(program.module(), wrong)


def test_the_streamed_plan_is_accepted():
    plan = streamed_plan()
    verify_plan(Streamed(STEPS).module(), plan)
    assert plan.allocations[0].size == 4 * SIZE


def test_says_that_a_read_comes_before_its_data():
    plan = streamed_plan()
    late = with_transfer(plan, replace(plan.transfers[1], done=2, end=3))
    assert rejection(late) == (
        "plan rejected: %w1 is read at tick 1, before its data: transfer 1 is done at tick 2 "
        "(tick 1, %a1 = f32[64] multiply, train.py:2). Wait for it at tick 1 or before."
    )


def test_says_that_a_buffer_is_not_fetched_again():
    plan = streamed_plan()
    once = replace(
        plan,
        transfers=plan.transfers[:3],
        fences=tuple(f for f in plan.fences if 3 not in (f.before.index, f.after.index)),
        slots=tuple(s for s in plan.slots if s.buffer != "w1#3"),
    )
    assert rejection(once) == (
        "plan rejected: %w1 is read at tick 4, but no copy is there: that of transfer 1 ended at "
        "tick 2 (tick 4, %a4 = f32[64] multiply, train.py:5). Fetch it again before this use, or "
        "hold the copy until after it."
    )


def test_says_that_nothing_brings_a_buffer():
    plan = streamed_plan()
    bare = replace(plan, transfers=(), fences=())
    assert rejection(bare) == (
        "plan rejected: %w0 lives off the device and is read at tick 0, but no transfer brings "
        "it (tick 0, %a0 = f32[64] multiply, train.py:1). Add a transfer that is done by then."
    )
    on_cpu = Streamed(STEPS, cpu=True)
    fingerprint = on_cpu.module().fingerprint
    assert "%w0 is placed in host and read, but no transfer brings it" in rejection(
        replace(bare, module_fingerprint=fingerprint), on_cpu
    )


def test_says_which_order_of_ticks_is_expected():
    plan = streamed_plan()
    assert (
        "transfer 3 of %w1: expected 1 <= start <= done < end <= 5, found start 5, done 4, end 5"
    ) in rejection(with_transfer(plan, replace(plan.transfers[3], start=5)))


def test_says_which_slots_overlap():
    plan = streamed_plan()
    first, second = slot_of(plan, "w0#0"), slot_of(plan, "w1#1")
    assert rejection(with_slot(plan, second, replace(second, offset=first.offset))) == (
        "plan rejected: the slots of %w0#0 and %w1#1 overlap in allocation 'arena': "
        f"bytes [{first.offset}, {first.offset + SIZE}) during ticks [0, 1) against "
        f"bytes [{first.offset}, {first.offset + SIZE}) during ticks [0, 2) "
        "(tick 0, %a0 = f32[64] multiply, train.py:1). Slots that are live at one time lie apart."
    )


def test_a_transfer_may_complete_at_once():
    """Disjoint in time if transfers took their time; but w0#2 is written from tick 1 on."""
    plan = streamed_plan()
    early, held = slot_of(plan, "w0#2"), slot_of(plan, "w1#1")
    assert early.live_range.start == 1
    assert "overlap" in rejection(with_slot(plan, early, replace(early, offset=held.offset)))


def test_names_the_fence_that_is_missing():
    plan = streamed_plan()
    no_data = replace(plan, fences=tuple(f for f in plan.fences if f.reason == "reuse"))
    assert rejection(no_data) == (
        "plan rejected: no fence makes %w0 wait for transfer 0 (tick 0, %a0 = f32[64] multiply, "
        "train.py:1). Add the data fence done:0 -> compute:0."
    )
    no_reuse = replace(plan, fences=tuple(f for f in plan.fences if f.reason == "data"))
    assert rejection(no_reuse) == (
        "plan rejected: transfer 3 of %w1 may overwrite %w1#1 while it is still read: no fence "
        "orders it after the last reader (tick 1, %a1 = f32[64] multiply, train.py:2). Add the "
        "reuse fence compute:1 -> start:3."
    )


def test_a_fence_may_follow_from_others():
    """start:3 comes after compute:1 when it comes after start:2, which does."""
    plan = streamed_plan(((0, 0), (0, 1), (2, 3), (2, 4)))
    two, three = slot_of(plan, "w0#2"), slot_of(plan, "w1#3")
    swapped = with_slot(plan, two, replace(two, offset=three.offset))
    swapped = with_slot(swapped, three, replace(three, offset=two.offset))
    assert "Add the reuse fence compute:1 -> start:3." in rejection(swapped)
    chain = Fence(Event("start", 2), Event("start", 3), "reuse")
    verify_plan(Streamed(STEPS).module(), replace(swapped, fences=(*plan.fences, chain)))


def test_says_that_a_fence_runs_backwards_or_names_nothing():
    plan = streamed_plan()
    back = Fence(Event("compute", 3), Event("start", 2), "reuse")
    assert rejection(replace(plan, fences=(*plan.fences, back))) == (
        "plan rejected: compute:3 does not come before start:2 in the plan's own order "
        "(fence compute:3 -> start:2, reuse). Such a program would wait for itself."
    )
    nothing = Fence(Event("done", 4), Event("compute", 4), "data")
    assert "there is no done:4: expected an index below 4" in rejection(
        replace(plan, fences=(*plan.fences, nothing))
    )


def test_says_what_is_wrong_with_a_slot():
    plan = streamed_plan()
    slot = slot_of(plan, "w0#2")
    assert rejection(with_slot(plan, slot, replace(slot, size=100))) == (
        "plan rejected: the slot of %w0#2 does not hold it: expected 256 bytes, found 100 "
        "(%w0 = f32[64]S(5) parameter). A slot is its buffer's from the first write to the last "
        "read."
    )
    short = replace(slot, live_range=LiveRange(2, 4))
    assert "expected ticks [1, 4), found ticks [2, 4)" in rejection(with_slot(plan, slot, short))
    outside = replace(slot, offset=4 * SIZE)
    assert "bytes [1024, 1280) are not within allocation 'arena' of 1024 bytes" in rejection(
        with_slot(plan, slot, outside)
    )
    empty = replace(slot, live_range=LiveRange(2, 2))
    assert "256 bytes during ticks [2, 2) hold nothing" in rejection(with_slot(plan, slot, empty))


def test_says_which_value_has_no_slot():
    plan = streamed_plan()
    gone = tuple(s for s in plan.slots if s.buffer != "a1")
    assert rejection(replace(plan, slots=gone)) == (
        "plan rejected: %a1 has no slot (%a1 = f32[64] multiply, train.py:2). Expected one of 256 "
        "bytes during ticks [1, 3), or an operand that dies here and has one."
    )
    gone = tuple(s for s in plan.slots if s.buffer != "x")
    assert "%x has no slot (%x = f32[64] parameter). Expected one of 256 bytes during ticks " in (
        rejection(replace(plan, slots=gone))
    )


def test_says_what_the_budget_would_have_to_be():
    plan = streamed_plan()
    assert rejection(replace(plan, budget_bytes=1500)) == (
        "plan rejected: it needs 1536 bytes of hbm, the budget is 1500 (arguments 256 + outputs "
        "256 - aliased 0 + arena 1024). Give at least 1536 bytes, or plan with fewer bytes in "
        "flight."
    )


def toy_machine(**capacity: int) -> Machine:
    tiers = tuple(Tier(name, None, size) for name, size in capacity.items())
    return Machine("toy", (), "gpu", 1.0, 1.0, (), tiers, (), None, ())


def test_a_machine_holds_what_is_put_there():
    module, plan = Streamed(STEPS).module(), streamed_plan()
    verify_plan(module, plan, toy_machine(hbm=1536, host=512))
    with pytest.raises(VerificationError, match="512 bytes of host, the capacity is 511"):
        verify_plan(module, plan, toy_machine(hbm=1536, host=511))
    with pytest.raises(VerificationError, match="1536 bytes of hbm, the capacity is 1535"):
        verify_plan(module, plan, toy_machine(hbm=1535, host=512))
    with pytest.raises(VerificationError, match="computes in tier hbm, the machine in dram"):
        verify_plan(module, plan, toy_machine(dram=1536, host=512))


def test_what_lies_in_the_arena_is_aligned():
    plan = streamed_plan()
    arena, *others = plan.allocations
    moved = with_slot(plan, (slot := slot_of(plan, "w0#0")), replace(slot, offset=arena.size + 128))
    larger = replace(
        moved,
        allocations=(replace(arena, size=arena.size + 128 + SIZE), *others),
        budget_bytes=plan.budget_bytes + 128 + SIZE,
    )
    verify_plan(Streamed(STEPS).module(), larger)
    with pytest.raises(VerificationError, match="begin at no multiple of 256 bytes"):
        verify_plan(Streamed(STEPS).module(), larger, toy_machine(hbm=4096, host=512))


def test_another_module_is_refused():
    plan = streamed_plan()
    with pytest.raises(PlanMismatchError, match=plan.module_fingerprint):
        verify_plan(Streamed((0, 1)).module(), plan)


def test_a_module_without_a_schedule_is_refused():
    text = Streamed(STEPS).text(["ROOT %n = f32[64]{0} negate(%x)"])
    module = module_of(text.replace("is_scheduled=true", "is_scheduled=false"))
    assert "the module has no schedule" in rejection(streamed_plan(), module)
