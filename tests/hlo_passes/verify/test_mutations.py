"""The checker accepts right edits, plans and rewrites with evictions, refetches and clones, and
rejects every mutation that makes one wrong.

A mutation is wrong by construction: where it could leave a plan right, it is not tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.plan import Allocation, Event, Fence, LiveRange, Plan, Slot, Transfer
from hlo_passes.proto import hlo_pb2
from hlo_passes.rewrite.edits import apply
from hlo_passes.rewrite.transfers import rewrite
from hlo_passes.verify import verify_equivalent, verify_executable, verify_plan
from tests.hlo_passes.edited import SIZE, Edited, edited, live_of, name_of, refetches
from tests.hlo_passes.streamed import slot_of, verify_rewrite, with_slot, with_transfer
from tests.hlo_passes.verify.relisting import relisted

RANDOM = st.randoms(use_true_random=False)


@given(edited(), RANDOM)
def test_what_is_right_is_accepted(program: Edited, choose: random.Random):
    verify_equivalent(program.original, program.module)
    plan = program.plan(choose)
    verify_plan(program.module, plan)
    rewritten = rewrite(program.module, plan, "copies")
    verify_rewrite(program.module, plan, rewritten)
    assert verify_executable(plan, rewritten).exactly


def test_a_program_has_what_is_mutated():
    """So that no mutation is tried on plans without its subject only."""
    program = Edited((0, 1, -1, 0, 2), ("keep", "evict", "recompute", "evict", "keep"))
    plan = program.plan(random.Random(0))
    assert [len(found) for found in refetches(plan).values()] == [2, 1]
    assert sum(t.buffer.startswith("w") for t in plan.transfers) >= 3
    assert any(i.name == "a2.again" for i in program.compute)


# ── Plans ────────────────────────────────────────────────────────────────────────────────


def some[T](pick: random.Random, found: Sequence[T]) -> T:
    assume(found)
    return pick.choice(found)


def of_kind(plan: Plan, kind: str) -> list[Transfer]:
    return [t for t in plan.transfers if t.kind == kind]


def without(plan: Plan, gone: Transfer) -> Plan:
    """The plan without a transfer, its slot and its fences: the others are numbered anew."""

    def number(i: int) -> int:
        return i - (i > gone.id)

    def event(e: Event) -> Event:
        return e if e.kind == "compute" else Event(e.kind, number(e.index))

    names = {name_of(t): f"{t.buffer}#{number(t.id)}" for t in plan.transfers if t is not gone}
    halves = {Event("start", gone.id), Event("done", gone.id)}
    return replace(
        plan,
        transfers=tuple(replace(t, id=number(t.id)) for t in plan.transfers if t is not gone),
        slots=tuple(
            replace(s, buffer=names.get(s.buffer, s.buffer))
            for s in plan.slots
            if s.buffer != name_of(gone)
        ),
        fences=tuple(
            Fence(event(f.before), event(f.after), f.reason)
            for f in plan.fences
            if not {f.before, f.after} & halves
        ),
    )


def start_behind_done(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    t = pick.choice(plan.transfers)
    return with_transfer(plan, replace(t, start=t.done + 1, end=max(t.end, t.done + 2)))


def start_before_the_value(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    t = some(pick, of_kind(plan, "evict"))
    return with_transfer(plan, replace(t, start=program.tick(t.buffer)))


def fetched_too_late(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    t = some(pick, of_kind(plan, "prefetch"))
    return with_transfer(plan, replace(t, done=t.done + 1, end=t.end + 1))


def fetched_before_it_is_away(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    back = {t: away for t in of_kind(plan, "evict") for away in refetches(plan)[t.id]}
    t = some(pick, [t for t, away in back.items() if away.start > t.start])
    first = min(away.start for away in refetches(plan)[t.id])
    later = replace(t, done=first + 1, end=max(t.end, first + 1))
    slot = slot_of(plan, t.buffer)
    held = LiveRange(slot.live_range.start, max(slot.live_range.end, later.done))
    return with_transfer(with_slot(plan, slot, replace(slot, live_range=held)), later)


def refetch_moved_before_the_eviction(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    pairs = [
        (plan.transfers[n], t)
        for n, found in refetches(plan).items()
        for t in found
        if plan.transfers[n].done > 0
    ]
    out, t = some(pick, pairs)
    return with_transfer(plan, replace(t, start=out.done - 1))


def copy_left_early(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    t = some(pick, [t for t in of_kind(plan, "evict") if t.end > t.start + 1])
    return with_transfer(plan, replace(t, end=t.end - 1))


def dropped_fence(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    # What is evicted, fetched and read at one tick is waited for through the fetch as well.
    at_once = {
        Event("done", n)
        for n, found in refetches(plan).items()
        if any(t.done == plan.transfers[n].done for t in found)
    }
    f = some(pick, [f for f in plan.fences if f.before not in at_once or f.reason == "data"])
    return replace(plan, fences=tuple(g for g in plan.fences if g is not f))


def weaker_fence(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    """The eviction is waited for one instruction later than its bytes are given away."""
    at_once = {t.done for found in refetches(plan).values() for t in found}
    last = len(program.compute) - 1
    outs = [t for t in of_kind(plan, "evict") if t.done not in at_once and t.done < last]
    t = some(pick, outs)
    old = Fence(Event("done", t.id), Event("compute", t.done), "reuse")
    later = replace(old, after=Event("compute", t.done + 1))
    return replace(plan, fences=tuple(later if f == old else f for f in plan.fences))


def overlapping_slots(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    pairs = [
        (a, b)
        for a in plan.slots
        for b in plan.slots
        if a.allocation == b.allocation
        and a.offset != b.offset
        and b.live_range.start <= a.live_range.start
        # More than the tick at which one may be written over the other.
        and min(a.live_range.end, b.live_range.end) > a.live_range.start + 1
    ]
    a, b = some(pick, pairs)
    return with_slot(plan, a, replace(a, offset=b.offset))


def slot_left_early(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    s = pick.choice(plan.slots)
    live = LiveRange(s.live_range.start, s.live_range.end - 1)
    return with_slot(plan, s, replace(s, live_range=live))


def evicted_slot_left_early(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    """As if nothing but the readers needed the bytes."""
    read_until = {t: max(program.readers(t.buffer), default=0) + 1 for t in of_kind(plan, "evict")}
    t = some(pick, [t for t, end in read_until.items() if end < t.done])
    s = slot_of(plan, t.buffer)
    live = LiveRange(s.live_range.start, read_until[t])
    return with_slot(plan, s, replace(s, live_range=live))


def shrunk_slot(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    s = pick.choice(plan.slots)
    return with_slot(plan, s, replace(s, size=s.size - 1))


def missing_slot(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    s = some(pick, [s for s in plan.slots if "#" in s.buffer])
    return replace(plan, slots=tuple(t for t in plan.slots if t is not s))


def slot_in_other_tier(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    s = pick.choice(plan.slots)
    tier = "hbm" if s.allocation == "host_temp" else "host"
    other = Allocation("elsewhere", tier, SIZE)
    moved = with_slot(plan, s, replace(s, allocation="elsewhere", offset=0))
    return replace(
        moved, allocations=(*plan.allocations, other), budget_bytes=plan.budget_bytes + SIZE
    )


def other_tier(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    t, end = pick.choice(plan.transfers), pick.choice(["source", "destination"])
    return with_transfer(plan, replace(t, **{end: "nvme"}))


def missing_refetch(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    return without(plan, some(pick, [t for found in refetches(plan).values() for t in found]))


def missing_fetch(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    return without(plan, some(pick, of_kind(plan, "prefetch")))


def dropped_eviction(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    return without(plan, some(pick, of_kind(plan, "evict")))


def dropped_journey(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    """The eviction and all its fetches are gone."""
    t = some(pick, of_kind(plan, "evict"))
    while found := [u for u in plan.transfers if u.buffer == t.buffer]:
        plan = without(plan, found[-1])
    return plan


def doubled_eviction(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    t = some(pick, of_kind(plan, "evict"))
    k = len(plan.transfers)
    again = replace(t, id=k, start=plan.transfers[-1].start, done=t.end)
    arena = next(a for a in plan.allocations if a.name == "host_temp")
    return replace(
        plan,
        transfers=(*plan.transfers, again),
        slots=(*plan.slots, Slot(name_of(again), "host_temp", arena.size, SIZE, live_of(t))),
        allocations=tuple(
            replace(a, size=a.size + SIZE) if a is arena else a for a in plan.allocations
        ),
    )


def swapped_transfers(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    """Two fetches exchange what they fetch, and their slots."""
    ins = of_kind(plan, "prefetch")
    a, b = some(pick, [(a, b) for a in ins for b in ins if a.buffer < b.buffer])
    names = {name_of(a): f"{b.buffer}#{a.id}", name_of(b): f"{a.buffer}#{b.id}"}
    buffers = {a.id: (b.buffer, b.source), b.id: (a.buffer, a.source)}
    changed = [
        replace(t, buffer=buffers[t.id][0], source=buffers[t.id][1]) if t.id in buffers else t
        for t in plan.transfers
    ]
    slots = [replace(s, buffer=names.get(s.buffer, s.buffer)) for s in plan.slots]
    return replace(plan, transfers=tuple(changed), slots=tuple(slots))


def eviction_of_an_argument(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    t = pick.choice([t for t in plan.transfers if t.buffer.startswith("w")])
    return with_transfer(plan, replace(t, kind="evict"))


def small_budget(program: Edited, plan: Plan, pick: random.Random) -> Plan:
    return replace(plan, budget_bytes=plan.budget_bytes - pick.randint(1, SIZE))


PLAN_MUTATIONS = (
    start_behind_done,
    start_before_the_value,
    fetched_too_late,
    fetched_before_it_is_away,
    refetch_moved_before_the_eviction,
    copy_left_early,
    dropped_fence,
    weaker_fence,
    overlapping_slots,
    slot_left_early,
    evicted_slot_left_early,
    shrunk_slot,
    missing_slot,
    slot_in_other_tier,
    other_tier,
    missing_refetch,
    missing_fetch,
    dropped_eviction,
    dropped_journey,
    doubled_eviction,
    swapped_transfers,
    eviction_of_an_argument,
    small_budget,
)


@pytest.mark.parametrize("mutate", PLAN_MUTATIONS, ids=lambda m: m.__name__)
@settings(max_examples=40)
@given(program=edited("evict", "recompute"), choose=RANDOM, pick=RANDOM)
def test_a_wrong_plan_is_rejected(
    mutate: Callable[[Edited, Plan, random.Random], Plan],
    program: Edited,
    choose: random.Random,
    pick: random.Random,
):
    plan = program.plan(choose)
    wrong = mutate(program, plan, pick)
    assert wrong != plan
    with pytest.raises(VerificationError):
        verify_plan(program.module, wrong)


# ── Edits ────────────────────────────────────────────────────────────────────────────────

Proto = hlo_pb2.HloModuleProto


def named(proto: Proto, name: str) -> hlo_pb2.HloInstructionProto:
    return next(i for c in proto.computations for i in c.instructions if i.name == name)


def clones(program: Edited) -> list[str]:
    return [r.clone for r in program.edits.recomputes]


def clone_of_other_operands(program: Edited, proto: Proto, pick: random.Random) -> None:
    clone = named(proto, some(pick, clones(program)))
    x = named(proto, "x").id
    # The first step alone reads x; it is kept.
    clone.operand_ids[pick.randrange(2)] = x


def clone_of_another_step(program: Edited, proto: Proto, pick: random.Random) -> None:
    clone = named(proto, some(pick, clones(program)))
    clone.frontend_attributes.map["memplan.recompute"] = "a0"


def changed_clone(program: Edited, proto: Proto, pick: random.Random) -> None:
    named(proto, some(pick, clones(program))).opcode = "add"


def reader_of_another_value(program: Edited, proto: Proto, pick: random.Random) -> None:
    e = some(pick, program.edits.evictions)
    k = int(e.buffer[1:])
    named(proto, f"b{k}").operand_ids[1] = named(proto, "a0").id


def reader_of_the_host(program: Edited, proto: Proto, pick: random.Random) -> None:
    e = some(pick, program.edits.evictions)
    away = named(proto, f"{e.buffer}.evict-done")
    named(proto, e.refetches[-1].before).operand_ids[1] = away.id


def eviction_of_another_value(program: Edited, proto: Proto, pick: random.Random) -> None:
    e = some(pick, program.edits.evictions)
    named(proto, f"{e.buffer}.evict-start").operand_ids[:] = [named(proto, "a0").id]


def lost_eviction(program: Edited, proto: Proto, pick: random.Random) -> None:
    """What comes back is another value's copy."""
    first, second = some(
        pick, [(a, b) for a in program.edits.evictions for b in program.edits.evictions if a != b]
    )
    back = named(proto, f"{max(first.buffer, second.buffer)}.refetch0-start")
    back.operand_ids[:] = [named(proto, f"{min(first.buffer, second.buffer)}.evict-done").id]


EDIT_MUTATIONS = (
    clone_of_other_operands,
    clone_of_another_step,
    changed_clone,
    reader_of_another_value,
    reader_of_the_host,
    eviction_of_another_value,
    lost_eviction,
)


@pytest.mark.parametrize("mutate", EDIT_MUTATIONS, ids=lambda m: m.__name__)
@settings(max_examples=40)
@given(program=edited("evict", "recompute", "evict"), pick=RANDOM)
def test_a_wrong_edit_is_rejected(
    mutate: Callable[[Edited, Proto, random.Random], None], program: Edited, pick: random.Random
):
    proto = program.module.to_proto()
    mutate(program, proto, pick)
    with pytest.raises(VerificationError):
        verify_equivalent(program.original, relisted(proto))


@given(edited("recompute"), RANDOM)
def test_what_is_random_is_not_computed_again(program: Edited, pick: random.Random):
    original = program.original.to_proto()
    opcode = pick.choice(["rng", "rng-bit-generator", "infeed", "all-reduce"])
    named(original, pick.choice(program.edits.recomputes).original).opcode = opcode
    module = Module(original)
    with pytest.raises(VerificationError, match="again, which"):
        verify_equivalent(module, apply(module, program.edits))


@given(edited(), RANDOM)
def test_a_reader_does_not_move_behind_an_update_in_place(program: Edited, pick: random.Random):
    # A reader of a0 that nothing but the result waits for, in front of the update and behind.
    original = program.original.to_proto()
    entry = next(c for c in original.computations if c.id == original.entry_computation_id)
    late = entry.instructions.add()
    late.CopyFrom(named(original, "a1"))
    late.name, late.id = "late", max(i.id for i in entry.instructions) + 1
    late.operand_ids[:] = [named(original, "a0").id] * 2
    entry.instructions.remove(named(original, "root"))
    root = entry.instructions.add()
    root.CopyFrom(named(program.original.to_proto(), "root"))
    root.operand_ids[0] = late.id
    ids = original.schedule.sequences[entry.id].instruction_ids
    ids.insert([*ids].index(named(original, "u").id), late.id)
    module = Module(original)
    order = [i.name for i in module.entry.instructions if i.opcode != "parameter"]
    order.remove("late")
    update = order.index("u")
    before = pick.randint(order.index("a0") + 1, update)

    def reordered(place: int) -> Module:
        return apply(module, replace(program.edits, order=(*order[:place], "late", *order[place:])))

    verify_equivalent(module, reordered(before))
    with pytest.raises(VerificationError, match="%u writes over what %a0 left, which %late reads"):
        verify_equivalent(module, reordered(update + 1))


# ── Rewrites ─────────────────────────────────────────────────────────────────────────────


@settings(max_examples=100)
@given(edited("evict", "recompute"), RANDOM, RANDOM)
def test_a_half_at_another_tick_is_rejected(
    program: Edited, choose: random.Random, pick: random.Random
):
    plan = program.plan(choose)
    proto = rewrite(program.module, plan, "copies").to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    by_id = {i.id: i for i in entry.instructions}
    schedule = proto.schedule.sequences[entry.id].instruction_ids
    sequence = [by_id[n] for n in schedule]
    is_half = ["memplan.transfer" in i.frontend_attributes.map for i in sequence]
    movable = [
        k
        for k in range(len(sequence) - 1)
        if is_half[k] != is_half[k + 1]
        and sequence[k].id not in sequence[k + 1].operand_ids
        and "parameter" not in (sequence[k].opcode, sequence[k + 1].opcode)
    ]
    k = some(pick, movable)
    sequence[k : k + 2] = sequence[k + 1], sequence[k]
    schedule[:] = [i.id for i in sequence]
    with pytest.raises(VerificationError, match="expected tick"):
        verify_rewrite(program.module, plan, Module(proto))


@given(edited("evict", "evict"), RANDOM)
def test_a_copy_of_another_value_is_rejected(program: Edited, choose: random.Random):
    plan = program.plan(choose)
    proto = rewrite(program.module, plan, "copies").to_proto()
    buffer = program.edits.evictions[0].buffer
    named(proto, f"{buffer}.evict-start").operand_ids[:] = [named(proto, "a0").id]
    with pytest.raises(VerificationError, match=f"expected %{buffer}, as %{buffer}.refetch"):
        verify_rewrite(program.module, plan, Module(proto))
