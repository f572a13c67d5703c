"""What became of each argument that was given away, and why."""

from __future__ import annotations

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.donation import Donation, donations
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.reading.reader import read_module


def found(alias: str, lines: str) -> dict[str, Donation]:
    text = f"HloModule m, is_scheduled=true{alias}\nENTRY e {{\n{lines}\n}}\n"
    ranges = compute_live_ranges(analyze_dataflow(read_module(text)))
    return {d.parameter.name: d for d in donations(ranges)}


ALIAS = ", input_output_alias={ {0}: (0, {}, may-alias) }"
UPDATE = """
  p = f32[64] parameter(0)
  q = f32[64] parameter(1)
  new = f32[64] add(p, q)
  late = f32[64] multiply(q, q)
  ROOT t = (f32[64], f32[64]) tuple(new, late)
"""


def test_a_result_in_the_arguments_place_is_reused():
    p = found(ALIAS, UPDATE)["p"]
    assert (p.fate, p.why, p.result, p.size) == ("reused", "", (0,), 256)


def test_a_result_of_the_same_shape_could_take_an_arguments_place():
    q = found(ALIAS, UPDATE)["q"]
    assert (q.fate, q.result) == ("kept", (1,))
    assert q.why == "result 1 has its shape and takes no argument's place"
    # There is one free result only, and none of another shape.
    more = UPDATE.replace("new =", "r = f32[64] parameter(2)\n  s = f32[32] parameter(3)\n  new =")
    assert set(found(ALIAS, more)) == {"p", "q"}


def test_each_argument_could_take_the_place_of_another_result():
    kept = found("", UPDATE)
    assert [(d.fate, d.result) for d in kept.values()] == [("kept", (0,)), ("kept", (1,))]
    assert kept["q"].why == "result 1 has its shape and takes no argument's place"


def test_what_lies_on_the_host_is_left_out():
    lines = UPDATE.replace("q = f32[64]", "q = f32[64]{0:S(5)}")
    lines = lines.replace("late = f32[64]", "late = f32[64]{0:S(5)}")
    hosted = lines.replace("(f32[64], f32[64]) tuple", "(f32[64], f32[64]{0:S(5)}) tuple")
    assert set(found(ALIAS, hosted)) == {"p"}


COPIED = """
  p = f32[64] parameter(0)
  q = f32[64] parameter(1)
  new = f32[64] add(p, q)
  late = f32[64] multiply(p, new)
  there = f32[64] copy(new)
  ROOT t = (f32[64], f32[64]) tuple(there, late)
"""


def test_what_is_read_after_the_new_value_is_there_is_copied():
    p = found(ALIAS, COPIED)["p"]
    assert (p.fate, p.result) == ("copied", (0,))
    assert p.why == "%late reads it after %new has computed the new value"


def test_a_copy_without_a_late_reader_is_named():
    p = found(ALIAS, COPIED.replace("multiply(p, new)", "multiply(q, new)"))["p"]
    assert p.why == "%new is computed elsewhere and copied there by %there"


def test_a_copy_from_the_chip_is_how_a_result_gets_there():
    lines = COPIED.replace("new = f32[64] add", "new = f32[64]{0:S(1)} add")
    assert found(ALIAS, lines)["p"].fate == "reused"


def test_an_argument_that_is_handed_back_is_reused():
    lines = """
  p = f32[64] parameter(0)
  same = f32[64] copy(p)
  ROOT t = (f32[64]) tuple(same)
"""
    assert found(ALIAS, lines)["p"].fate == "reused"


DONORS = ", buffer_donor={ (1, {}), (2, {}), (3, {}) }"
LOST = """
  p = f32[64] parameter(0)
  q = f32[64] parameter(1)
  r = f32[32] parameter(2)
  s = f32[16] parameter(3)
  new = f32[64] add(p, q)
  other = s32[32] iota(), iota_dimension=0
  u = f32[32] negate(r)
  v = f32[16] negate(s)
  ROOT t = (f32[64], s32[32]) tuple(new, other)
"""


def test_what_has_no_partner_says_why():
    lost = found(ALIAS + DONORS, LOST)
    assert {name: d.fate for name, d in lost.items()} == {
        "p": "reused",
        "q": "lost",
        "r": "lost",
        "s": "lost",
    }
    assert lost["q"].why == "all results of as many bytes take the place of other arguments"
    assert lost["r"].why == "the free result of as many bytes is s32[32], it is f32[32]"
    assert lost["s"].why == "no result has its 64 bytes"


def test_the_largest_comes_first():
    assert [d.size for d in found(ALIAS + DONORS, LOST).values()] == [256, 256, 128, 64]
