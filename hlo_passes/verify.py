"""The independent checker: is a plan right, and does the rewritten module follow it?

Nothing here is shared with the planner. Values, reads and orders are derived again from
the HLO by one walk along the schedule, so that a mistake in the planner's analyses is not
repeated in the proof (the idea of google/minimalloc's validator.cc).

    bytes of an arena
      ▲  ┌─ w0#0 ──────────┐         ┌─ w2#2 ────────
      │  │ start ▒▒▒▒ read │         │ start ▒▒▒▒
      │  └─────────────────┘         └───────────────
      │          compute:4 ──reuse──► start:2          fences: the plan's own words
      │                               done:2 ──data──► compute:9
      └────────────────────────────────────────────────► order, not time

Two slots may share bytes when everything that touches the earlier one *happens before*
(Lamport 1978) the first write to the later one. A transfer may complete at any moment
between its start and its done (▒), so it writes from its start on. Compute runs in the
order of the schedule; between compute and a transfer only a fence gives an order.

Not proved: what happens inside a called computation (slots for it must not collide with
others, but none is asked for); that an instruction can work in place, beyond a list of those
that cannot; and seconds. Evictions and recomputation are refused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hlo_passes.errors import PlanMismatchError, VerificationError
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE, Module
from hlo_passes.machine import Machine
from hlo_passes.plan import Event, Fence, LogicalTime, Plan, Slot
from hlo_passes.verify_loops import verify_loops
from hlo_passes.verify_replay import Program, Replay, Value, check_scheduled, describe, issue_rank
from hlo_passes.verify_rewrite import (
    Followed,
    verify_executable,
    verify_reordering,
    verify_rewrite,
)

__all__ = [
    "Followed",
    "verify_executable",
    "verify_loops",
    "verify_plan",
    "verify_reordering",
    "verify_rewrite",
]


def verify_plan(module: Module, plan: Plan, machine: Machine | None = None) -> None:
    """Proves that `plan` is right for `module`, or says why it is not.

    The plan is for this module; every read of a buffer that lives off the device is served
    by a transfer whose data has come; every value on the device has a slot of its size for
    as long as it lives; no bytes are given to two holders that could ever meet; every order
    that this rests on is a fence of the plan; tiers and budget hold it all.

    Args:
      module: the scheduled module that the plan was made for, before it is rewritten.
      machine: if given, its tiers hold what the plan puts there.

    Raises:
      PlanMismatchError: when the plan was made for another module.
      VerificationError: at the first thing that is wrong.

    Time O((n + m) log(n + m)) for n instructions, and m slots and transfers.
    """
    check_scheduled(module)
    if plan.module_fingerprint != module.fingerprint:
        raise PlanMismatchError(module.name, plan.module_fingerprint, module.fingerprint)
    program = Program.of(module, plan)
    _check_placements(program, plan)
    _check_transfers(program, plan)
    _check_allocations(plan)
    replay = Replay(program, plan)
    holders = _assign_slots(replay, plan)
    _check_order(replay, holders, plan)
    _check_capacity(replay, holders, plan, machine)


def _check_placements(program: Program, plan: Plan) -> None:
    module, device = program.module, plan.device_tier
    placed = {p.parameter: p for p in plan.placements}
    moved = {t.buffer for t in plan.transfers}
    read = {operand for i in program.compute for operand in i.operand_ids}
    for p in module.entry.parameters:
        placement, where = placed.pop(p.parameter_number, None), describe(module, p)
        size = sum(shape.byte_size for _, shape in p.shape.leaves())
        found = None if placement is None else (placement.buffer, placement.size)
        if placement is None or found != (p.name, size):
            raise VerificationError(
                f"parameter {p.parameter_number}: expected a placement of %{p.name} with "
                f"{size} bytes, found {found}",
                where,
                "Every argument is placed once.",
            )
        if p.shape.memory_space == HOST_MEMORY_SPACE and placement.tier == device:
            raise VerificationError(
                f"%{p.name} is placed in {device}, but the module takes it from host memory",
                where,
                "Place it off the device, or compile it with a device memory kind.",
            )
        is_direct = p.shape.memory_space == DEVICE_MEMORY_SPACE and p.id in read
        is_away = placement.tier != device and not placement.in_place
        if is_away and is_direct and p.name not in moved:
            raise VerificationError(
                f"%{p.name} is placed in {placement.tier} and read, but no transfer brings it",
                where,
                f"Add a transfer, or place it in {device}.",
            )
    if placed or len({p.parameter for p in plan.placements}) != len(plan.placements):
        raise VerificationError(
            f"{len(plan.placements)} placements for {len(module.entry.parameters)} parameters",
            f"module {module.name}",
            "Every argument is placed once.",
        )


def _check_transfers(program: Program, plan: Plan) -> None:
    if plan.edits.recomputes:
        raise VerificationError(
            f"it recomputes %{plan.edits.recomputes[0].clone}, which this checker cannot prove",
            f"{len(plan.edits.recomputes)} recomputed instructions",
            "Plan without recomputation.",
        )
    parameters = {p.name: p for p in program.module.entry.parameters}
    tier_of = {p.buffer: p.tier for p in plan.placements}
    earlier = 0
    for k, t in enumerate(plan.transfers):
        if t.buffer not in parameters or t.kind != "prefetch":
            raise VerificationError(
                f"transfer {t.id} ({t.kind}) of %{t.buffer}: expected the prefetch of an argument",
                f"module {program.module.name}",
                "This checker cannot prove an eviction.",
            )
        size = parameters[t.buffer].shape.byte_size
        for what, found, expected in (
            ("id", t.id, k),
            ("size in bytes", t.size, size),
            ("source", t.source, tier_of[t.buffer]),
            ("destination", t.destination, plan.device_tier),
        ):
            if found != expected:
                raise VerificationError(
                    f"transfer {t.id} of %{t.buffer}, {what}: found {found}, expected {expected}",
                    describe(program.module, parameters[t.buffer]),
                )
        if t.source == t.destination:
            raise VerificationError(
                f"transfer {t.id} of %{t.buffer} goes from {t.source} to {t.destination}",
                describe(program.module, parameters[t.buffer]),
                "An argument on the device needs no transfer.",
            )
        if not earlier <= t.start <= t.done < t.end <= program.end:
            raise VerificationError(
                f"transfer {t.id} of %{t.buffer}: expected {earlier} <= start <= done < end <= "
                f"{program.end}, found start {t.start}, done {t.done}, end {t.end}",
                describe(program.module, parameters[t.buffer]),
                "Transfers stand in the order in which they are issued.",
            )
        earlier = t.start


def _check_allocations(plan: Plan) -> None:
    sizes = {a.name: a.size for a in plan.allocations}
    if len(sizes) != len(plan.allocations):
        raise VerificationError("two allocations have one name", ", ".join(sorted(sizes)))
    for slot in plan.slots:
        where = f"slot of %{slot.buffer}"
        if slot.allocation not in sizes:
            raise VerificationError(
                f"there is no allocation {slot.allocation!r}",
                where,
                f"The plan has {', '.join(sizes)}.",
            )
        if slot.size < 0 or (slot.size and slot.live_range.start >= slot.live_range.end):
            raise VerificationError(
                f"{slot.size} bytes during {_ticks(slot)} hold nothing",
                where,
                "Ranges are half-open: the end is the tick after the last read.",
            )
        if slot.offset < 0 or slot.offset + slot.size > sizes[slot.allocation]:
            raise VerificationError(
                f"{_bytes(slot)} are not within allocation {slot.allocation!r} of "
                f"{sizes[slot.allocation]} bytes",
                where,
            )


def _assign_slots(replay: Replay, plan: Plan) -> dict[Slot, Value]:
    """Finds the slot of every value; one without may lie in bytes that it was written over.

    From the last value to the first, so that a slot is known to be needed until the last
    read of whatever came to lie in it.
    """
    tiers = {a.name: a.tier for a in plan.allocations}
    holders: dict[Slot, Value] = {}
    for value in reversed(replay.values):
        # A name inside a computation that is called twice stands for two values.
        value.slots = [s for s in value.slots if s not in holders]
        if value.home is not None:
            _settle(replay.module, value, value.home)
        elif not value.needs_slot:
            holders.update(dict.fromkeys(value.slots, value))
        elif value.slots:
            holders[_fitting_slot(replay.module, value, tiers, plan)] = value
        else:
            under = _overwritten(replay.module, value)
            under.is_taken = True
            under.read(value.last_read)
            if value in replay.apart:
                replay.apart.add(under)  # An output's bytes, before the output is there.
    return holders


def _settle(module: Module, value: Value, home: Value) -> None:
    """Finds how a value comes to lie in the bytes of `home`, an argument that was given away.

        home     ░░░░░░░ read                    free from here on
        copy             │        ▒▒▒▒▒▒▒        has no operand to lie in: lies in home, too
        value                     │      ▒▒▒▒▒   written over the copy, and returned

    It is written over the argument itself; or over an operand that comes to lie there, as one
    does that is written over the argument or has no other place; or after the argument has
    been read for the last time.
    """
    free = [v for v in value.over if _is_free_for(value, v)]
    under = home
    if home not in free:
        origins = {v: _origins(v) for v in free if v.needs_slot}
        under = next((v for v, found in origins.items() if home in found or not found), home)
        is_read = home.last_read > value.written or home.is_read_at(value.written)
        if under is not home:
            under.home = home
        elif home.is_taken or is_read:
            raise VerificationError(
                f"%{value.name} takes the place of %{home.name} at tick {value.written}, which "
                f"is read until tick {home.last_read}",
                describe(module, value.writer),
                "A donated argument is overwritten after its last read.",
            )
    under.is_taken = True
    if under is not home:
        under.read(value.last_read)


def _overwritten(module: Module, value: Value) -> Value:
    """The operand in whose bytes a value without a slot lies.

    The plan does not say which one it means. It must have been read for the last time, and
    have a slot that lasts as long as the value, or lie itself in an operand that has one: of
    these the one that lasts least longer, so that what else the instruction writes, and lives
    longer, finds the others.
    """

    def until(under: Value) -> LogicalTime:
        ends = (s.live_range.end for v in _origins(under) for s in v.slots)
        return min((end for end in ends if end > value.last_read), default=0)

    lasting = {v: until(v) for v in value.over if _is_free_for(value, v)}
    free = [v for v, end in lasting.items() if end]
    if not free:
        raise VerificationError(
            f"%{value.name} has no slot",
            describe(module, value.writer),
            f"Expected one of {value.size} bytes during ticks [{value.written}, "
            f"{value.last_read + 1}), or an operand that dies here and has one.",
        )
    return min(free, key=lambda v: (lasting[v], not v.slots))


def _is_free_for(value: Value, under: Value) -> bool:
    """Whether an operand dies where `value` is written, and has not been written over yet."""
    return not under.is_taken and under.last_read_beside(value.writer) <= value.written


def _origins(value: Value) -> list[Value]:
    """The values with slots in whose bytes one without may lie, over others without."""
    found: list[Value] = []
    pending, seen = [value], {value}
    for v in pending:
        if v.slots:
            found.append(v)
            continue
        new = [u for u in v.over if u not in seen and _is_free_for(v, u)]
        pending += new
        seen.update(new)
    return found


def _fitting_slot(module: Module, value: Value, tiers: Mapping[str, str], plan: Plan) -> Slot:
    where, hint = describe(module, value.writer), ""
    t = value.transfer
    if t is not None and value.last_read >= t.end:
        raise VerificationError(
            f"the copy that transfer {t.id} makes of %{t.buffer} ends at tick {t.end}, but what "
            f"its users make of it is read until tick {value.last_read}",
            where,
            f"Hold it until tick {value.last_read + 1}.",
        )
    for slot in value.slots:
        start, end = slot.live_range
        if slot.size < value.size:
            hint = f"expected {value.size} bytes, found {slot.size}"
        elif tiers[slot.allocation] != plan.device_tier:
            hint = f"expected tier {plan.device_tier}, found {tiers[slot.allocation]}"
        elif t is not None and slot.live_range != (t.start, t.end):
            hint = f"expected ticks [{t.start}, {t.end}), found {_ticks(slot)}"
        elif start > value.written or end <= value.last_read:
            hint = f"expected ticks [{value.written}, {value.last_read + 1}), found {_ticks(slot)}"
        else:
            return slot
    raise VerificationError(
        f"the slot of %{value.name} does not hold it: {hint}",
        where,
        "A slot is its buffer's from the first write to the last read.",
    )


def _check_order(replay: Replay, holders: Mapping[Slot, Value], plan: Plan) -> None:
    """Checks that no two slots meet, and that the plan's fences keep it that way."""
    program = replay.program
    finished, awaited = _happens_before(plan, program)
    for value in replay.values:
        t, use = value.transfer, value.first_use
        if t is not None and use is not None and awaited[Event("done", t.id)] > use:
            raise VerificationError(
                f"no fence makes %{t.buffer} wait for transfer {t.id}",
                program.at(use),
                f"Add the data fence done:{t.id} -> compute:{use}.",
            )
    by_allocation: defaultdict[str, list[Slot]] = defaultdict(list)
    for slot in plan.slots:
        by_allocation[slot.allocation].append(slot)
    for slots in by_allocation.values():
        for slot, earlier in _handovers(slots):
            for old in earlier:
                met = old.live_range.overlaps(slot.live_range)
                if met and not _takes_over(holders.get(old), holders.get(slot), old, slot):
                    raise VerificationError(
                        f"the slots of %{old.buffer} and %{slot.buffer} overlap in allocation "
                        f"{slot.allocation!r}: {_bytes(old)} during {_ticks(old)} against "
                        f"{_bytes(slot)} during {_ticks(slot)}",
                        program.at(slot.live_range.start),
                        "Slots that are live at one time lie apart.",
                    )
            holder = holders.get(slot)
            if holder is None or holder.transfer is None:
                continue  # Compute runs in order: what it overwrites has been read.
            for old in earlier:
                reader = old.live_range.end - 1
                if old in holders:
                    reader = min(reader, holders[old].last_read)
                start = Event("start", holder.transfer.id)
                if reader > finished[start]:
                    raise VerificationError(
                        f"transfer {holder.transfer.id} of %{holder.transfer.buffer} may "
                        f"overwrite %{old.buffer} while it is still read: no fence orders it "
                        "after the last reader",
                        program.at(reader),
                        f"Add the reuse fence compute:{reader} -> {start}.",
                    )


def _takes_over(old: Value | None, new: Value | None, below: Slot, above: Slot) -> bool:
    """Whether an instruction leaves its result in the bytes of an operand that it reads last."""
    return (
        old is not None
        and new is not None
        and old in new.over
        and not old.is_taken
        and old.last_read_beside(new.writer) <= new.written == above.live_range.start
        and below.offset == above.offset
    )


def _handovers(slots: Sequence[Slot]) -> Iterator[tuple[Slot, list[Slot]]]:
    """Paints the slots onto the bytes in order of their starts.

        bytes   0      4      8             yields  c with [a, b]
        before  │  a   │  b   │
        after   │ a │   c   │b│

    Yields:
      Each slot with those that its bytes show last. A slot that is painted over needs no
      look later: the one above it was ordered after it.
    """
    cuts: list[int] = [0]  # segment k is [cuts[k], cuts[k + 1])
    shown: list[Slot | None] = [None]
    for slot in sorted(slots, key=lambda s: s.live_range.start):
        low, high = slot.offset, slot.offset + slot.size
        if low == high:
            continue
        first, after = bisect_right(cuts, low) - 1, bisect_left(cuts, high)
        yield slot, [s for s in shown[first:after] if s is not None]
        segments: list[tuple[int, Slot | None]] = [(low, slot)]
        if cuts[first] < low:
            segments.insert(0, (cuts[first], shown[first]))
        if after == len(cuts) or cuts[after] > high:
            segments.append((high, shown[after - 1]))
        cuts[first:after] = [cut for cut, _ in segments]
        shown[first:after] = [s for _, s in segments]


def _happens_before(
    plan: Plan, program: Program
) -> tuple[Mapping[Event, LogicalTime], Mapping[Event, LogicalTime]]:
    """Follows the fences of the plan.

    Compute is one chain, so that one number says all that a transfer's vector clock would.

    Returns:
      Of every start and done the last compute that has finished before it, −1 for none; and
      the first compute that waits for it, the end for none.
    """
    events = [Event(kind, t.id) for t in plan.transfers for kind in ("start", "done")]
    events.sort(key=lambda e: issue_rank(plan, e))
    before: defaultdict[Event, list[Event]] = defaultdict(list)
    after: defaultdict[Event, list[Event]] = defaultdict(list)
    for t in plan.transfers:
        before[Event("done", t.id)].append(Event("start", t.id))
        after[Event("start", t.id)].append(Event("done", t.id))
    for f in plan.fences:
        _check_fence(plan, program, f)
        before[f.after].append(f.before)
        after[f.before].append(f.after)
    finished: dict[Event, LogicalTime] = {}
    awaited: dict[Event, LogicalTime] = {}
    for e in events:
        finished[e] = max(
            (b.index if b.kind == "compute" else finished[b] for b in before[e]), default=-1
        )
    for e in reversed(events):
        awaited[e] = min(
            (a.index if a.kind == "compute" else awaited[a] for a in after[e]),
            default=program.end,
        )
    return finished, awaited


def _check_fence(plan: Plan, program: Program, fence: Fence) -> None:
    where = f"fence {fence.before} -> {fence.after}, {fence.reason}"
    for e in (fence.before, fence.after):
        count = program.end if e.kind == "compute" else len(plan.transfers)
        if e.index >= count:
            raise VerificationError(f"there is no {e}: expected an index below {count}", where)
    if issue_rank(plan, fence.before) >= issue_rank(plan, fence.after):
        raise VerificationError(
            f"{fence.before} does not come before {fence.after} in the plan's own order",
            where,
            "Such a program would wait for itself.",
        )


def _check_capacity(
    replay: Replay, holders: Mapping[Slot, Value], plan: Plan, machine: Machine | None
) -> None:
    device = plan.device_tier
    apart: defaultdict[str, list[Slot]] = defaultdict(list)
    for slot, value in holders.items():
        if value in replay.apart:
            apart[slot.allocation].append(slot)
    used: defaultdict[str, int] = defaultdict(int)
    for a in plan.allocations:
        # Arguments and outputs are counted from the module, whatever slots they have.
        used[a.tier] += a.size - (_covered(apart[a.name]) if a.tier == device else 0)
    arena = used[device]
    used[device] += replay.argument_bytes + replay.output_bytes - replay.aliased_bytes
    parts = (
        f"arguments {replay.argument_bytes} + outputs {replay.output_bytes} - aliased "
        f"{replay.aliased_bytes} + arena {arena}"
    )
    if used[device] > plan.budget_bytes:
        raise VerificationError(
            f"it needs {used[device]} bytes of {device}, the budget is {plan.budget_bytes}",
            parts,
            f"Give at least {used[device]} bytes, or plan with fewer bytes in flight.",
        )
    if machine is None:
        return
    if device != machine.device_memory.name:
        raise VerificationError(
            f"it computes in tier {device}, the machine in {machine.device_memory.name}",
            f"machine {machine.name}",
        )
    placed: defaultdict[str, int] = defaultdict(int)
    for p in plan.placements:
        placed[p.tier] += p.size
    capacity = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    for tier in {**used, **placed}:
        size = max(used[tier], placed[tier])
        if size > capacity.get(tier, 0):
            raise VerificationError(
                f"it needs {size} bytes of {tier}, the capacity is {capacity.get(tier, 0)}",
                f"machine {machine.name}, tiers {', '.join(capacity)}",
                "Place fewer arguments there, or plan for another machine.",
            )


def _covered(slots: Sequence[Slot]) -> int:
    """How many bytes lie under at least one of the slots."""
    covered = top = 0
    for slot in sorted(slots, key=lambda s: s.offset):
        end = slot.offset + slot.size
        covered += max(0, end - max(top, slot.offset))
        top = max(top, end)
    return covered


def _ticks(slot: Slot) -> str:
    return f"ticks [{slot.live_range.start}, {slot.live_range.end})"


def _bytes(slot: Slot) -> str:
    return f"bytes [{slot.offset}, {slot.offset + slot.size})"
