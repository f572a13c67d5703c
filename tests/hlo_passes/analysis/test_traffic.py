"""Which bytes are touched: whole operands and outputs, but of slices the slice."""

import pytest

from hlo_passes.analysis.traffic import Traffic, traffic
from tests.hlo_passes.toys import module_of


def traffic_of(text):
    module = module_of(text)
    return traffic(module).get(module.entry.root.id, Traffic())


def entry(*lines):
    body = "\n  ".join(lines)
    return f"HloModule m\nENTRY e {{\n  {body}\n}}\n"


def test_operands_are_read_and_outputs_written():
    found = traffic_of(
        entry(
            "a = f32[10] parameter(0)",
            "b = bf16[10] parameter(1)",
            'ROOT c = (f32[10], s8[10]) custom-call(a, b), custom_call_target="f"',
        )
    )
    assert found == Traffic({0: 60}, {0: 50})


def test_an_operand_used_twice_is_read_once():
    found = traffic_of(entry("a = f32[10] parameter(0)", "ROOT b = f32[10] multiply(a, a)"))
    assert found == Traffic({0: 40}, {0: 40})


def test_bytes_are_told_apart_by_memory_space():
    found = traffic_of(
        entry(
            "a = f32[10] parameter(0)",
            "b = f32[10]{0:S(1)} parameter(1)",
            "ROOT c = f32[10]{0:S(1)} add(a, b)",
        )
    )
    assert found == Traffic({0: 40, 1: 40}, {1: 40})


@pytest.mark.parametrize(
    "root",
    ["f32[2,5] bitcast(a)", "(f32[10]) tuple(a)", "f32[10] opt-barrier(a)", "f32[] constant(1)"],
)
def test_what_has_no_bytes_of_its_own_moves_none(root):
    assert traffic_of(entry("a = f32[10] parameter(0)", f"ROOT r = {root}")) == Traffic()


def test_of_a_slice_only_the_slice_is_read():
    found = traffic_of(
        entry(
            "a = f32[100,10] parameter(0)",
            "i = s32[] parameter(1)",
            "ROOT s = f32[2,10] dynamic-slice(a, i, i), dynamic_slice_sizes={2,10}",
        )
    )
    assert found == Traffic({0: 80 + 4}, {0: 80})


def test_an_update_touches_only_the_update():
    found = traffic_of(
        entry(
            "a = f32[100,10] parameter(0)",
            "u = f32[2,10] parameter(1)",
            "i = s32[] constant(0)",
            "ROOT s = f32[100,10] dynamic-update-slice(a, u, i, i)",
        )
    )
    assert found == Traffic({0: 80 + 4}, {0: 80})


def test_a_copy_start_reads_its_source_and_writes_its_destination():
    module = module_of(
        entry(
            "a = f32[10]{0:S(5)} parameter(0)",
            "s = (f32[10]{0}, f32[10]{0:S(5)}, u32[]) copy-start(a)",
            "ROOT d = f32[10]{0} copy-done(s)",
        )
    )
    by_name = {module.instructions[i].name: moved for i, moved in traffic(module).items()}
    assert by_name == {"s": Traffic({5: 40}, {0: 40})}


FUSION = """HloModule m
inner {
  q = f32[100,10] parameter(0)
  ROOT r = f32[100,10] bitcast(q)
}
body {
  p = bf16[100,10] parameter(0)
  x = f32[1,10] parameter(1)
  i = s32[] parameter(2)
%s
}
ENTRY e {
  a = bf16[100,10] parameter(0)
  b = f32[1,10] parameter(1)
  c = s32[] parameter(2)
  ROOT f = %s fusion(a, b, c), kind=kLoop, calls=body
}
"""


def test_a_fusion_that_slices_reads_the_slice_through_conversions():
    found = traffic_of(
        FUSION
        % (
            """  w = f32[100,10] convert(p)
  n = f32[100,10] fusion(w), kind=kLoop, calls=inner
  s = f32[1,10] dynamic-slice(n, i, i), dynamic_slice_sizes={1,10}
  ROOT t = f32[1,10] add(s, x)""",
            "f32[1,10]",
        )
    )
    assert found == Traffic({0: 20 + 40 + 4}, {0: 40})


def test_a_fusion_that_also_needs_the_whole_reads_the_whole():
    found = traffic_of(
        FUSION
        % (
            """  s = bf16[1,10] dynamic-slice(p, i, i), dynamic_slice_sizes={1,10}
  n = bf16[100,10] negate(p)
  ROOT t = (bf16[1,10], bf16[100,10]) tuple(s, n)""",
            "(bf16[1,10], bf16[100,10])",
        )
    )
    # Nothing uses %x.
    assert found == Traffic({0: 2000 + 4}, {0: 20 + 2000})


def test_a_fusion_updates_in_place():
    found = traffic_of(
        FUSION
        % (
            """  u = bf16[1,10] convert(x)
  ROOT t = bf16[100,10] dynamic-update-slice(p, u, i, i)""",
            "bf16[100,10]",
        )
    )
    assert found == Traffic({0: 40 + 4}, {0: 20})


def test_an_asynchronous_start_moves_what_it_wraps():
    module = module_of("""HloModule m
wrapped {
  p = f32[3,10]{1,0} parameter(0)
  u = f32[1,10]{1,0} parameter(1)
  i = s32[] parameter(2)
  ROOT s = f32[3,10]{1,0:S(5)} dynamic-update-slice(p, u, i, i)
}
ENTRY e {
  a = f32[3,10]{1,0} parameter(0)
  b = f32[1,10]{1,0} parameter(1)
  c = s32[] parameter(2)
  s = ((f32[3,10]{1,0}, f32[1,10]{1,0}, s32[]), f32[3,10]{1,0:S(5)}, u32[])
      async-start(a, b, c), calls=wrapped
  ROOT d = f32[3,10]{1,0:S(5)} async-done(s)
}
""")
    (start,) = (i for i in module.instructions.values() if i.opcode == "async-start")
    assert traffic(module)[start.id] == Traffic({0: 40 + 4}, {5: 40})
