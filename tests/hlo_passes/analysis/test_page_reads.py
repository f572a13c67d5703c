"""What is declared of pages, and who reads them."""

from __future__ import annotations

import dataclasses

import pytest

from hlo_passes.analysis.page_reads import PAGE_READS_ATTRIBUTE, PageReads, page_reads
from hlo_passes.reading.reader import read_module

READS = PageReads(pool=(8, 2, 16, 64), tokens=16, sequences=3, pages=4, queries=1, window=None)


@pytest.mark.parametrize("window", [None, 0, 100])
def test_what_is_declared_is_read_back(window: int | None) -> None:
    reads = dataclasses.replace(READS, window=window)
    assert PageReads.of_attribute(reads.to_attribute()) == reads


@pytest.mark.parametrize("text", ["", "pool=8", "pool=a tokens=1", READS.to_attribute()[:-4]])
def test_what_is_no_declaration_is_left_alone(text: str) -> None:
    assert PageReads.of_attribute(text) is None


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
    found = [(reader.name, pool.name) for reader, pool, reads in page_reads(module)]
    assert found == [("call", "k"), ("call", "moved"), ("layer", "stack")]
