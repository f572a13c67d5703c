"""What reports and explanations say of a loop whose temporaries are evicted or computed again."""

import json

import pytest

from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.pipeline import plan_module, rewrite_module
from hlo_passes.plan import BodyPlan, Plan
from memplan.explaining import explain, explanations
from memplan.report.build import view_run
from memplan.report.sections import report_tables
from memplan.report.summary import summarize
from memplan.report.tables import plain_text
from memplan.report.view import Report
from tests.hlo_passes.looped import FAST, SIZE, SLOW, TRIPS, module, taken


def planned(machine: Machine) -> tuple[Module, Plan, BodyPlan]:
    plan = plan_module(module(), machine, taken(module()) - SIZE)
    (body,) = plan.bodies
    return rewrite_module(module(), plan, machine), plan, body


def report(machine: Machine) -> Report:
    written, plan, _ = planned(machine)
    return Report("loop", "toy", None, (view_run("memplan", written, machine, plan=plan),), "0")


def test_a_row_for_each_loop():
    _, _, body = planned(SLOW)
    (table,) = (t for t in report_tables(report(SLOW)) if "whose iterations" in t.title)
    (row,) = table.rows
    again = len(body.plan.edits.recomputes)
    assert row[:2] == ("%w", str(TRIPS))
    assert row[4:6] == ("0", str(again))
    assert again


def test_decisions_are_told_loop_by_loop():
    _, plan, body = planned(SLOW)
    tables = [t for t in report_tables(report(SLOW)) if "each iteration of %w: " in t.title]
    assert [len(t.rows) for t in tables] == [len(body.plan.decisions)]
    assert "each iteration of %w: temporaries that are idle" in explain(plan)


def test_none_where_no_loop_is_planned():
    plan = plan_module(module(), SLOW, taken(module()))
    run = view_run("memplan", module(), SLOW, plan=plan)
    text = "".join(map(plain_text, report_tables(Report("loop", "toy", None, (run,), "0"))))
    assert "iteration" not in text
    assert "iteration" not in explain(plan)


def test_the_bytes_that_each_iteration_moves_are_in_the_report():
    _, plan, body = planned(FAST)
    found = json.loads(json.dumps(summarize(report(FAST))))
    (run,) = found["runs"]
    (told,) = run["bodies"]
    assert (told["loop"], told["computation"], told["executions"]) == ("w", "body", TRIPS)
    assert told["moved_bytes"] == body.moved_bytes == run["moved_bytes"] == plan.moved_bytes > 0
    assert len(told["edits"]["evictions"]) == len(body.plan.edits.evictions)


@pytest.mark.parametrize(("machine", "done"), [(FAST, "is evicted"), (SLOW, "is computed again")])
def test_a_sentence_says_that_it_is_each_iteration(machine: Machine, done: str):
    written, plan, body = planned(machine)
    chosen = next(d for d in body.plan.decisions if d.action != "keep")
    told = explanations(plan, chosen.buffer, module=written)
    assert told[0].sentence.startswith(f"In each iteration of %w, %{chosen.buffer} (16.0 KiB")
    assert done in told[0].sentence


def test_source_lines_are_read_in_the_body():
    written, plan, _ = planned(FAST)
    (told,) = explanations(plan, "a", module=written)
    assert told.sentence.startswith("In each iteration of %w, %a (16.0 KiB, model.py:3) is ")
