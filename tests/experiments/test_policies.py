"""Each run is one process, once; what fails is a row."""

import json
from pathlib import Path

import pytest

from experiments import policies
from experiments.policies import Found, Results, Row, Run
from hlo_passes.machine import load_machine

RUN = Run("llama", "v5e")


def row(total: int, step_s: float, hbm: int | None = None) -> Row:
    return Row("way", "what", Run("llama", "v5e", hbm=hbm), Found(total=total, step_s=step_s))


def test_what_ends_badly_says_how():
    found = Results(None, 100).of(Run("llama", "no such target"))
    assert found.total is None
    assert "no such target" in found.failure


def test_what_a_file_has_is_not_compiled_again(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    first = Results(file, 0.01).of(RUN)
    (line,) = file.read_text().splitlines()
    assert json.loads(line)[1]["failure"] == first.failure

    again = Results(file, 60)
    assert again.of(RUN) == first
    assert file.read_text().splitlines() == [line]


def test_a_row_is_held_against_the_others_that_take_no_more_memory():
    rows = [row(8, 1.0), row(4, 2.0), row(6, 1.5), row(2, 9.0, hbm=2), row(6, 1.2, hbm=6)]
    column = [c.heading for c in policies._COLUMNS].index("within it")
    held = [policies._cells(r, rows)[column] for r in rows]
    assert held == ["1.5 s", "–", "2 s", "–", "1.5 s"]


def test_a_failure_is_a_row_without_figures():
    failed = Row("way", "what", RUN, Found("out of memory"))
    cells = policies._cells(failed, [failed, row(8, 1.0)])
    assert cells[:3] == ("way", "what", "out of memory")
    assert set(cells[3:]) == {"–"}
    assert len(cells) == len(policies._COLUMNS)
    assert policies._panel("title", [failed]).series == {}


@pytest.mark.parametrize(
    ("machine", "limit", "percent"), [("v5e", 8_454_668_288, "50"), ("h200", 1, "1")]
)
def test_a_limit_is_a_share_of_the_device(machine: str, limit: int, percent: str):
    options = policies._limit_options(load_machine(machine), limit)
    assert options is not None
    assert list(options.values()) == [percent]
