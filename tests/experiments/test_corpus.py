"""The corpus under budgets: on small programs, on this CPU."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import experiments.corpus as corpus
from experiments.corpus import Log, Own, Point, Settings, measure_own, measure_point
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
def test_what_is_donated_cannot_leave_and_the_least_budget_says_so(own: Own):
    point = measure_point(Point("adam", "cpu", 10, budget=own.total // 10), SETTINGS)
    assert not point.is_kept
    assert own.total // 10 < point.least <= own.total
    assert point.least_works is not None
    total, wrong = point.least_works
    assert wrong or 0 < total <= point.least


def test_a_kept_budget_is_no_more_than_was_asked_for():
    point = Point("adam", "cpu", 50, budget=10, total=10)
    assert point.is_kept
    assert not replace(point, total=11).is_kept
    assert not replace(point, total=0).is_kept


def test_a_run_is_resumed(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    measured = Point("adam", "cpu", 50, budget=10, least=20, least_works=(19, ""))

    def again() -> Point:
        raise AssertionError("measured twice")

    wanted = Point("adam", "cpu", 50)
    assert Log(path, resume=True).measured(wanted, lambda: measured) == measured
    assert Log(path, resume=True).measured(wanted, again) == measured
    # Another share, and the program as XLA has it, are other cases.
    log = Log(path, resume=True)
    other = replace(wanted, percent=25)
    assert log.measured(other, lambda: other) == other
    assert log.measured(ADAM, lambda: replace(ADAM, temp=7)).temp == 7
    assert Log(path, resume=True).measured(ADAM, lambda: ADAM).temp == 7
    # Without resuming, everything is measured anew.
    assert Log(path, resume=False).measured(wanted, lambda: wanted) == wanted
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.usefixtures("in_process")
@pytest.mark.slow
def test_every_point_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "corpus.jsonl"
    options = ["--small", "--target", "cpu", "--workload", "adam", "--budget", "100", "10"]
    corpus.main([*options, "--json", str(path)])
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["workload"], line.get("percent")) for line in found] == [
        ("adam", None),
        ("adam", 100),
        ("adam", 10),
    ]
    text = capsys.readouterr().out
    kept, refused = (line for line in text.splitlines() if " % " in line and "adam" in line)
    assert " yes " in kept
    assert "1.000" in kept
    assert " least " in refused
    assert text.splitlines()[-2].split()[:4] == ["all", "2", "1", "100%"]
    # The same tables of the file alone, with what else was asked for left out.
    capsys.readouterr()
    options = ["--small", "--target", "cpu", "--budget", "100", "60", "--show"]
    corpus.main([*options, "--json", str(path)])
    shown = capsys.readouterr().out
    assert [f" {percent} % " in shown for percent in (100, 60, 10)] == [True, False, False]
    assert len(path.read_text().splitlines()) == len(found)


@pytest.mark.usefixtures("in_process")
def test_a_failure_is_a_row_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(wanted: Own, settings: Settings) -> Own:
        raise MemplanError("the compiler gave up")

    monkeypatch.setattr(corpus, "measure_own", fail)
    corpus.main(["--target", "cpu", "--workload", "adam"])
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
    corpus.main(["--target", "cpu", "--workload", "adam", "--budget", "50"])
    text = capsys.readouterr().out
    assert "the planner gave up" in text
    assert text.splitlines()[-2].split()[:4] == ["all", "1", "1", "0%"]


def test_resuming_needs_a_file(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        corpus.main(["--resume"])
    assert "--resume and --show need --json FILE" in capsys.readouterr().err
