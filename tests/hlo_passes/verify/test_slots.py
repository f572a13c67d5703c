"""What a copy is read through, and where values lie."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from hlo_passes import pipeline
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.normalize.sink import sink_weight_work
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
from hlo_passes.verify import verify_plan
from hlo_passes.verify.replay import Replay, Value
from hlo_passes.verify.slots import assign_slots
from tests.hlo_passes.streamed import (
    SIZE,
    entry,
    rejection,
    with_transfer,
)
from tests.hlo_passes.toys import module_of, toy_machine

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


def test_an_update_in_place_holds_the_copy():
    module = entry(UPDATE)
    slots = (
        Slot("one", "arena", SIZE, 4, LiveRange(1, 3)),
        Slot("s", "arena", 2 * SIZE, SIZE, LiveRange(3, 5)),
        Slot("r", "outputs", 0, SIZE, LiveRange(4, 5)),
    )
    verify_plan(module, fetched(module, 4, 5, *slots))
    assert "is read until tick 4" in rejection(fetched(module, 3, 5, *slots), module)
    # Wherever a plan would have it: XLA leaves it where the copy is.
    own = Slot("u", "arena", 3 * SIZE, SIZE, LiveRange(2, 5))
    assert "is read until tick 4" in rejection(fetched(module, 2, 5, *slots, own), module)


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


def test_an_update_in_flight_holds_the_copy():
    slots = (
        Slot("some", "arena", SIZE, 4, LiveRange(0, 4)),
        Slot("a", "arena", 2 * SIZE, SIZE, LiveRange(2, 5)),
        Slot("r", "outputs", 0, SIZE, LiveRange(4, 5)),
    )
    module = entry(UPDATE_IN_FLIGHT, UPDATING)
    verify_plan(module, fetched(module, 4, 5, *slots))
    assert "is read until tick 4" in rejection(fetched(module, 3, 5, *slots), module)


def test_what_runs_beside_has_bytes_of_its_own():
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
        Slot("a", "arena", SIZE, SIZE, LiveRange(1, 4)),
        Slot("r", "outputs", 0, SIZE, LiveRange(3, 4)),
    )
    assert "%go{1} has no slot" in rejection(fetched(module, 3, 4, *slots), module)


def test_a_result_may_have_the_slot_of_an_operand_that_dies():
    lines = """
    %one = f32[1]{0} slice(%x), slice={[0:1]}
    %u = f32[64]{0} WORK(%done)
    %s = f32[64]{0} negate(%x)
    ROOT %r = f32[64]{0} add(%u, %s)
    """
    module = entry(FETCH + lines.replace("WORK", "cosine"))
    slots = (
        Slot("one", "arena", SIZE, 4, LiveRange(0, 1)),
        Slot("s", "arena", 2 * SIZE, SIZE, LiveRange(2, 4)),
        Slot("r", "outputs", 0, SIZE, LiveRange(3, 4)),
    )
    over = Slot("u", "arena", 0, SIZE, LiveRange(1, 4))
    verify_plan(module, fetched(module, 1, 4, *slots, over))
    early = replace(over, live_range=LiveRange(0, 4))
    assert "the slots of %w0#0 and %u overlap" in rejection(
        fetched(module, 1, 4, *slots, early), module
    )
    # What reads one element for another one has no such choice.
    backwards = entry(FETCH + lines.replace("WORK(%done)", "reverse(%done), dimensions={0}"))
    assert "the slots of %w0#0 and %u overlap" in rejection(
        fetched(backwards, 1, 4, *slots, over), backwards
    )


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
    return module_of(
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


@pytest.mark.parametrize("reads_x", [True, False])
def test_what_takes_the_place_of_an_argument_has_its_bytes_to_the_end(reads_x: bool):
    """In between another value may lie there; afterwards none may."""
    module = donated(
        FETCH
        + f"""
        %a = f32[64]{{0}} multiply(%{"x" if reads_x else "done"}, %done)
        %b = f32[64]{{0}} reverse(%a), dimensions={{0}}
        %r = f32[64]{{0}} reverse(%b), dimensions={{0}}
        %c = f32[64]{{0}} reverse(%b), dimensions={{0}}
        %d = f32[64]{{0}} reverse(%c), dimensions={{0}}
        ROOT %same = f32[64]{{0}} bitcast(%r)
        """
    )

    def plan(**colocated: Slot) -> Plan:
        slots = {
            n: Slot(n, "arena", (k + 1) * SIZE, SIZE, LiveRange(k, k + 3))
            for k, n in enumerate("ab")
        }
        slots |= {
            n: Slot(n, "arena", SIZE * (4 + k), SIZE, LiveRange(3 + k, 5))
            for k, n in enumerate("cd")
        }
        found = fetched(module, 0, 5, *(slots | colocated).values())
        x, *others = found.slots
        return replace(found, slots=(replace(x, live_range=LiveRange(0, 1)), *others))

    verify_plan(module, plan())
    late = Slot("c", "arguments", 0, SIZE, LiveRange(3, 5))
    assert "the slots of %x and %c overlap" in rejection(plan(c=late), module)


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
        %f = (f32[64]{0}, f32[64]{0}) fusion(%u, %b), kind=kLoop, calls=%both
        %one = f32[64]{0} get-tuple-element(%f), index=1
        %s = f32[64]{0} reverse(%one), dimensions={0}
        %two = f32[64]{0} get-tuple-element(%f), index=0
        ROOT %r = f32[64]{0} subtract(%two, %s)
        """,
        """
%both {
  %p = f32[64]{0} parameter(0)
  %q = f32[64]{0} parameter(1)
  %m = f32[64]{0} multiply(%p, %q)
  %n = f32[64]{0} add(%p, %q)
  ROOT %t = (f32[64]{0}, f32[64]{0}) tuple(%m, %n)
}""".strip(),
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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_operand_that_only_one_result_can_lie_in_is_left_to_it(order: tuple[int, int]):
    """The first result can lie in a only, the second in a or b, which last as long."""
    module = entry(
        """
        %x = f32[64]{0} parameter(0)
        %a = f32[64]{0} negate(%x)
        %b = f32[64]{0} exponential(%x)
        ROOT %f = f32[64]{0} add(%a, %b)
        """
    )
    _, *writers, f = module.entry.instructions
    a, b = operands = [
        Value(i.name, i, SIZE, n, 2, slots=[Slot(i.name, "arena", n * SIZE, SIZE, LiveRange(n, 4))])
        for n, i in enumerate(writers)
    ]
    first = Value("f{0}", f, SIZE, 2, 3, over=[a])
    second = Value("f{1}", f, SIZE, 2, 3, over=[operands[n] for n in order])
    replay = SimpleNamespace(module=module, values=[a, b, first, second], apart=set[Value]())
    arena = SimpleNamespace(name="arena", tier="hbm")
    plan = SimpleNamespace(allocations=[arena], placements=[], device_tier="hbm")
    assign_slots(cast(Replay, replay), cast(Plan, plan))
    assert first.under is a
    assert second.under is b


def test_a_donated_argument_is_not_fetched():
    lines = FETCH + "ROOT %r = f32[64]{0} add(%x, %done)"
    module = module_of(
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


def test_results_that_change_places_lie_in_the_arguments_until_they_are_copied():
    """As XLA:TPU leaves an optimizer's update: n is made in the bytes of g, and p in those of n."""
    alias = "input_output_alias={ {0}: (0, {}), {1}: (1, {}) }"
    lines = """
    %p = f32[64]{0} parameter(0)
    %n = f32[64]{0} parameter(1)
    %x = f32[1]{0} parameter(2)
    %zero = s32[] constant(0)
    %y = f32[64]{0} parameter(3)
    %g = f32[64]{0} negate(%y)
    %new_n = f32[64]{0} dynamic-update-slice(%g, %x, %zero)
    %new_p = f32[64]{0} dynamic-update-slice(%n, %x, %zero)
    %first = f32[64]{0} copy(%new_p)
    %second = f32[64]{0} copy(%new_n)
    ROOT %r = (f32[64]{0}, f32[64]{0}) tuple(%first, %second)
"""
    text = f"HloModule m, is_scheduled=true, {alias}\n\nENTRY %main {{{lines}}}\n"
    module = module_of(text)
    machine = toy_machine(platform="gpu")
    plan = pipeline.plan_module(module, machine, 10**6)
    verify_plan(module, plan, machine)
    # The other way round the bytes of n still hold p when its successor is copied there.
    first, second = (line for line in lines.splitlines() if " copy(" in line)
    swapped = text.replace(first, "?").replace(second, first).replace("?", second)
    wrong = replace(plan, module_fingerprint=module_of(swapped).fingerprint)
    with pytest.raises(VerificationError, match="%second takes the place of %n"):
        verify_plan(module_of(swapped), wrong, machine)


def test_updates_that_begin_in_a_donated_argument_stay_there():
    """XLA:GPU's update of a stack in two steps. The first could lie in g, had that a slot for as
    long as it takes."""
    module = module_of("""HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}) }

%update {
  %a = f32[64]{0} parameter(0)
  %c = f32[64]{0} parameter(1)
  %e = f32[64]{0} parameter(2)
  %zero = s32[] constant(0)
  %s = f32[1]{0} slice(%c), slice={[0:1]}
  %t = f32[1]{0} slice(%e), slice={[0:1]}
  %u = f32[1]{0} add(%s, %t)
  ROOT %d = f32[64]{0} dynamic-update-slice(%a, %u, %zero)
}

%again {
  %a = f32[64]{0} parameter(0)
  %c = f32[64]{0} parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1]{0} slice(%c), slice={[0:1]}
  ROOT %d = f32[64]{0} dynamic-update-slice(%a, %s, %zero)
}

ENTRY %main {
  %p = f32[64]{0} parameter(0)
  %y = f32[64]{0} parameter(1)
  %c = f32[64]{0} copy(%p)
  %g = f32[64]{0} negate(%y)
  %k = f32[64]{0} copy(%g)
  %first = f32[64]{0} fusion(%k, %c, %g), kind=kLoop, calls=%update
  %h = f32[1]{0} slice(%y), slice={[0:1]}
  %second = f32[64]{0} fusion(%first, %c), kind=kLoop, calls=%again
  ROOT %r = (f32[64]{0}, f32[1]{0}) tuple(%second, %h)
}
""")
    # Which the checker agrees to.
    plan = pipeline.plan_module(module, toy_machine(platform="gpu"), 10**6)
    assert not {s.buffer for s in plan.slots} & {"k", "first", "second"}


def test_a_copy_that_was_worked_on_serves_nobody_else():
    """XLA makes two copies of an argument of which one is updated in place."""
    lines = """
        %x = f32[64]{0} parameter(0)
        %w0 = f32[64]{0:S(5)} parameter(1)
        %start = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%w0)
        %done = f32[64]{0} copy-done(%start)
        %start.1 = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%w0)
        %done.1 = f32[64]{0} copy-done(%start.1)
        %zero = s32[] constant(0)
        %one = f32[1]{0} slice(%x), slice={[0:1]}
        %u = f32[64]{0} dynamic-update-slice(%done, %one, %zero)
        %v = f32[64]{0} multiply(%u, %x)
        ROOT %r = f32[64]{0} add(%v, %done.1)
        """
    module = entry(lines)
    slots = (
        Slot("one", "arena", SIZE, 4, LiveRange(1, 3)),
        Slot("v", "arena", 2 * SIZE, SIZE, LiveRange(3, 5)),
        Slot("r", "outputs", 0, SIZE, LiveRange(4, 5)),
    )
    assert "%w0 is read at tick 4 from transfer 0, but %u has written over that copy" in rejection(
        fetched(module, 4, 5, *slots), module
    )
    machine = toy_machine(platform="gpu")
    plan = pipeline.plan_module(module, machine, 10**6)
    pipeline.rewrite_module(module, plan, machine)


WORKING = """HloModule m, is_scheduled=true

%condition {
  %c = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body {
  %b = (s32[], f32[64]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %y = f32[64]{0} get-tuple-element(%b), index=1
  %wide = f32[512]{0} concatenate(%y, %y, %y, %y, %y, %y, %y, %y), dimensions={0}
  %z = f32[64]{0} slice(%wide), slice={[64:128]}
  ROOT %t = (s32[], f32[64]{0}) tuple(%j, %z)
}

ENTRY %main {
  %x = f32[64]{0} parameter(0)
  %zero = s32[] constant(0)
  %first = s32[] copy(%zero)
  %a = f32[64]{0} negate(%x)
  %init = (s32[], f32[64]{0}) tuple(%first, %a)
  %loop = (s32[], f32[64]{0}) while(%init), condition=%condition, body=%body
  %g = f32[64]{0} get-tuple-element(%loop), index=1
  ROOT %r = f32[64]{0} reverse(%g), dimensions={0}
}
"""


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_loop_has_the_bytes_that_its_body_needs(platform: str):
    module = sink_weight_work(module_of(WORKING))
    machine = toy_machine(platform=platform)
    plan = pipeline.plan_module(module, machine, 10**6)
    workspace = [s for s in plan.slots if s.buffer == "loop"]
    assert sum(s.size for s in workspace) >= 512 * 4
    kept = tuple(s for s in plan.slots if s not in workspace)
    with pytest.raises(VerificationError, match=r"what %loop runs needs 20\d\d bytes at tick 4"):
        verify_plan(module, replace(plan, slots=kept), machine)
    small = (*kept, *(replace(s, size=s.size // 2) for s in workspace))
    with pytest.raises(VerificationError, match="what %loop runs needs"):
        verify_plan(module, replace(plan, slots=small), machine)


OUT_OF_PLACE = {
    "transpose": "%t = f32[8,8]{1,0} transpose(%p), dimensions={1,0}",
    "product": "%t = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "another slice": "%s = f32[4,8]{1,0} slice(%p), slice={[4:8], [0:8]}\n"
    "  %t = f32[8,8]{1,0} concatenate(%s, %s), dimensions={0}",
}


@pytest.mark.parametrize("kind", [*OUT_OF_PLACE, "gemm"])
def test_a_result_that_reads_all_of_an_operand_has_bytes_of_its_own(kind: str):
    call = "fusion(%m), kind=kLoop, calls=%work"
    if kind == "gemm":
        call = 'custom-call(%m, %m), custom_call_target="__cublas$gemm"'
    body = OUT_OF_PLACE.get(kind, "%t = f32[8,8]{1,0} negate(%p)").replace("%t =", "ROOT %t =")
    module = entry(
        FETCH
        + f"""
        %m = f32[8,8]{{1,0}} bitcast(%done)
        %y = f32[8,8]{{1,0}} {call}
        %z = f32[64]{{0}} bitcast(%y)
        ROOT %r = f32[64]{{0}} add(%x, %z)
        """,
        f"%work {{\n  %p = f32[8,8]{{1,0}} parameter(0)\n  {body}\n}}",
    )
    output = Slot("r", "outputs", 0, SIZE, LiveRange(3, 4))
    assert "%y has no slot" in rejection(fetched(module, 3, 4, output), module)
    own = Slot("y", "arena", SIZE, SIZE, LiveRange(1, 4))
    verify_plan(module, fetched(module, 1, 4, output, own))


def test_an_argument_on_the_device_is_not_read_on_the_host():
    module = entry("%x = f32[64]{0} parameter(0)\nROOT %r = f32[64]{0} negate(%x)")
    machine = toy_machine(platform="gpu")
    plan = pipeline.plan_module(module, machine, 10**6)
    (x,) = plan.placements
    away = replace(plan, placements=(replace(x, tier="host", in_place=True),))
    with pytest.raises(VerificationError, match="%x is placed in host in place, but the module"):
        verify_plan(module, away, machine)
    nowhere = replace(plan, placements=(replace(x, in_place=True),))
    with pytest.raises(VerificationError, match="%x is placed in hbm in place, but the module"):
        verify_plan(module, nowhere, machine)


def test_what_transfers_bring_is_not_read_in_place():
    module = entry(FETCH + "ROOT %r = f32[64]{0} add(%x, %done)")
    plan = fetched(module, 0, 1, Slot("r", "outputs", 0, SIZE, LiveRange(0, 1)))
    x, w0 = plan.placements
    both = replace(plan, placements=(x, replace(w0, in_place=True)))
    assert "%w0 is read in place in host, but transfers bring it" in rejection(both, module)


def test_an_argument_waits_in_the_tier_that_it_is_placed_in():
    module = entry(FETCH + "ROOT %r = f32[64]{0} add(%x, %done)")
    plan = fetched(module, 0, 1, Slot("r", "outputs", 0, SIZE, LiveRange(0, 1)))
    waiting = Slot("w0", "away", 0, SIZE, LiveRange(0, 1))

    def with_away(tier: str, size: int) -> Plan:
        allocations = (*plan.allocations, Allocation("away", tier, SIZE))
        slots = (*plan.slots, replace(waiting, size=size))
        return replace(plan, allocations=allocations, slots=slots)

    verify_plan(module, with_away("host", SIZE))
    assert "expected tier host, found cxl" in rejection(with_away("cxl", SIZE), module)
    assert f"expected {SIZE} bytes, found 1" in rejection(with_away("host", 1), module)
