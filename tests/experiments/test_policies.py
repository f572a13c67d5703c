"""Each run is one process; what fails is a row."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import policies
from experiments.policies import EXPERIMENT, front
from experiments.running import Row
from hlo_passes.hardware.machine import load_machine

POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)))
CASE = {"step": "llama", "target": "v5e", "policy": "none", "hbm": None, "limit": None}


def row(total: int, step_s: float, hbm: int | None = None, way: str = "way") -> Row:
    found = {"total": total, "temp": 0, "host": 0, "moved": 0, "overlapped": None}
    return {**CASE, "way": way, "what": "what", "hbm": hbm, **found, "step_s": step_s}


def held_against(rows: list[Row]) -> list[str]:
    (table,) = EXPERIMENT.tables(rows)
    column = [c.heading for c in table.columns].index("within it")
    return [cells[column] for cells in table.rows]


def test_a_row_is_held_against_the_others_that_take_no_more_memory():
    rows = [row(8, 1.0), row(4, 2.0), row(6, 1.5), row(2, 9.0, hbm=2), row(6, 1.2, hbm=6)]
    assert held_against(rows) == ["1.5 s", "–", "2 s", "–", "1.5 s"]


def test_a_failure_is_a_row_without_figures():
    failed: Row = {**CASE, "way": "way", "what": "what", "failure": "out of memory"}
    (table,) = EXPERIMENT.tables([failed, row(8, 1.0)])
    cells = table.rows[0]
    assert cells[:3] == ("way", "what", "out of memory")
    assert set(cells[3:]) == {"–"}
    assert len(cells) == len(table.columns)
    (axes,) = drawn([failed])
    assert not axes.lines


@pytest.mark.parametrize(
    ("machine", "limit", "percent"), [("v5e", 8_454_668_288, "50"), ("h200", 1, "1")]
)
def test_a_limit_is_a_share_of_the_device(machine: str, limit: int, percent: str):
    options = policies._limit_options(load_machine(machine), limit)
    assert options is not None
    assert list(options.values()) == [percent]


@given(POINTS)
def test_a_front_is_what_no_point_beats(points: list[tuple[int, int]]):
    found = front(points)
    beaten = {p for p in points for q in points if q[0] <= p[0] and q[1] <= p[1] and q != p}
    assert set(found) == {p for p in points if p not in beaten}
    assert [y for _, y in found] == sorted({y for _, y in found}, reverse=True)


def drawn(rows: list[Row]) -> list[Any]:
    assert EXPERIMENT.plot is not None
    return EXPERIMENT.plot(rows).axes


def test_every_point_is_drawn_once_and_named():
    rows = [row(1 << 30, 1e-3, way="jit"), row(2 << 30, 5e-4, way="jit"), row(3 << 30, 1e-3)]
    (axes,) = drawn(rows)
    points, _, other, _ = (line.get_xydata().tolist() for line in axes.lines)
    assert points == [[1, 1], [2, 0.5]]
    assert other == [[3, 1]]
    assert [text.get_text() for text in axes.texts] == ["what"] * 3
