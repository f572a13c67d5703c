"""Which bytes of the heap are free between two values that lie in the same place."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.analysis.sharing import Target
from hlo_passes.ir import Module
from hlo_passes.memory.allocations import HeapRange, find_allocations
from hlo_passes.reading.reader import read_module

# The slot is read first thing, and written again at the end of the body.
RING = """
HloModule ring, is_scheduled=true

%condition {
  %c = (f32[32768]{0}, f32[16384]{0}, s32[]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=2
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%n, %four), direction=LT
}

%body {
  %state = (f32[32768]{0}, f32[16384]{0}, s32[]) parameter(0)
  %slot = f32[32768]{0} get-tuple-element(%state), index=0
  %x = f32[16384]{0} get-tuple-element(%state), index=1
  %i = s32[] get-tuple-element(%state), index=2
  %part = f32[16384]{0} slice(%slot), slice={[0:16384]}
  %both = f32[16384]{0} add(%x, %part)
  %work = f32[16384]{0} reverse(%both), dimensions={0}
  %next = f32[16384]{0} reverse(%work), dimensions={0}
  %filled = f32[32768]{0} iota(), iota_dimension=0
  %one = s32[] constant(1)
  %more = s32[] add(%i, %one)
  ROOT %out = (f32[32768]{0}, f32[16384]{0}, s32[]) tuple(%filled, %next, %more)
}

ENTRY %main {
  %p = f32[16384]{0} parameter(0)
  %first = f32[32768]{0} iota(), iota_dimension=0
  %start = f32[16384]{0} negate(%p)
  %zero = s32[] constant(0)
  %count = s32[] copy(%zero)
  %init = (f32[32768]{0}, f32[16384]{0}, s32[]) tuple(%first, %start, %count)
  %loop = (f32[32768]{0}, f32[16384]{0}, s32[]) while(%init), condition=%condition, body=%body
  %y = f32[16384]{0} get-tuple-element(%loop), index=1
  ROOT %r = f32[16384]{0} reverse(%y), dimensions={0}
}
"""


def heap_of(module: Module, target: Target, name: str) -> list[HeapRange]:
    """What lies in the bytes of a value, in the order of time."""
    ranges = compute_live_ranges(analyze_dataflow(module))
    heap = find_allocations(ranges, target).heap
    (group,) = {h.group for h in heap if str(h.value) == name}
    return sorted((h for h in heap if h.group == group), key=lambda h: h.events)


def is_free_in_between(heap: list[HeapRange]) -> bool:
    return any(a.events.end < b.events.start for a, b in pairwise(heap))


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_slot_is_free_until_it_is_written_again(target: Target):
    assert is_free_in_between(heap_of(read_module(RING), target, "first"))


def test_on_tpu_a_slot_is_never_free():
    heap = heap_of(read_module(RING), "tpu", "first")
    assert len(heap) > 2
    assert not is_free_in_between(heap)
    assert len({h.size for h in heap}) == 1
