"""What is declared of pages, and who reads them."""

from __future__ import annotations

import dataclasses

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.pages import (
    PAGE_READS_ATTRIBUTE,
    PAGE_WRITES_ATTRIBUTE,
    PageAccess,
    origin,
    page_reads,
    page_writes,
)
from hlo_passes.reading.reader import read_module

READS = PageAccess(pool=(8, 2, 16, 64), tokens=16, sequences=3, pages=4, queries=1, window=None)


@pytest.mark.parametrize("window", [None, 0, 100])
def test_what_is_declared_is_read_back(window: int | None) -> None:
    reads = dataclasses.replace(READS, window=window)
    assert PageAccess.of_attribute(reads.to_attribute()) == reads


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pool=8",
        "pool=a tokens=1",
        READS.to_attribute()[:-4],
        READS.to_attribute().replace("=16 ", "=0 "),
        READS.to_attribute().replace("=8,2,16,64 ", "=8 "),
        READS.to_attribute().replace("sequences=", "sequences=-"),
    ],
)
def test_what_is_no_declaration_is_left_alone(text: str) -> None:
    assert PageAccess.of_attribute(text) is None


def test_readers_of_pools_and_of_stacks_of_them() -> None:
    said = f'frontend_attributes={{{PAGE_READS_ATTRIBUTE}="{READS.to_attribute()}"}}'
    module = read_module(f"""
HloModule m, is_scheduled=true

fused {{
  p = f32[5,8,2,16,64] parameter(0)
  s = f32[1,8,2,16,64] slice(p), slice={{[0:1],[0:8],[0:2],[0:16],[0:64]}}
  ROOT n = f32[1,8,2,16,64] negate(s), {said}
}}

ENTRY e {{
  k = f32[8,2,16,64] parameter(0)
  stack = f32[5,8,2,16,64] parameter(1)
  q = f32[3,64] parameter(2)
  moved = f32[8,2,16,64] copy(k), {said}
  other = f32[3,64] custom-call(q, k), custom_call_target="other"
  call = f32[3,64] custom-call(q, k, moved), custom_call_target="kernel", {said}
  layer = f32[1,8,2,16,64] fusion(stack), kind=kLoop, calls=fused
  ROOT t = (f32[3,64], f32[3,64], f32[1,8,2,16,64]) tuple(other, call, layer)
}}
""")
    found = [(use.instruction.name, use.pool.name) for use in page_reads(module)]
    assert found == [("call", "k"), ("call", "moved"), ("layer", "stack")]


def test_a_fusion_may_read_pools_of_several_declarations():
    """XLA fuses what two layers do with the same numbers: each pool has its own window."""
    first, second = (dataclasses.replace(READS, window=window) for window in (16, None))

    def said(reads: PageAccess) -> str:
        return f'frontend_attributes={{{PAGE_READS_ATTRIBUTE}="{reads.to_attribute()}"}}'

    module = read_module(f"""
HloModule m, is_scheduled=true

fused {{
  a = f32[8,2,16,64] parameter(0)
  b = f32[8,2,16,64] parameter(1)
  i = s32[3] parameter(2)
  j = s32[3] negate(i), {said(second)}
  c = f32[8,2,16,64] bitcast(a)
  n = f32[8,2,16,64] negate(c), {said(first)}
  m = f32[8,2,16,64] negate(b), {said(second)}
  ROOT t = (f32[8,2,16,64], f32[8,2,16,64], s32[3]) tuple(n, m, j)
}}

ENTRY e {{
  k = f32[8,2,16,64] parameter(0)
  v = f32[8,2,16,64] parameter(1)
  i = s32[3] parameter(2)
  ROOT both = (f32[8,2,16,64], f32[8,2,16,64], s32[3]) fusion(k, v, i), kind=kLoop, calls=fused
}}
""")
    assert [(use.pool.name, use.access) for use in page_reads(module)] == [
        ("k", first),
        ("v", second),
    ]


def test_writers_are_those_that_work_on_a_pool_in_place():
    said = f'frontend_attributes={{{PAGE_WRITES_ATTRIBUTE}="{READS.to_attribute()}"}}'
    module = read_module(f"""
HloModule m, is_scheduled=true

ENTRY e {{
  k = f32[8,2,16,64] parameter(0)
  stack = f32[5,8,2,16,64] parameter(1)
  new = f32[1,2,16,64] parameter(2)
  zero = s32[] constant(0)
  layer = f32[1,8,2,16,64] slice(stack), slice={{[2:3],[0:8],[0:2],[0:16],[0:64]}}
  pool = f32[8,2,16,64] bitcast(layer)
  sum = f32[8,2,16,64] add(k, pool), {said}
  one = f32[8,2,16,64] dynamic-update-slice(sum, new, zero, zero, zero, zero), {said}
  own = f32[8,2,16,64] dynamic-update-slice(pool, new, zero, zero, zero, zero), {said}
  ROOT t = (f32[8,2,16,64], f32[8,2,16,64]) tuple(one, own)
}}
""")
    found = list(page_writes(module))
    assert [(use.instruction.name, use.pool.name) for use in found] == [
        ("one", "sum"),
        ("own", "pool"),
    ]
    where = origin(analyze_dataflow(module), found[1])
    assert where.argument is not None
    assert (where.argument.name, where.is_copy, where.of_stack) == ("stack", True, True)


@pytest.mark.parametrize("window", [None, 0, 5, 16, 40])
@pytest.mark.parametrize("queries", [1, 3, 17])
def test_pages_are_those_of_the_tokens(window: int | None, queries: int) -> None:
    access = dataclasses.replace(READS, window=window, queries=queries)
    for length in range(64):
        for last in (*range(queries + 1), None):
            begin = length - (queries if last is None else last) - (window or 0)
            tokens = range(0 if window is None else max(begin, 0), length)
            pages = sorted({token // 16 for token in tokens})
            assert [*access.touched(length, last)] == pages
