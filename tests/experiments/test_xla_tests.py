"""Modules in a checkout of XLA are found, and what becomes of each is told."""

import json
from pathlib import Path

import pytest

from experiments import xla_tests
from experiments.xla_tests import Outcome, Worker, find_texts
from tests.hlo_passes.reading.test_hlo_text import FATAL
from tests.hlo_passes.reading.test_reader import TEXT

UNSCHEDULED = TEXT.replace(", is_scheduled=true", "").replace("tiny", "plain")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "xla"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/two.hlo").write_text(f"// RUN: x\n{TEXT}\n// -----\n{UNSCHEDULED}")
    (folder / "fatal_test.cc").write_text(
        f'const char* a = R"(\n{TEXT})";\nconst char* b = R"x(\n{FATAL})x";\nc = R"(no module)";\n'
    )
    (folder / "notes.md").write_text(TEXT)
    return folder


def test_every_text_is_found_once(sources: Path) -> None:
    found = dict(find_texts(sources))
    assert list(found) == [
        "fatal_test.cc:1",
        "fatal_test.cc:9",
        "tests/two.hlo:1",
        "tests/two.hlo:9",
    ]
    assert found["fatal_test.cc:9"].strip() == FATAL.strip()
    assert list(dict(find_texts(sources, "two"))) == ["tests/two.hlo:1", "tests/two.hlo:9"]


@pytest.mark.slow
def test_what_becomes_of_each_is_told_and_known_afterwards(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "outcomes.jsonl"
    xla_tests.EXPERIMENT.run(str(sources), "--json", str(log))
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = {
        line["case"]["module"]: {o["step"]: o["kind"] for o in line["found"]["outcomes"]}
        for line in lines
    }
    assert kinds["fatal_test.cc:9"] == {"read": "refused"}
    assert kinds["tests/two.hlo:1"]["plan 100 %"] == "ok"
    assert kinds["tests/two.hlo:1"]["plan 50 %"] == "refused"
    assert kinds["tests/two.hlo:9"]["inspect unscheduled"] == "refused"
    assert kinds["tests/two.hlo:9"]["plan 100 %, as written"] == "ok"
    assert "UnreadableModuleError" in printed
    before = log.read_text()
    for again in ("--resume", "--show"):
        xla_tests.EXPERIMENT.run(str(sources), "--json", str(log), again)
        assert capsys.readouterr().out == printed
        assert log.read_text() == before


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_one_outcome_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(20, 1 << 30)
    try:
        assert worker.look("a", TEXT)[0] == Outcome("read", "ok")
        assert worker._process is not None
        worker._process.kill()
        (only,) = worker.look("a", TEXT)
        assert (only.step, only.kind, only.what) == ("read", "killed", "exit code -9")
        assert worker.look("a", TEXT)[0] == Outcome("read", "ok")
        monkeypatch.setattr(worker, "_seconds", 0.0)
        (only,) = worker.look("a", TEXT)
        assert only.kind == "over time"
    finally:
        worker.end()
