"""Programs that stream weights, and right plans for them: nothing of the planner is used.

Programs are written as HLO text, plans come from the few lines of `Streamed.plan` below, and
a rewritten module is the same text printed with its transfers where the plan has them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.plan import (
    Allocation,
    Event,
    Fence,
    LiveRange,
    Placement,
    Plan,
    Prediction,
    Slot,
    Transfer,
)
from hlo_passes.verify import verify_equivalent, verify_plan, verify_schedule
from tests.hlo_passes.toys import module_of

SIZE = 256  # bytes of f32[64], the only shape here
HERE = 'metadata={source_file="train.py" source_line=%d}'


# A value is read, idle while there is much else, and read again.
IDLE = """
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} negate(%x)
  %b = f32[64]{0} exponential(%a)
  %c = f32[192]{0} concatenate(%b, %b, %b), dimensions={0}
  %d = f32[64]{0} slice(%c), slice={[64:128]}
  %e = f32[64]{0} multiply(%d, %a)
  ROOT %r = f32[1]{0} slice(%e), slice={[0:1]}
"""


def entry(lines: str, *before: str) -> Module:
    body = "\n  ".join(line.strip() for line in lines.strip().splitlines())
    parts = ("HloModule by_hand, is_scheduled=true", *before, f"ENTRY %main {{\n  {body}\n}}")
    return module_of("\n\n".join(parts) + "\n")


@dataclass(frozen=True)
class Streamed:
    """x = op(x) or x = x * w, once a tick; `steps[t]` names the weight, −1 for none.

    A weight with `through` is read by a bitcast first, one tick earlier than its bytes.
    """

    steps: tuple[int, ...]
    through: bool = False
    cpu: bool = False

    @property
    def weights(self) -> int:
        return max(self.steps, default=-1) + 1

    def compute(self, copy: Callable[[int, int], str]) -> list[str]:
        """The lines of c0, c1, ...; `copy(w, tick)` is what a user of weight w reads there."""
        lines: list[str] = []
        x = "x"
        for step, w in enumerate(self.steps):
            root = "ROOT " if step == len(self.steps) - 1 else ""
            at = HERE % (step + 1)
            if w >= 0 and self.through:
                read = copy(w, len(lines))
                lines.append(f"%view{step} = f32[8,8]{{1,0}} bitcast(%{read})")
                lines.append(f"%flat{step} = f32[64]{{0}} bitcast(%view{step})")
                operands = f"(%{x}, %flat{step})"
            elif w >= 0:
                operands = f"(%{x}, %{copy(w, len(lines))})"
            else:
                operands = f"(%{x}, %{x})"
            lines.append(f"{root}%a{step} = f32[64]{{0}} multiply{operands}, {at}")
            x = f"a{step}"
        return lines

    def reads(self) -> dict[int, list[LiveRange]]:
        """Of every weight the ticks [first use, last read + 1) of each user."""
        found: dict[int, list[LiveRange]] = {w: [] for w in range(self.weights)}
        tick = 0
        for w in self.steps:
            length = 3 if w >= 0 and self.through else 1
            if w >= 0:
                found[w].append(LiveRange(tick, tick + length))
            tick += length
        return found

    def text(self, entry: list[str]) -> str:
        space = "" if self.cpu else ":S(5)"
        parameters = ["%x = f32[64]{0} parameter(0)"]
        parameters += [
            f"%w{w} = f32[64]{{0{space}}} parameter({w + 1})" for w in range(self.weights)
        ]
        body = "\n  ".join(parameters + entry)
        return f"HloModule streamed, is_scheduled=true\n\nENTRY %main {{\n  {body}\n}}\n"

    def module(self) -> Module:
        copies: list[str] = []
        for w in range(self.weights if not self.cpu else 0):
            copies.append(f"%start{w} = (f32[64]{{0}}, f32[64]{{0:S(5)}}, u32[]) copy-start(%w{w})")
            copies.append(f"%done{w} = f32[64]{{0}} copy-done(%start{w})")
        name = "w{}" if self.cpu else "done{}"
        return module_of(self.text(copies + self.compute(lambda w, _: name.format(w))))

    def plan(self, choose: random.Random) -> Plan:
        """A right plan: hold or fetch again, start early or late, first fit, all fences."""
        module = self.module()
        fetches: list[tuple[int, int, LiveRange]] = []  # start, weight, [done, end)
        for w, reads in self.reads().items():
            held: list[LiveRange] = []
            for read in reads:
                if held and choose.random() < 0.4:
                    held[-1] = LiveRange(held[-1].start, read.end)
                else:
                    held.append(read)
            fetches += [(choose.randint(max(0, h.start - 4), h.start), w, h) for h in held]
        transfers = [
            Transfer(i, f"w{w}", "host", "hbm", SIZE, start, held.start, held.end)
            for i, (start, w, held) in enumerate(sorted(fetches))
        ]
        return planned(module, transfers, temporaries(module))

    def rewritten(self, plan: Plan) -> list[str]:
        """The lines of the entry after the parameters, with the plan's transfers."""

        def serving(w: int, tick: int) -> str:
            there = [t for t in plan.transfers if t.buffer == f"w{w}" and t.done <= tick < t.end]
            return f"here{max(there, key=lambda t: t.done).id}"

        lines: list[str] = []
        for tick, line in enumerate(self.compute(serving)):
            lines += [self._start(plan, t) for t in plan.transfers if t.start == tick]
            lines += [self._done(t) for t in plan.transfers if t.done == tick]
            lines.append(line)
        return lines

    @cached_property
    def _names(self) -> list[str]:
        return [line.removeprefix("ROOT ").split()[0] for line in self.compute(lambda w, _: "x")]

    def _start(self, plan: Plan, t: Transfer) -> str:
        tag = f'frontend_attributes={{memplan.transfer="{t.id}"}}'
        if not self.cpu:
            shape = "(f32[64]{0}, f32[64]{0:S(5)}, u32[])"
            return f"%go{t.id} = {shape} copy-start(%{t.buffer}), {tag}"
        waits = [
            self._names[f.before.index] for f in plan.fences if f.after == Event("start", t.id)
        ]
        control = f", control-predecessors={{{', '.join(waits)}}}" if waits else ""
        target = 'custom_call_target="memplan.copy_start", api_version=API_VERSION_TYPED_FFI'
        return f"%go{t.id} = f32[64]{{0}} custom-call(%{t.buffer}), {target}{control}, {tag}"

    def _done(self, t: Transfer) -> str:
        tag = f'frontend_attributes={{memplan.transfer="{t.id}"}}'
        if not self.cpu:
            return f"%here{t.id} = f32[64]{{0}} copy-done(%go{t.id}), {tag}"
        target = 'custom_call_target="memplan.copy_done", api_version=API_VERSION_TYPED_FFI'
        alias = "output_to_operand_aliasing={{}: (0, {})}"
        operands = f"(%go{t.id}, %{t.buffer})"
        return f"%here{t.id} = f32[64]{{0}} custom-call{operands}, {target}, {alias}, {tag}"


def verify_rewrite(edited: Module, plan: Plan, rewritten: Module) -> None:
    """All that is asked of a rewritten module."""
    verify_equivalent(edited, rewritten)
    verify_schedule(edited, plan, rewritten)


def temporaries(module: Module) -> list[tuple[str, LiveRange]]:
    """The values a0, a1, ... of a `Streamed` program but the last, which is the output."""
    compute = [i for i in module.entry.instructions if i.opcode in ("multiply", "bitcast")]
    ticks = [t for t, i in enumerate(compute) if i.opcode == "multiply"]
    return [(compute[t].name, LiveRange(t, following + 1)) for t, following in pairwise(ticks)]


def planned(
    module: Module,
    transfers: list[Transfer],
    held: list[tuple[str, LiveRange]],
    device: str = "hbm",
) -> Plan:
    """Gives every buffer the lowest offset that is free, and states every fence."""
    slots: list[Slot] = []
    copies = [(f"{t.buffer}#{t.id}", LiveRange(t.start, t.end)) for t in transfers]
    for name, live in held + copies:
        taken = {s.offset for s in slots if s.live_range.overlaps(live)}
        offset = next(o for o in range(0, len(slots) * SIZE + 1, SIZE) if o not in taken)
        slots.append(Slot(name, "arena", offset, SIZE, live))
    fences: list[Fence] = []
    for t in transfers:
        own = slots[len(held) + t.id]
        earlier = [
            s.live_range.end - 1
            for s in slots
            if s.offset == own.offset and s.live_range.end <= t.start
        ]
        if earlier:
            before = Event("compute", max(earlier))
            fences.append(Fence(before, Event("start", t.id), "reuse"))
        fences.append(Fence(Event("done", t.id), Event("compute", t.done), "data"))
    return assembled(module, slots, transfers, fences, device)


def assembled(
    module: Module,
    slots: list[Slot],
    transfers: list[Transfer],
    fences: list[Fence],
    device: str = "hbm",
) -> Plan:
    """A plan of these, with slots for the argument and the output, and the least budget."""
    end = sum(i.opcode in ("multiply", "bitcast") for i in module.entry.instructions)
    arena = max((s.offset + s.size for s in slots), default=0)
    moved = {t.buffer for t in transfers}
    placements = [
        Placement(p.parameter_number, p.name, "host" if p.name in moved else device, SIZE)
        for p in module.entry.parameters
    ]
    apart = (
        Slot("x", "arguments", 0, SIZE, LiveRange(0, end)),
        Slot(module.entry.root.name, "outputs", 0, SIZE, LiveRange(end - 1, end)),
    )
    return Plan(
        module_fingerprint=module.fingerprint,
        machine="toy",
        budget_bytes=2 * SIZE + arena,
        placements=tuple(placements),
        allocations=(
            Allocation("arena", device, arena),
            Allocation("arguments", device, SIZE),
            Allocation("outputs", device, SIZE),
        ),
        slots=(*slots, *apart),
        transfers=tuple(transfers),
        fences=tuple(fences),
        prediction=Prediction(SIZE, SIZE, 0, arena, arena, 0.0, 0.0, 0.0, 0.0, 0.0),
        device_tier=device,
    )


@st.composite
def streamed(draw: st.DrawFn, cpu: bool = False) -> Streamed:
    """Programs in which every weight is read at least once."""
    weights = draw(st.integers(1, 4))
    rest = draw(st.lists(st.integers(-1, weights - 1), max_size=8))
    steps = draw(st.permutations([*range(weights), *rest]))
    return Streamed(tuple(steps), through=draw(st.booleans()), cpu=cpu)


def with_transfer(plan: Plan, changed: Transfer) -> Plan:
    """Changes a transfer, and its slot's range with it."""
    transfers = tuple(changed if t.id == changed.id else t for t in plan.transfers)
    name, live = f"{changed.buffer}#{changed.id}", LiveRange(changed.start, changed.end)
    slots = (replace(s, live_range=live) if s.buffer == name else s for s in plan.slots)
    return replace(plan, transfers=transfers, slots=tuple(slots))


def with_slot(plan: Plan, old: Slot, new: Slot) -> Plan:
    return replace(plan, slots=tuple(new if s == old else s for s in plan.slots))


def slot_of(plan: Plan, buffer: str) -> Slot:
    return next(s for s in plan.slots if s.buffer == buffer)


STEPS = (0, 1, -1, 0, 1)
"""x*w0, x*w1, x*x, x*w0, x*w1: five ticks."""


TICKS = ((0, 0), (0, 1), (1, 3), (2, 4))
"""Start and done of a transfer for each use of w0, w1, w0, w1."""


def streamed_plan(ticks: tuple[tuple[int, int], ...] = TICKS) -> Plan:
    module = Streamed(STEPS).module()
    transfers = [
        Transfer(i, f"w{i % 2}", "host", "hbm", SIZE, start, done, done + 1)
        for i, (start, done) in enumerate(ticks)
    ]
    return planned(module, transfers, temporaries(module))


def rejection(plan: Plan, program: Streamed | Module | None = None) -> str:
    module = program if isinstance(program, Module) else (program or Streamed(STEPS)).module()
    with pytest.raises(VerificationError) as rejected:
        verify_plan(module, plan)
    return str(rejected.value)
