"""Which slot is whose: every value has bytes of its own for as long as it is needed. See `verify`.

    slot of a   [──────────────────────)
    a           written   read   read
    b                            written over a ─────── read
    slot of a, if b has none   [─────────────────────────────)

A value without a slot may lie in an operand that dies where it is written, and what it needs
its host then needs. The plan does not say which one that is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.plan import ON_CHIP, LogicalTime, Plan, Slot
from hlo_passes.verify.hlo import describe
from hlo_passes.verify.replay import Replay, Value


def assign_slots(replay: Replay, plan: Plan) -> dict[Slot, Value]:
    """Finds the slot of every value; one without may lie in bytes that it was written over.

    From the last value to the first, so that a slot is known to be needed until the last
    read of whatever came to lie in it.
    """
    tiers = {a.name: a.tier for a in plan.allocations}
    placed = {p.buffer: p.tier for p in plan.placements}
    holders: dict[Slot, Value] = {}
    ends = _Ends(replay)
    for value in reversed(replay.values):
        # A name inside a computation that is called twice stands for two values.
        value.slots = [s for s in value.slots if s not in holders]
        if value.home is not None:
            ends.forget(_settle(replay.module, value, value.home, ends))
        elif value.slots and (value.needs_slot or value.writer.opcode == "parameter"):
            is_argument = value.writer.opcode == "parameter" and value.transfer is None
            tier = placed[value.writer.name] if is_argument else plan.device_tier
            holders[_fitting_slot(replay.module, value, tiers, tier)] = value
        elif not value.needs_slot:
            holders.update(dict.fromkeys(value.slots, value))
        else:
            under = _overwritten(replay.module, value, ends)
            under.hold(value)
            ends.forget(under)
            if value in replay.apart:
                replay.apart.add(under)  # An output's bytes, before the output is there.
    return holders


def _settle(module: Module, value: Value, home: Value, ends: _Ends) -> Value:
    """Finds what a value is written over to lie in the bytes of `home`, a donated argument.

        home     ░░░░░░░ read                    free from here on
        copy             │        ▒▒▒▒▒▒▒        has no operand to lie in: lies in home, too
        value                     │      ▒▒▒▒▒   written over the copy, and returned

    It is written over the argument itself; or over an operand that comes to lie there, as one
    does that is written over the argument or has no other place; or after the argument has
    been read for the last time; or when it is, by a copy onto itself.
    """
    free = [v for v in value.over if _is_free_for(value, v)]
    under = home
    if home not in free:

        def lies_there(v: Value) -> bool:
            has_place = any(end > v.last_read for end in ends.of(v))
            return v.needs_slot and (not has_place or home in _origins(v))

        under = next(filter(lies_there, free), home)
        is_moved = any(t.done > value.written for t in home.readers)
        is_onto_itself = value.copied is home and not is_moved
        is_read = home.last_read > value.written or (
            (is_moved or (home.is_used and home.last_used == value.written)) and not is_onto_itself
        )
        if under is not home:
            under.home = home
        elif not home.is_taken and not is_read:
            home.followed_at = value.written
            return home
        else:
            raise VerificationError(
                f"%{value.name} takes the place of %{home.name} at tick {value.written}, which "
                f"is read until tick {home.last_read}",
                describe(module, value.writer),
                "A donated argument is overwritten after its last read.",
            )
    under.is_taken = True
    if under is not home:
        under.hold(value)
    return under


def _overwritten(module: Module, value: Value, ends: _Ends) -> Value:
    """The operand in whose bytes a value without a slot lies.

    The plan does not say which one it means. It must have been read for the last time, and
    have a slot that lasts as long as the value, or lie itself in an operand that has one: of
    these one that nothing else depends on of what the instruction writes, and that lasts least
    longer, so that what lives longer finds the others.
    """

    def lasting(value: Value) -> dict[Value, LogicalTime]:
        until = {
            v: min((end for end in ends.of(v) if end > value.last_read), default=0)
            for v in value.over
            if _is_free_for(value, v)
        }
        return {v: end for v, end in until.items() if end}

    free = lasting(value)
    if not free:
        raise VerificationError(
            f"%{value.name} has no slot",
            describe(module, value.writer),
            f"Expected one of {value.size} bytes during ticks [{value.written}, "
            f"{value.last_read + 1}), or an operand that dies here and has one.",
        )
    others = [lasting(v) for v in ends.pending_beside(value)]
    only = {next(iter(places)) for places in others if len(places) == 1}
    return min(free, key=lambda v: (v in only, free[v], not v.slots))


def _is_free_for(value: Value, under: Value) -> bool:
    """Whether an operand dies where `value` is written, and has not been written over yet."""
    if under.is_taken or under.is_free_from > value.written:
        return False
    return under.followed_at is None or value.last_read < under.followed_at


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


class _Ends:
    """When the slots end in which a value may lie, its own or those of its `_origins`.

    What was found holds until one of the values on the way is written over. A slot that ends
    before a value is written can hold neither it nor what is written over it: so few are kept.
    """

    def __init__(self, replay: Replay) -> None:
        self._found: dict[Value, frozenset[LogicalTime]] = {}
        self._above: defaultdict[Value, list[Value]] = defaultdict(list)
        self._beside: defaultdict[tuple[int, LogicalTime], list[Value]] = defaultdict(list)
        for value in replay.values:
            for under in value.over:
                self._above[under].append(value)
            if value.over:
                self._beside[value.writer.id, value.written].append(value)

    def pending_beside(self, value: Value) -> list[Value]:
        """What the instruction writes before `value` and that has no slot: it is placed later."""
        written = self._beside[value.writer.id, value.written]
        before = written[: written.index(value)]
        return [v for v in before if v.needs_slot and not v.slots and v.home is None]

    def of(self, value: Value) -> frozenset[LogicalTime]:
        """Returns the ends after the tick at which `value` is written."""
        pending = [value]
        while pending:  # Operands first: a chain of them can be as long as the schedule.
            v = pending[-1]
            below = [] if v.slots else [u for u in v.over if _is_free_for(v, u)]
            unknown = [u for u in below if u not in self._found]
            if unknown:
                pending += unknown
                continue
            pending.pop()
            ends = {s.live_range.end for s in v.slots}.union(*(self._found[u] for u in below))
            if v.followed_at is not None:
                ends = {min(end, v.followed_at) for end in ends}
            self._found[v] = frozenset(end for end in ends if end > v.written)
        return self._found[value]

    def forget(self, under: Value) -> None:
        """Takes note that something else may not lie in `under` any more, or not as long."""
        self._found.pop(under, None)
        pending = [under]
        while pending:
            for above in self._above[pending.pop()]:
                if self._found.pop(above, None) is not None:
                    pending.append(above)


def _fitting_slot(module: Module, value: Value, tiers: Mapping[str, str], tier: str) -> Slot:
    """The slot of a value in `tier`; a transfer goes where it says."""
    hint = ""
    t = value.transfer
    tier = tier if t is None else t.destination
    if t is not None and t.kind == "prefetch" and value.last_read >= t.end:
        raise VerificationError(
            f"the copy that transfer {t.id} makes of %{t.buffer} ends at tick {t.end}, but what "
            f"its users make of it is read until tick {value.last_read}",
            describe(module, value.writer),
            f"Hold it until tick {value.last_read + 1}.",
        )
    for slot in value.slots:
        start, end = slot.live_range
        if slot.size < value.size:
            hint = f"expected {value.size} bytes, found {slot.size}"
        elif tiers[slot.allocation] != tier and (t is not None or slot.allocation != ON_CHIP):
            hint = f"expected tier {tier}, found {tiers[slot.allocation]}"
        # A copy in host memory may be left later: the one that takes its place says when.
        elif t is not None and t.kind == "prefetch" and slot.live_range != (t.start, t.end):
            hint = f"expected ticks [{t.start}, {t.end}), found {ticks_of(slot)}"
        elif start > value.written or end <= value.last_read:
            hint = (
                f"expected ticks [{value.written}, {value.last_read + 1}), found {ticks_of(slot)}"
            )
        else:
            return slot
    raise VerificationError(
        f"the slot of %{value.name} does not hold it: {hint}",
        describe(module, value.writer),
        "A slot is its buffer's from the first write to the last read.",
    )


def ticks_of(slot: Slot) -> str:
    return f"ticks [{slot.live_range.start}, {slot.live_range.end})"


def bytes_of(slot: Slot) -> str:
    return f"bytes [{slot.offset}, {slot.offset + slot.size})"
