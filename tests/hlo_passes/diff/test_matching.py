"""What corresponds: one kind of edit at a time, then whatever is drawn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.module_edits import rewritten, without_metadata
from hlo_passes.diff.matching import Matching, Pair, match_modules
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from tests import corpus


def module(entry: str, computations: str = "") -> Module:
    """A module whose entry is `entry`, where F stands for ``f32[8]{0}``."""
    text = f"HloModule m, is_scheduled=true\n{computations}\nENTRY e {{{entry}}}\n"
    return read_module(text.replace("F ", "f32[8]{0} "))


def names(found: Matching) -> dict[str, str]:
    return {a.name: b.name for a, b in found.pairs}


def changes(found: Matching) -> dict[str, set[str]]:
    """Of each pair that is not equal, by its name before, what changed."""
    return {p.before.name: set(c) for p in found.pairs if (c := found.changes(p))}


def left(found: Matching) -> tuple[set[str], set[str]]:
    return {i.name for i in found.only_before}, {i.name for i in found.only_after}


def groups(found: Matching) -> list[tuple[set[str], set[str]]]:
    return [({i.name for i in g.before}, {i.name for i in g.after}) for g in found.groups]


# ── Nothing changed ──────────────────────────────────────────────────────────────────────

PROGRAMS = [
    "adam.cpu",
    "conditional.h200",
    "mlp_grad.cpu",
    "random.cpu",
    "scan_grad.h200",
    "scan_offloaded.v5e",
    "sharded_grad.v5e",
    "sort.cpu",
    "while.v5e",
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_module_matches_itself(name: str):
    program = corpus.read(name)
    found = match_modules(program, program)
    assert [p for p in found.pairs if p.before is not p.after] == []
    assert len(found.pairs) == len(program.instructions)
    assert (changes(found), left(found), groups(found)) == ({}, (set(), set()), [])


@pytest.mark.parametrize("name", PROGRAMS)
def test_names_numbers_metadata_and_order_do_not_matter(name: str):
    program = corpus.read(name)
    other, original = rewritten(program, seed=1, permute=True)
    for after in (other, without_metadata(other)):
        found = match_modules(program, after)
        assert [p for p in found.pairs if original[p.after.id] != p.before.id] == []
        assert len(found.pairs) == len(program.instructions)
        assert changes(found) == {}


def test_equal_parts_are_told_apart_by_where_they_are_returned():
    text = """
  p = F parameter(0)
  q = F parameter(1)
  {0}
  ROOT t = (F , F ) tuple(n, m)
"""
    first = module(text.replace("{0}", "n = F negate(p)\n m = F negate(q)"))
    second = module(text.replace("{0}", "m = F negate(q)\n n = F negate(p)"))
    assert names(match_modules(first, second)) == {k: k for k in "pqnmt"}


def test_equal_parts_that_nothing_tells_apart_are_taken_in_order():
    plain = "p = F parameter(0)\n q = F parameter(1)\n n = F negate(p)\n m = F negate(q)\n"
    before = module(plain + "ROOT t = (F , F ) tuple(n, m)")
    after = module(plain + "a = F abs(p)\n ROOT t = (F , F , F ) tuple(a, n, m)")
    found = match_modules(before, after)
    assert names(found) == {k: k for k in "pqnmt"}
    assert left(found) == (set(), {"a"})


# ── Fusions ──────────────────────────────────────────────────────────────────────────────

ONE = module(
    """
  p = F parameter(0)
  q = F parameter(1)
  ROOT f = F fusion(p, q), kind=kLoop, calls=c
""",
    """c {
  c0 = F parameter(0)
  c1 = F parameter(1)
  n = F negate(c0)
  x = F exponential(n)
  s = F subtract(c1, x)
  ROOT h = F tanh(s)
}""",
)

TWO = module(
    """
  p = F parameter(0)
  q = F parameter(1)
  g = F fusion(p), kind=kLoop, calls=d
  ROOT k = F fusion(g, q), kind=kLoop, calls=e.1
""",
    """d {
  d0 = F parameter(0)
  ROOT n = F negate(d0)
}
e.1 {
  e0 = F parameter(0)
  e1 = F parameter(1)
  x = F exponential(e0)
  s = F subtract(e1, x)
  ROOT h = F tanh(s)
}""",
)

ALONE = module("""
  p = F parameter(0)
  q = F parameter(1)
  n = F negate(p)
  x = F exponential(n)
  s = F subtract(q, x)
  ROOT h = F tanh(s)
""")


def test_a_split_fusion_is_the_part_that_holds_most_of_it():
    found = match_modules(ONE, TWO)
    same = {k: k for k in "pqnxsh"}
    assert names(found).items() >= {**same, "f": "k", "c1": "e1", "c0": "d0"}.items()
    assert left(found) == (set(), {"g", "e0"})
    assert groups(found) == [({"f"}, {"g", "k"})]
    assert changes(found) == {"f": {"fused with"}, "n": {"fused with"}, "c0": {"fused with"}}


def test_merged_fusions_are_a_group():
    found = match_modules(TWO, ONE)
    assert groups(found) == [({"g", "k"}, {"f"})]
    assert names(found)["k"] == "f"


def test_what_stands_alone_belongs_to_the_group_of_its_fusion():
    found = match_modules(ALONE, ONE)
    assert names(found) == {k: k for k in "pqnxsh"}
    assert groups(found) == [({"n", "x", "s", "h"}, {"f"})]
    assert left(found) == (set(), {"f", "c0", "c1"})
    assert changes(found) == {k: {"fused with"} for k in "nxsh"}


def fused(first: str, second: str, root: str = "g") -> Module:
    """Two fusions, the second of what the first gives, or both of the argument."""
    operand = "f" if root == "g" else "p"
    return module(
        f"""
  p = F parameter(0)
  f = F fusion(p), kind=kLoop, calls=c
  g = F fusion({operand}), kind=kLoop, calls=d
  {"ROOT o = F tanh(g)" if root == "g" else root}
""",
        f"c {{\n c0 = F parameter(0)\n {first} }}\nd {{\n d0 = F parameter(0)\n {second} }}",
    )


def test_what_moves_from_one_fusion_to_another_makes_no_group():
    before = fused(
        "a = F negate(c0)\n b = F exponential(a)\n ROOT m = F cosine(b)",
        "u = F abs(d0)\n v = F sine(u)\n ROOT w = F log(v)",
    )
    after = fused(
        "a = F negate(c0)\n ROOT b = F exponential(a)",
        "m = F cosine(d0)\n u = F abs(m)\n v = F sine(u)\n ROOT w = F log(v)",
    )
    found = match_modules(before, after)
    assert names(found).items() >= {k: k for k in "pfgabmuvwo"}.items()
    assert groups(found) == []
    assert changes(found) == {"m": {"fused with"}}


def test_a_constant_in_another_place_makes_no_group():
    constant = "z = f32[] constant(2)\n y = F broadcast(z), dimensions={}\n"
    apart = module(
        f"p = F parameter(0)\n {constant} ROOT f = F fusion(p, y), kind=kLoop, calls=c",
        "c {\n c0 = F parameter(0)\n c1 = F parameter(1)\n ROOT s = F subtract(c0, c1)\n}",
    )
    inside = module(
        "p = F parameter(0)\n ROOT f = F fusion(p), kind=kLoop, calls=c",
        f"c {{\n c0 = F parameter(0)\n {constant} ROOT s = F subtract(c0, y)\n}}",
    )
    found = match_modules(apart, inside)
    assert names(found) == {k: k for k in ("p", "z", "y", "f", "s", "c0")}
    assert groups(found) == []


def test_fusions_that_give_something_else_are_what_they_share():
    first = "a = F negate(c0)\n b = F exponential(a)\n ROOT m = F {}(b)"
    second = "u = F abs(d0)\n v = F sine(u)\n ROOT w = F {}(v)"
    before = fused(first.format("cosine"), second.format("cbrt"), "ROOT o = F subtract(f, g)")
    after = fused(
        second.format("floor").replace("d0", "c0"),
        first.format("ceil").replace("c0", "d0"),
        "ROOT o = F subtract(g, f)",
    )
    found = match_modules(before, after)
    assert names(found).items() >= {"f": "g", "g": "f", "a": "a", "u": "u"}.items()


CLONED = """
  p = F parameter(0)
  f = F fusion(p), kind=kLoop, calls=c
  ROOT g = F fusion(f, p), kind=kLoop, calls=d
"""
CLONES = """c {
  c0 = F parameter(0)
  x = F exponential(c0)
  ROOT n = F negate(x)
}
d {
  d0 = F parameter(0)
  d1 = F parameter(1)
  y = F exponential(d1)
  ROOT s = F subtract(d0, y)
}"""


def test_clones_are_told_apart_by_their_fusions():
    # The root is another one: no whole future is the same.
    after = module(CLONED, CLONES.replace("subtract", "power"))
    found = match_modules(module(CLONED, CLONES), rewritten(after, seed=4, permute=True).module)
    kernels = {p.before.name: p.after.computation_id for p in found.pairs}
    assert kernels["x"] == kernels["n"]
    assert kernels["y"] == kernels["d0"] != kernels["x"]


def test_a_clone_more_is_left():
    once = module(
        "p = F parameter(0)\n x = F exponential(p)\n"
        "f = F fusion(x), kind=kLoop, calls=c\n"
        "ROOT g = F fusion(f, x), kind=kLoop, calls=d",
        """c {
  c0 = F parameter(0)
  ROOT n = F negate(c0)
}
d {
  d0 = F parameter(0)
  d1 = F parameter(1)
  ROOT s = F subtract(d0, d1)
}""",
    )
    found = match_modules(once, module(CLONED, CLONES))
    assert names(found).items() >= {"n": "n", "s": "s", "f": "f", "g": "g"}.items()
    assert len({"x", "y"} & left(found)[1]) == 1


# ── Changed ──────────────────────────────────────────────────────────────────────────────


def chain(middle: str, dtype: str = "f32") -> Module:
    return module(f"""
  p = F parameter(0)
  a = F exponential(p)
  c = {dtype}[8]{{0}} convert(a)
  {middle}
  d = F convert(m)
  ROOT b = F tanh(d)
""")


def test_another_element_type():
    found = match_modules(
        chain("m = f32[8]{0} negate(c)"), chain("m = bf16[8]{0} negate(c)", "bf16")
    )
    assert names(found) == {k: k for k in "pacmdb"}
    assert changes(found) == {"c": {"element type"}, "m": {"element type"}}


def test_other_attributes():
    text = "s = f32[4]{0} slice(c), slice={[0:4]}\n m = F pad(s, z), padding=0_4"
    zero = "z = f32[] constant(0)\n "
    found = match_modules(
        chain(zero + text), chain(zero + text.replace("[0:4]", "[4:8]").replace("0_4", "4_0"))
    )
    assert changes(found) == {"s": {"attributes"}, "m": {"attributes"}}


def test_another_constant():
    text = "z = f32[] constant(1)\n w = F broadcast(z), dimensions={}\n m = F add(c, w)"
    found = match_modules(chain(text), chain(text.replace("(1)", "(2)")))
    assert changes(found) == {"z": {"attributes"}}


def test_another_layout_and_memory_space():
    text = "ENTRY e {{ p = f32[8,4]{{{}}} parameter(0)\n ROOT c = f32[8,4]{{1,0}} copy(p) }}"
    before, after = (
        read_module("HloModule m, is_scheduled=true\n" + text.format(layout))
        for layout in ("1,0", "0,1:S(5)")
    )
    assert changes(match_modules(before, after)) == {"p": {"layout", "memory space"}}


def test_other_dimensions():
    text = """HloModule m, is_scheduled=true
ENTRY e {
  p = f32[8]{0} parameter(0)
  ROOT n = f32[8]{0} negate(p)
}"""
    found = match_modules(read_module(text), read_module(text.replace("[8]", "[16]")))
    assert changes(found) == {"p": {"dimensions"}, "n": {"dimensions"}}


def test_asynchronous_instead():
    start = "s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(p)\n d = F copy-done(s)"
    text = "p = f32[8]{0:S(5)} parameter(0)\n {0}\n ROOT n = F negate(d)"
    found = match_modules(
        module(text.replace("{0}", "d = F copy(p)")), module(text.replace("{0}", start))
    )
    assert names(found) == {"p": "p", "d": "s", "n": "n"}
    assert "opcode" in changes(found)["d"]


def test_what_was_put_in_between_is_new():
    found = match_modules(chain("m = F negate(c)"), chain("n = F negate(c)\n m = F abs(n)"))
    assert names(found) == {"p": "p", "a": "a", "c": "c", "m": "n", "d": "d", "b": "b"}
    assert left(found) == (set(), {"m"})


def test_nothing_in_common():
    found = match_modules(
        module("p = F parameter(0)\n ROOT n = F negate(p)"), module("ROOT c = s32[] constant(1)")
    )
    assert (found.pairs, groups(found)) == ((), [])
    assert left(found) == ({"p", "n"}, {"c"})


# ── Equal layers ─────────────────────────────────────────────────────────────────────────

LAYER = """
  n.{0} = F negate(x.{0}), metadata={{op_name="{1}/neg"}}
  e.{0} = F exponential(n.{0}), metadata={{op_name="{1}/exp"}}
  y.{0} = F multiply(e.{0}, w.{0}), metadata={{op_name="{1}/mul"}}
  x.{2} = F add(x.{0}, y.{0}), metadata={{op_name="{1}/add"}}
"""


def layers(tags: str) -> Module:
    """Equal layers in a row, one for each letter, which names it."""
    weights = "".join(f"w.{n} = F parameter({n + 1})\n" for n in range(len(tags)))
    steps = "".join(LAYER.format(n, tag, n + 1) for n, tag in enumerate(tags))
    return module(f"x.0 = F parameter(0)\n{weights}{steps}ROOT r = F tanh(x.{len(tags)})\n")


@pytest.mark.parametrize("after", ["zabcdef", "abczdef", "abcdefz"])
def test_the_layer_with_the_new_name_is_new(after: str):
    found = match_modules(layers("abcdef"), layers(after))
    new = after.index("z")
    assert left(found) == (set(), {f"{k}.{new}" for k in "wney"} | {f"x.{new + 1}"})


def test_without_names_a_whole_layer_is_new():
    found = match_modules(without_metadata(layers("abcdef")), without_metadata(layers("abcdefg")))
    new = {name.partition(".")[0] for name in left(found)[1]}
    assert left(found)[0] == set()
    assert new == set("wneyx")
    shifts = [int(b.partition(".")[2]) - int(a.partition(".")[2]) for a, b in weights(found)]
    assert shifts == sorted(shifts)
    assert len(shifts) == 6


def weights(found: Matching) -> list[tuple[str, str]]:
    return [(a, b) for a, b in sorted(names(found).items()) if a.startswith("w")]


# ── Called computations ──────────────────────────────────────────────────────────────────

LOOP = """
sum {{
  u = f32[] parameter(0)
  v = f32[] parameter(1)
  ROOT uv = f32[] add(u, v)
}}
body {{
  s = (s32[], F {extra}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = F get-tuple-element(s), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  zero = f32[] constant(0)
  m = f32[] reduce(x, zero), dimensions={{0}}, to_apply=sum
  w = F broadcast(m), dimensions={{}}
  y = F subtract(x, w)
  {more}
  ROOT t = (s32[], F {extra}) tuple(j, y{also})
}}
cond {{
  sc = (s32[], F {extra}) parameter(0)
  ic = s32[] get-tuple-element(sc), index=0
  n = s32[] constant(4)
  ROOT l = pred[] compare(ic, n), direction=LT
}}
"""
AROUND = """
  p = F parameter(0)
  z = s32[] constant(0)
  a = (s32[], F {extra}) tuple(z, p{given})
  r = (s32[], F {extra}) while(a), condition=cond, body=body
  ROOT o = F get-tuple-element(r), index=1
"""


def loop(extra: str = "", more: str = "", also: str = "", given: str = "") -> Module:
    return module(
        AROUND.format(extra=extra, given=given), LOOP.format(extra=extra, more=more, also=also)
    )


def test_a_loop_that_carries_more():
    found = match_modules(
        loop(),
        loop(", F ", "g = F get-tuple-element(s), index=2\n h = F negate(g)", ", h", ", p"),
    )
    assert all(a == b for a, b in names(found).items())
    assert left(found) == (set(), {"g", "h"})
    assert {k for k, v in changes(found).items() if "dimensions" in v} == {"s", "t", "sc", "a", "r"}


def test_reductions_of_another_kind_are_changed_with_what_they_call():
    text = loop().to_proto()
    for c in text.computations:
        for i in c.instructions:
            if i.name == "uv":
                i.opcode = "maximum"
    found = match_modules(loop(), Module(text))
    assert names(found).items() >= {k: k for k in ("m", "y", "x", "r", "o")}.items()
    assert "uv" in left(found)[0]


# ── Whatever is drawn ────────────────────────────────────────────────────────────────────

_UNARY = ("negate", "exponential", "tanh")
_BINARY = ("subtract", "divide", "add")

_ARGUMENTS = 3

Step = tuple[str, *tuple[int, ...]]


@st.composite
def programs(draw: st.DrawFn) -> Module:
    """Instructions that are all different; the program returns its arguments and what nobody
    reads."""
    steps: dict[Step, None] = {}
    for _ in range(draw(st.integers(1, 12))):
        opcode = draw(st.sampled_from(_UNARY + _BINARY))
        numbers = st.integers(0, _ARGUMENTS + len(steps) - 1)
        operands = [draw(numbers) for _ in range(1 + (opcode in _BINARY))]
        steps[opcode, *(sorted(operands) if opcode == "add" else operands)] = None
    lines = [f"i{n} = F parameter({n})" for n in range(_ARGUMENTS)]
    for n, (opcode, *operands) in enumerate(steps, _ARGUMENTS):
        lines.append(f"i{n} = F {opcode}({', '.join(f'i{o}' for o in operands)})")
    read = {o for _, *operands in steps for o in operands if o >= _ARGUMENTS}
    ends = [n for n in range(len(lines)) if n not in read]
    lines.append(
        f"ROOT r = ({', '.join('F ' for _ in ends)}) tuple({', '.join(f'i{n}' for n in ends)})"
    )
    return module("\n".join(lines))


@settings(max_examples=60)
@given(programs(), st.integers(0, 1000))
def test_what_differs_is_found_again(program: Module, seed: int):
    other, original = rewritten(program, seed, permute=True)
    found = match_modules(program, other)
    assert {original[b.id]: a.id for a, b in found.pairs} == {i: i for i in program.instructions}


@settings(max_examples=60)
@given(programs(), programs())
def test_exchanged_modules_give_the_exchanged_result(before: Module, after: Module):
    found, back = match_modules(before, after), match_modules(after, before)
    assert {(a.id, b.id) for a, b in found.pairs} == {(b.id, a.id) for a, b in back.pairs}
    assert found.only_before == back.only_after
    assert found.only_after == back.only_before
    assert groups(found) == [(b, a) for a, b in groups(back)]
    assert [found.changes(p) for p in found.pairs] == [
        back.changes(Pair(b, back.after_of[b.id])) for _, b in found.pairs
    ]


@settings(max_examples=60)
@given(programs(), programs())
def test_each_instruction_occurs_once(before: Module, after: Module):
    found = match_modules(before, after)
    for program, side, rest in ((before, 0, found.only_before), (after, 1, found.only_after)):
        ids = [pair[side].id for pair in found.pairs] + [i.id for i in rest]
        assert sorted(ids) == sorted(program.instructions)
    assert all(a.opcode == b.opcode for a, b in found.pairs)
