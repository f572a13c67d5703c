"""A read after its bytes were written over is found, whatever writes over them."""

from __future__ import annotations

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.verify import verify_equivalent
from hlo_passes.verify.memory import Memory
from tests import corpus
from tests.hlo_passes.streamed import entry
from tests.hlo_passes.toys import module_of, two_fused_gathers

FUSED = """
%updating {
  %p = f32[64]{0} parameter(0)
  %one = f32[1]{0} parameter(1)
  %zero = s32[] constant(0)
  %u = f32[64]{0} dynamic-update-slice(%p, %one, %zero)
  ROOT %root = f32[64]{0} RESULT(%u)
}""".strip()

BODY = """
%condition {
  %c = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body {
  %b = (s32[], f32[64]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%b), index=0
  %x.1 = f32[64]{0} get-tuple-element(%b), index=1
  %y.1 = f32[64]{0} RESULT(%x.1)
  ROOT %t.1 = (s32[], f32[64]{0}) tuple(%i.1, %y.1)
}""".strip()

LOOP = """
    %zero = s32[] constant(0)
    %t = (s32[], f32[64]{0}) tuple(%zero, %v)
    %loop = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body
    %w = f32[64]{0} get-tuple-element(%loop), index=1
"""

CALLED = """
%called {
  %p = f32[64]{0} parameter(0)
  %one = f32[1]{0} slice(%p), slice={[0:1]}
  %zero.1 = s32[] constant(0)
  %u = f32[64]{0} WORK
  ROOT %root = f32[64]{0} negate(%u)
}""".strip()

BRANCHES = """
%left {
  ROOT %p = f32[64]{0} parameter(0)
}

%right {
  %p.1 = f32[64]{0} parameter(0)
  ROOT %n = f32[64]{0} RESULT(%p.1)
}""".strip()

WRAPPED = """
%wrapped {
  %p.2 = f32[64]{0} parameter(0)
  %one.2 = f32[1]{0} parameter(1)
  ROOT %updated = f32[64]{0} fusion(%p.2, %one.2), kind=kLoop, calls=%updating
}""".strip()

ONE = "%one = f32[1]{0} slice(%v), slice={[0:1]}\n"
ZERO = "%zero = s32[] constant(0)\n"
UPDATE = "dynamic-update-slice(%p, %one, %zero.1)"
IN_FLIGHT = "%go = ((f32[64]{0}, f32[1]{0}), f32[64]{0}, s32[]) async-start(%v, %one), "

# How v is worked on, and what is called for it.
IN_PLACE = {
    "update": (ONE + ZERO + "%w = f32[64]{0} dynamic-update-slice(%v, %one, %zero)", ()),
    "fused update": (
        ONE + "%w = f32[64]{0} fusion(%v, %one), kind=kLoop, calls=%updating",
        (FUSED.replace("RESULT", "bitcast"),),
    ),
    "declared": (
        '%w = f32[64]{0} custom-call(%v), custom_call_target="f", '
        "output_to_operand_aliasing={{}: (0, {})}",
        (),
    ),
    "loop": (LOOP, (BODY.replace("RESULT", "negate"),)),
    "call": (
        "%w = f32[64]{0} call(%v), to_apply=%called",
        (CALLED.replace("WORK", UPDATE),),
    ),
    "branches": (
        "%flag = pred[] constant(true)\n"
        "%w = f32[64]{0} conditional(%flag, %v, %v), true_computation=%left, "
        "false_computation=%right",
        (BRANCHES.replace("RESULT", "negate"),),
    ),
    "in flight": (
        ONE + IN_FLIGHT + "calls=%wrapped\n%w = f32[64]{0} async-done(%go)",
        (FUSED.replace("RESULT", "bitcast"), WRAPPED),
    ),
}

NOT_IN_PLACE = {
    "negate": ("%w = f32[64]{0} negate(%v)", ()),
    "fused and read again": (
        ONE + "%w = f32[64]{0} fusion(%v, %one), kind=kLoop, calls=%updating",
        (FUSED.replace("RESULT", "negate"),),
    ),
    "handed through": (LOOP, (BODY.replace("RESULT", "bitcast"),)),
    "call": (
        "%w = f32[64]{0} call(%v), to_apply=%called",
        (CALLED.replace("WORK", "negate(%p)"),),
    ),
    "branches": (
        "%flag = pred[] constant(true)\n"
        "%w = f32[64]{0} conditional(%flag, %v, %v), true_computation=%left, "
        "false_computation=%right",
        (BRANCHES.replace("RESULT", "bitcast"),),
    ),
}


def program(work: str, called: tuple[str, ...], first: str, last: str) -> Module:
    """v is worked on, with a line in front and one behind, and both results are returned."""
    lines = f"""
        %x = f32[64]{{0}} parameter(0)
        %v = f32[64]{{0}} abs(%x)
        {first}
        {work}
        {last}
        ROOT %r = (f32[64]{{0}}, f32[64]{{0}}) tuple(%w, %late)
        """
    return entry("\n".join(line for line in lines.splitlines() if line.strip()), *called)


def found(module: Module) -> str:
    """What the entry reads too late."""
    return "; ".join(
        f"%{c.writer.name} writes over what %{c.written.name} left, "
        f"which %{c.reader.name} reads later"
        for c in Memory(module).conflicts(module.entry)
    )


READ = "%late = f32[64]{0} negate(%v)"


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_works_in_place_comes_after_all_readers(kind: str):
    work, called = IN_PLACE[kind]
    assert not found(program(work, called, READ, ""))
    assert "writes over what %v left, which %late reads later" in found(
        program(work, called, "", READ)
    )


@pytest.mark.parametrize("kind", NOT_IN_PLACE)
def test_what_has_a_result_of_its_own_may_stand_anywhere(kind: str):
    work, called = NOT_IN_PLACE[kind]
    assert not found(program(work, called, READ, ""))
    assert not found(program(work, called, "", READ))


def test_a_read_in_flight_lasts_until_its_done():
    update, _ = IN_PLACE["update"]
    copy = "%s = (f32[64]{0:S(5)}, f32[64]{0}, u32[]) copy-start(%v)"
    done = "%late = f32[64]{0:S(5)} copy-done(%s)"
    assert not found(program(update, (), f"{copy}\n{done}", ""))
    assert "which %s reads later" in found(program(update, (), copy, done))


def test_a_result_is_read_at_the_end():
    update, _ = IN_PLACE["update"]
    assert not found(program(update, (), "%late = f32[64]{0} copy(%v)", ""))
    assert "which %r reads later" in found(
        program(update, (), "%late = f32[64]{0} bitcast(%v)", "")
    )


def donated(*lines: str) -> Module:
    """A program that gives x away to its result."""
    body = "\n".join(("%x = f32[64]{0} parameter(0)", *lines))
    alias = "input_output_alias={ {}: (0, {}) }"
    return module_of(f"HloModule m, is_scheduled=true, {alias}\n\nENTRY %main {{\n{body}\n}}\n")


def test_a_donated_argument_is_read_before_its_successor_is_written():
    n, r = "%n = f32[64]{0} negate(%x)", "ROOT %r = f32[64]{0} add(%w, %m)"
    first, last = "%w = f32[64]{0} copy(%n)", "%m = f32[64]{0} abs(%x)"
    assert not found(donated(n, first, last, r))
    over = f"{ZERO}{ONE.replace('%v', '%w')}ROOT %r = f32[64]{{0}} dynamic-update-slice(%w, "
    over += "%one, %zero)"
    # The result lies where the copy lay, and that where the argument was.
    assert "%w writes over what %x left, which %m reads" in found(donated(n, first, last, over))
    assert not found(donated(n, last, first, over))


def test_what_a_fused_collective_hands_on_it_has_not_written():
    """Two read one array, and so does an instruction behind them."""
    module = module_of(two_fused_gathers())
    assert not found(module)
    named = {i.name: i for i in module.entry.instructions}
    needed = dependences(analyze_dataflow(module), module.entry)
    assert needed[named["s.0"].id] == {named["p"].id}
    assert needed[named["s.1"].id] == {named["p"].id}


def test_nothing_writes_over_what_a_fused_collective_sends():
    update = "r = f32[100] dynamic-update-slice(p, c, z)"
    consts = "c = f32[1] constant({1})\n  z = s32[] constant(0)\n  "
    text = two_fused_gathers().replace("r = f32[100] negate(p)", consts + update)
    module = module_of(text)
    assert not found(module)
    lines = text.splitlines(keepends=True)
    early = [line for line in lines if " constant(" in line or " dynamic-update-slice(" in line]
    rest = [line for line in lines if line not in early]
    done = next(n for n, line in enumerate(rest) if line.startswith("  d.0 = "))
    assert "%r writes over what %p left, which %d.0 reads" in found(
        module_of("".join((*rest[:done], *early, *rest[done:])))
    )
    needed = dependences(analyze_dataflow(module), module.entry)
    named = {i.name: i.id for i in module.entry.instructions}
    assert needed[named["r"]] >= {named["d.0"], named["d.1"]}


@pytest.mark.parametrize("key", corpus.memory())
def test_programs_as_xla_leaves_them_are_accepted(key: str):
    module = corpus.read(key)
    assert module.is_scheduled
    for computation in module.computations.values():
        if not computation.is_fusion:
            assert not [*Memory(module).conflicts(computation)], computation.name


# ── Loop bodies ──────────────────────────────────────────────────────────────────────────

STORING = """
%over (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  %one = f32[1]{0} slice(%p), slice={[0:1]}
  %zero.1 = s32[] constant(0)
  ROOT %u = f32[64]{0} dynamic-update-slice(%p, %one, %zero.1)
}

%same (q: f32[64]) -> f32[64] {
  ROOT %q = f32[64]{0} parameter(0)
}

%condition (c: (s32[], f32[64], f32[64])) -> pred[] {
  %c = (s32[], f32[64]{0}, f32[64]{0:S(5)}) parameter(0)
  %i.c = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i.c, %n), direction=LT
}

%body (b: (s32[], f32[64], f32[64])) -> (s32[], f32[64], f32[64]) {
  %b = (s32[], f32[64]{0}, f32[64]{0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[64]{0} get-tuple-element(%b), index=1
  %s = (f32[64]{0:S(5)}, f32[64]{0}, u32[]) copy-start(%x)
  %first = s32[] constant(0)
  %d = f32[64]{0:S(5)} copy-done(%s)
  WORK
  %z = f32[64]{0} negate(%y)
  ROOT %t = (s32[], f32[64]{0}, f32[64]{0:S(5)}) tuple(%i, %z, %d)
}

ENTRY %main (x.0: f32[64], h.0: f32[64]) -> (s32[], f32[64], f32[64]) {
  %x.0 = f32[64]{0} parameter(0)
  %h.0 = f32[64]{0:S(5)} parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], f32[64]{0}, f32[64]{0:S(5)}) tuple(%zero, %x.0, %h.0)
  ROOT %loop = (s32[], f32[64]{0}, f32[64]{0:S(5)}) while(%init), condition=%condition, body=%body
}
"""

OVERWRITING = {
    "custom call": '%y = f32[64]{0} custom-call(%x), custom_call_target="f", '
    "output_to_operand_aliasing={{}: (0, {})}",
    "call": "%y = f32[64]{0} call(%x), to_apply=%over",
    "conditional": "%y = f32[64]{0} conditional(%first, %x, %x), "
    "branch_computations={%over, %same}",
    "fusion": "%y = f32[64]{0} fusion(%x), kind=kCustom, calls=%over, "
    "output_to_operand_aliasing={{}: (0, {})}",
    "update": "%one.1 = f32[1]{0} slice(%x), slice={[0:1]}\n"
    "  %y = f32[64]{0} dynamic-update-slice(%x, %one.1, %first)",
}


def storing(work: str, done_before: str = "") -> Module:
    """A loop that stores x and works on it; the store is done at once, or before a line."""
    text = "HloModule storing, is_scheduled=true\n" + STORING.replace("WORK", work)
    if done_before:
        done = "  %d = f32[64]{0:S(5)} copy-done(%s)\n"
        text = text.replace(done, "").replace(f"  {done_before} =", f"{done}  {done_before} =")
    return module_of(text)


@pytest.mark.parametrize("kind", OVERWRITING)
def test_a_store_in_flight_in_a_loop_reads_until_its_done(kind: str):
    """What y is made of, and not what is handed on, lies where x lies."""
    right = storing(OVERWRITING[kind])
    verify_equivalent(right, storing(OVERWRITING[kind], done_before="%y"))
    with pytest.raises(VerificationError, match="%y writes over what %b left, which %s reads"):
        verify_equivalent(right, storing(OVERWRITING[kind], done_before="%z"))


def test_what_a_loop_hands_on_is_written_when_the_state_has_been_read():
    """Around the back edge: z comes to lie where x lies."""
    work = "%y = f32[64]{0} cosine(%x)"
    verify_equivalent(storing(work), storing(work, done_before="%z"))
    with pytest.raises(VerificationError, match="%z writes over what %b left, which %s reads"):
        verify_equivalent(storing(work), storing(work, done_before="ROOT %t"))


def test_a_done_that_goes_on_with_nothing_is_named():
    module = entry(
        """
        %x = f32[64]{0} parameter(0)
        %n = u32[] parameter(1)
        %t = ((f32[64]{0}), f32[64]{0}, u32[]) tuple(%x, %x, %n)
        ROOT %done = f32[64]{0} custom-call-done(%t)
        """
    )
    with pytest.raises(VerificationError, match="%done goes on with %t, which starts nothing"):
        Memory(module).walk(module.entry)
