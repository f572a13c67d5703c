"""The trace keeps to the format that Perfetto reads."""

import json

import pytest

import memplan.report.trace as trace
from hlo_passes.reading.reader import read_module
from memplan.report.build import view_run
from memplan.report.view import Report
from tests.memplan.programs import streamed_text

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


@pytest.fixture(scope="module")
def events(report):
    return json.loads(trace.render_trace(report))["traceEvents"]


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_every_event_has_what_its_phase_needs(events):
    assert {event["ph"] for event in events} == set(REQUIRED)
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys()


def test_times_are_microseconds_in_order(events, report):
    timed = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    assert times == sorted(times)
    assert min(times) >= 0
    assert all(event["dur"] >= 0 for event in of_phase(events, "X"))
    end = max(event["ts"] + event["dur"] for event in of_phase(events, "X"))
    assert end == pytest.approx(max(run.clock.step_time_s for run in report.runs) * 1e6)


def test_spans_of_a_thread_do_not_overlap(events):
    ends: dict[tuple[int, int], float] = {}
    for event in of_phase(events, "X"):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(thread, 0.0) - 1e-6
        ends[thread] = event["ts"] + event["dur"]


def test_arrows_come_in_pairs_and_point_forwards(events, report):
    tails = {event["id"]: event for event in of_phase(events, "s")}
    heads = {event["id"]: event for event in of_phase(events, "f")}
    assert tails.keys() == heads.keys()
    # From the start to the bytes, and from the bytes to the done.
    assert len(tails) == 2 * sum(len(run.transfers) for run in report.runs)
    for identity, tail in tails.items():
        assert tail["ts"] <= heads[identity]["ts"]
        assert tail["pid"] == heads[identity]["pid"]
        assert tail["tid"] != heads[identity]["tid"]


def test_processes_and_threads_have_names(events):
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in of_phase(events, "M")}
    assert names["process_name", 1, 0] == {"name": "XLA alone: jit_step"}
    assert names["process_name", 2, 0] == {"name": "memplan: jit_step"}
    assert names["thread_name", 2, 0] == {"name": "compute"}
    assert names["thread_name", 2, 1] == {"name": "host→hbm"}
    named = {(pid, tid) for name, pid, tid in names if name == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"} <= named


def test_counters_reach_the_peak(events, report):
    for process, run in enumerate(report.runs, 1):
        counted = [
            sum(event["args"].values())
            for event in of_phase(events, "C")
            if event["pid"] == process and event["name"] == "hbm bytes"
        ]
        assert max(counted) == run.tiers[0].peak_bytes


def test_a_run_without_a_clock_has_no_times():
    run = view_run("schedule", read_module(streamed_text()))
    assert json.loads(trace.render_trace(Report("t", "", None, (run,), "0")))["traceEvents"] == []
