"""One kernel in parts: the same numbers, and less between two that are cut alike."""

import numpy as np
import pytest

from hlo_passes.errors import SplittingError
from hlo_passes.fusions.editing import fuse
from hlo_passes.fusions.splitting import split
from hlo_passes.fusions.traffic import fusion_traffic
from hlo_passes.memory.usage import memory_usage
from hlo_passes.reading.reader import read_module
from tests.hlo_passes.fusions.test_editing import numbers

TEXT = """HloModule step, is_scheduled=true
%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}
%scaled (a: f32[64,16], b: f32[16], c: f32[16,16]) -> f32[64,32] {
  %a = f32[64,16]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %c = f32[16,16]{1,0} parameter(2)
  %rows = f32[64,16]{1,0} broadcast(%b), dimensions={1}
  %product = f32[64,16]{1,0} dot(%a, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %times = f32[64,16]{1,0} multiply(%product, %rows)
  %flat = f32[64,4,4]{2,1,0} reshape(%times)
  %back = f32[64,16]{1,0} reshape(%flat)
  %turned = f32[16,64]{1,0} transpose(%back), dimensions={1,0}
  %again = f32[64,16]{1,0} transpose(%turned), dimensions={1,0}
  ROOT %wide = f32[64,32]{1,0} concatenate(%again, %a), dimensions={1}
}
%sums (d: f32[64,32]) -> f32[64] {
  %d = f32[64,32]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[64]{0} reduce(%d, %zero), dimensions={1}, to_apply=%sum
}
ENTRY %main (x: f32[64,16], y: f32[16], z: f32[16,16]) -> (f32[64], f32[64,16]) {
  %x = f32[64,16]{1,0} parameter(0)
  %y = f32[16]{0} parameter(1)
  %z = f32[16,16]{1,0} parameter(2)
  %first = f32[64,32]{1,0} fusion(%x, %y, %z), kind=kLoop, calls=%scaled
  %second = f32[64]{0} fusion(%first), kind=kInput, calls=%sums
  %across = f32[16,64]{1,0} transpose(%x), dimensions={1,0}
  %down = f32[16]{0} reduce(%across, %y0), dimensions={1}, to_apply=%sum
  %third = f32[64,16]{1,0} dot(%x, %z), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %all = (f32[64]{0}, f32[64,16]{1,0}) tuple(%second, %third)
}
""".replace("  %down = f32[16]{0} reduce(%across, %y0), dimensions={1}, to_apply=%sum\n", "")


def same(one, other) -> None:
    for a, b in zip(numbers(one), numbers(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    "edits", [[("first", 4)], [("second", 8)], [("third", 2)], [("across", 4)], [("first", 64)]]
)
def test_parts_compute_the_same(edits):
    module = edited = read_module(TEXT)
    for name, parts in edits:
        edited = split(edited, name, parts)
        names = [i.name for i in edited.entry.instructions]
        assert {f"{name}.{k}" for k in range(parts)} < {*names}
        assert name in names
    same(module, edited)


def test_what_is_cut_alike_holds_a_part_between_the_two():
    module = read_module(TEXT)
    edited = split(split(module, "first", 8), "second", 8)
    same(module, edited)
    order = [i.name for i in edited.entry.instructions]
    at = [order.index(name) for k in range(8) for name in (f"first.{k}", f"second.{k}")]
    assert at == sorted(at)
    assert "first" not in order
    # 64 * 32 * 4 bytes whole, and a part of 8 of it.
    whole, part = (memory_usage(m, "gpu").lower_bound_bytes for m in (module, edited))
    assert whole - part >= 8192 - 2 * 1024
    assert len(edited.entry.instructions) == len(module.entry.instructions) - 2 + 16 + 1


def test_a_reader_can_be_fused_with_what_joins_the_parts():
    module = read_module(TEXT)
    parts = split(module, "first", 4)
    joined = fuse(parts, "first", "second")
    same(module, joined)
    before, after, fused = (fusion_traffic(m).compiled.total for m in (module, parts, joined))
    # To join is to read and to write once more; in the reader it is free. z and y are read 4 times.
    assert after - before == 2 * 8192 + 3 * (1024 + 64)
    assert fused - before == 3 * (1024 + 64)


@pytest.mark.parametrize(
    ("name", "parts", "why"),
    [
        ("nothing", 2, "the entry has no %nothing"),
        ("first", 7, "7 parts do not divide its first dimension, 64"),
        ("first", 1, "1 parts do not divide its first dimension, 64"),
        ("all", 2, "it makes no single array with a first dimension"),
        ("x", 2, "%x is a parameter, of which there is no part by rows"),
    ],
)
def test_what_has_no_parts_says_why(name, parts, why):
    with pytest.raises(SplittingError, match=f"cannot split %{name} in {parts}: {why}"):
        split(read_module(TEXT), name, parts)


def test_a_scan_along_the_rows_has_no_parts():
    text = """HloModule step, is_scheduled=true
ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %turned = f32[8,4]{1,0} reverse(%x), dimensions={0}
  ROOT %flat = f32[32]{0} reshape(%turned)
}
"""
    module = read_module(text.replace("-> f32[8,4]", "-> f32[32]"))
    with pytest.raises(SplittingError, match="%turned is a reverse"):
        split(module, "turned", 2)
    with pytest.raises(SplittingError, match="%flat joins or parts the dimension"):
        split(module, "flat", 2)
