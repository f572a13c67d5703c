"""What a module computes, seen through what only passes it on."""

from hlo_passes.diff.value_graph import Numbering, ValueGraph, attributes, flat, value_graph
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module


def graph(text: str, numbering: Numbering | None = None) -> ValueGraph:
    text = f"HloModule m, is_scheduled=true\n{text}".replace("F ", "f32[8]{0} ")
    return value_graph(read_module(text), numbering or Numbering())


def value(found: ValueGraph, name: str) -> int:
    """The value of an array instruction."""
    (number,) = flat(found.flow[instruction(found.module, name).id])
    return number


def instruction(module: Module, name: str):
    return next(i for i in module.instructions.values() if i.name == name)


def test_other_forms_of_the_same_elements_are_one_value():
    found = graph("""ENTRY e {
  p = F parameter(0)
  n = F negate(p)
  s = (f32[8], f32[8], u32[]) copy-start(n)
  d = F copy-done(s)
  c = bf16[8] convert(d)
  b = bf16[2,4] bitcast(c)
  ROOT t = bf16[4,2] transpose(b), dimensions={1,0}
}""")
    assert {value(found, k) for k in "ndcbt"} == {value(found, "n")}
    assert value(found, "p") != value(found, "n")


def test_fusions_are_looked_through_and_clones_are_one_value():
    found = graph("""c {
  q = F parameter(0)
  x = F exponential(q)
  ROOT m = (F , F ) tuple(x, q)
}
ENTRY e {
  p = F parameter(0)
  f = (F , F ) fusion(p), kind=kLoop, calls=c
  g = F get-tuple-element(f), index=0
  h = F get-tuple-element(f), index=1
  y = F exponential(p)
  ROOT a = F subtract(y, g)
}""")
    assert value(found, "g") == value(found, "x") == value(found, "y")
    assert value(found, "h") == value(found, "p")
    assert [i.name for i in found.values[value(found, "y")].members] == ["x", "y"]
    assert {k: found.kernel[instruction(found.module, k).id].name for k in "xya"} == {
        "x": "f",
        "y": "y",
        "a": "a",
    }


def test_order_of_operands_counts_where_it_matters():
    found = graph("""ENTRY e {
  p = F parameter(0)
  q = F parameter(1)
  a = F add(p, q)
  b = F add(q, p)
  c = F subtract(p, q)
  d = F subtract(q, p)
  ROOT t = (F , F , F , F ) tuple(a, b, c, d)
}""")
    assert value(found, "a") == value(found, "b")
    assert value(found, "c") != value(found, "d")


def test_what_a_loop_hands_on_is_what_it_was_given():
    found = graph("""body {
  s = (F , F ) parameter(0)
  x = F get-tuple-element(s), index=0
  w = F get-tuple-element(s), index=1
  y = F subtract(x, w)
  ROOT t = (F , F ) tuple(y, w)
}
cond {
  sc = (F , F ) parameter(0)
  ROOT l = pred[] constant(false)
}
ENTRY e {
  p = F parameter(0)
  q = F parameter(1)
  a = (F , F ) tuple(p, q)
  r = (F , F ) while(a), condition=cond, body=body
  g = F get-tuple-element(r), index=0
  h = F get-tuple-element(r), index=1
  ROOT z = F subtract(g, h)
}""")
    assert value(found, "w") == value(found, "h") == value(found, "q")
    assert value(found, "x") == value(found, "g") != value(found, "p")
    assert found.values[value(found, "x")].operands == [
        (value(found, "p"), 0),
        (value(found, "y"), 1),
    ]


def test_equal_computations_have_equal_labels_in_two_modules():
    numbering = Numbering()
    text = "ENTRY e {{ p = F parameter(0)\n ROOT {} = F {}(p) }}"
    first, second, third = (
        graph(text.format(*of), numbering)
        for of in (("n", "negate"), ("k", "negate"), ("n", "exponential"))
    )
    label = [g.values[value(g, k)].label for g, k in ((first, "n"), (second, "k"), (third, "n"))]
    assert label[0] == label[1] != label[2]


def test_constants_depend_on_no_argument():
    found = graph("""ENTRY e {
  p = f32[] parameter(0)
  z = f32[] constant(0)
  b = F broadcast(z), dimensions={}
  w = F broadcast(p), dimensions={}
  ROOT a = F subtract(b, w)
}""")
    constant = {k: found.values[value(found, k)].is_constant for k in "pzbwa"}
    assert constant == {"p": False, "z": True, "b": True, "w": False, "a": False}


def test_attributes_are_what_is_computed():
    text = """HloModule m
ENTRY e {{
  p = f32[8]{{0}} parameter(0)
  ROOT {} = f32[4]{{0}} slice(p), slice={{[{}]}}, metadata={{op_name="{}"}}
}}"""
    slices = [
        attributes(read_module(text.format(*of)).entry.root)
        for of in (("s", "0:4", "x"), ("t", "0:4", "y"), ("s", "4:8", "x"))
    ]
    assert slices[0] == slices[1] != slices[2]


def test_the_number_of_a_channel_is_no_attribute():
    text = """HloModule m
sum {{
  u = f32[] parameter(0)
  v = f32[] parameter(1)
  ROOT w = f32[] add(u, v)
}}
ENTRY e {{
  p = f32[8]{{0}} parameter(0)
  ROOT a = f32[8]{{0}} all-reduce(p), channel_id={}, replica_groups={{{{{}}}}}, to_apply=sum
}}"""
    sums = [
        attributes(read_module(text.format(*of)).entry.root)
        for of in ((1, "0,1"), (2, "0,1"), (1, "0,1,2"))
    ]
    assert sums[0] == sums[1] != sums[2]
