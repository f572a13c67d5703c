"""Packings that are drawn, where what XLA:TPU holds on the chip is not known."""

from dataclasses import replace

import pytest

from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.memory.spread import drawn_heaps
from hlo_passes.memory.usage import memory_usage
from tests.hlo_passes.toys import module_of

MIB = 1 << 20

# `a` is large, what begins beside it small.
MODULE = module_of("""HloModule m, is_scheduled=true
ENTRY e {
  x = f32[16777216]{0:T(1024)} parameter(0)
  s = f32[2097152]{0:T(1024)} parameter(1)
  t = f32[2097152]{0:T(1024)} negate(s)
  a = f32[16777216]{0:T(1024)} negate(x)
  u = f32[2097152]{0:T(1024)} add(t, t)
  b = f32[16777216]{0:T(1024)} abs(a)
  v = f32[2097152]{0:T(1024)} add(u, u)
  ROOT r = (f32[16777216]{0:T(1024)}, f32[2097152]{0:T(1024)}) tuple(b, v)
}""")


def v5e(vmem: int) -> Machine:
    machine = load_machine("v5e")
    tiers = (replace(t, capacity_bytes=vmem) if t.name == "vmem" else t for t in machine.tiers)
    return replace(machine, tiers=tuple(tiers))


def test_what_is_small_is_there_or_not():
    heap = memory_usage(MODULE, "tpu").heap_bytes
    drawn = drawn_heaps(MODULE, v5e(64 * MIB))
    assert {heap - n * 8 * MIB for n in (0, 1, 2)} >= set(drawn) > {heap}
    assert min(drawn) >= 64 * MIB


def test_it_is_the_same_each_time():
    assert drawn_heaps(MODULE, v5e(64 * MIB)) == drawn_heaps(MODULE, v5e(64 * MIB))


@pytest.mark.parametrize("vmem", [0, 63 * MIB])
def test_what_is_not_small_is_always_there(vmem: int):
    assert set(drawn_heaps(MODULE, v5e(vmem))) == {memory_usage(MODULE, "tpu").heap_bytes}


def test_no_heap():
    empty = module_of("""HloModule m, is_scheduled=true
ENTRY e {
  ROOT x = f32[8] parameter(0)
}""")
    assert set(drawn_heaps(empty, v5e(MIB))) == {0}
