"""Orders that only another program could have, and what a rewrite may not merge."""

from __future__ import annotations

import pytest

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.normalize.sink import sink_weight_work
from hlo_passes.verify import verify_equivalent
from tests.hlo_passes.streamed import entry
from tests.hlo_passes.toys import module_of


def swapped(text: str, *names: str) -> tuple[Module, Module]:
    """A program, and the same with two lines in the other order."""
    lines = text.strip().splitlines()
    a, b = (next(n for n, line in enumerate(lines) if f"%{name} =" in line) for name in names)
    other = list(lines)
    other[a], other[b] = other[b], other[a]
    return entry("\n".join(lines)), entry("\n".join(other))


def rejection(original: Module, rewritten: Module) -> str:
    with pytest.raises(VerificationError) as rejected:
        verify_equivalent(original, rewritten)
    return str(rejected.value)


def test_infeeds_keep_their_order():
    original, other = swapped(
        """
        %begin = token[] after-all()
        %one = ((f32[64]{0}), token[]) infeed(%begin)
        %two = ((f32[64]{0}), token[]) infeed(%begin)
        ROOT %r = (((f32[64]{0}), token[]), ((f32[64]{0}), token[])) tuple(%one, %two)
        """,
        "one",
        "two",
    )
    assert "%two stands where %one was expected" in rejection(original, other)


def test_random_state_keeps_its_order():
    original, other = swapped(
        """
        %one = u64[1]{0} rng-get-and-update-state(), delta=1
        %two = u64[1]{0} rng-get-and-update-state(), delta=1
        ROOT %r = (u64[1]{0}, u64[1]{0}) tuple(%one, %two)
        """,
        "one",
        "two",
    )
    assert "%two stands where %one was expected" in rejection(original, other)


def test_a_reader_stays_before_what_writes_over_what_it_reads():
    original, other = swapped(
        """
        %x = f32[64]{0} parameter(0)
        %one = f32[1]{0} constant({1})
        %zero = s32[] constant(0)
        %v = f32[64]{0} cosine(%x)
        %read = f32[64]{0} negate(%v)
        %u = f32[64]{0} dynamic-update-slice(%v, %one, %zero)
        ROOT %r = (f32[64]{0}, f32[64]{0}) tuple(%read, %u)
        """,
        "read",
        "u",
    )
    assert "%u writes over what %v left, which %read reads later" in rejection(original, other)


def test_asynchronous_work_without_effects_may_move():
    original, other = swapped(
        """
        %x = f32[64]{0} parameter(0)
        %y = f32[64]{0:S(5)} parameter(1)
        %s = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%y)
        %a = f32[64]{0} negate(%x)
        %d = f32[64]{0} copy-done(%s)
        ROOT %r = f32[64]{0} add(%a, %d)
        """,
        "s",
        "a",
    )
    verify_equivalent(original, other)


def test_two_elements_of_a_loop_do_not_share_bytes():
    text = """HloModule m, is_scheduled=true

%condition {
  %c = (s32[], f32[64]{0}, f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body {
  %b = (s32[], f32[64]{0}, f32[64]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %x = f32[64]{0} get-tuple-element(%b), index=1
  %y = f32[64]{0} negate(%x)
  %k = f32[64]{0} copy(%y)
  ROOT %t = (s32[], f32[64]{0}, f32[64]{0}) tuple(%j, %y, %k)
}

ENTRY %main {
  %p = (s32[], f32[64]{0}, f32[64]{0}) parameter(0)
  ROOT %loop = (s32[], f32[64]{0}, f32[64]{0}) while(%p), condition=%condition, body=%body
}
"""
    dropped = text.replace("  %k = f32[64]{0} copy(%y)\n", "").replace("%y, %k)", "%y, %y)")
    found = rejection(module_of(text), module_of(dropped))
    assert "%t hands on the same bytes as [1] and [2]" in found


# A gather of an argument, hidden by work on another one.
GATHERED = """HloModule m, is_scheduled=true
start {
  q = f32[1000] parameter(0)
  g = f32[4000] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}
  ROOT t = (f32[1000], f32[4000]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}
done {
  q = f32[1000] parameter(0)
  o = f32[4000] parameter(1)
  g = f32[4000] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}
  ROOT t = f32[4000] custom-call(q, o, g), custom_call_target="AsyncCollectiveDone"
}
ENTRY e {
  p = f32[1000] parameter(0)
  w = f32[1000] parameter(1)
  x = f32[1000] parameter(2)
  s = (f32[1000], f32[4000]) fusion(p), kind=kCustom, calls=start,
    output_to_operand_aliasing={{0}: (0, {})}
  a = f32[1000] get-tuple-element(s), index=0
  b = f32[4000] get-tuple-element(s), index=1
  k = f32[1000] copy(w)
  y = f32[1000] multiply(x, x)
  d = f32[4000] fusion(a, b), kind=kCustom, calls=done, output_to_operand_aliasing={{}: (1, {})}
  z = f32[1000] multiply(k, y)
  ROOT t = (f32[4000], f32[1000]) tuple(d, z)
}
"""


def test_collectives_in_fusions_and_what_they_hide_stay():
    """Where start and done depend on arguments alone, they could stand side by side."""
    module = module_of(GATHERED)
    sunk = sink_weight_work(module)
    names = [i.name for i in sunk.entry.instructions]
    assert names == [i.name for i in module.entry.instructions]
    lines = GATHERED.splitlines(keepends=True)
    start = next(line for line in lines if line.startswith("  s = "))
    others = [line for line in lines if line.startswith(("  k = ", "  y = "))]
    kept = [line for line in lines if line not in others]
    place = kept.index(start)
    early = module_of("".join((*kept[:place], *others, *kept[place:])))
    assert "moved out of the span of the asynchronous %s" in rejection(module, early)


def test_two_elements_of_a_loops_state_do_not_begin_in_the_same_bytes():
    text = """HloModule m, is_scheduled=true

%condition {
  %c = (f32[64]{0}, f32[64]{0}) parameter(0)
  ROOT %go = pred[] constant(false)
}

%body {
  %b = (f32[64]{0}, f32[64]{0}) parameter(0)
  %x = f32[64]{0} get-tuple-element(%b), index=0
  %y = f32[64]{0} get-tuple-element(%b), index=1
  %z = f32[64]{0} negate(%x)
  %w = f32[64]{0} add(%y, %y)
  ROOT %t = (f32[64]{0}, f32[64]{0}) tuple(%z, %w)
}

ENTRY %main {
  %p = f32[64]{0} parameter(0)
  %one = f32[64]{0} copy(%p)
  %two = f32[64]{0} copy(%p)
  %init = (f32[64]{0}, f32[64]{0}) tuple(%one, %two)
  ROOT %loop = (f32[64]{0}, f32[64]{0}) while(%init), condition=%condition, body=%body
}
"""
    shared = text.replace("tuple(%one, %two)", "tuple(%one, %one)")
    found = rejection(module_of(text), module_of(shared))
    assert "%loop writes over what %one left, which it also reads" in found


def test_what_a_pass_says_it_left_alone_is_compared():
    """Views that were taken over show the loop as it was; XLA reads the message."""
    original = module_of(
        """HloModule m, is_scheduled=true
        %fused {
          %p = f32[64]{0} parameter(0)
          ROOT %n = f32[64]{0} negate(%p)
        }
        ENTRY %main {
          %x = f32[64]{0} parameter(0)
          ROOT %r = f32[64]{0} fusion(%x), kind=kLoop, calls=%fused
        }
        """
    )
    proto = original.to_proto()
    fused = next(c for c in proto.computations if c.name == "fused")
    fused.instructions[1].opcode = "abs"
    rewritten = Module(proto, original)
    assert rewritten.computations[fused.id] is original.computations[fused.id]
    assert "computation %fused differs" in rejection(original, rewritten)


ORDERED = """
%x = f32[64]{0} parameter(0)
%y = f32[64]{0:S(5)} parameter(1)
%s = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%y)
%a = f32[64]{0} negate(%x)
%k = f32[64]{0} copy(%a)
%b = f32[64]{0} cosine(%x)MARK
%d = f32[64]{0} copy-done(%s)
ROOT %r = (f32[64]{0}, f32[64]{0}, f32[64]{0}) tuple(%k, %b, %d)
"""


@pytest.mark.parametrize("turned", [False, True])
def test_what_waits_for_another_goes_on_waiting_for_it(turned: bool):
    original = entry(ORDERED.replace("MARK", ", control-predecessors={%k}"))
    inorder, other = swapped(ORDERED.replace("MARK", ""), "k", "b")
    assert "%b lost a control predecessor" in rejection(original, other if turned else inorder)


def test_what_waits_for_a_transfer_need_not():
    original = entry(ORDERED.replace("MARK", ", control-predecessors={%s}"))
    verify_equivalent(original, entry(ORDERED.replace("MARK", "")))


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("copy(%x)", 'copy(%x), frontend_attributes={said="otherwise"}'),
        ("copy(%x)", 'copy(%x), backend_config="other"'),
        ("exponential(%x)", "copy(%x)"),
    ],
)
def test_what_keeps_its_name_is_what_it_was(line: str, other: str):
    lines = "%x = f32[64]{0} parameter(0)\n%k = f32[64]{0} LINE\nROOT %r = f32[64]{0} negate(%x)"
    original, changed = (entry(lines.replace("LINE", text)) for text in (line, other))
    assert "%k is not the instruction that %k was" in rejection(original, changed)


def test_a_copy_goes_on_waiting_for_what_it_waited_for():
    lines = """
    %x = f32[64]{0} parameter(0)
    %a = f32[64]{0} negate(%x)
    %k = f32[64]{0} copy(%x)MARK
    ROOT %r = (f32[64]{0}, f32[64]{0}) tuple(%a, %k)
    """
    original = entry(lines.replace("MARK", ", control-predecessors={%a}"))
    assert "%k lost a control predecessor" in rejection(original, entry(lines.replace("MARK", "")))
