"""The corpus under budgets: on small programs, on this CPU."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import jax
import pytest

import experiments.corpus as corpus
from experiments.corpus import EXPERIMENT, Own, Point, Settings, measure_own, measure_point
from experiments.isolated import Failure
from hlo_passes.errors import MemplanError
from models.corpus import CORPUS

SETTINGS = Settings(small=True, try_least=True, timeout_s=100)
ADAM = Own("adam", "cpu")


@pytest.fixture(scope="module")
def own() -> Own:
    return measure_own(ADAM, SETTINGS)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch):
    def call(function, *args, timeout_s):
        try:
            return function(*args)
        except MemplanError as error:
            return Failure(str(error))

    monkeypatch.setattr(corpus, "isolated", call)


def test_as_xla_has_it(own: Own):
    # Weights, gradients and two moments; the gradients are not given back.
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves(CORPUS["adam"].small()[1][1]))
    assert own.arguments == pytest.approx(4 * weights, rel=0.01)
    assert own.aliased == pytest.approx(3 * weights, rel=0.01)
    assert own.total == own.arguments + own.outputs + own.temp - own.aliased
    assert own.step_time_s > 0 < own.xla_s


def test_xlas_own_total_needs_no_plan(own: Own):
    point = measure_point(Point("adam", "cpu", 100, budget=own.total), SETTINGS)
    assert (point.total, point.gap, point.moved) == (own.total, None, 0)
    assert point.is_kept
    assert point.step_time_s == pytest.approx(own.step_time_s)


@pytest.mark.slow
def test_one_update_has_to_be_there_and_the_least_budget_says_so(own: Own):
    point = measure_point(Point("adam", "cpu", 1, budget=own.total // 100), SETTINGS)
    assert not point.is_kept
    assert own.total // 100 < point.least <= own.total
    assert point.least_works is not None
    total, wrong = point.least_works
    assert wrong or 0 < total <= point.least


def test_a_kept_budget_is_no_more_than_was_asked_for():
    point = Point("adam", "cpu", 50, budget=10, total=10)
    assert point.is_kept
    assert not replace(point, total=11).is_kept
    assert not replace(point, total=0).is_kept


@pytest.mark.usefixtures("in_process")
@pytest.mark.slow
def test_every_point_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "corpus.jsonl"
    options = ["--small", "--target", "cpu", "--workload", "adam", "--budget", "100", "1"]
    EXPERIMENT.run(*options, "--json", str(path))
    found = [json.loads(line)["case"] for line in path.read_text().splitlines()]
    assert [(line["workload"], line.get("percent")) for line in found] == [
        ("adam", None),
        ("adam", 100),
        ("adam", 1),
    ]
    text = capsys.readouterr().out
    kept, refused = (line for line in text.splitlines() if " % " in line and "adam" in line)
    assert " yes " in kept
    assert "1.000" in kept
    assert " least " in refused
    assert text.splitlines()[-2].split()[:4] == ["all", "2", "1", "100%"]
    EXPERIMENT.run("--show", "--json", str(path))
    assert capsys.readouterr().out == text
    assert len(path.read_text().splitlines()) == len(found)


@pytest.mark.usefixtures("in_process")
def test_a_failure_is_a_row_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(wanted: Own, settings: Settings) -> Own:
        raise MemplanError("the compiler gave up")

    monkeypatch.setattr(corpus, "measure_own", fail)
    EXPERIMENT.run("--target", "cpu", "--workload", "adam")
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["adam", "cpu"]
    assert row.endswith("the compiler gave up")


@pytest.mark.usefixtures("in_process")
def test_a_failed_point_counts_as_feasible_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(wanted: Point, settings: Settings) -> Point:
        raise MemplanError("the planner gave up")

    monkeypatch.setattr(corpus, "measure_own", lambda own, _: replace(own, temp=9, step_time_s=1.0))
    monkeypatch.setattr(corpus, "measure_point", fail)
    EXPERIMENT.run("--target", "cpu", "--workload", "adam", "--budget", "50")
    text = capsys.readouterr().out
    assert "the planner gave up" in text
    assert text.splitlines()[-2].split()[:4] == ["all", "1", "1", "0%"]


def test_training_steps_stand_beside_each_other_and_are_drawn(tmp_path: Path):
    """In any order; a budget that no plan keeps names the least."""
    own = Own("vit-train", "cpu", arguments=80, temp=20, step_time_s=1.0, xla_s=1.0)
    half = Point("vit-train", "cpu", 50, 50, total=50, step_time_s=1.5, gap=0.25)
    refused = Point("vit-train", "cpu", 35, 35, least=40, least_works=(40, ""))
    rows = [{k: v for k, v in asdict(found).items()} for found in (refused, half, own)]
    table = next(t for t in EXPERIMENT.tables(rows) if t.title == "Training steps")
    (cells,) = table.rows
    by_heading = dict(zip((c.heading for c in table.columns), cells, strict=True))
    assert by_heading["cpu, 50 %"] == "1.500 (25.0%)"
    assert by_heading["cpu, 35 %"] == "least 40%"
    assert by_heading["v5e, 50 %"] == ""
    assert EXPERIMENT.plot is not None
    (axes,) = EXPERIMENT.plot(rows).axes
    lines = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xdata())]
    assert lines == [[[0.5, 1.5]], [[0.5, 1.2]]]  # The step, and what no plan undercuts.
