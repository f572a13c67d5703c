"""One change of a plan, and whether it matters. See `mutants`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from experiments.plan_replay import first_fault
from experiments.symbolic import Outcome, outcomes
from hlo_passes import pipeline
from hlo_passes.errors import MemplanError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops import body_plans
from hlo_passes.loops import rewrite as loop_rewrite
from hlo_passes.plan import Event, Fence, LiveRange, LoopSchedule, Plan, Slot, Transfer
from hlo_passes.rewrite import edits
from hlo_passes.verify import verify_plan

_RUNNING = ("async-start", "call", "conditional", "while")

# Not every plan lends itself to every change.
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Planned:
    """A module with a plan that the checker accepts, and with its loops and edits."""

    name: str
    module: Module
    machine: Machine
    plan: Plan
    edited: Module


def planned(name: str, module: Module, machine: Machine, plan: Plan) -> Planned:
    return Planned(name, module, machine, plan, _edited(module, machine, plan))


def _edited(module: Module, machine: Machine, plan: Plan) -> Module:
    ordered = loop_rewrite.rewrite_loops(pipeline.normalized(module), plan.loops, machine)
    return edits.apply(body_plans.write_bodies(ordered, plan.bodies), plan.edits)


def judged(program: Planned, count: int, pick: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yields kind, outcome and description of `count` mutants of a plan."""
    expected = outcomes(program.module, 4)
    fault = _told_apart(program, program.plan, program.edited, expected)
    if fault:  # Some of XLA's tests write over constants, or over arguments that stay.
        yield "nothing", "malformed", fault
        return
    left = count
    for _ in range(_TRIES * count):
        if not left:
            return
        kind = pick.choice([*_KINDS])
        changed = _KINDS[kind](program, pick)
        if changed is None or changed == program.plan:
            continue
        left -= 1
        what = _difference(program.plan, changed)
        try:
            edited = program.edited
            if (changed.edits, changed.loops) != (program.plan.edits, program.plan.loops):
                edited = _edited(program.module, program.machine, changed)
                changed = replace(changed, module_fingerprint=edited.fingerprint)
            verify_plan(edited, changed, program.machine)
            pipeline.rewrite_module(program.module, changed, program.machine)
        except MemplanError:
            yield kind, "rejected", what
        else:
            apart = _told_apart(program, changed, edited, expected)
            yield kind, "told apart" if apart else "not told apart", f"{what}: {apart}"


def _told_apart(
    program: Planned, changed: Plan, edited: Module, expected: frozenset[Outcome]
) -> str:
    """How a plan is seen to be another; ``""`` if it is not."""
    plan = program.plan
    is_edited = edited is not program.edited or changed is plan
    if is_edited and outcomes(edited, 4) != expected:
        return "it computes something else"
    more = _device_bytes(changed) - _device_bytes(plan)
    if more > plan.budget_bytes - plan.prediction.total_bytes:
        return f"it needs {more} bytes more"
    return first_fault(edited, changed, {t.buffer for t in plan.transfers})


def _device_bytes(plan: Plan) -> int:
    return sum(a.size for a in plan.allocations if a.tier == plan.device_tier)


def _difference(old: Plan, new: Plan) -> str:
    """The first line in which two plans differ."""
    lines = (plan.to_json(1).splitlines() for plan in (old, new))
    pairs = itertools.zip_longest(*lines, fillvalue="")
    return next(f"{a.strip()} -> {b.strip()}" for a, b in pairs if a != b)


# Changes. Each gives None where the plan has nothing of the kind.


def _transfer_tick(program: Planned, pick: random.Random) -> Plan | None:
    t, field = _some(pick, program.plan.transfers), pick.choice(("start", "done", "end"))
    return t and _with_transfer(program.plan, t, **{field: _near(pick, getattr(t, field))})


def _transfer_and_slot_tick(program: Planned, pick: random.Random) -> Plan | None:
    """The slot's range follows, so that it is not what gives the change away."""
    plan = program.plan
    t = _some(pick, plan.transfers)
    slots = [] if t is None else [s for s in plan.slots if s.buffer == f"{t.buffer}#{t.id}"]
    if t is None or not slots:
        return None
    start, end = slots[0].live_range
    if pick.random() < 0.5:
        moved = _near(pick, t.start)
        plan, start = _with_transfer(plan, t, start=moved), moved
    else:
        end = _near(pick, end)
        plan = _with_transfer(plan, t, end=end)
    return _with_slot(plan, slots[0], live_range=LiveRange(start, end))


def _transfer_size(program: Planned, pick: random.Random) -> Plan | None:
    t = _some(pick, program.plan.transfers)
    return t and _with_transfer(program.plan, t, size=_other_size(pick, t.size))


def _transfer_tier(program: Planned, pick: random.Random) -> Plan | None:
    t, field = _some(pick, program.plan.transfers), pick.choice(("source", "destination"))
    return t and _with_transfer(program.plan, t, **{field: _tier(program, pick)})


def _transfer_buffer(program: Planned, pick: random.Random) -> Plan | None:
    t, other = (_some(pick, program.plan.transfers) for _ in range(2))
    return t and other and _with_transfer(program.plan, t, buffer=other.buffer)


def _transfer_left_out(program: Planned, pick: random.Random) -> Plan | None:
    """What is behind it is numbered anew."""
    plan = program.plan
    gone = _some(pick, plan.transfers)
    if gone is None:
        return None

    def number(n: int) -> int:
        return n - (n > gone.id)

    def moved(e: Event) -> Event:
        return e if e.kind == "compute" else Event(e.kind, number(e.index))

    names = {f"{t.buffer}#{t.id}": f"{t.buffer}#{number(t.id)}" for t in plan.transfers}
    own = f"{gone.buffer}#{gone.id}"
    halves = {Event("start", gone.id), Event("done", gone.id)}
    return replace(
        plan,
        transfers=tuple(replace(t, id=number(t.id)) for t in plan.transfers if t is not gone),
        slots=tuple(
            replace(s, buffer=names.get(s.buffer, s.buffer)) for s in plan.slots if s.buffer != own
        ),
        fences=tuple(
            Fence(moved(f.before), moved(f.after), f.reason)
            for f in plan.fences
            if not halves & {f.before, f.after}
        ),
    )


def _slot_offset(program: Planned, pick: random.Random) -> Plan | None:
    slot, other = (_some(pick, program.plan.slots) for _ in range(2))
    if slot is None or other is None:
        return None
    step = pick.choice((-1, 1)) * pick.choice((1, slot.size // 2, slot.size, other.size))
    return _with_slot(
        program.plan, slot, offset=pick.choice((other.offset, max(0, slot.offset + step)))
    )


def _slot_size(program: Planned, pick: random.Random) -> Plan | None:
    slot = _some(pick, program.plan.slots)
    return slot and _with_slot(program.plan, slot, size=_other_size(pick, slot.size))


def _slot_range(program: Planned, pick: random.Random) -> Plan | None:
    slot = _some(pick, program.plan.slots)
    if slot is None:
        return None
    start, end = slot.live_range
    moved = pick.choice((LiveRange(_near(pick, start), end), LiveRange(start, _near(pick, end))))
    return _with_slot(program.plan, slot, live_range=moved)


def _slot_allocation(program: Planned, pick: random.Random) -> Plan | None:
    slot, other = _some(pick, program.plan.slots), pick.choice(program.plan.allocations)
    return slot and _with_slot(program.plan, slot, allocation=other.name)


def _slot_left_out(program: Planned, pick: random.Random) -> Plan | None:
    return _without_slot(program.plan, _some(pick, program.plan.slots))


def _slot_of_another(program: Planned, pick: random.Random) -> Plan | None:
    slot, other = (_some(pick, program.plan.slots) for _ in range(2))
    return slot and other and _with_slot(program.plan, slot, buffer=other.buffer)


def _workspace(program: Planned, pick: random.Random) -> Plan | None:
    running = {i.name for i in program.edited.entry.instructions if i.opcode in _RUNNING}
    slot = _some(pick, [s for s in program.plan.slots if s.buffer in running])
    if slot is None or pick.random() < 0.5:
        return _without_slot(program.plan, slot)
    return _with_slot(program.plan, slot, size=_other_size(pick, slot.size))


def _fence_left_out(program: Planned, pick: random.Random) -> Plan | None:
    gone = _some(pick, program.plan.fences)
    return gone and replace(
        program.plan, fences=tuple(f for f in program.plan.fences if f is not gone)
    )


def _fence_moved(program: Planned, pick: random.Random) -> Plan | None:
    fence, field = _some(pick, program.plan.fences), pick.choice(("before", "after"))
    if fence is None:
        return None
    event: Event = getattr(fence, field)
    moved = replace(fence, **{field: replace(event, index=_near(pick, event.index))})
    return replace(
        program.plan, fences=tuple(moved if f is fence else f for f in program.plan.fences)
    )


def _allocation(program: Planned, pick: random.Random) -> Plan | None:
    a = pick.choice(program.plan.allocations)
    changes = {"size": _other_size(pick, a.size), "tier": _tier(program, pick)}
    field = pick.choice([*changes])
    return replace(
        program.plan,
        allocations=tuple(
            replace(b, **{field: changes[field]}) if b is a else b for b in program.plan.allocations
        ),
    )


def _placement(program: Planned, pick: random.Random) -> Plan | None:
    p = _some(pick, program.plan.placements)
    if p is None:
        return None
    changes: dict[str, Any] = {
        "tier": _tier(program, pick),
        "in_place": not p.in_place,
        "size": _other_size(pick, p.size),
    }
    field = pick.choice([*changes])
    return replace(
        program.plan,
        placements=tuple(
            replace(q, **{field: changes[field]}) if q is p else q for q in program.plan.placements
        ),
    )


def _edited_order(program: Planned, pick: random.Random) -> Plan | None:
    order = [*program.plan.edits.order]
    if len(order) < 2:
        return None
    n = pick.randrange(len(order))
    name = order.pop(n)
    order.insert(max(0, min(len(order), n + pick.choice((-3, -2, -1, 1, 2, 3)))), name)
    return replace(program.plan, edits=replace(program.plan.edits, order=tuple(order)))


def _recompute(program: Planned, pick: random.Random) -> Plan | None:
    plan = program.plan
    r = _some(pick, plan.edits.recomputes)
    if r is None:
        return None
    names = [i.name for i in program.module.entry.instructions]
    changed = pick.choice(
        (
            replace(r, before=pick.choice(names)),
            replace(r, readers=r.readers[:-1]),
            replace(r, original=pick.choice(names)),
        )
    )
    recomputes = tuple(changed if s is r else s for s in plan.edits.recomputes)
    return replace(plan, edits=replace(plan.edits, recomputes=recomputes))


def _eviction(program: Planned, pick: random.Random) -> Plan | None:
    plan = program.plan
    e = _some(pick, plan.edits.evictions)
    if e is None:
        return None
    names = [i.name for i in program.module.entry.instructions]
    first = e.refetches[0]
    changed = pick.choice(
        (
            replace(e, after=pick.choice(names)),
            replace(e, refetches=(replace(first, before=pick.choice(names)), *e.refetches[1:])),
            replace(e, refetches=(replace(first, readers=first.readers[:-1]), *e.refetches[1:])),
        )
    )
    evictions = tuple(changed if f is e else f for f in plan.edits.evictions)
    return replace(plan, edits=replace(plan.edits, evictions=evictions))


def _loop_tick(program: Planned, pick: random.Random) -> Plan | None:
    loop = _some(pick, program.plan.loops)
    t = loop and _some(pick, loop.transfers)
    if loop is None or t is None:
        return None
    field = pick.choice(("start", "done", "end"))
    moved = replace(t, **{field: _near(pick, getattr(t, field))})
    changed = replace(loop, transfers=tuple(moved if u is t else u for u in loop.transfers))
    return _with_loop(program.plan, loop, changed)


def _loop_copies(program: Planned, pick: random.Random) -> Plan | None:
    """Drops a copy that is needed, or keeps one that the plan drops."""
    loop = _some(pick, program.plan.loops)
    if loop is None:
        return None
    body = next(c for c in program.edited.computations.values() if c.name == loop.computation)
    copies = [i.name for i in body.instructions if i.opcode == "copy"]
    dropped = {*loop.dropped_copies} ^ {pick.choice([*copies, *loop.dropped_copies, ""])}
    return _with_loop(program.plan, loop, replace(loop, dropped_copies=tuple(sorted(dropped))))


_KINDS: dict[str, Callable[[Planned, random.Random], Plan | None]] = {
    "tick of a transfer": _transfer_tick,
    "tick of a transfer and its slot": _transfer_and_slot_tick,
    "size of a transfer": _transfer_size,
    "tier of a transfer": _transfer_tier,
    "what a transfer moves": _transfer_buffer,
    "a transfer left out": _transfer_left_out,
    "offset of a slot": _slot_offset,
    "size of a slot": _slot_size,
    "ticks of a slot": _slot_range,
    "allocation of a slot": _slot_allocation,
    "a slot left out": _slot_left_out,
    "whose a slot is": _slot_of_another,
    "workspace of what runs": _workspace,
    "a fence left out": _fence_left_out,
    "a fence moved": _fence_moved,
    "an allocation": _allocation,
    "a placement": _placement,
    "order of the entry": _edited_order,
    "what is computed again": _recompute,
    "what is evicted": _eviction,
    "tick of a transfer in a loop": _loop_tick,
    "copies in a loop": _loop_copies,
}


def _some[T](pick: random.Random, of: tuple[T, ...] | list[T]) -> T | None:
    return pick.choice(of) if of else None


def _near(pick: random.Random, tick: int) -> int:
    return max(0, tick + pick.choice((-10, -3, -2, -1, 1, 2, 3, 10)))


def _other_size(pick: random.Random, size: int) -> int:
    return max(0, pick.choice((0, size - 1, size // 2, size + 1, 2 * size)))


def _tier(program: Planned, pick: random.Random) -> str:
    return pick.choice([*(t.name for t in program.machine.tiers), "nowhere"])


def _with_transfer(plan: Plan, old: Transfer, **changes: Any) -> Plan:
    new = replace(old, **changes)
    return replace(plan, transfers=tuple(new if t is old else t for t in plan.transfers))


def _with_slot(plan: Plan, old: Slot, **changes: Any) -> Plan:
    new = replace(old, **changes)
    return replace(plan, slots=tuple(new if s is old else s for s in plan.slots))


def _without_slot(plan: Plan, gone: Slot | None) -> Plan | None:
    return gone and replace(plan, slots=tuple(s for s in plan.slots if s is not gone))


def _with_loop(plan: Plan, old: LoopSchedule, new: LoopSchedule) -> Plan:
    return replace(plan, loops=tuple(new if loop is old else loop for loop in plan.loops))
