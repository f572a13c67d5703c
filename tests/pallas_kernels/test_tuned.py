"""Rows of tuned configurations: which one a kernel takes, and what is wrong with a file."""

import dataclasses
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels import tuned
from pallas_kernels.errors import TunedFileError, TunedRowError
from pallas_kernels.tuned import Key, Row, Tunable


class Order(enum.Enum):
    ROWS = "rows"
    COLUMNS = "columns"


@dataclasses.dataclass(frozen=True)
class Config:
    block: int
    order: Order
    parts: int


@dataclasses.dataclass(frozen=True)
class Problem:
    width: int
    length: int


def candidates(problem: Problem) -> Iterator[Config]:
    for block in (64, 128, 256):
        for order in Order:
            if block <= problem.length:
                yield Config(block, order, parts=problem.length // block)


KERNEL = Tunable(
    "sm90",
    "toy",
    lambda problem: Key({"width": problem.width}, {"length": problem.length}),
    candidates,
    derived=("parts",),
)
ROW = Row(
    "sm90",
    "toy",
    {"width": 64},
    {"length": 1024},
    {"block": 128, "order": "columns"},
    {"by": "evidence"},
    {"jax": "0"},
)


def write(path: Path, *rows: Row) -> Path:
    tuned.write(path, rows)
    return path


def test_without_a_row_it_is_the_first_candidate() -> None:
    assert KERNEL.choose(Problem(64, 1024)) == Config(64, Order.ROWS, 16)


def test_a_row_chooses_and_what_follows_from_the_problem_is_not_in_it(tmp_path: Path) -> None:
    with tuned.using(write(tmp_path / "rows.json", ROW)):
        assert KERNEL.choose(Problem(64, 1024)) == Config(128, Order.COLUMNS, 8)
        # The nearest size; another width is another kind of problem.
        assert KERNEL.choose(Problem(64, 4096)) == Config(128, Order.COLUMNS, 32)
        assert KERNEL.choose(Problem(128, 1024)) == Config(64, Order.ROWS, 16)
    assert KERNEL.choose(Problem(64, 1024)) == Config(64, Order.ROWS, 16)


def test_the_nearest_size_is_by_ratio(tmp_path: Path) -> None:
    small = dataclasses.replace(ROW, size={"length": 256}, config={"block": 64, "order": "columns"})
    with tuned.using(write(tmp_path / "rows.json", ROW, small)):
        assert KERNEL.choose(Problem(64, 500)).block == 64
        assert KERNEL.choose(Problem(64, 600)).block == 128


def test_the_innermost_file_is_asked_first(tmp_path: Path) -> None:
    other = dataclasses.replace(ROW, config={"block": 256, "order": "rows"})
    outer, inner = write(tmp_path / "a.json", ROW), write(tmp_path / "b.json", other)
    with tuned.using(outer), tuned.using(inner):
        assert KERNEL.choose(Problem(64, 1024)).block == 256
    with tuned.using(outer, inner):
        assert KERNEL.choose(Problem(64, 1024)).block == 256


def test_a_row_that_is_no_candidate_is_refused(tmp_path: Path) -> None:
    stale = dataclasses.replace(ROW, config={"block": 512, "order": "rows"})
    path = write(tmp_path / "rows.json", stale)
    with tuned.using(path), pytest.raises(TunedRowError) as caught:
        KERNEL.choose(Problem(64, 1024))
    assert str(caught.value) == (
        f"{path}: toy on sm90 has no candidate block=512, order=rows for width=64, length=1024. "
        "Tune it again, or take the row out."
    )


def test_a_row_of_another_size_that_does_not_fit_says_nothing(tmp_path: Path) -> None:
    with tuned.using(write(tmp_path / "rows.json", ROW)):
        assert KERNEL.choose(Problem(64, 100)) == Config(64, Order.ROWS, 1)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = dataclasses.replace(ROW, kernel="another")
    path = write(tmp_path / "rows.json", ROW, other)
    found = tuned.read(path)
    assert [dataclasses.replace(row, source="") for row in found] == [other, ROW]
    assert path.read_text().count("\n") == 4
    assert [each.name for each in tmp_path.iterdir()] == ["rows.json"]


def test_measured_stands_against_evidence_and_the_last_against_the_first() -> None:
    measured = dataclasses.replace(ROW, found={"by": "measured", "seconds": 1.0})
    faster = dataclasses.replace(ROW, found={"by": "measured", "seconds": 0.5})
    later = dataclasses.replace(ROW, versions={"jax": "1"})
    assert tuned.merge([ROW], [later]) == (later,)
    assert tuned.merge([ROW], [measured], [later]) == (measured,)
    assert tuned.merge([measured], [faster]) == (faster,)


def entry(**changes: Any) -> dict[str, Any]:
    return ROW.as_json() | changes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "it is not JSON"),
        ("{}", "it is not a list of rows"),
        (json.dumps([{"target": "sm90"}]), "row 0 does not have the fields target, kernel"),
        (json.dumps([entry(), entry(config=[])]), "config of row 1 is of the wrong type"),
        (json.dumps([entry(kernel=3)]), "kernel of row 0 is of the wrong type"),
        (json.dumps([entry(found={"by": "hearsay"})]), "found.by of row 0 is not one of measured"),
        (json.dumps([entry(size={"length": 0})]), "a size of row 0 is not a positive integer"),
        (json.dumps([entry(), entry()]), "rows 0 and 1 are of the same problem"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(TunedFileError, match=reason):
        tuned.read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TunedFileError, match="No such file"), tuned.using(tmp_path / "rows.json"):
        pass


def test_the_rows_of_the_package_are_sorted() -> None:
    rows = tuned.package_rows()
    lines = [json.dumps(row.as_json()) for row in rows]
    assert lines == sorted(lines)
