"""``memplan whatif``: what it predicts, and what it refuses."""

import json

import pytest

from hlo_passes.fusions.editing import fuse
from hlo_passes.hardware.machine import load_machine
from hlo_passes.reading.reader import read_module
from memplan.report.simulated import simulated
from memplan.whatif import best_edits, measured
from tests.hlo_passes.fusions.test_editing import TEXT

H100 = load_machine("h100")


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "step.hlo"
    found.write_text(TEXT)
    return found


def test_a_step_before_and_after(run, path):
    words = "whatif", path, "--machine", "h100", "--fuse", "late,third"
    shown = json.loads(run(*words, "--json"))
    assert (shown["format"], shown["predicted"]) == ("memplan.whatif", True)
    (edit,) = shown["edits"]
    module = read_module(TEXT)
    edited = fuse(module, "late", "third")
    for result, of in ((shown["before"], module), (edit["result"], edited)):
        assert result["step_s"] == simulated(of, H100, "h100").step_s
    assert edit["edit"] == "fuse late,third"
    assert shown["before"]["hbm_bytes"] - edit["result"]["hbm_bytes"] == 256
    assert H100.launch_s is not None
    # A launch less, and what is written and read.
    assert edit["result"]["step_s"] < shown["before"]["step_s"] - 0.9 * H100.launch_s
    table = run(*words, "--fuse", "late.third,fourth")
    assert "fuse late.third,fourth" in table
    assert "a prediction" in table


def test_edits_are_made_in_their_order(run, refused, path):
    words = "whatif", path, "--machine", "h100"
    shown = json.loads(run(*words, "--fuse", "late,third", "--split", "late.third:4", "--json"))
    assert [e["edit"] for e in shown["edits"]] == ["fuse late,third", "split late.third:4"]
    # Three launches more, and what joins the parts.
    assert shown["edits"][1]["result"]["step_s"] > shown["edits"][0]["result"]["step_s"]
    said = refused(*words, "--split", "late.third:4", "--fuse", "late,third")
    assert "cannot split %late.third in 4: the entry has no %late.third" in said


def test_the_search_ranks_what_it_tried(run, path):
    module = read_module(TEXT)
    found = best_edits(module, H100, 100)
    steps = [e.result.step_s for e in found.best]
    assert steps == sorted(steps)
    assert len(steps) == found.tried == 5
    for e in found.best:
        pair = e.edit.removeprefix("fuse ").split(",")
        assert measured(fuse(module, *pair), H100) == e.result
    assert found.refused == {"opaque": 2, "several results": 1}
    shown = json.loads(run("whatif", path, "--machine", "h100", "--best", "2", "--json"))
    assert [e["edit"] for e in shown["best"]] == [e.edit for e in found.best[:2]]
    assert "pairs that cannot be one kernel" in run("whatif", path, "--machine", "h100")


def test_what_is_refused(refused, path):
    words = "whatif", path, "--machine", "h100"
    assert "cannot fuse %third with %square: %square is a dot" in refused(
        *words, "--fuse", "third,square"
    )
    assert "--fuse 'third': expected the names of two kernels, A,B" in refused(
        *words, "--fuse", "third"
    )
    assert "--split 'third': expected a kernel and a number, A:8" in refused(
        *words, "--split", "third"
    )
    assert "--best 0: expected at least 1" in refused(*words, "--best", "0")
