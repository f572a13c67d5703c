"""Does what shares bytes come one after the other, by the plan's own words? See `verify`.

    bytes of an arena
      ▲  ┌─ w0#0 ──────────┐         ┌─ w2#2 ────────
      │  │ start ▒▒▒▒ read │         │ start ▒▒▒▒
      │  └─────────────────┘         └───────────────
      │          compute:4 ──reuse──► start:2          fences
      │                               done:2 ──data──► compute:9
      └────────────────────────────────────────────────► order, not time

A transfer reads and writes at any moment between its start and its done (▒). Compute runs in
the order of the schedule. Between the two only a fence gives an order; between transfers it
is a fence, or the order of issue where one is done before the other is issued.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hlo_passes.errors import VerificationError
from hlo_passes.plan import Event, Fence, LiveRange, LogicalTime, Plan, Slot, Transfer
from hlo_passes.verify.program import Program, issue_rank
from hlo_passes.verify.replay import Replay, Value
from hlo_passes.verify.slots import bytes_of, ticks_of


def check_order(replay: Replay, holders: Mapping[Slot, Value], plan: Plan) -> None:
    """Checks that no two slots meet, and that the plan's fences keep it that way.

    Args:
      holders: the value of each slot that has one.

    Raises:
      VerificationError: at the first two that may meet, or order that no fence states.
    """
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
    _check_evictions(plan, program, awaited)
    by_allocation: defaultdict[str, list[Slot]] = defaultdict(list)
    slots, holders = _with_successors(replay, holders, plan)
    for slot in slots:
        by_allocation[slot.allocation].append(slot)
    for slots in by_allocation.values():
        for slot, earlier in _handovers(slots):
            for old in earlier:
                met = old.live_range.overlaps(slot.live_range)
                if met and not _takes_over(holders.get(old), holders.get(slot), old, slot):
                    raise VerificationError(
                        f"the slots of %{old.buffer} and %{slot.buffer} overlap in allocation "
                        f"{slot.allocation!r}: {bytes_of(old)} during {ticks_of(old)} against "
                        f"{bytes_of(slot)} during {ticks_of(slot)}",
                        program.at(slot.live_range.start),
                        "Slots that are live at one time lie apart.",
                    )
            holder = holders.get(slot)
            if holder is None or holder.transfer is None:
                continue  # Compute runs in order: what it overwrites has been read.
            for old in earlier:
                _check_reuse(plan, program, old, holders.get(old), holder.transfer, finished)


def _with_successors(
    replay: Replay, holders: Mapping[Slot, Value], plan: Plan
) -> tuple[list[Slot], Mapping[Slot, Value]]:
    """The plan's slots, and who holds them, with those of donated arguments divided where a result
    takes their bytes that has no slot of its own:

        slot of x   ────────────────────)
        x, result   x ── read                   result ────────── end of the program
        in between            what else the plan puts there
    """
    given = {value: slot for slot, value in holders.items()}
    parts: dict[Slot, dict[Slot, Value]] = {}
    for value in replay.values:
        home = value.home
        if home is None or home.followed_at != value.written or home not in given:
            continue
        slot = given[home]
        start, end = slot.live_range
        before = replace(slot, live_range=LiveRange(start, min(end, value.written)))
        after = replace(slot, live_range=LiveRange(value.written, replay.program.end))
        parts[slot] = {before: home, after: value}
    holders = {k: v for s, h in holders.items() for k, v in parts.get(s, {s: h}).items()}
    return [part for s in plan.slots for part in parts.get(s, (s,))], holders


def _check_evictions(plan: Plan, program: Program, awaited: Mapping[Event, LogicalTime]) -> None:
    """Checks that compute waits for evictions, and so do the fetches of what they took away."""
    fences = {(f.before, f.after) for f in plan.fences}
    away: dict[str, Event] = {}
    for t in plan.transfers:
        start, done = Event("start", t.id), Event("done", t.id)
        if t.kind == "evict":
            away[t.buffer] = done
            if awaited[done] > t.done:
                raise VerificationError(
                    f"no fence makes compute wait for the eviction of %{t.buffer}, transfer {t.id}",
                    program.at(t.done),
                    f"Add the reuse fence {done} -> compute:{t.done}.",
                )
        elif t.buffer in away and (away[t.buffer], start) not in fences:
            raise VerificationError(
                f"no fence makes transfer {t.id} wait until %{t.buffer} is in host memory",
                f"tick {t.start}",
                f"Add the data fence {away[t.buffer]} -> {start}.",
            )


def _check_reuse(
    plan: Plan,
    program: Program,
    old: Slot,
    holder: Value | None,
    transfer: Transfer,
    finished: Mapping[Event, LogicalTime],
) -> None:
    """Checks that `transfer` begins to write after all have read what `old` held."""
    start = Event("start", transfer.id)
    reader = old.live_range.end - 1
    if holder is not None:
        reader = min(reader, holder.last_used)
    if reader > finished[start]:
        raise VerificationError(
            f"transfer {transfer.id} of %{transfer.buffer} may overwrite %{old.buffer} while it is "
            "still read: no fence orders it after the last reader",
            program.at(reader),
            f"Add the reuse fence compute:{reader} -> {start}.",
        )
    for t in holder.readers if holder is not None else ():
        # There are evictions only where transfers are issued in order, and XLA:CPU runs what
        # touches the same bytes in order: one that is done before another starts needs no fence.
        if issue_rank(plan, Event("done", t.id)) > issue_rank(plan, start):
            raise VerificationError(
                f"transfer {transfer.id} of %{transfer.buffer} may overwrite %{old.buffer} while "
                f"transfer {t.id} still reads it",
                f"tick {transfer.start}",
                f"Start it when transfer {t.id} is done, at tick {t.done}.",
            )


def _takes_over(old: Value | None, new: Value | None, below: Slot, above: Slot) -> bool:
    """Whether an instruction leaves its result in the bytes of an operand that it reads last, or
    of a donated argument that nobody reads."""
    if old is None or new is None:
        return False
    if old.followed_at is not None and not (old.is_taken or old.is_used or old.readers):
        return True
    fits = new.written == above.live_range.start and below.offset == above.offset
    return fits and any(
        v.bottom is old and not v.is_taken and v.is_free_from <= new.written for v in new.over
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
