from hlo_passes.analysis.kernel_digest import kernel_digests
from hlo_passes.reading.reader import read_module

BODY = """
HloModule m, is_scheduled=true

%%body (a: f32[8,4], b: %(other)s) -> f32[8,4] {
  %%a = f32[8,4]{1,0} parameter(%(first)d)
  %%b = %(other)s parameter(%(second)d)
  %%c = f32[8,4]{1,0} broadcast(%%b), dimensions={0}
  %%%(name)s = f32[8,4]{1,0} add(%%a, %%c)
  ROOT %%t = f32[8,4]{1,0} %(last)s(%%%(name)s)
}

ENTRY %%e {
  %%x = f32[8,4]{1,0%(space)s} parameter(0)
  %%y = %(other)s parameter(1)
  ROOT %%f = f32[8,4]{1,0} fusion(%(operands)s), kind=kLoop, calls=%%body
}
"""


def digests(**changes):
    words = {"other": "f32[8]{0}", "first": 0, "second": 1, "name": "s", "last": "tanh"}
    words |= {"space": "", "operands": "%x, %y", **changes}
    module = read_module(BODY % words)
    return {module.instructions[id_].name: digest for id_, digest in kernel_digests(module).items()}


def test_only_what_computes_or_moves_is_a_kernel():
    assert digests().keys() == {"f"}


def test_names_operands_order_and_memories_are_no_part_of_it():
    plain = digests()
    assert digests(name="other_name") == plain
    assert digests(first=1, second=0, operands="%y, %x") == plain
    assert digests(space=":S(5)") == plain


def test_what_it_computes_and_on_which_shapes_is():
    found = [digests(), digests(last="negate"), digests(other="f32[8,1]{1,0}")]
    found.append(digests(other="bf16[8]{0}"))
    assert len({d["f"] for d in found[:2]}) == 2
    assert len({d["f"] for d in found}) == len(found)
