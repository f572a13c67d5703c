"""The checker accepts right plans and rewrites, and rejects every way to get them wrong.

Nothing of the planner is used: programs are written as HLO text, plans come from the
few lines of `Streamed.plan` below, and a rewritten module is the same text printed with
its transfers where the plan has them.
"""

from __future__ import annotations

import ast
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hlo_passes
from hlo_passes.errors import PlanMismatchError, VerificationError
from hlo_passes.ir import Module
from hlo_passes.machine import Machine, Tier
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
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify import verify_executable, verify_plan, verify_rewrite
from hlo_passes.xla import hlo_text_to_proto

SIZE = 256  # bytes of f32[64], the only shape here
HERE = 'metadata={source_file="train.py" source_line=%d}'


def test_the_checker_shares_nothing_with_the_planner():
    folder = Path(hlo_passes.__file__).parent
    checker = {file.stem for file in folder.glob("verify*.py")}
    allowed = {"errors", "ir", "machine", "plan", "proto", *checker}
    for name in checker:
        source = (folder / f"{name}.py").read_text()
        imports = [n.module or "" for n in ast.walk(ast.parse(source)) if is_import_from(n)]
        ours = {m.split(".")[1] for m in imports if m.startswith("hlo_passes.")}
        assert ours <= allowed, name


def is_import_from(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    assert not isinstance(node, ast.Import) or node.names[0].name == "re"
    return isinstance(node, ast.ImportFrom)


def parse(text: str) -> Module:
    return Module(hlo_pb2.HloModuleProto.FromString(hlo_text_to_proto(text)))


# ── Programs that stream weights, and plans for them ─────────────────────────────────────


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
        return parse(self.text(copies + self.compute(lambda w, _: name.format(w))))

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


# ── verify_plan ──────────────────────────────────────────────────────────────────────────


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
    return Machine("toy", (), "tpu", 1.0, 1.0, (), tiers, (), None, ())


def test_a_machine_holds_what_is_put_there():
    module, plan = Streamed(STEPS).module(), streamed_plan()
    verify_plan(module, plan, toy_machine(hbm=1536, host=512))
    with pytest.raises(VerificationError, match="512 bytes of host, the capacity is 511"):
        verify_plan(module, plan, toy_machine(hbm=1536, host=511))
    with pytest.raises(VerificationError, match="1536 bytes of hbm, the capacity is 1535"):
        verify_plan(module, plan, toy_machine(hbm=1535, host=512))
    with pytest.raises(VerificationError, match="computes in tier hbm, the machine in dram"):
        verify_plan(module, plan, toy_machine(dram=1536, host=512))


def test_another_module_is_refused():
    plan = streamed_plan()
    with pytest.raises(PlanMismatchError, match=plan.module_fingerprint):
        verify_plan(Streamed((0, 1)).module(), plan)


def test_a_module_without_a_schedule_is_refused():
    text = Streamed(STEPS).text(["ROOT %n = f32[64]{0} negate(%x)"])
    module = parse(text.replace("is_scheduled=true", "is_scheduled=false"))
    assert "the module has no schedule" in rejection(streamed_plan(), module)


# ── What a copy is read through, and where values lie ────────────────────────────────────


def entry(lines: str, *before: str) -> Module:
    body = "\n  ".join(line.strip() for line in lines.strip().splitlines())
    parts = ("HloModule by_hand, is_scheduled=true", *before, f"ENTRY %main {{\n  {body}\n}}")
    return parse("\n\n".join(parts) + "\n")


FETCH = """
    %x = f32[64]{0} parameter(0)
    %w0 = f32[64]{0:S(5)} parameter(1)
    %start = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%w0)
    %done = f32[64]{0} copy-done(%start)
"""

LOOP = """
%condition {
  %c = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body {
  ROOT %b = (s32[], f32[64]{0}) parameter(0)
}""".strip()

WRAPPED = """
%wrapped {
  %p = f32[64]{0} parameter(0)
  ROOT %negated = f32[64]{0} negate(%p)
}""".strip()


def fetched(module: Module, last: int, end: int, *slots: Slot) -> Plan:
    """One transfer of w0 at tick 0, read until `last`; its own slots at 0, others as given."""
    sizes = {"arena": SIZE, "outputs": 0, "arguments": SIZE}
    for slot in slots:
        sizes[slot.allocation] = max(sizes[slot.allocation], slot.offset + slot.size)
    return Plan(
        module_fingerprint=module.fingerprint,
        machine="toy",
        budget_bytes=10**6,
        placements=(Placement(0, "x", "hbm", SIZE), Placement(1, "w0", "host", SIZE)),
        allocations=tuple(Allocation(name, "hbm", size) for name, size in sizes.items()),
        slots=(
            Slot("x", "arguments", 0, SIZE, LiveRange(0, end)),
            Slot("w0#0", "arena", 0, SIZE, LiveRange(0, last + 1)),
            *slots,
        ),
        transfers=(Transfer(0, "w0", "host", "hbm", SIZE, 0, 0, last + 1),),
        fences=(Fence(Event("done", 0), Event("compute", 0), "data"),),
        prediction=Prediction(SIZE, SIZE, 0, SIZE, SIZE, 0.0, 0.0, 0.0, 0.0, 0.0),
    )


def assert_last_read(module: Module, last: int, end: int, *slots: Slot) -> None:
    """A copy held until after `last` is accepted, one that ends before is rejected."""
    verify_plan(module, fetched(module, last, end, *slots))
    assert f"is read until tick {last}" in rejection(fetched(module, last - 1, end, *slots), module)


def test_a_copy_is_read_through_tuples_and_barriers():
    module = entry(
        FETCH
        + """
        %t = (f32[64]{0}, f32[64]{0}) tuple(%x, %done)
        %o = (f32[64]{0}, f32[64]{0}) opt-barrier(%t)
        %g = f32[64]{0} get-tuple-element(%o), index=1
        ROOT %r = f32[64]{0} negate(%g)
        """
    )
    assert_last_read(module, 3, 4, Slot("r", "outputs", 0, SIZE, LiveRange(3, 4)))


def test_a_copy_is_read_through_a_loop_that_carries_it():
    module = entry(
        FETCH
        + """
        %zero = s32[] constant(0)
        %t = (s32[], f32[64]{0}) tuple(%zero, %done)
        %loop = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body
        %g = f32[64]{0} get-tuple-element(%loop), index=1
        ROOT %r = f32[64]{0} negate(%g)
        """,
        LOOP,
    )
    # The first user is the tuple, at tick 1.
    plan = fetched(module, 4, 5, Slot("r", "outputs", 0, SIZE, LiveRange(4, 5)))
    verify_plan(module, plan)
    short = with_transfer(plan, replace(plan.transfers[0], end=4))
    assert "is read until tick 4" in rejection(short, module)


def test_a_copy_is_read_until_an_asynchronous_call_is_done():
    module = entry(
        FETCH
        + """
        %go = ((f32[64]{0}), f32[64]{0}, s32[]) async-start(%done), calls=%wrapped
        %a = f32[64]{0} negate(%x)
        %here = f32[64]{0} async-done(%go)
        ROOT %r = f32[64]{0} add(%a, %here)
        """,
        WRAPPED,
    )
    slots = (
        Slot("r", "outputs", 0, SIZE, LiveRange(3, 4)),
        Slot("a", "arena", SIZE, SIZE, LiveRange(1, 4)),
        Slot("go{1}", "arena", 2 * SIZE, SIZE, LiveRange(0, 4)),
    )
    assert_last_read(module, 2, 4, *slots)
    # The callee's name for the result is as good.
    named = (*slots[:2], replace(slots[2], buffer="negated"))
    verify_plan(module, fetched(module, 2, 4, *named))
    assert "%go{1} has no slot" in rejection(fetched(module, 2, 4, *slots[:2]), module)


UPDATE = (
    FETCH
    + """
    %zero = s32[] constant(0)
    %one = f32[1]{0} slice(%x), slice={[0:1]}
    %u = f32[64]{0} dynamic-update-slice(%done, %one, %zero)
    %s = f32[64]{0} negate(%x)
    ROOT %r = f32[64]{0} add(%u, %s)
    """
)


def test_an_update_in_place_holds_the_copy_or_has_a_slot():
    module = entry(UPDATE)
    slots = (
        Slot("one", "arena", SIZE, 4, LiveRange(1, 3)),
        Slot("s", "arena", 2 * SIZE, SIZE, LiveRange(3, 5)),
        Slot("r", "outputs", 0, SIZE, LiveRange(4, 5)),
    )
    verify_plan(module, fetched(module, 4, 5, *slots))
    assert "%u has no slot" in rejection(fetched(module, 3, 5, *slots), module)
    own = Slot("u", "arena", 3 * SIZE, SIZE, LiveRange(2, 5))
    verify_plan(module, fetched(module, 2, 5, *slots, own))


UPDATING = """
%updating {
  %p = f32[64]{0} parameter(0)
  %one = f32[1]{0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %u = f32[64]{0} dynamic-update-slice(%p, %one, %zero)
}

%wrapped {
  %p.1 = f32[64]{0} parameter(0)
  %one.1 = f32[1]{0} parameter(1)
  ROOT %updated = f32[64]{0} fusion(%p.1, %one.1), kind=kLoop, calls=%updating
}""".strip()

UPDATE_IN_FLIGHT = (
    FETCH
    + """
    %some = f32[1]{0} slice(%x), slice={[0:1]}
    %go = ((f32[64]{0}, f32[1]{0}), f32[64]{0}, s32[]) async-start(%done, %some), calls=%wrapped
    %a = f32[64]{0} negate(%x)
    %here = f32[64]{0} async-done(%go)
    ROOT %r = f32[64]{0} add(%a, %here)
    """
)


def test_an_update_in_flight_may_be_in_place():
    slots = (
        Slot("some", "arena", SIZE, 4, LiveRange(0, 4)),
        Slot("a", "arena", 2 * SIZE, SIZE, LiveRange(2, 5)),
        Slot("r", "outputs", 0, SIZE, LiveRange(4, 5)),
    )
    module = entry(UPDATE_IN_FLIGHT, UPDATING)
    verify_plan(module, fetched(module, 4, 5, *slots))
    assert "%go{1} has no slot" in rejection(fetched(module, 3, 5, *slots), module)
    over = Slot("go{1}", "arena", 0, SIZE, LiveRange(1, 5))
    verify_plan(module, fetched(module, 3, 5, *slots, over))
    # Nobody else may read the copy once the update has begun.
    module = entry(UPDATE_IN_FLIGHT.replace("negate(%x)", "negate(%done)"), UPDATING)
    assert "%go{1} has no slot" in rejection(fetched(module, 4, 5, *slots), module)
    assert "the slots of %w0#0 and %go{1} overlap" in rejection(
        fetched(module, 3, 5, *slots, over), module
    )


def test_what_reads_after_it_writes_is_not_in_place_in_flight():
    slots = (
        Slot("a", "arena", SIZE, SIZE, LiveRange(1, 4)),
        Slot("r", "outputs", 0, SIZE, LiveRange(3, 4)),
    )
    text = """
        %go = ((f32[64]{0}), f32[64]{0}, s32[]) async-start(%done), calls=%wrapped
        %a = f32[64]{0} negate(%x)
        %here = f32[64]{0} async-done(%go)
        ROOT %r = f32[64]{0} add(%a, %here)
        """
    module = entry(FETCH + text, WRAPPED)
    verify_plan(module, fetched(module, 3, 4, *slots))
    reverse = entry(FETCH + text, WRAPPED.replace("negate(%p)", "reverse(%p), dimensions={0}"))
    assert "%go{1} has no slot" in rejection(fetched(reverse, 3, 4, *slots), reverse)


def test_a_result_may_have_the_slot_of_an_operand_that_dies():
    module = entry(UPDATE)
    slots = (
        Slot("one", "arena", SIZE, 4, LiveRange(1, 3)),
        Slot("s", "arena", 2 * SIZE, SIZE, LiveRange(3, 5)),
        Slot("r", "outputs", 0, SIZE, LiveRange(4, 5)),
    )
    over = Slot("u", "arena", 0, SIZE, LiveRange(2, 5))
    verify_plan(module, fetched(module, 2, 5, *slots, over))
    early = replace(over, live_range=LiveRange(1, 5))
    assert "the slots of %w0#0 and %u overlap" in rejection(
        fetched(module, 2, 5, *slots, early), module
    )
    swapped = replace(slots[1], offset=0)
    assert "overlap" in rejection(fetched(module, 3, 5, swapped, *slots[::2], over), module)


def test_an_argument_is_not_written_over_unless_it_is_donated():
    lines = FETCH + "ROOT %r = f32[64]{0} add(%x, %done)"
    kept = entry(lines)
    slot = Slot("r", "arguments", 0, SIZE, LiveRange(0, 1))
    assert "the slots of %x and %r overlap in allocation 'arguments'" in rejection(
        fetched(kept, 0, 1, slot), kept
    )
    given = donated(lines)
    verify_plan(given, fetched(given, 0, 1, slot))
    verify_plan(given, fetched(given, 0, 1))
    # Argument and output are one buffer: they are counted once.
    assert "it needs 512 bytes of hbm, the budget is 511" in rejection(
        replace(fetched(given, 0, 1), budget_bytes=511), given
    )


def donated(lines: str) -> Module:
    """A program that gives x away to its result."""
    return parse(
        f"HloModule by_hand, is_scheduled=true, input_output_alias={{ {{}}: (0, {{}}) }}\n\n"
        f"ENTRY %main {{{lines}\n}}\n"
    )


def test_what_a_result_is_written_over_lies_in_the_donated_argument():
    # Nothing but the argument has bytes for the copy: the result is written over it.
    module = donated(
        FETCH
        + """
        %a = f32[64]{0} multiply(%x, %done)
        %c = f32[64]{0} copy(%a)
        %b = f32[64]{0} negate(%c)
        ROOT %r = f32[64]{0} add(%b, %a)
        """
    )
    slot = Slot("a", "arena", SIZE, SIZE, LiveRange(0, 4))
    verify_plan(module, fetched(module, 0, 4, slot))
    short = replace(slot, live_range=LiveRange(0, 3))
    assert "the slot of %a does not hold it" in rejection(fetched(module, 0, 4, short), module)


def test_an_argument_is_read_before_what_takes_its_place_is_written():
    lines = (
        FETCH
        + """
        %a = f32[64]{0} multiply(%x, %done)
        %c = f32[64]{0} copy(%a)
        %n = f32[64]{0} negate(%LATE)
        ROOT %r = f32[64]{0} add(%c, %n)
        """
    )
    slots = (
        Slot("a", "arena", SIZE, SIZE, LiveRange(0, 3)),
        Slot("n", "arena", 2 * SIZE, SIZE, LiveRange(2, 4)),
    )
    right = donated(lines.replace("LATE", "a"))
    verify_plan(right, fetched(right, 0, 4, *slots))
    wrong = donated(lines.replace("LATE", "x"))
    assert "%c takes the place of %x at tick 1, which is read until tick 2" in rejection(
        fetched(wrong, 0, 4, *slots), wrong
    )


def test_a_copy_that_is_not_returned_does_not_lie_in_a_donated_argument():
    module = donated(
        FETCH
        + """
        %a = f32[64]{0} multiply(%x, %done)
        %c = f32[64]{0} copy(%a)
        ROOT %r = f32[64]{0} reverse(%c), dimensions={0}
        """
    )
    slot = Slot("a", "arena", SIZE, SIZE, LiveRange(0, 2))
    assert "%c has no slot" in rejection(fetched(module, 0, 3, slot), module)
    own = Slot("c", "arena", 2 * SIZE, SIZE, LiveRange(1, 3))
    verify_plan(module, fetched(module, 0, 3, slot, own))


def test_each_result_of_an_instruction_has_an_operand_of_its_own():
    # The first result lives long, and only b lasts so; the second has to be in u, and that
    # in a, although b has a slot itself and u has none.
    module = entry(
        FETCH
        + """
        %a = f32[64]{0} multiply(%x, %done)
        %b = f32[64]{0} negate(%x)
        %u = f32[64]{0} negate(%a)
        %f = (f32[64]{0}, f32[64]{0}) custom-call(%u, %b), custom_call_target="both"
        %one = f32[64]{0} get-tuple-element(%f), index=1
        %s = f32[64]{0} reverse(%one), dimensions={0}
        %two = f32[64]{0} get-tuple-element(%f), index=0
        ROOT %r = f32[64]{0} subtract(%two, %s)
        """
    )
    slots = (
        Slot("a", "arena", SIZE, SIZE, LiveRange(0, 6)),
        Slot("b", "arena", 2 * SIZE, SIZE, LiveRange(1, 8)),
        Slot("s", "arena", 3 * SIZE, SIZE, LiveRange(5, 8)),
        Slot("r", "outputs", 0, SIZE, LiveRange(7, 8)),
        Slot("f", "arena", 4 * SIZE, 16, LiveRange(3, 7)),
    )
    verify_plan(module, fetched(module, 0, 8, *slots))
    short = replace(slots[1], live_range=LiveRange(1, 7))
    assert "%f{0} has no slot" in rejection(
        fetched(module, 0, 8, slots[0], short, *slots[2:]), module
    )


def test_a_donated_argument_is_not_fetched():
    lines = FETCH + "ROOT %r = f32[64]{0} add(%x, %done)"
    module = parse(
        f"HloModule by_hand, is_scheduled=true, input_output_alias={{ {{}}: (1, {{}}) }}\n\n"
        f"ENTRY %main {{{lines}\n}}\n"
    )
    assert "transfer 0 serves no use of %w0" in rejection(fetched(module, 0, 1), module)


def test_a_placement_agrees_with_the_module():
    module = entry(FETCH + "ROOT %r = f32[64]{0} add(%x, %done)")
    plan = fetched(module, 0, 1, Slot("r", "outputs", 0, SIZE, LiveRange(0, 1)))
    verify_plan(module, plan)
    on_device = (plan.placements[0], replace(plan.placements[1], tier="hbm"))
    assert "%w0 is placed in hbm, but the module takes it from host memory" in rejection(
        replace(plan, placements=on_device), module
    )
    wrong = (plan.placements[0], replace(plan.placements[1], size=8))
    assert (
        "parameter 1: expected a placement of %w0 with 256 bytes, found ('w0', 8)"
    ) in rejection(replace(plan, placements=wrong), module)
    assert "3 placements for 2 parameters" in rejection(
        replace(plan, placements=(*plan.placements, Placement(2, "z", "hbm", 0))), module
    )


# ── verify_rewrite ───────────────────────────────────────────────────────────────────────


def accept(program: Streamed, plan: Plan, lines: list[str]) -> Module:
    rewritten = parse(program.text(lines))
    verify_rewrite(program.module(), plan, rewritten)
    return rewritten


def rewrite_rejection(program: Streamed, plan: Plan, lines: list[str]) -> str:
    with pytest.raises(VerificationError) as rejected:
        accept(program, plan, lines)
    return str(rejected.value)


@given(st.one_of(streamed(), streamed(cpu=True)), st.randoms(use_true_random=False))
def test_a_right_rewrite_is_accepted(program: Streamed, choose: random.Random):
    plan = program.plan(choose)
    rewritten = accept(program, plan, program.rewritten(plan))
    assert verify_executable(plan, rewritten).exactly


@given(st.one_of(streamed(), streamed(cpu=True)), st.randoms(use_true_random=False), st.data())
def test_a_rewrite_in_another_order_is_rejected(
    program: Streamed, choose: random.Random, data: st.DataObject
):
    plan = program.plan(choose)
    lines = program.rewritten(plan)
    assume(len(lines) > 1)
    k = data.draw(st.integers(0, len(lines) - 2))
    assume(not lines[k + 1].startswith("ROOT"))
    # Neighbours that are both dones wait for each other.
    assume(not (lines[k].startswith("%here") and lines[k + 1].startswith("%here")))
    lines[k : k + 2] = lines[k + 1], lines[k]
    name = lines[k + 1].split()[0]
    assume(
        f"{name})" not in lines[k] and f"{name}," not in lines[k] and f"{name}}}" not in lines[k]
    )
    rewrite_rejection(program, plan, lines)


PROGRAM = Streamed(STEPS)


def changed(old: str, new: str, program: Streamed = PROGRAM) -> str:
    """Why the rewrite is rejected in which `old` has become `new`."""
    plan = plan_for(program)
    text = "\n".join(program.rewritten(plan))
    assert text.count(old) == 1, text
    return rewrite_rejection(program, plan, text.replace(old, new).splitlines())


def plan_for(program: Streamed) -> Plan:
    return replace(streamed_plan(), module_fingerprint=program.module().fingerprint)


def test_a_wrong_operand_is_rejected():
    assert changed("multiply(%a2, %here2)", "multiply(%a2, %here0)") == (
        "plan rejected: %a3 at tick 3: expected operands %a2, %here2, found %a2, %here0 "
        "(%a3 = f32[64] multiply, train.py:4)."
    )
    assert "expected operands %a1, %a1, found %a1, %a0" in changed(
        "multiply(%a1, %a1)", "multiply(%a1, %a0)"
    )


def test_a_changed_instruction_is_rejected():
    assert "%a2 at tick 2 is not the instruction that it was" in changed(
        "multiply(%a1, %a1)", "add(%a1, %a1)"
    )


def test_lost_or_added_compute_is_rejected():
    extra = "%a2 = f32[64]{0} multiply"
    assert "tick 2: expected %a2, found %extra" in changed(
        extra, f"%extra = f32[64]{{0}} negate(%a1)\n{extra}"
    )
    assert "tick 4: expected %a4, found %after" in changed(
        "ROOT %a4 = f32[64]{0} multiply(%a3, %here3)",
        "ROOT %after = f32[64]{0} multiply(%a3, %here3)",
    )
    plan = plan_for(PROGRAM)
    lines = [line.removeprefix("ROOT ") for line in PROGRAM.rewritten(plan)]
    assert "tick 5: expected nothing, found %more" in rewrite_rejection(
        PROGRAM, plan, [*lines, "ROOT %more = f32[64]{0} negate(%a4)"]
    )


def test_another_result_is_rejected():
    plan = plan_for(PROGRAM)
    lines = PROGRAM.rewritten(plan)
    lines[-1] = lines[-1].removeprefix("ROOT ")
    k = next(k for k, line in enumerate(lines) if line.startswith("%a3"))
    lines[k] = "ROOT " + lines[k]
    assert "expected the result %a4, found %a3" in rewrite_rejection(PROGRAM, plan, lines)


def test_a_missing_half_is_rejected():
    untagged = 'frontend_attributes={memplan.transfer="2"}'
    done = f"%here2 = f32[64]{{0}} copy-done(%go2), {untagged}"
    assert "tick 3: expected %a3, found %here2" in changed(done, done.replace(f", {untagged}", ""))
    plan = plan_for(PROGRAM)
    lines = [line for line in PROGRAM.rewritten(plan) if "%here2 =" not in line]
    lines = [line.replace("%here2", "%here0") for line in lines]
    assert rewrite_rejection(PROGRAM, plan, lines) == (
        "plan rejected: done:2 of %w0 is missing (module streamed). Both halves carry the frontend "
        "attribute memplan.transfer."
    )


def test_a_transfer_too_many_is_rejected():
    go = "%go3 = (f32[64]{0}"
    more = "%go9 = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%w0), "
    more += 'frontend_attributes={memplan.transfer="9"}'
    assert "start:9 is none of the plan's 4 transfers" in changed(go, f"{more}\n{go}")
    again = more.replace('"9"', '"0"')
    assert "start:0 is there twice, first as %go0" in changed(go, f"{again}\n{go}")


def test_a_transfer_of_another_buffer_is_rejected():
    assert "transfer 2 of %w0, operands of %go2: found %w1, expected %w0" in changed(
        'copy-start(%w0), frontend_attributes={memplan.transfer="2"}',
        'copy-start(%w1), frontend_attributes={memplan.transfer="2"}',
    )


def test_a_transfer_at_another_tick_is_rejected():
    plan = plan_for(PROGRAM)
    lines = PROGRAM.rewritten(plan)
    k = next(k for k, line in enumerate(lines) if line.startswith("%go3"))
    later = [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]
    assert rewrite_rejection(PROGRAM, plan, later) == (
        "plan rejected: start:3 of %w1 stands at tick 3, expected tick 2 "
        "(%go3 = (f32[64], f32[64]S(5), u32[]) copy-start)."
    )
    swapped = [*lines]
    one, two = (next(k for k, s in enumerate(lines) if s.startswith(f"%go{i}")) for i in (0, 1))
    swapped[one], swapped[two] = swapped[two], swapped[one]
    assert "start:0 of %w0 stands out of order in tick 0" in rewrite_rejection(
        PROGRAM, plan, swapped
    )


def test_a_change_around_the_entry_is_rejected():
    plan = plan_for(PROGRAM)
    text = PROGRAM.text(PROGRAM.rewritten(plan))
    aliased = text.replace("=true", "=true, input_output_alias={ {}: (0, {}) }")
    with pytest.raises(VerificationError, match="the module differs outside its computations"):
        verify_rewrite(PROGRAM.module(), plan, parse(aliased))
    helper = "%helper {\n  ROOT %p = f32[64]{0} parameter(0)\n}\n\nENTRY"
    with pytest.raises(VerificationError, match="differs"):
        verify_rewrite(PROGRAM.module(), plan, parse(text.replace("ENTRY", helper)))


def edited(change: Callable[[hlo_pb2.HloModuleProto], None]) -> str:
    """Why the rewrite is rejected whose proto `change` has edited."""
    plan = plan_for(PROGRAM)
    proto = parse(PROGRAM.text(PROGRAM.rewritten(plan))).to_proto()
    change(proto)
    with pytest.raises(VerificationError) as rejected:
        verify_rewrite(PROGRAM.module(), plan, Module(proto))
    return str(rejected.value)


def test_a_schedule_that_cannot_run_is_rejected():
    def swap(proto: hlo_pb2.HloModuleProto) -> None:
        ids = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
        ids[-1], ids[-3] = ids[-3], ids[-1]

    def repeat(proto: hlo_pb2.HloModuleProto) -> None:
        ids = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
        ids.append(ids[-1])

    def renumber(proto: hlo_pb2.HloModuleProto) -> None:
        ids = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
        ids[-1] = proto.computations[0].instructions[-1].id = 7 << 32
        proto.computations[0].root_id = 7 << 32

    assert "is scheduled before what it needs" in edited(swap)
    assert "%a4 is scheduled twice" in edited(repeat)
    assert "%a4 has id 30064771072, which is not of computation 0" in edited(renumber)


def test_a_lost_control_edge_is_rejected():
    original = Streamed(STEPS)
    text = original.text(
        [
            "%start0 = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%w0)",
            "%done0 = f32[64]{0} copy-done(%start0)",
            "%a = f32[64]{0} negate(%x)",
            "ROOT %b = f32[64]{0} multiply(%x, %done0), control-predecessors={%a}",
        ]
    )
    module = parse(text)
    lost = parse(
        text.replace(", control-predecessors={%a}", "")
        .replace("copy-start(%w0)", 'copy-start(%w0), frontend_attributes={memplan.transfer="0"}')
        .replace(
            "copy-done(%start0)", 'copy-done(%start0), frontend_attributes={memplan.transfer="0"}'
        )
    )
    transfer = Transfer(0, "w0", "host", "hbm", SIZE, 0, 0, 2)
    plan = replace(streamed_plan(), transfers=(transfer,), fences=())
    with pytest.raises(VerificationError, match="%b lost its control predecessors %a"):
        verify_rewrite(module, plan, lost)


ON_CPU = Streamed(STEPS, cpu=True)


def test_on_cpu_every_fence_is_an_edge():
    assert changed(", control-predecessors={%a1}", "", ON_CPU) == (
        "plan rejected: %go3 may run before %a1 has finished, against the reuse fence compute:1 -> "
        "start:3 (%go3 = f32[64] custom-call). Order them by an operand or a control predecessor."
    )
    plan = plan_for(ON_CPU)
    text = "\n".join(ON_CPU.rewritten(plan)).replace(", control-predecessors={%a1}", "")
    go = "%go3 = f32[64]{0} custom-call"
    by_operand = text.replace(f"{go}(%w1)", f"{go}(%w1, %a1)")
    assert by_operand != text
    accept(ON_CPU, plan, by_operand.splitlines())


def test_on_cpu_a_done_names_its_source_and_its_alias():
    assert "transfer 2 of %w0, operands of %here2: found %go2, expected %go2, %w0" in changed(
        "custom-call(%go2, %w0)", "custom-call(%go2)", ON_CPU
    )
    plan = plan_for(ON_CPU)
    bare = [
        line.replace(", output_to_operand_aliasing={{}: (0, {})}", "")
        for line in ON_CPU.rewritten(plan)
    ]
    assert "aliasing of %here0: found [], expected [((), 0, ())]" in rewrite_rejection(
        ON_CPU, plan, bare
    )


# ── verify_executable ────────────────────────────────────────────────────────────────────


def test_an_executable_that_follows_the_plan():
    plan = plan_for(PROGRAM)
    followed = verify_executable(plan, parse(PROGRAM.text(PROGRAM.rewritten(plan))))
    assert (followed.transfers, followed.missing, followed.reordered) == (4, (), ())


def test_a_transfer_that_moved_is_reported():
    plan = plan_for(PROGRAM)
    lines = PROGRAM.rewritten(plan)
    two, three = (
        next(k for k, line in enumerate(lines) if line.startswith(f"%go{i}")) for i in (2, 3)
    )
    lines.insert(three, lines.pop(two))
    followed = verify_executable(plan, parse(PROGRAM.text(lines)))
    assert (followed.missing, followed.reordered, followed.exactly) == ((), (2,), False)


def test_a_transfer_that_is_gone_is_reported():
    plan = plan_for(PROGRAM)
    lines = [line.replace("%here2)", "%here0)") for line in PROGRAM.rewritten(plan)]
    lines = [line for line in lines if not line.startswith(("%go2", "%here2"))]
    followed = verify_executable(plan, parse(PROGRAM.text(lines)))
    assert (followed.transfers, followed.missing, followed.reordered) == (3, (2,), ())


def test_a_transfer_without_its_attribute_is_known_by_its_name():
    plan = plan_for(ON_CPU)
    lines = [
        line.split(", frontend_attributes")[0]
        .replace("%go", "%memplan_copy_start.")
        .replace("%here", "%memplan_copy_done.")
        for line in ON_CPU.rewritten(plan)
    ]
    assert verify_executable(plan, parse(ON_CPU.text(lines))).exactly


# ── At size ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cpu", [False, True])
def test_a_large_plan_is_checked_in_a_moment(cpu: bool):
    """3,500 ticks, 2,000 transfers through a ring of three slots, in a fraction of a second."""
    before, weights = 1500, 2000
    program = Streamed((-1,) * before + tuple(range(weights)), cpu=cpu)
    module = program.module()
    transfers: list[Transfer] = []
    fences: list[Fence] = []
    slots = [
        Slot(name, "arena", (k % 2) * SIZE, SIZE, live)
        for k, (name, live) in enumerate(temporaries(module))
    ]
    for w in range(weights):
        use = before + w
        transfers.append(Transfer(w, f"w{w}", "host", "hbm", SIZE, use - 2, use, use + 1))
        ring = (2 + w % 3) * SIZE
        slots.append(Slot(f"w{w}#{w}", "arena", ring, SIZE, LiveRange(use - 2, use + 1)))
        fences.append(Fence(Event("done", w), Event("compute", use), "data"))
        if w >= 3:
            fences.append(Fence(Event("compute", use - 3), Event("start", w), "reuse"))
    plan = assembled(module, slots, transfers, fences)
    rewritten = parse(program.text(program.rewritten(plan)))
    began = time.perf_counter()
    verify_plan(module, plan)
    verify_rewrite(module, plan, rewritten)
    took = time.perf_counter() - began
    # A bound for a busy machine: it is there to catch what is not linear.
    assert took < 3, f"{took:.2f} s"
