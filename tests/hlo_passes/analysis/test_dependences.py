"""What must stand before what, where collectives of several computations share bytes."""

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from tests.hlo_passes.toys import module_of


def called(n: int) -> str:
    """The fusions in which XLA:TPU starts an all-gather, and ends it."""
    gather = (
        "f32[400] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, "
        f'frontend_attributes={{chain_id="{n}"}}'
    )
    return f"""
start.{n} {{
  q = f32[100] parameter(0)
  g = {gather}
  ROOT t = (f32[100], f32[400]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}}
done.{n} {{
  q = f32[100] parameter(0)
  o = f32[400] parameter(1)
  g = {gather}
  ROOT t = f32[400] custom-call(q, o, g), custom_call_target="AsyncCollectiveDone"
}}
body.{n} {{
  state = (f32[100], f32[400], s32[]) parameter(0)
  w = f32[100] get-tuple-element(state), index=0
  i = s32[] get-tuple-element(state), index=2
  s = (f32[100], f32[400]) fusion(w), kind=kCustom, calls=start.{n},
    output_to_operand_aliasing={{{{0}}: (0, {{}})}}
  a = f32[100] get-tuple-element(s), index=0
  b = f32[400] get-tuple-element(s), index=1
  d = f32[400] fusion(a, b), kind=kCustom, calls=done.{n},
    output_to_operand_aliasing={{{{}}: (1, {{}})}}
  ROOT r = (f32[100], f32[400], s32[]) tuple(a, d, i)
}}
condition.{n} {{
  state.1 = (f32[100], f32[400], s32[]) parameter(0)
  i.1 = s32[] get-tuple-element(state.1), index=2
  k = s32[] constant(4)
  ROOT c = pred[] compare(i.1, k), direction=LT
}}
"""


@pytest.mark.parametrize("computation", ["e", "body.0", "body.1", "body.2"])
def test_a_gather_in_several_loops_sends_one_weight(computation: str) -> None:
    """Each loop's start hands on the bytes that the loop before it gave."""
    loops = "\n".join(
        f"  l.{n} = (f32[100], f32[400], s32[]) while({'t' if n == 0 else f'l.{n - 1}'}), "
        f"condition=condition.{n}, body=body.{n}"
        for n in range(3)
    )
    module = module_of(f"""HloModule m, is_scheduled=true, replica_count=4
{called(0)}{called(1)}{called(2)}
ENTRY e {{
  p = f32[100] parameter(0)
  o = f32[400] parameter(1)
  z = s32[] constant(0)
  w = f32[100] abs(p)
  t = (f32[100], f32[400], s32[]) tuple(w, o, z)
{loops}
  ROOT g = f32[400] get-tuple-element(l.2), index=1
}}
""")
    place = {c.name: c for c in module.computations.values()}[computation]
    before = dependences(analyze_dataflow(module), place)
    if computation == "e":
        first, second, third = (i.id for i in place.instructions if i.opcode == "while")
        assert first in before[second]
        assert second in before[third]
    else:
        start, done = (i.id for i in place.instructions if i.opcode == "fusion")
        weight, handed_on = place.instructions[1].id, place.instructions[4].id
        assert weight in before[start]
        assert start in before[handed_on]
        assert done not in before[start]
