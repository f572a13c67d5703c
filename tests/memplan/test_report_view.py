"""What a view says of a program small enough to work out by hand."""

import dataclasses
import itertools

import pytest

import memplan.report.build as build
import memplan.report.view as view
from hlo_passes.errors import UnscheduledModuleError
from hlo_passes.reading.reader import read_module
from tests.memplan.programs import streamed_text

WEIGHT, ACTIVATION = 256 * 1024, 64 * 1024


def bands_at(tier: view.TierUsage, time: int) -> dict[str, int]:
    i = max(k for k, start in enumerate(tier.times) if start <= time)
    return {band.kind: band.bytes[i] for band in tier.bands}


def test_xla_alone_holds_all_weights_at_once(report):
    hbm, host = report.runs[0].tiers
    assert (hbm.tier, host.tier) == ("hbm", "host")
    assert bands_at(hbm, hbm.peak_time)["transferred"] == 3 * WEIGHT
    assert hbm.peak.instruction in ("start.2", "done.0", "dot.0")
    assert {held.label for held in hbm.held if held.kind == "transferred"} == {
        "params['w'][0]",
        "params['w'][1]",
        "params['w'][2]",
    }
    assert host.totals == (3 * WEIGHT,)


def test_one_ahead_holds_two(report):
    hbm = report.runs[1].tiers[0]
    assert bands_at(hbm, hbm.peak_time)["transferred"] == 2 * WEIGHT
    assert report.runs[1].device.total <= report.budget_bytes < report.runs[0].device.total


def test_arguments_and_outputs_are_there_throughout(report):
    hbm = report.runs[0].tiers[0]
    for kind in ("arguments", "outputs"):
        (band,) = (band for band in hbm.bands if band.kind == kind)
        assert set(band.bytes) == {ACTIVATION}


def test_the_figures_agree_with_each_other(report):
    for run in report.runs:
        hbm = run.tiers[0]
        assert run.device.source == "memplan"
        # The packing cannot be smaller than the most that is live.
        assert run.device.total >= hbm.peak_bytes
        assert run.clock.step_time_s >= run.clock.lower_bound_s > 0
        spans = run.clock.spans
        assert sum(s.end_s - s.start_s for s in spans if s.stall) == pytest.approx(
            run.clock.stall_s
        )
        assert spans[-1].end_s == pytest.approx(run.clock.step_time_s)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_a_stall_stands_at_the_done_that_waits(report):
    run = report.runs[0]
    (stall,) = (span for span in run.clock.spans if span.stall)
    assert run.steps[stall.tick].instruction == "done.0"


def test_transfers_know_what_hides_them(report):
    transfers = report.runs[0].transfers
    assert [t.label for t in transfers] == ["params['w'][0]", "params['w'][1]", "params['w'][2]"]
    assert [t.computes_between for t in transfers] == [0, 2, 4]
    assert [round(t.hidden_bytes) for t in transfers] == [0, WEIGHT, WEIGHT]
    assert report.runs[0].overlapped == pytest.approx(2 / 3)


def test_without_a_machine_there_are_transfers_but_no_seconds():
    run = build.view_run("schedule", read_module(streamed_text()))
    assert run.clock is None
    assert [(t.route, t.busy_s) for t in run.transfers] == [("host→hbm", None)] * 3
    assert run.overlapped == pytest.approx(2 / 3)


def test_a_fusion_is_named_after_its_root(report):
    (step,) = (s for s in report.runs[0].steps if s.instruction == "act.1")
    assert str(step) == "%act.1 (jit(step)/tanh, model.py:7)"


def test_a_fusion_with_several_results_is_named_after_the_last_thing_with_a_name():
    """XLA:GPU names neither such a fusion nor the tuple in it."""
    text = """
    HloModule jit_step, is_scheduled=true
    %fused (p: f32[8]) -> (f32[8], f32[8]) {
      %p = f32[8]{0} parameter(0)
      %sine = f32[8]{0} sine(%p), metadata={op_name="sin" source_file="m.py" source_line=3}
      %minus = f32[8]{0} negate(%sine)
      ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%minus, %minus)
    }
    ENTRY %main (x: f32[8]) -> (f32[8], f32[8]) {
      %x = f32[8]{0} parameter(0)
      ROOT %fusion = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%fused
    }
    """
    *_, step = build.view_run("schedule", read_module(text)).steps
    assert str(step) == "%fusion (sin, m.py:3)"


def test_the_compiler_s_own_bytes_come_first():
    @dataclasses.dataclass
    class Stats:
        argument_size_in_bytes: int = 1
        output_size_in_bytes: int = 2
        alias_size_in_bytes: int = 1
        temp_size_in_bytes: int = 4

    run = build.view_run("schedule", read_module(streamed_text()), compiled=Stats())
    assert run.device == view.DeviceBytes(1, 2, 1, 4, "xla")
    assert run.device.total == 6


def test_a_program_without_a_schedule_is_refused():
    text = streamed_text().replace(", is_scheduled=true", "")
    with pytest.raises(UnscheduledModuleError, match="jit_step: it has no schedule"):
        build.view_run("schedule", read_module(text))


def test_figures_without_a_value_are_left_out():
    run = build.view_run("schedule", read_module(streamed_text()))
    labels = [f.label for f in view.figures(view.Report("t", "", None, (run,), "0"))]
    assert labels == [
        "HBM temp",
        "HBM total",
        "HBM lower bound",
        "Arguments in HBM",
        "Moved",
        "Overlapped",
    ]
