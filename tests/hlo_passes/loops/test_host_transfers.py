"""Slices between host and device are found in every computation, copies of arguments are not."""

import pytest

from hlo_passes.ir import Module
from hlo_passes.loops.host_transfers import host_transfers, nests
from hlo_passes.simulator.loop_floor import floor_costs, link_floor_s
from tests.hlo_passes.rings import SLOT_BYTES, TRIPS, Ring, ring_machine
from tests.hlo_passes.toys import module_of

MACHINE = ring_machine(10.0)

# As XLA:GPU writes it: an asynchronous computation with a fusion of one slice.
_STACK, _ROW = "f32[4,8,8]{2,1,0:S(5)}", "f32[1,8,8]{2,1,0}"
GPU = (
    """HloModule gpu, is_scheduled=true

%slice (stack: f32[4,8,8], i: s32[], z: s32[]) -> f32[1,8,8] {
  %stack = f32[4,8,8]{2,1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] parameter(2)
  ROOT %row = f32[1,8,8]{2,1,0} dynamic-slice(%stack, %i, %z, %z), dynamic_slice_sizes={1,8,8}
}

%update (stack.1: f32[4,8,8], new: f32[1,8,8], i.1: s32[], z.1: s32[]) -> f32[4,8,8] {
  %stack.1 = f32[4,8,8]{2,1,0:S(5)} parameter(0)
  %new = f32[1,8,8]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %z.1 = s32[] parameter(3)
  ROOT %changed = f32[4,8,8]{2,1,0:S(5)} dynamic-update-slice(%stack.1, %new, %i.1, %z.1, %z.1)
}

ENTRY %main (w: f32[8,8], stack.2: f32[4,8,8], k: s32[]) -> (f32[8,8], f32[4,8,8]) {
  %w = f32[8,8]{1,0:S(5)} parameter(0)
  %stack.2 = f32[4,8,8]{2,1,0:S(5)} parameter(1)
  %k = s32[] parameter(2)
  %zero = s32[] constant(0)
  %whole = (f32[8,8]{1,0}, f32[8,8]{1,0:S(5)}, u32[]) copy-start(%w)
  %get = ((STACK, s32[], s32[]), ROW, u32[]) fusion-start(%stack.2, %k, %zero), CALLS=%slice
  %here = f32[8,8]{1,0} copy-done(%whole)
  %got = f32[1,8,8]{2,1,0} fusion-done(%get)
  %put = ((STACK, ROW, s32[], s32[]), STACK, u32[])
    fusion-start(%stack.2, %got, %k, %zero), CALLS=%update
  %kept = f32[4,8,8]{2,1,0:S(5)} fusion-done(%put)
  ROOT %out = (f32[8,8]{1,0}, f32[4,8,8]{2,1,0:S(5)}) tuple(%here, %kept)
}
""".replace("STACK", _STACK)
    .replace("ROW", _ROW)
    .replace("CALLS", "kind=kLoop, calls")
)


def found_in(module: Module) -> dict[str, list[tuple[str, str, int, str]]]:
    return {
        module.computations[c].name: [
            (t.start.name, t.done.name, t.size, t.kind) for t in transfers
        ]
        for c, transfers in host_transfers(module, MACHINE).items()
    }


def test_slices_as_the_tpu_compiler_writes_them():
    found = found_in(Ring(stores=True).module())
    assert found["body"] == [
        ("p0.start", "p0.done", SLOT_BYTES, "evict"),
        ("p1.start", "p1.done", SLOT_BYTES, "evict"),
        ("f0.start", "f0.done", SLOT_BYTES, "prefetch"),
        ("f1.start", "f1.done", SLOT_BYTES, "prefetch"),
    ]
    assert found["main"] == [("first0.start", "first0.done", SLOT_BYTES, "prefetch")]


def test_slices_as_the_gpu_compiler_writes_them():
    assert found_in(module_of(GPU)) == {
        "main": [
            ("get", "got", SLOT_BYTES, "prefetch"),
            ("put", "kept", SLOT_BYTES, "evict"),
        ]
    }


def test_where_computations_run():
    module = Ring().module()
    found = {module.computations[c].name: nest for c, nest in nests(module).items()}
    assert found["main"][1:] == (None, 0, 1)
    assert found["body"][1:] == found["condition"][1:] == (TRIPS, 1, TRIPS)
    assert found["body"].caller is module.entry.root


@pytest.mark.parametrize(("bytes_per_s", "seconds"), [(10.0, 2 * 25.6), (1000.0, 2 * 7.68)])
def test_a_loop_takes_no_less_than_compute_and_link(bytes_per_s: float, seconds: float):
    module, machine = Ring().module(), ring_machine(bytes_per_s)
    costs = {i.id: 7.68 for i in module.instructions.values() if i.opcode == "dot"}
    loop = module.entry.root
    assert floor_costs(module, machine, costs)[loop.id] == pytest.approx(TRIPS * seconds)


def test_every_slice_occupies_the_link():
    slices = Ring(stores=True).layers
    floor = link_floor_s(Ring(stores=True).module(), MACHINE)
    assert floor["host", "hbm"] == pytest.approx((TRIPS * 2 + 1) * SLOT_BYTES / 10.0)
    assert floor["hbm", "host"] == pytest.approx(TRIPS * 2 * SLOT_BYTES / 10.0)
    assert slices == TRIPS * 2 + 1


def test_an_argument_that_is_copied_whole_counts_with_the_weights():
    assert link_floor_s(module_of(GPU), MACHINE)["host", "hbm"] == pytest.approx(25.6)
