"""Reports of a plan that evicts, computes again and re-orders; and of collectives."""

import json
from dataclasses import replace

import pytest

from hlo_passes.hardware.machine import Interconnect, Machine
from hlo_passes.plan import LiveRange
from hlo_passes.reading.reader import read_module
from memplan.compare import COLUMNS, cells, compared
from memplan.report.build import view_run
from memplan.report.decisions import LIMIT, temporaries_table
from memplan.report.html import render_html
from memplan.report.sections import report_tables
from memplan.report.summary import summarize
from memplan.report.tables import plain_text
from memplan.report.trace import render_trace
from memplan.report.view import Report, RunView, SplitView, figures
from tests.memplan.edited import SIZE, TEXT, edited_module, edited_plan


@pytest.fixture(scope="module")
def run(toy: Machine) -> RunView:
    return view_run("memplan", edited_module(), toy, plan=edited_plan())


def report_of(*runs: RunView) -> Report:
    return Report("jit_step", "toy", 6 * SIZE, runs, "0.0")


def test_each_direction_has_its_kind_and_its_lane(run: RunView):
    assert [(t.buffer, t.kind, t.route) for t in run.transfers] == [
        ("a.evict-start", "evict", "hbm→host"),
        ("a.refetch0-start", "refetch", "host→hbm"),
    ]
    assert run.overlapped == 1.0


def test_what_the_host_had_is_fetched(report: Report):
    assert {t.kind for run in report.runs for t in run.transfers} == {"fetch"}


def test_a_split_temporary_shows_when_it_is_there(run: RunView):
    assert run.split == (
        SplitView("a", SIZE, "fetched", (LiveRange(0, 3), LiveRange(4, 7))),
        SplitView("c", SIZE, "computed again", (LiveRange(2, 4), LiveRange(5, 7))),
    )


def test_memory_falls_while_a_temporary_is_away(run: RunView):
    hbm, host = run.tiers
    bands = {band.kind: band.bytes for band in hbm.bands}
    fetched = [size for size in bands["transferred"] if size]
    assert set(fetched) == {SIZE}
    assert max(host.totals) == SIZE
    assert host.totals[0] == 0


def test_clones_are_marked(run: RunView, toy: Machine):
    assert run.recomputed == {"c.again": "c"}
    # XLA may drop the attribute, or there may be no plan: either tells.
    bare = read_module(TEXT.replace(', frontend_attributes={memplan.recompute="c"}', ""))
    assert view_run("m", bare, toy, plan=edited_plan()).recomputed == {"c.again": "c"}
    assert view_run("m", bare, toy).recomputed == {}
    assert view_run("m", edited_module(), toy).recomputed == {"c.again": "c"}


def test_the_clock_tells_what_is_computed_again(run: RunView):
    assert run.clock is not None
    # Read and written, at 1 GB/s.
    assert run.clock.recompute_s == pytest.approx(2 * SIZE / 1e9)
    # Another plan might not compute it again.
    assert run.clock.lower_bound_s == pytest.approx(run.clock.compute_s - run.clock.recompute_s)
    assert run.clock.gap == pytest.approx(run.clock.step_time_s / run.clock.lower_bound_s - 1)


def test_the_figures_say_so(run: RunView, toy: Machine):
    shown = {f.label: f.values for f in figures(report_of(run))}
    assert shown["Order of instructions"] == ("memplan's",)
    assert shown["Computed again, predicted"] == ("131 µs",)
    assert shown["Bound by, predicted"] == ("compute 100.0%",)
    plain = {f.label for f in figures(report_of(view_run("m", edited_module(), toy)))}
    assert "Order of instructions" not in plain


def test_the_trace_marks_clones_and_evictions(run: RunView):
    events = json.loads(render_trace(report_of(run)))["traceEvents"]
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert (spans["c.again"]["cat"], spans["c.again"]["args"]["again"]) == ("recompute", "c")
    assert spans["c"]["cat"] == "compute"
    away, back = spans["a.evict-start"], spans["a.refetch0-start"]
    assert (away["cat"], back["cat"]) == ("evict", "refetch")
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert (lanes[away["tid"]], lanes[back["tid"]]) == ("hbm→host", "host→hbm")


def test_the_page_holds_them(run: RunView):
    page = render_html(report_of(run))
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    (shown,) = data["runs"]
    assert shown["recomputed"] == {"c.again": "c"}
    assert [t["kind"] for t in shown["transfers"]] == ["evict", "refetch"]
    assert [t["title"] for t in shown["edits"]] == [
        "temporaries that leave the device and come back",
        "temporaries that are idle while memory is short",
    ]


def test_the_summary_holds_them(run: RunView):
    data = json.loads(json.dumps(summarize(report_of(run))))
    (shown,) = data["runs"]
    assert data["version"] == 4
    assert shown["is_reordered"]
    assert shown["split"][0]["held"] == [[0, 3], [4, 7]]
    assert [d["action"] for d in shown["decisions"]] == ["evict", "recompute", "keep"]
    assert shown["predicted"]["binding"]["shares"] == {"compute": 1.0}
    assert shown["predicted"]["gap"] == pytest.approx(run.clock.gap if run.clock else None)


def test_the_tables(run: RunView, golden):
    golden("edits.txt", "\n".join(map(plain_text, report_tables(report_of(run)))))


def test_long_tables_say_how_much_more_there_is():
    (decision, *_) = edited_plan().decisions
    table = temporaries_table("", [decision] * (LIMIT + 3))
    assert (len(table.rows), table.note) == (LIMIT, "and 3 more")


def test_runs_are_compared_by_their_gap(run: RunView):
    assert run.clock is not None
    row = dict(zip((column.heading for column in COLUMNS), cells(compared(run)), strict=True))
    assert row["gap"] == f"{run.clock.gap:.1%}"
    assert len(cells(None)) == len(COLUMNS)


def test_a_fetch_that_starts_late_is_told(toy: Machine):
    # The fetch right before its reader, and so behind c.again.
    start = next(line for line in TEXT.splitlines() if "a.refetch0-start =" in line)
    done = next(line for line in TEXT.splitlines() if "a.refetch0-done =" in line)
    text = TEXT.replace(start + "\n", "").replace(done, f"{start}\n{done}")
    run = view_run("memplan", read_module(text), toy, plan=edited_plan())
    assert run.clock is not None
    assert (run.clock.binding.at, run.clock.binding.transfer) == ("c.again", "a.refetch0-start")
    (bound,) = (f for f in figures(report_of(run)) if f.label.startswith("Bound by"))
    assert bound.values == ("compute 94.7%, memory at c.again 5.3%",)
    alone = view_run("XLA alone", read_module(text), toy)
    (bound,) = (f for f in figures(report_of(alone)) if f.label.startswith("Bound by"))
    assert bound.values == ("compute 94.7%, late start at c.again 5.3%",)


GATHERED = """HloModule jit_step, is_scheduled=true
ENTRY main {
  x = f32[64,256]{1,0} parameter(0), metadata={op_name="x"}
  s = (f32[64,256]{1,0}, f32[128,256]{1,0}) all-gather-start(x), dimensions={0},
      replica_groups={{0,1}}
  n = f32[64,256]{1,0} negate(x)
  d = f32[128,256]{1,0} all-gather-done(s)
  ROOT out = (f32[64,256]{1,0}, f32[128,256]{1,0}) tuple(n, d)
}
"""


def test_collectives_have_a_lane_of_their_own(toy: Machine):
    wired = replace(toy, interconnect=Interconnect("ici", 1e8, 1.0, 0.0))
    run = view_run("m", read_module(GATHERED), wired)
    (gather,) = run.collectives
    assert (gather.kind, gather.route, gather.size) == ("collective", "hbm→ici", SIZE)
    assert (gather.start, gather.done) == (1, 3)
    # They are no transfers to slower memory.
    assert (run.transfers, run.moved_bytes) == ((), 0)
    assert run.clock is not None
    assert run.clock.interconnect_s == pytest.approx(SIZE / 1e8)
    assert run.clock.binding.engine == "interconnect"
    stall = next(span for span in run.clock.spans if span.stall)
    assert run.steps[stall.tick].instruction == "d"
    events = json.loads(render_trace(report_of(run)))["traceEvents"]
    (span,) = (e for e in events if e.get("cat") == "collective")
    assert span["name"] == "s"
    labels = {f.label for f in figures(report_of(run))}
    assert "Collectives, predicted" in labels
    assert "Moved" not in labels


def test_collectives_are_counted_without_a_machine_that_prices_them(toy: Machine):
    priced = replace(toy, interconnect=Interconnect("ici", 1e8, 1.0, 0.0))
    for machine in (None, toy):
        (gather,) = view_run("m", read_module(GATHERED), machine).collectives
        assert (gather.kind, gather.size, gather.executions) == ("collective", SIZE, 1)
        assert (gather.start, gather.done, gather.spans) == (1, 3, ())
    (wired,) = view_run("m", read_module(GATHERED), priced).collectives
    assert (wired.start, wired.done, wired.computes_between) == (
        gather.start,
        gather.done,
        gather.computes_between,
    )


def test_a_plan_that_held_kernels_dearer_than_they_are_has_no_bound_above_the_step(toy):
    plan = edited_plan()
    dear = replace(plan, prediction=replace(plan.prediction, lower_bound_s=1e3))
    clock = view_run("memplan", edited_module(), toy, plan=dear).clock
    assert clock is not None
    assert clock.lower_bound_s == clock.step_time_s
    assert clock.gap == 0
