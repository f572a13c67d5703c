"""What the tables of programs in chunks say."""

from __future__ import annotations

from typing import Any

from experiments.split import EXPERIMENT

OF = {"program": "vit", "target": "v5e", "fixed": 100}


def row(way: str, size: int, step_s: float, **more: Any) -> dict[str, Any]:
    return {**OF, "way": way, "bytes": size, "step_s": step_s, **more}


def beside(*planned: dict[str, Any]) -> tuple[str, ...]:
    rows = [row("plain", 2000, 1.0), row("by hand", 1000, 2.0, parts=4), *planned]
    _, table = EXPERIMENT.tables(rows)
    return table.rows[0]


def test_plans_beside_the_hand_are_those_in_its_seconds_and_in_its_bytes():
    small = row("memplan", 500, 2.05, within=1000)
    fast = row("memplan", 1020, 1.0, within=1030)
    slow = row("memplan", 100, 3.0, within=1000)
    fat = row("memplan", 1100, 0.5, within=1100)
    _, _, parts, _, in_seconds, _, in_bytes = beside(small, fast, slow, fat)
    assert (parts, in_seconds, in_bytes) == ("4", "0.500", "0.500")


def test_where_no_plan_is_as_good_there_is_a_dash():
    *_, in_seconds, _, in_bytes = beside(row("memplan", 1100, 3.0, within=1200))
    assert (in_seconds, in_bytes) == ("–", "–")
    failed = {**OF, "way": "memplan", "within": 1000, "failure": "refused"}
    *_, in_seconds, _, in_bytes = beside(failed)
    assert (in_seconds, in_bytes) == ("–", "–")
