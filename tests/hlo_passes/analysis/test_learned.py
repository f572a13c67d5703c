"""What executables say of the modules that the hook is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.learned import held_on_chip, known_by, with_learned
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.errors import VerificationError
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.memory.usage import memory_usage
from hlo_passes.pipeline import plan_module
from hlo_passes.placing import problem
from hlo_passes.placing.ticks import entry_ticks
from hlo_passes.plan import ON_CHIP, Edits, Recompute
from hlo_passes.rewrite import edits
from hlo_passes.verify import verify_plan
from tests.hlo_passes.toys import module_of

MIB = 1 << 20
SIZE = 32 * MIB

TEXT = """HloModule m, is_scheduled=true
fused {{
  q = f32[8388608] parameter(0)
  n = f32[8388608] negate(q)
  ROOT t = (f32[8388608], f32[8388608]) tuple(n, q)
}}
ENTRY e {{
  x = f32[8388608] parameter(0)
  a = f32[8388608]{{0:T(1024){a}}} negate(x)
  f = (f32[8388608]{{0:T(1024){f}}}, f32[8388608]{{0:T(1024)}}) fusion(a), kind=kLoop, calls=fused
  g = f32[8388608]{{0:T(1024){f}}} get-tuple-element(f), index=0
  h = f32[8388608]{{0:T(1024)}} get-tuple-element(f), index=1
  b = f32[8388608]{{0:T(1024){b}}} add(g, h)
  v = f32[8388608]{{0:T(1024){b}}} bitcast(b)
  {copy}
  ROOT r = f32[8388608]{{0:T(1024)}} add(v, w)
}}
"""

SHOWN = module_of(TEXT.format(a="", f="", b="", copy="w = f32[8388608] copy(v)"))

# Of what is held on the chip, `b` is also copied out.
FINAL = module_of(
    TEXT.format(
        a="S(1)",
        f="S(1)",
        b="S(1)",
        copy="""s = (f32[8388608]{0:T(1024)}, f32[8388608]{0:T(1024)S(1)}, u32[]) copy-start(v)
  w = f32[8388608]{0:T(1024)} copy-done(s)""",
    )
)

LEARNED = with_learned(SHOWN, {}, held_on_chip(FINAL))


def v5e(vmem: int = 64 * MIB) -> Machine:
    machine = load_machine("v5e")
    tiers = (replace(t, capacity_bytes=vmem) if t.name == "vmem" else t for t in machine.tiers)
    return replace(machine, tiers=tuple(tiers))


def test_what_is_copied_out_is_not_held_on_the_chip_alone():
    found = held_on_chip(FINAL)
    held = {i.name: found[known_by(i)] for i in FINAL.entry.instructions}
    assert held["a"] == held["g"] == {()}
    assert held["f"] == {(0,)}
    assert not any(held[name] for name in ("x", "h", "b", "w", "r"))


def test_it_holds_for_what_has_one_name_opcode_and_shape():
    assert LEARNED.learned.on_chip is not None
    assert LEARNED.learned.on_chip >= {("a", ()), ("f", (0,)), ("g", ())}
    assert LEARNED.learned.on_chip.isdisjoint({("f", (1,)), ("b", ()), ("w", ())})
    assert with_learned(LEARNED, {}, held_on_chip(FINAL)) is LEARNED
    other = module_of(
        """HloModule m, is_scheduled=true
ENTRY e {
  x = f32[8388608] parameter(0)
  ROOT a = f32[8388608] abs(x)
}"""
    )
    assert with_learned(other, {}, held_on_chip(FINAL)).learned.on_chip == set()
    assert with_learned(other, {}, {}).learned.on_chip is None


def test_it_takes_none_of_the_device_s_bytes():
    ranges = compute_live_ranges(analyze_dataflow(LEARNED))
    kinds = {r.name: r.kind for r in entry_ticks(ranges, "tpu").residents}
    assert {name: kinds[name] for name in ("a", "f{0}", "f{1}", "b")} == {
        "a": "on_chip",
        "f{0}": "on_chip",
        "f{1}": "temp",
        "b": "temp",
    }
    shown, learned = (memory_usage(m, "tpu").heap_bytes for m in (SHOWN, LEARNED))
    assert (shown, learned) == (3 * SIZE, 2 * SIZE)


@pytest.mark.parametrize("table_bytes", [0, 100_000, 3 * MIB])
def test_what_executables_say_of_tables_is_counted(table_bytes: int):
    posed = problem.pose(with_learned(SHOWN, {}, {}, table_bytes), v5e(), ())
    assert table_bytes <= posed.arena.tables < table_bytes + 512 * posed.ticks.end
    assert problem.pose(SHOWN, v5e(), ()).arena.tables == (24 << 10) * posed.ticks.end


def test_of_what_runs_again_nothing_is_known():
    again = edits.apply(LEARNED, Edits(recomputes=(Recompute("a.again", "a", "r", ("r",)),)))
    buffers = analyze_dataflow(again).buffers
    spaces = {str(b.values[0]): b.memory_space for b in buffers}
    assert (spaces["a"], spaces["a.again"]) == (1, 0)


@pytest.mark.parametrize(("vmem", "held"), [(64 * MIB, {"a", "f{0}"}), (48 * MIB, {"f{0}"})])
def test_no_more_is_counted_there_than_it_holds(vmem: int, held: set[str]):
    posed = problem.pose(LEARNED, v5e(vmem), ())
    assert {r.name for r, _ in posed.on_chip} == held
    assert {t.name for t in posed.arena.temporaries} == {"a", "f{0}", "f{1}", "b", "w"} - held


def test_a_plan_says_what_it_counts_on():
    machine = v5e()
    plain, plan = (plan_module(module, machine, 1 << 30) for module in (SHOWN, LEARNED))
    assert plain.prediction.temp_bytes - plan.prediction.temp_bytes == SIZE
    assert {s.buffer for s in plan.slots if s.allocation == ON_CHIP} == {"a", "f{0}"}
    verify_plan(SHOWN, plan, machine)
    elsewhere = tuple(replace(a, tier="hbm") if a.name == ON_CHIP else a for a in plan.allocations)
    with pytest.raises(VerificationError, match="what is held on the chip is in tier hbm"):
        verify_plan(SHOWN, replace(plan, allocations=elsewhere), machine)
    with pytest.raises(VerificationError, match="bytes of vmem, the capacity is"):
        verify_plan(SHOWN, plan, v5e(SIZE))
    without = replace(plan, slots=tuple(s for s in plan.slots if s.allocation != ON_CHIP))
    with pytest.raises(VerificationError, match="has no slot"):
        verify_plan(SHOWN, without, machine)
