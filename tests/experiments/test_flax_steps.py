"""Flax's examples are not here: what is said without them, and how rows are told."""

from typing import Any

import pytest
from absl import app

from experiments.flax_steps import EXPERIMENT
from experiments.running import Row


@pytest.mark.parametrize("words", [(), ("--path", "/nowhere")])
def test_a_folder_without_the_examples_is_refused(words: tuple[str, ...]):
    with pytest.raises(app.UsageError, match=r"lm1b/train.py in it, found (None|/nowhere): that"):
        EXPERIMENT.run(*words)


def test_rows_are_told_by_the_bytes_they_take_and_refusals_first():
    of: Row = {"program": "lm1b", "target": "h200"}
    figures: Row = {"moved": 0, "step_s": 0.2, "bound_s": 0.1, "taken_s": 60.0}
    rows: list[dict[str, Any]] = [
        {**of, "policy": "as_it_is", "offload": "nothing", "total": 3 << 30, **figures},
        {**of, "share": 0.75, "budget": 2 << 30, "total": 2 << 30, **figures},
        {**of, "share": 0.5, "budget": 1 << 30, "least": 5 << 29, "taken_s": 60.0},
        {**of, "policy": "dots_offloaded", "offload": "both", "failure": "out of memory"},
        {**of, "program": "gemma", "policy": "full", "offload": "nothing", "failure": "none"},
    ]
    tables = list(EXPERIMENT.tables(rows))
    assert [table.title for table in tables] == ["Flax's lm1b on h200", "Flax's gemma on h200"]
    assert [row[:5] for row in tables[0].rows] == [
        ("memplan", "planned", "planned", "1.0 GiB (50%)", "refused, least 2.5 GiB"),
        ("hand", "dots offloaded", "both", "–", "failed: out of memory"),
        ("hand", "as it is", "nothing", "–", "3.0 GiB"),
        ("memplan", "planned", "planned", "2.0 GiB (75%)", "2.0 GiB"),
    ]
    assert {len(row) for table in tables for row in table.rows} == {len(tables[0].columns)}
