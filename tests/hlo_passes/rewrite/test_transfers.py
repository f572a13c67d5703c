"""What the calls on CPU that move a weight take besides it."""

import pytest

from hlo_passes.rewrite.transfers import rewrite
from hlo_passes.verify import verify_equivalent
from tests.hlo_passes.streamed import entry
from tests.hlo_passes.toys import plan_of

EFFECT = 'custom-call(%a), custom_call_target="op", custom_call_has_side_effect=true'


@pytest.mark.parametrize("shape", ["token[]", "()", "(token[], ())"])
def test_a_call_waits_for_the_last_array_where_what_ran_since_gives_none(shape: str):
    module = entry(f"""
      %x = f32[64]{{0}} parameter(0)
      %w = f32[64]{{0}} parameter(1)
      %a = f32[64]{{0}} negate(%x)
      %effect = {shape} {EFFECT}
      ROOT %r = f32[64]{{0}} multiply(%a, %w)
    """)
    rewritten = rewrite(module, plan_of(module, [("w", 2, 2, 3)]), "custom calls")
    verify_equivalent(module, rewritten)
    start, done = (i for i in rewritten.entry.instructions if i.name.startswith("memplan_copy"))
    w, a = (next(i.id for i in module.entry.instructions if i.name == name) for name in "wa")
    assert start.operand_ids == (w, a)
    assert done.operand_ids == (start.id, w, a)
