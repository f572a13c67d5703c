"""Programs that evict, fetch again and recompute, and right plans for them.

    forward    a0 = x * w   a1 = a0 * a0   a2 = a1 * w   ...
    backward   b2 = -a2     b1 = b2 * a1   b0 = b1 * a0        each a is read again
    then       u = update(a0)   root = b0 + u                  in place, when a0 is read no more

Each a between is kept, evicted, or computed again for the backward pass. Nothing of the
planner is used: `Edited.plan` chooses ticks at random and packs by first fit.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hypothesis import strategies as st

from hlo_passes.ir import Instruction, Module
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
    Recompute,
    Refetch,
    Slot,
    Transfer,
)
from hlo_passes.rewrite.edits import apply
from tests.hlo_passes.streamed import SIZE, entry

Action = Literal["keep", "evict", "recompute"]
COPIES = ("copy-start", "copy-done")


@dataclass(frozen=True)
class Edited:
    """`weights[k]` names the weight that step k multiplies by, −1 for none; `actions[k]` says
    what is done with its result, which is kept for the first and the last."""

    weights: tuple[int, ...]
    actions: tuple[Action, ...]

    @cached_property
    def original(self) -> Module:
        lines = ["%x = f32[64]{0} parameter(0)"]
        found = sorted({w for w in self.weights if w >= 0})
        for n, w in enumerate(found):
            lines.append(f"%w{w} = f32[64]{{0:S(5)}} parameter({n + 1})")
        for w in found:
            shape = "(f32[64]{0}, f32[64]{0:S(5)}, u32[])"
            lines.append(f"%start{w} = {shape} copy-start(%w{w})")
            lines.append(f"%done{w} = f32[64]{{0}} copy-done(%start{w})")
        x = "x"
        for k, w in enumerate(self.weights):
            factor = f"done{w}" if w >= 0 else x
            lines.append(f"%a{k} = f32[64]{{0}} multiply(%{x}, %{factor})")
            x = f"a{k}"
        last = len(self.weights) - 1
        lines.append(f"%b{last} = f32[64]{{0}} negate(%a{last})")
        for k in reversed(range(last)):
            lines.append(f"%b{k} = f32[64]{{0}} multiply(%b{k + 1}, %a{k})")
        lines.append("%zero = s32[] constant(0)")
        lines.append("%u = f32[64]{0} dynamic-update-slice(%a0, %b0, %zero)")
        lines.append("ROOT %root = f32[64]{0} add(%b0, %u)")
        return entry("\n".join(lines))

    @cached_property
    def edits(self) -> Edits:
        def chosen(action: Action) -> list[int]:
            return [k for k, a in enumerate(self.actions) if a == action]

        return Edits(
            recomputes=tuple(
                Recompute(f"a{k}.again", f"a{k}", f"b{k}", (f"b{k}",)) for k in chosen("recompute")
            ),
            evictions=tuple(
                Eviction(f"a{k}", f"a{k + 1}", self._refetches(k)) for k in chosen("evict")
            ),
        )

    def _refetches(self, k: int) -> tuple[Refetch, ...]:
        back = (Refetch(f"b{k}", (f"b{k}",)),)
        if self.actions[k + 1] != "recompute":
            return back
        # What is computed again reads it first, one tick earlier.
        return (Refetch(f"b{k + 1}", (f"a{k + 1}.again",)), *back)

    @cached_property
    def module(self) -> Module:
        return apply(self.original, self.edits)

    @cached_property
    def compute(self) -> tuple[Instruction, ...]:
        hidden = (*COPIES, "parameter")
        return tuple(i for i in self.module.entry.instructions if i.opcode not in hidden)

    def readers(self, name: str) -> list[int]:
        """The ticks that read an instruction."""
        (id_,) = (i.id for i in self.module.entry.instructions if i.name == name)
        return [tick for tick, i in enumerate(self.compute) if id_ in i.operand_ids]

    def tick(self, name: str) -> int:
        return [i.name for i in self.compute].index(name)

    def plan(self, choose: random.Random) -> Plan:
        """A right plan: start early or late, hold weights or fetch them again, first fit."""
        transfers = self._transfers(choose)
        held = self._held(transfers)
        held += [(name_of(t), live_of(t)) for t in transfers if t.kind == "prefetch"]
        away = [(name_of(t), live_of(t)) for t in transfers if t.kind == "evict"]
        device, host = packed("arena", held), packed("host_temp", away)
        return self._assembled(transfers, device, host)

    def _transfers(self, choose: random.Random) -> list[Transfer]:
        found: list[Transfer] = []

        def add(buffer: str, start: int, done: int, end: int) -> None:
            found.append(Transfer(0, buffer, "host", "hbm", SIZE, start, done, end))

        for w in sorted({w for w in self.weights if w >= 0}):
            reads: list[LiveRange] = []
            for tick in self.readers(f"done{w}"):
                if reads and choose.random() < 0.5:
                    reads[-1] = LiveRange(reads[-1].start, tick + 1)
                else:
                    reads.append(LiveRange(tick, tick + 1))
            for read in reads:
                add(f"w{w}", choose.randint(max(0, read.start - 4), read.start), *read)
        for eviction in self.edits.evictions:
            name = eviction.buffer
            backs = [f"{name}.refetch{n}-done" for n in range(len(eviction.refetches))]
            ticks = [self.readers(back)[0] for back in backs]
            first, last = ticks[0], ticks[-1]
            written = self.tick(name)
            start = choose.randint(written + 1, min(written + 3, first, last - 1))
            done = choose.randint(start, first)
            out = Transfer(0, name, "hbm", "host", SIZE, start, done, last)
            found.append(replace(out, kind="evict"))
            begun = done
            for tick in ticks:
                begun = choose.randint(begun, tick)
                add(name, begun, tick, tick + 1)
        found.sort(key=lambda t: (t.start, t.kind != "evict"))
        return [replace(t, id=n) for n, t in enumerate(found)]

    def _held(self, transfers: list[Transfer]) -> list[tuple[str, LiveRange]]:
        """The temporaries: what compute writes, but the constant and the result."""
        until = {t.buffer: t.done for t in transfers if t.kind == "evict"}
        found: list[tuple[str, LiveRange]] = []
        for tick, i in enumerate(self.compute[:-1]):
            if i.opcode not in ("constant", "dynamic-update-slice"):
                # What is updated in place stays where it is.
                names = [i.name, "u"] if i.name == "a0" else [i.name]
                last = max((t for n in names for t in self.readers(n)), default=tick)
                found.append((i.name, LiveRange(tick, max(last + 1, until.get(i.name, 0)))))
        return found

    def _assembled(self, transfers: list[Transfer], device: list[Slot], host: list[Slot]) -> Plan:
        end = len(self.compute)
        parameters = self.module.entry.parameters
        apart = (
            Slot("x", "arguments", 0, SIZE, LiveRange(0, end)),
            Slot("root", "outputs", 0, SIZE, LiveRange(end - 1, end)),
        )
        arena = top(device)
        return Plan(
            module_fingerprint=self.module.fingerprint,
            machine="toy",
            budget_bytes=2 * SIZE + arena,
            placements=tuple(
                Placement(p.parameter_number, p.name, "hbm" if p.name == "x" else "host", SIZE)
                for p in parameters
            ),
            allocations=(
                Allocation("arena", "hbm", arena),
                Allocation("arguments", "hbm", SIZE),
                Allocation("outputs", "hbm", SIZE),
                Allocation("host_temp", "host", top(host)),
            ),
            slots=(*device, *host, *apart),
            transfers=tuple(transfers),
            fences=tuple(fences(transfers, device)),
            prediction=Prediction(SIZE, SIZE, 0, arena, arena, 0.0, 0.0, 0.0, 0.0, 0.0),
            edits=self.edits,
        )


def packed(allocation: str, held: list[tuple[str, LiveRange]]) -> list[Slot]:
    """Gives each the lowest offset that is free."""
    slots: list[Slot] = []
    for name, live in sorted(held, key=lambda h: h[1]):
        # At the tick at which a copy on the host is left, an eviction may not take its bytes.
        wide = [
            LiveRange(s.live_range.start, s.live_range.end + (allocation == "host_temp"))
            for s in slots
        ]
        taken = {s.offset for s, w in zip(slots, wide, strict=True) if w.overlaps(live)}
        offset = next(o for o in range(0, len(slots) * SIZE + 1, SIZE) if o not in taken)
        slots.append(Slot(name, allocation, offset, SIZE, live))
    return slots


def fences(transfers: list[Transfer], device: list[Slot]) -> list[Fence]:
    found: list[Fence] = []
    slots = {s.buffer: s for s in device}
    away: dict[str, Event] = {}
    for t in transfers:
        start, done = Event("start", t.id), Event("done", t.id)
        if t.kind == "evict":
            away[t.buffer] = done
            found.append(Fence(done, Event("compute", t.done), "reuse"))
            continue
        if t.buffer in away:
            found.append(Fence(away[t.buffer], start, "data"))
        own = slots[name_of(t)]
        earlier = [
            s.live_range.end - 1
            for s in device
            if s.offset == own.offset and s.live_range.end <= t.start
        ]
        if earlier:
            found.append(Fence(Event("compute", max(earlier)), start, "reuse"))
        found.append(Fence(done, Event("compute", t.done), "data"))
    return found


def name_of(t: Transfer) -> str:
    return f"{t.buffer}#{t.id}"


def live_of(t: Transfer) -> LiveRange:
    return LiveRange(t.start, t.end)


def top(slots: list[Slot]) -> int:
    return max((s.offset + s.size for s in slots), default=0)


def refetches(plan: Plan) -> dict[int, list[Transfer]]:
    """The fetches of what each eviction took away, by the eviction's id."""
    by_buffer: defaultdict[str, list[Transfer]] = defaultdict(list)
    for t in plan.transfers:
        if t.kind == "prefetch":
            by_buffer[t.buffer].append(t)
    return {t.id: by_buffer[t.buffer] for t in plan.transfers if t.kind == "evict"}


@st.composite
def edited(draw: st.DrawFn, *actions: Action) -> Edited:
    """Programs with at least one of each of `actions`."""
    n = draw(st.integers(len(actions) + 2, len(actions) + 6))
    weights = draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n))
    rest: list[Action] = draw(
        st.lists(
            st.sampled_from(["keep", "evict", "recompute"]),
            min_size=n - 2 - len(actions),
            max_size=n - 2 - len(actions),
        )
    )
    inner: list[Action] = draw(st.permutations([*actions, *rest]))
    return Edited((0, *weights[1:]), ("keep", *inner, "keep"))
