"""Live ranges on the flattened time line."""

from itertools import pairwise

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.errors import UnscheduledModuleError
from hlo_passes.plan import LiveRange
from hlo_passes.reading.reader import read_module
from tests import corpus


def compute(body: str, header: str = "") -> LiveRanges:
    module = read_module(f"HloModule m, is_scheduled=true{header}\n{body}")
    return compute_live_ranges(analyze_dataflow(module))


def lives(ranges: LiveRanges) -> dict[str, LiveRange]:
    return {str(v): ranges.of_value[v.id] for v in ranges.dataflow.values}


CHAIN = """
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] negate(p)
  b = f32[8] abs(a)
  c = f32[8] add(a, b)
  ROOT d = f32[8] negate(c)
}
"""


def test_a_value_lives_from_its_definition_past_its_last_reader() -> None:
    found = lives(compute(CHAIN))
    assert found["a"] == (1, 4)
    assert found["b"] == (2, 4)
    assert found["c"] == (3, 5)


def test_an_argument_and_the_result_live_to_the_end() -> None:
    ranges = compute(CHAIN)
    assert ranges.end == 5
    assert lives(ranges)["p"] == (0, 6)
    assert lives(ranges)["d"] == (4, 6)


def test_a_donated_argument_dies_with_its_last_reader() -> None:
    ranges = compute(CHAIN, header=", input_output_alias={ {}: (0, {}, may-alias) }")
    assert lives(ranges)["p"] == (0, 2)
    assert lives(ranges)["d"] == (4, 6)


def test_passing_on_prolongs_a_life() -> None:
    found = lives(
        compute("""
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] negate(p)
  b = f32[2,4] bitcast(a)
  c = f32[8] abs(p)
  t = (f32[2,4], f32[8]) tuple(b, c)
  g = f32[2,4] get-tuple-element(t), index=0
  ROOT d = f32[2,4] negate(g)
}
""")
    )
    assert found["a"] == (1, 7)
    assert found["c"] == (3, 5)


LOOP = """
body {
  b = (f32[8], f32[8]) parameter(0)
  b0 = f32[8] get-tuple-element(b), index=0
  b1 = f32[8] get-tuple-element(b), index=1
  x = f32[8] add(b0, b1)
  n = f32[8] negate(x)
  ROOT r = (f32[8], f32[8]) tuple(n, b1)
}
condition {
  q = (f32[8], f32[8]) parameter(0)
  ROOT k = pred[] constant(false)
}
ENTRY e {
  p = f32[8] parameter(0)
  c0 = f32[8] copy(p)
  c1 = f32[8] copy(p)
  t = (f32[8], f32[8]) tuple(c0, c1)
  w = (f32[8], f32[8]) while(t), condition=condition, body=body
  w0 = f32[8] get-tuple-element(w), index=0
  ROOT s = f32[8] negate(w0)
}
"""


def test_a_loop_is_laid_out_before_itself_condition_first() -> None:
    names = [i.name for i in compute(LOOP).sequence]
    assert names == [
        "p",
        "c0",
        "c1",
        "t",
        "q",
        "k",
        *("b", "b0", "b1", "x", "n", "r"),
        "w",
        "w0",
        "s",
    ]


def test_a_carry_is_dead_between_its_last_reader_and_its_new_value() -> None:
    found = lives(compute(LOOP))
    assert found["c0"] == (1, 5)  # to the condition's parameter
    assert found["b{0}"] == (6, 10)  # to x
    assert found["n"][0] == 10
    assert found["w{0}"] == (12, 15)


def test_what_a_loop_hands_through_lives_all_along() -> None:
    assert lives(compute(LOOP))["c1"] == (2, 13)


def test_what_an_asynchronous_call_makes_lives_from_its_start_until_it_is_done() -> None:
    found = lives(
        compute("""
async {
  q = f32[16] parameter(0)
  ROOT l = f32[8] slice(q), slice={[0:8]}
}
ENTRY e {
  p = f32[16] parameter(0)
  m = f32[16] negate(p)
  s = ((f32[16]), f32[8], u32[]) async-start(m), calls=async
  a = f32[16] abs(p)
  d = f32[8] async-done(s)
  ROOT n = f32[8] negate(d)
}
""")
    )
    assert found["l"] == (4, 8)
    assert found["m"] == (1, 7)


def test_an_unscheduled_module_is_refused() -> None:
    module = read_module("HloModule m\nENTRY e {\n  ROOT p = f32[8] parameter(0)\n}\n")
    with pytest.raises(UnscheduledModuleError, match="Expected a module after XLA's scheduler"):
        compute_live_ranges(analyze_dataflow(module))


@pytest.mark.parametrize("key", corpus.memory())
def test_values_of_one_buffer_follow_on_each_other(key: str) -> None:
    ranges = compute_live_ranges(analyze_dataflow(corpus.read(key)))
    for buffer in ranges.dataflow.buffers:
        found = sorted(ranges.of_value[v.id] for v in buffer.values)
        for one, two in pairwise(found):
            assert one.end <= two.start + 1
