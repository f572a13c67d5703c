"""HBM traffic without fusions, as compiled and at the least, counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import memplan
from hlo_passes.fusions.traffic import FusionTraffic, HbmBytes, fusion_traffic
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from tests import corpus

BIG, WEIGHT, SMALL = 4 * 8 * 16, 4 * 16 * 4, 4 * 8 * 4


def module(body: str, called: str = "", head: str = "") -> Module:
    text = f"HloModule m, is_scheduled=true{head}\n{called}\nENTRY e {{\n{body}\n}}\n"
    return read_module(text)


def found(body: str, called: str = "", head: str = "") -> FusionTraffic:
    return fusion_traffic(module(body, called, head))


FUSED = """
f {
  p = f32[8,16]{1,0} parameter(0)
  m = f32[8,16]{1,0} multiply(p, p)
  ROOT t = f32[8,16]{1,0} tanh(m)
}
"""
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_each_total_is_as_counted_by_hand():
    totals = found(
        f"""
  p = f32[8,16]{{1,0}} parameter(0)
  w = f32[16,4]{{1,0}} parameter(1)
  x = f32[8,16]{{1,0}} fusion(p), kind=kLoop, calls=f
  ROOT d = f32[8,4]{{1,0}} dot(x, w), {DOT}
""",
        FUSED,
    )
    assert totals.unfused == HbmBytes(3 * BIG + WEIGHT, 2 * BIG + SMALL)
    assert totals.compiled == HbmBytes(2 * BIG + WEIGHT, BIG + SMALL)
    assert totals.bound == HbmBytes(BIG + WEIGHT, SMALL)
    assert totals.bound.total == BIG + WEIGHT + SMALL


def test_a_view_within_a_fusion_is_no_kernel():
    """What is converted, broadcast and reshaped is read as it is, once by each who reads it."""
    totals = found(
        "  p = bf16[8,16]{1,0} parameter(0)\n  s = f32[] parameter(1)\n"
        "  ROOT x = f32[8,16]{1,0} fusion(p, s), kind=kLoop, calls=f",
        """
f {
  p = bf16[8,16]{1,0} parameter(0)
  s = f32[] parameter(1)
  c = f32[8,16]{1,0} convert(p)
  r = f32[128]{0} reshape(c)
  b = f32[128]{0} broadcast(s), dimensions={}
  a = f32[128]{0} add(r, b)
  k = f32[8,16]{1,0} reshape(a)
  ROOT m = f32[8,16]{1,0} multiply(k, c)
}
""",
    )
    half = BIG // 2
    assert totals.unfused == HbmBytes(half + 4 + BIG + half, 2 * BIG)
    assert totals.compiled == totals.bound == HbmBytes(half + 4, BIG)


def test_a_result_that_is_a_view_is_written():
    totals = found(
        "  p = bf16[8,16]{1,0} parameter(0)\n"
        "  ROOT x = f32[8,16]{1,0} fusion(p), kind=kLoop, calls=f",
        "f {\n  p = bf16[8,16]{1,0} parameter(0)\n  ROOT c = f32[8,16]{1,0} convert(p)\n}",
    )
    assert totals.unfused == totals.compiled == totals.bound == HbmBytes(BIG // 2, BIG)


def test_what_is_in_on_chip_memory_is_not_counted():
    totals = found(
        f"""
  p = f32[8,16]{{1,0}} parameter(0)
  w = f32[16,4]{{1,0}} parameter(1)
  x = f32[8,16]{{1,0:S(1)}} fusion(p), kind=kLoop, calls=f
  ROOT d = f32[8,4]{{1,0}} dot(x, w), {DOT}
""",
        FUSED,
    )
    # The array between the fused two is nowhere yet.
    assert totals.unfused == HbmBytes(2 * BIG + WEIGHT, BIG + SMALL)
    assert totals.compiled == totals.bound == HbmBytes(BIG + WEIGHT, SMALL)


def test_what_passes_through_is_neither_read_nor_written():
    totals = found(
        "  p = f32[8,16]{1,0} parameter(0)\n  q = f32[8,16]{1,0} parameter(1)\n"
        "  s = f32[8,16]{1,0} sine(q)\n"
        "  ROOT t = (f32[8,16]{1,0}, f32[8,16]{1,0}) tuple(p, s)",
    )
    assert totals.compiled == totals.bound == HbmBytes(BIG, BIG)


def test_an_update_in_place_counts_as_much_as_it_writes():
    row = 4 * 16
    totals = found(
        """
  cache = f32[64,16]{1,0} parameter(0)
  new = f32[1,16]{1,0} parameter(1)
  at = s32[] parameter(2)
  ROOT u = f32[64,16]{1,0} fusion(cache, new, at), kind=kLoop, calls=f
""",
        """
f {
  cache = f32[64,16]{1,0} parameter(0)
  new = f32[1,16]{1,0} parameter(1)
  at = s32[] parameter(2)
  zero = s32[] constant(0)
  n = f32[1,16]{1,0} negate(new)
  ROOT u = f32[64,16]{1,0} dynamic-update-slice(cache, n, at, zero)
}
""",
        ", input_output_alias={ {}: (0, {}, must-alias) }",
    )
    assert totals.compiled == totals.bound == HbmBytes(row + 4, row)
    assert totals.unfused == HbmBytes(2 * row + 4, 2 * row)


LOOP = """
cond {
  s = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}
body {
  s = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[8,16]{1,0} get-tuple-element(s), index=1
  w = f32[16,16]{1,0} get-tuple-element(s), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  y = f32[8,16]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) tuple(j, y, w)
}
"""


def test_a_loop_runs_as_often_as_it_does_and_its_arguments_are_read_once():
    totals = found(
        """
  p = f32[8,16]{1,0} parameter(0)
  w = f32[16,16]{1,0} parameter(1)
  zero = s32[] constant(0)
  x = f32[8,16]{1,0} negate(p)
  t = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) tuple(zero, x, w)
  l = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) while(t), condition=cond, body=body
  ROOT r = f32[8,16]{1,0} get-tuple-element(l), index=1
""",
        LOOP,
    )
    # The condition runs as often as the body here; each reads two numbers.
    numbers = 5 * 4 * 4
    weight = 4 * 16 * 16
    assert totals.compiled == HbmBytes(
        BIG + 5 * (BIG + weight) + numbers, BIG + 5 * BIG + 5 * (4 + 1)
    )
    assert totals.unfused == totals.compiled
    assert totals.bound == HbmBytes(BIG + weight, BIG)


def test_of_an_argument_that_is_sliced_the_slice_is_read():
    totals = found(
        "  p = f32[64,16]{1,0} parameter(0)\n"
        "  ROOT s = f32[2,16]{1,0} slice(p), slice={[0:2], [0:16]}"
    )
    assert totals.bound == totals.compiled == HbmBytes(2 * 16 * 4, 2 * 16 * 4)


@pytest.mark.parametrize("key", corpus.memory())
def test_fusions_save_and_the_bound_holds(key: str):
    ordered(fusion_traffic(corpus.read(key)))


def ordered(totals: FusionTraffic) -> None:
    assert totals.unfused.read >= totals.compiled.read >= totals.bound.read
    assert totals.unfused.written >= totals.compiled.written >= totals.bound.written > 0


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("v5e", marks=pytest.mark.tpu),
        pytest.param("h200", marks=pytest.mark.gpu),
    ],
)
def test_what_the_compilers_fuse(target: str):
    """GeLU between two products, too large for a chip's memory: fused, it goes through HBM
    once at most."""

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ up) @ down

    sizes = ((32768, 1024), (1024, 4096), (4096, 1024))
    arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    compiled = memplan.jit(block, machine=target).lower(*arguments).compile()
    totals = fusion_traffic(compiled.module)
    ordered(totals)
    arguments_bytes = sum(2 * a * b for a, b in sizes)
    assert totals.bound == HbmBytes(arguments_bytes, 2 * 32768 * 1024)
    hidden = 2 * 32768 * 4096
    # GeLU's cubic polynomial and tanh alone take several arrays of that size.
    assert totals.unfused.read - totals.bound.read > 6 * hidden
    assert totals.compiled.read - totals.bound.read <= 2 * hidden
