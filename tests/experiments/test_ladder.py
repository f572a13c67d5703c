"""Budgets in small steps: on small programs, on this CPU."""

import pytest

from experiments.ladder import EXPERIMENT, measure
from experiments.running import Row

NAMED = {"workload": "adam", "target": "cpu"}


def row(percent: int, found: Row) -> Row:
    return {**NAMED, "percent": percent, **found}


@pytest.mark.slow
def test_a_budget_is_kept_or_refused():
    own = measure("adam", "cpu", True, 0)
    kept, refused = (measure("adam", "cpu", True, own["total"] * n // 100) for n in (75, 1))
    assert kept["used"] <= 0.75 * own["total"]
    assert kept["moved"] > 0
    assert kept["step_s"] >= kept["bound_s"] * (1 - 1e-9) > 0
    assert own["total"] // 100 < refused["least"] <= own["total"]
    assert "step_s" not in refused
    (table,) = EXPERIMENT.tables([row(100, own), row(75, kept), row(1, refused)])
    (cells,) = table.rows
    assert cells[:2] == ("adam", "cpu")
    assert cells[3:6] == ("1", "none", "75 %")
    assert cells[9] == "75 %"


def test_what_is_told_of_many_steps():
    own = {"total": 1000, "step_s": 1.0, "xla_s": 10.0}
    steps = {
        75: {"used": 1, "moved": 0, "step_s": 1.2, "bound_s": 1.0, "planning_s": 1.0},
        50: {"least": 600, "planning_s": 5.0},
        40: {"used": 1, "moved": 0, "step_s": 1.1, "bound_s": 1.0, "planning_s": 3.0},
        25: {"least": 380, "planning_s": 5.0},
    }
    found = [row(100, own), *(row(percent, of) for percent, of in steps.items())]
    (table,) = EXPERIMENT.tables(found)
    (cells,) = table.rows
    told = dict(zip((column.heading for column in table.columns), cells, strict=True))
    assert told["refused above"] == "50 %"
    assert told["least named"] == "38.0%"
    assert told["gap, worst"] == "20.0%"
    assert told["slower than for less"] == "1"
    assert told["planning / XLA"] == "20%"


def test_what_xla_refuses_has_no_steps():
    (table,) = EXPERIMENT.tables([row(100, {"failure": "out of memory"})])
    assert table.rows[0][2] == "out of memory"
