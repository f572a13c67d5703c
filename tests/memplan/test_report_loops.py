"""Programs with loops: every iteration counts, and each transfer is named once.

The program is `Ring`: three turns of two slots of 256 bytes, and a fetch ahead of the loop.
"""

import itertools
import json
from dataclasses import asdict, replace

import pytest

import memplan.report.html as html
from hlo_passes.hardware.machine import Tier
from hlo_passes.ir import Module
from hlo_passes.pipeline import plan_module, rewrite_module
from hlo_passes.plan import LoopStack, LoopStreams, Plan
from memplan.report.build import view_run
from memplan.report.sections import report_tables
from memplan.report.summary import summarize
from memplan.report.tables import plain_text
from memplan.report.trace import render_trace
from memplan.report.view import Report, RunView
from tests.hlo_passes.rings import SLOT_BYTES, TRIPS, Ring, ring_machine
from tests.hlo_passes.toys import module_of

RING = Ring(stores=True)
MACHINE = replace(
    ring_machine(40.0),
    tiers=(Tier("hbm", 0, 1 << 20), Tier("vmem", 1, 100), Tier("host", 5, 1 << 20)),
)
MOVED = (RING.layers + TRIPS * RING.slots) * SLOT_BYTES

W = LoopStack("w", f"float32[{RING.layers},8,8]", SLOT_BYTES)
SAVED = LoopStack("residual 0 of the loop at model.py:3", W.shape, SLOT_BYTES)
STREAMS = LoopStreams("model.py:3", RING.layers, 1, 2, 0.5, (W,), (SAVED,), ())


@pytest.fixture(scope="module")
def planned() -> tuple[Module, Plan]:
    module = RING.module()
    plan = plan_module(module, MACHINE, 1 << 30, labels={module.entry.parameters[1].name: "w"})
    plan = replace(
        plan,
        streams=(STREAMS,),
        left_alone={"table": "indexed by data at model.py:9"},
        compiler_options={"xla_some_option": "false"},
    )
    return rewrite_module(module, plan, MACHINE), plan


@pytest.fixture(scope="module")
def run(planned: tuple[Module, Plan]) -> RunView:
    module, plan = planned
    return view_run("memplan", module, MACHINE, plan=plan)


@pytest.fixture(scope="module")
def report(run: RunView) -> Report:
    return Report("ring", "toy", None, (run,), "0.0")


def test_bytes_of_every_iteration_count(run: RunView, planned: tuple[Module, Plan]):
    assert run.moved_bytes == planned[1].moved_bytes == MOVED
    by_name = {t.buffer: t for t in run.transfers}
    assert len(by_name) == len(run.transfers)
    for t in run.transfers:
        inside = t.buffer != "first0.start"
        assert (t.executions, t.loop) == ((TRIPS, "loop") if inside else (1, ""))
        assert len(t.spans) == t.executions
        assert t.moved_bytes == t.executions * SLOT_BYTES
        assert t.start <= t.done
    assert run.overlapped == pytest.approx(sum(t.hidden_bytes for t in run.transfers) / MOVED)


def test_without_a_machine_the_bytes_are_the_same(planned: tuple[Module, Plan]):
    bare = view_run("schedule", planned[0])
    assert bare.moved_bytes == MOVED
    assert {t.executions for t in bare.transfers} == {1, TRIPS}
    assert all(t.spans == () and t.busy_s is None for t in bare.transfers)


def test_slices_have_the_names_of_their_stacks(run: RunView):
    labels = {t.buffer: t.label for t in run.transfers}
    assert labels["f0.start"] == labels["first0.start"] == "w[i]"
    assert labels["p0.start"] == "result 4[i]"
    held = {h.name for h in run.tiers[0].held if h.kind == "transferred"}
    assert held == {"w[i]"}


def test_a_loop_is_there_once_with_its_iterations(run: RunView):
    (loop,) = run.loops
    assert (loop.step.instruction, loop.trip_count, loop.iterations) == ("loop", TRIPS, TRIPS)


def test_a_loop_of_unknown_length_counts_once():
    text = RING.text().replace(
        "ROOT %more = pred[] compare(%j.1, %n), direction=LT",
        "%x.1 = f32[8,8]{1,0} get-tuple-element(%s.1), index=1\n"
        "  %y.1 = f32[] bitcast(%x.1)\n"
        "  %zero.1 = f32[] constant(0)\n"
        "  ROOT %more = pred[] compare(%y.1, %zero.1), direction=LT",
    )
    run = view_run("schedule", module_of(text), MACHINE)
    (loop,) = run.loops
    assert (loop.trip_count, loop.iterations) == (None, 1)
    (table,) = (
        t for t in report_tables(Report("r", "toy", None, (run,), "0")) if "loops" in t.title
    )
    assert table.rows[0][1] == "unknown"
    assert "counted once" in table.note


def test_the_tables_of_a_program_with_loops(report: Report, golden):
    golden("loops.txt", "\n".join(map(plain_text, report_tables(report))))


def test_json_says_what_was_done_about_loops(report: Report):
    (run,) = json.loads(json.dumps(summarize(report)))["runs"]
    assert run["moved_bytes"] == MOVED
    assert [loop["iterations"] for loop in run["loops"]] == [TRIPS]
    (streams,) = run["streams"]
    assert streams["source_line"] == "model.py:3"
    assert streams["fetched"] == [asdict(W)]
    assert (streams["fetched_bytes"], streams["stored_bytes"]) == (SLOT_BYTES, SLOT_BYTES)
    assert run["left_alone"] == {"table": "indexed by data at model.py:9"}
    assert run["compiler_options"] == {"xla_some_option": "false"}
    assert sum(t["moved_bytes"] for t in run["transfers"]) == MOVED
    assert not [t for t in run["transfers"] if "spans" in t]


def test_the_page_draws_every_execution_and_lists_each_loop(report: Report):
    text = html.render_html(report)
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    (run,) = data["runs"]
    assert sum(len(t["spans"]) for t in run["transfers"]) == 1 + 4 * TRIPS
    titles = [table["title"] for table in run["loops"]]
    assert titles[0] == "loops that move bytes"
    assert titles[1].startswith("loop at model.py:3: 7 layers, 2 slots")


@pytest.fixture(scope="module")
def events(report: Report) -> list[dict]:
    return json.loads(render_trace(report))["traceEvents"]


def test_the_trace_has_every_execution(events: list[dict]):
    moves = [e for e in events if e.get("cat") in ("fetch", "evict") and e["ph"] == "X"]
    assert len(moves) == 1 + 4 * TRIPS
    assert {e["args"]["execution"] for e in moves if e["name"] == "result 4[i]"} == {
        f"{n} of {TRIPS}" for n in range(1, TRIPS + 1)
    }


def test_arrows_end_in_their_own_iteration(events: list[dict], run: RunView):
    assert run.clock is not None
    heads = {e["id"]: e for e in events if e["ph"] == "f"}
    for number, t in enumerate(run.transfers):
        arrivals = [heads[f"1.{number}.{n}.done"]["ts"] / 1e6 for n in range(t.executions)]
        for arrival, span in zip(arrivals, t.spans, strict=True):
            assert arrival >= span.end_s - 1e-9
        # One is waited for before the next one of the same transfer is issued.
        for arrival, following in zip(arrivals, t.spans[1:], strict=False):
            assert arrival <= following.issued_s + 1e-6


def test_memory_rises_and_falls_in_every_iteration(events: list[dict], run: RunView):
    assert run.clock is not None
    counted = [e for e in events if e["ph"] == "C" and e["name"] == "hbm bytes"]
    totals = [sum(e["args"].values()) for e in counted]
    assert max(totals) == run.tiers[0].peak_bytes
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(counted))
    fetches = next(t.spans for t in run.transfers if t.buffer == "f0.start")
    for earlier, later in itertools.pairwise(fetches):
        inside = [e for e in counted if earlier.issued_s <= e["ts"] / 1e6 < later.issued_s]
        assert len({sum(e["args"].values()) for e in inside}) > 1
