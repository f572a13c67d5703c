from typing import Any

from experiments.pods import EXPERIMENT


def test_each_end_of_a_row_is_told():
    taken = {"taken_s": 5.0, "planning_s": 1.0, "resident": 1 << 30}
    of = {"model": "dbrx", "target": "v5e:16x16"}
    figures = {"total": 3 << 30, "moved": 0, "overlapped": None, "step_s": 2.0, "bound_s": 1.0}
    rows: list[dict[str, Any]] = [
        {**of, "way": "XLA alone", "budget": None, "exhausted": True, **taken},
        {**of, "way": "by hand", "failure": "no result within 5 s"},
        {**of, "way": "memplan", "budget": 4 << 30, "least": 5 << 30, **taken},
        {**of, "way": "memplan", "budget": 4 << 30, **figures, **taken},
    ]
    (table,) = EXPERIMENT.tables(rows)
    assert [row[2:4] for row in table.rows] == [
        ("–", "out of memory"),
        ("–", "no result within 5 s"),
        ("4.0 GiB", "refused, least 5.0 GiB"),
        ("4.0 GiB", "3.0 GiB"),
    ]
    assert {len(row) for row in table.rows} == {len(table.columns)}
