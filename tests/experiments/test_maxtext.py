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


def test_rows_are_told_by_the_bytes_they_take_and_refusals_first():
    figures: Row = {"moved": 0, "step_s": 0.2, "bound_s": 0.1, "taken_s": 60.0}
    within: Row = {"policy": "full", "budget": 2 << 30, "plan": True, "taken_s": 60.0}
    rows: list[dict[str, Any]] = [
        {"axis": 0, "policy": "full", "offload": "nothing", "total": 3 << 30, **figures},
        {"axis": 1, **within, **figures, "share": 0.75, "total": 2 << 30},
        {"axis": 1, **within, "share": 0.5, "least": 5 << 29},
        {"axis": 1, "policy": "minimal", "offload": "both", "failure": "no result within 5 s"},
        {"axis": 1, "policy": "full", "offload": "nothing", "total": 3 << 30, **figures},
    ]
    by_axis = {table.title[-1]: table for table in EXPERIMENT.tables(rows)}
    assert [*by_axis] == ["1", "0"]
    assert [row[:5] for row in by_axis["1"].rows] == [
        ("memplan", "full", "planned", "2.0 GiB (50%)", "refused, least 2.5 GiB"),
        ("MaxText", "minimal", "both", "–", "failed: no result within 5 s"),
        ("MaxText", "full", "nothing", "–", "3.0 GiB"),
        ("memplan", "full", "planned", "2.0 GiB (75%)", "2.0 GiB"),
    ]
    assert by_axis["1"].rows[-1][5] == "the plan"
    assert {len(row) for row in by_axis["1"].rows} == {len(by_axis["1"].columns)}
