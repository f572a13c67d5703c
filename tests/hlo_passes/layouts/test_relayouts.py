"""What only moves bytes is found, and what does more is not."""

from __future__ import annotations

import pytest

from hlo_passes.layouts.relayouts import Relayout, relayouts
from hlo_passes.reading.reader import read_module

SIZE = 2 * 4 * 8 * 16  # Read and written.


def found(line: str, called: str = "") -> tuple[Relayout, ...]:
    return relayouts(
        read_module(f"""HloModule m, is_scheduled=true
{called}
ENTRY e {{
  p = f32[8,16]{{1,0}} parameter(0)
  a = f32[8,16]{{1,0}} negate(p)
  ROOT u = {line}
}}
""")
    )


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("f32[8,16]{0,1} copy(a)", "relayout"),
        ("f32[8,16]{1,0:T(8,128)} copy(a)", "relayout"),
        ("f32[8,16]{0,1:S(1)} copy(a)", "relayout"),  # To other memory, and in another order.
        ("f32[16,8]{1,0} transpose(a), dimensions={1,0}", "transpose"),
        ("f32[8,16]{1,0} copy(a)", "copy"),
    ],
)
def test_what_moves_bytes_says_how(line: str, kind: str):
    (only,) = found(line)
    assert (only.instruction.name, only.kind) == ("u", kind)
    assert only.before.minor_to_major == (1, 0)


@pytest.mark.parametrize(
    "line",
    [
        "f32[8,16]{1,0} sine(a)",
        "f32[16,8]{1,0} bitcast(a)",
        "f32[8,16]{1,0:S(1)} copy(a)",  # To other memory: a transfer.
    ],
)
def test_what_does_more_or_less_is_none(line: str):
    assert not found(line)


def test_nothing_to_move_is_none():
    text = "HloModule m, is_scheduled=true\nENTRY e {\n"
    text += "  p = f32[0,16]{1,0} parameter(0)\n  ROOT u = f32[0,16]{0,1} copy(p)\n}\n"
    assert not relayouts(read_module(text))


FUSED = """
f {{
  p = f32[8,16]{{1,0}} parameter(0)
  b = f32[8,16]{{1,0}} {first}(p)
  c = f32[8,16]{{0,1}} copy(b)
  ROOT r = f32[16,8]{{1,0}} bitcast(c)
}}
"""


def test_a_fusion_that_only_moves_is_what_is_in_it():
    (only,) = found("f32[16,8]{1,0} fusion(a), kind=kLoop, calls=f", FUSED.format(first="copy"))
    assert only.kind == "relayout"
    assert (only.before.minor_to_major, only.after.minor_to_major) == ((1, 0), (0, 1))
    assert only.size == SIZE


def test_a_fusion_that_computes_is_none():
    assert not found("f32[16,8]{1,0} fusion(a), kind=kLoop, calls=f", FUSED.format(first="sine"))


def test_each_iteration_counts_and_what_moves_most_comes_first():
    module = read_module("""HloModule m, is_scheduled=true
cond {
  s = (s32[], f32[8,16]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}
body {
  s = (s32[], f32[8,16]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[8,16]{1,0} get-tuple-element(s), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  y = f32[8,16]{0,1} copy(x)
  z = f32[8,16]{1,0} copy(y)
  ROOT t = (s32[], f32[8,16]{1,0}) tuple(j, z)
}
ENTRY e {
  p = f32[8,16]{1,0} parameter(0)
  q = f32[16,16]{1,0} parameter(1)
  r = f32[16,16]{0,1} copy(q)
  zero = s32[] constant(0)
  t = (s32[], f32[8,16]{1,0}) tuple(zero, p)
  w = (s32[], f32[8,16]{1,0}) while(t), condition=cond, body=body
  v = f32[8,16]{1,0} get-tuple-element(w), index=1
  ROOT out = (f32[8,16]{1,0}, f32[16,16]{0,1}) tuple(v, r)
}
""")
    assert [(r.instruction.name, r.executions, r.moved_bytes) for r in relayouts(module)] == [
        ("y", 5, 5 * SIZE),
        ("z", 5, 5 * SIZE),
        ("r", 1, 2 * SIZE),
    ]
