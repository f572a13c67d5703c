"""Which kernels are two, and why; and which are no pair."""

from __future__ import annotations

from hlo_passes.fusions.pairs import FusionPair, fusion_pairs
from hlo_passes.reading.reader import read_module

X = "f32[16,16]{1,0}"
SIZE = 4 * 16 * 16
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"

ADDED = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
"""


def pairs(body: str, called: str = "") -> tuple[FusionPair, ...]:
    text = f"HloModule m, is_scheduled=true\n{called}\nENTRY e {{\n  p = {X} parameter(0)\n{body}}}"
    return fusion_pairs(read_module(text))


def said(body: str, called: str = "") -> list[tuple[str, str, str]]:
    return [(p.producer.name, p.consumer.name, p.reason) for p in pairs(body, called)]


def test_what_is_read_from_memory_is_written_and_read():
    (only,) = pairs(f"  a = {X} sine(p)\n  ROOT b = {X} cosine(a)\n")
    assert (only.producer.name, only.consumer.name, only.reason) == ("a", "b", "open")
    assert (only.read, only.written, only.saved) == (SIZE, SIZE, 2 * SIZE)
    assert only.conversion is None


def test_a_view_between_the_two_is_looked_through():
    (only,) = pairs(
        f"  a = {X} sine(p)\n  v = f32[256]{{0}} bitcast(a)\n  ROOT b = f32[256]{{0}} cosine(v)\n"
    )
    assert (only.producer.name, only.consumer.name) == ("a", "b")


def test_what_stays_on_the_chip_is_no_pair():
    on_chip = X.replace("1,0", "1,0:S(1)")
    assert not pairs(f"  a = {on_chip} sine(p)\n  ROOT b = {X} cosine(a)\n")


def test_what_comes_to_the_chip_by_a_transfer_is_read_from_memory_all_the_same():
    on_chip = X.replace("1,0", "1,0:S(1)")
    (only,) = pairs(f"""
  a = {X} sine(p)
  s = ({on_chip}, {X}, u32[]) copy-start(a)
  d = {on_chip} copy-done(s)
  ROOT b = {X} cosine(d)
""")
    assert (only.producer.name, only.consumer.name, only.saved) == ("a", "b", 2 * SIZE)


def test_an_argument_is_no_product():
    assert not pairs(f"  ROOT b = {X} cosine(p)\n")


def test_a_conversion_is_why():
    found = pairs(f"""
  a = {X} sine(p)
  c = f32[16,16]{{0,1}} copy(a)
  ROOT d = f32[16,16]{{0,1}} cosine(c)
""")
    assert [(p.producer.name, p.consumer.name, p.reason) for p in found] == [
        ("a", "c", "layout"),
        ("c", "d", "layout"),
    ]
    for pair in found:
        assert pair.conversion is not None
        assert pair.conversion.name == "c"
        assert pair.why == "%c only brings {1,0} into {0,1}"


def test_a_copy_in_the_same_order_is_no_conversion():
    found = said(f"  a = {X} sine(p)\n  c = {X} copy(a)\n  ROOT d = {X} cosine(c)\n")
    assert [reason for *_, reason in found] == ["open", "open"]


def test_a_transpose_that_is_fused_with_work_is_no_conversion():
    fused = f"""
f {{
  q = {X} parameter(0)
  t = {X} transpose(q), dimensions={{1,0}}
  ROOT n = {X} negate(t)
}}
"""
    body = f"  a = {X} sine(p)\n  ROOT b = {X} fusion(a), kind=kLoop, calls=f\n"
    assert said(body, fused) == [("a", "b", "open")]


def test_a_product_of_a_product_waits_for_all_of_it():
    (only,) = pairs(f"  a = {X} dot(p, p), {DOT}\n  ROOT b = {X} dot(a, p), {DOT}\n")
    assert only.reason == "sums"
    assert only.why == "a dot makes it, and a dot needs many of its elements"


def test_a_product_of_what_is_made_element_by_element_does_not():
    assert said(f"  a = {X} sine(p)\n  ROOT b = {X} dot(a, p), {DOT}\n") == [("a", "b", "open")]


def test_nor_does_what_is_made_of_a_product_element_by_element():
    assert said(f"  a = {X} dot(p, p), {DOT}\n  ROOT b = {X} sine(a)\n") == [("a", "b", "open")]


def test_sums_are_found_in_fusions():
    fused = f"""{ADDED}
f {{
  q = {X} parameter(0)
  zero = f32[] constant(0)
  r = f32[16]{{0}} reduce(q, zero), dimensions={{1}}, to_apply=add
  s = f32[16]{{0}} sine(r)
  n = {X} negate(q)
  ROOT t = (f32[16]{{0}}, {X}) tuple(s, n)
}}
g {{
  r = f32[16]{{0}} parameter(0)
  n = {X} parameter(1)
  b = {X} broadcast(r), dimensions={{0}}
  ROOT m = {X} multiply(b, n)
}}
"""
    body = f"""
  a = (f32[16]{{0}}, {X}) fusion(p), kind=kInput, calls=f
  s = f32[16]{{0}} get-tuple-element(a), index=0
  n = {X} get-tuple-element(a), index=1
  ROOT b = {X} fusion(s, n), kind=kLoop, calls=g
"""
    found = {str(p.shape): (p.reason, p.why) for p in pairs(body, fused)}
    assert found == {
        "f32[16]": ("sums", "a reduce makes it, and a broadcast repeats its elements"),
        "f32[16,16]": ("open", "XLA did not"),
    }


def test_a_broadcast_that_repeats_nothing_needs_each_element_once():
    body = f"  a = {X} dot(p, p), {DOT}\n  ROOT b = {X} broadcast(a), dimensions={{0,1}}\n"
    assert said(body) == [("a", "b", "open")]


def test_of_several_readers_none_alone_saves_the_write():
    found = pairs(f"""
  a = {X} sine(p)
  b = {X} cosine(a)
  c = {X} negate(a)
  ROOT t = ({X}, {X}) tuple(b, c)
""")
    assert [(p.consumer.name, p.reason, p.read, p.written) for p in found] == [
        ("b", "shared", SIZE, 0),
        ("c", "shared", SIZE, 0),
    ]


def test_a_result_is_written_in_any_case():
    (only,) = pairs(f"""
  a = {X} sine(p)
  b = {X} cosine(a)
  ROOT t = ({X}, {X}) tuple(a, b)
""")
    assert (only.reason, only.saved) == ("shared", SIZE)


def test_xla_does_not_look_into_a_library():
    (only,) = pairs(f"""
  a = {X} sine(p)
  ROOT b = {X} custom-call(a), custom_call_target="lib"
""")
    assert (only.reason, only.why) == ("opaque", "%b is a custom-call of lib")


def test_each_iteration_counts_and_what_is_carried_is_no_pair():
    loop = f"""
cond {{
  s = (s32[], {X}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}}
body {{
  s = (s32[], {X}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = {X} get-tuple-element(s), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  a = {X} sine(x)
  b = {X} cosine(a)
  ROOT t = (s32[], {X}) tuple(j, b)
}}
"""
    (only,) = pairs(
        f"""
  zero = s32[] constant(0)
  q = {X} negate(p)
  t = (s32[], {X}) tuple(zero, q)
  l = (s32[], {X}) while(t), condition=cond, body=body
  v = {X} get-tuple-element(l), index=1
  ROOT r = {X} negate(v)
""",
        loop,
    )
    assert (only.producer.name, only.consumer.name) == ("a", "b")
    assert only.saved == 5 * 2 * SIZE


def test_what_a_transfer_brings_to_several_readers_is_read_from_memory_once():
    on_chip = X.replace("1,0", "1,0:S(1)")
    (only,) = pairs(f"""
  a = {X} sine(p)
  s = ({on_chip}, {X}, u32[]) copy-start(a)
  d = {on_chip} copy-done(s)
  b = {X} cosine(d)
  c = {X} negate(d)
  ROOT t = ({X}, {X}) tuple(b, c)
""")
    assert (only.consumer.name, only.reason, only.saved) == ("b", "shared", SIZE)
