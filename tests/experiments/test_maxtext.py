"""MaxText itself is not here: what is said without it, and how rows are told."""

from typing import Any

import pytest
from absl import app

from experiments.maxtext import EXPERIMENT
from experiments.running import Row


@pytest.mark.parametrize("words", [(), ("--path", "/nowhere")])
def test_a_folder_without_maxtext_is_refused(words: tuple[str, ...]):
    with pytest.raises(
        app.UsageError, match=r"package maxtext in it, found (None|/nowhere): unpack"
    ):
        EXPERIMENT.run(*words)


def test_rows_are_told_by_axis_run_and_budget():
    figures: Row = {"total": 3 << 30, "moved": 0, "step_s": 0.2, "bound_s": 0.1, "taken_s": 60.0}
    within: Row = {"run": "memplan", "budget": 2 << 30, "plan": True, "taken_s": 60.0}
    rows: list[dict[str, Any]] = [
        {"axis": 0, "run": "full", **figures},
        {"axis": 1, **within, "share": 0.5, "least": 5 << 29},
        {"axis": 1, **within, **figures, "share": 0.75},
        {"axis": 1, "run": "offload", "failure": "no result within 5 s"},
    ]
    (table,) = EXPERIMENT.tables(rows)
    assert [row[:4] for row in table.rows] == [
        ("1", "XLA alone, MaxText's host offload", "–", "failed: no result within 5 s"),
        ("1", "memplan", "2.0 GiB (75%)", "3.0 GiB"),
        ("1", "memplan", "2.0 GiB (50%)", "refused, least 2.5 GiB"),
        ("0", "XLA alone", "–", "3.0 GiB"),
    ]
    assert table.rows[1][4] == "the plan"
    assert {len(row) for row in table.rows} == {len(table.columns)}
