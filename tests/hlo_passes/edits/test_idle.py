"""The longest time between two accesses is found, with who they are."""

from __future__ import annotations

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.edits.idle import Idle, idle_temporaries
from hlo_passes.placing.ticks import entry_ticks
from hlo_passes.plan import LiveRange
from tests.hlo_passes.streamed import IDLE, SIZE, entry


def found(text: str) -> tuple[Idle, ...]:
    ranges = compute_live_ranges(analyze_dataflow(entry(text)))
    return idle_temporaries(ranges, entry_ticks(ranges, "cpu"))


def test_what_is_read_again_late_is_idle_in_between():
    (idle,) = found(IDLE)
    assert (idle.buffer.name, idle.maker.name, idle.size) == ("a", "a", SIZE)
    assert (idle.after.name, idle.before.name) == ("b", "e")
    assert idle.ticks == LiveRange(2, 4)


def test_what_is_read_at_once_is_not():
    assert not found("""
      %x = f32[64]{0} parameter(0)
      %a = f32[64]{0} negate(%x)
      %b = f32[64]{0} sine(%a)
      ROOT %c = f32[1]{0} slice(%b), slice={[0:1]}
    """)


def test_of_several_gaps_the_longest_and_of_several_temporaries_the_largest_area_counts():
    idles = found("""
      %x = f32[64]{0} parameter(0)
      %a = f32[64]{0} negate(%x)
      %h = f32[512]{0} concatenate(%a, %a, %a, %a, %a, %a, %a, %a), dimensions={0}
      %b = f32[64]{0} sine(%x)
      %c = f32[64]{0} multiply(%a, %b)
      %d = f32[64]{0} cosine(%c)
      %e = f32[64]{0} negate(%d)
      %f = f32[64]{0} slice(%h), slice={[0:64]}
      %g = f32[64]{0} multiply(%a, %e)
      %i = f32[64]{0} add(%f, %g)
      ROOT %r = f32[1]{0} slice(%i), slice={[0:1]}
    """)
    assert [(i.buffer.name, i.ticks, i.after.name, i.before.name) for i in idles[:2]] == [
        ("h", LiveRange(2, 6), "h", "f"),
        ("a", LiveRange(4, 7), "c", "g"),
    ]


def test_what_lies_in_the_bytes_of_a_result_takes_none_of_its_own():
    text = IDLE.replace(
        "ROOT %r = f32[1]{0} slice(%e), slice={[0:1]}", "ROOT %r = f32[64]{0} negate(%e)"
    )
    assert "a" not in {i.buffer.name for i in found(text)}
