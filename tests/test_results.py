"""The pages of results say what the rows in docs/data/ say, and where each table comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import results
from experiments.results import DOCS, PAGES, PLACE, VERSIONS, body, markdown, origin
from memplan.report.tables import Column, Table

PLACES = [(page, place) for page in PAGES for place in PLACE.finditer(page.read_text())]

STAMP = {
    "commit": "abc",
    "dirty": False,
    "date": "2026-01-02T03:04:05+00:00",
    "machine": {"cores": 2},
    "versions": {"python": "3.12.1", **VERSIONS},
}


def named(case: object) -> str | None:
    return case["title"] if isinstance(case, re.Match) else getattr(case, "stem", None)


@pytest.mark.parametrize(("page", "place"), PLACES, ids=named)
def test_a_table_is_what_its_rows_say(page: Path, place: re.Match[str]):
    found, expected = place["body"].split("\n"), body(place).split("\n")
    for n, (line, due) in enumerate(zip(found, expected, strict=False)):
        assert line == due, f"line {n} of the table: run `python -m experiments.results`"
    assert len(found) == len(expected), "run `python -m experiments.results`"


def tables(text: str) -> list[tuple[str, str]]:
    """Each table's first line, and the next line below it that is none of its own."""
    found: list[tuple[str, str]] = []
    lines = [line.strip() for line in text.splitlines()]
    for n, line in enumerate(lines):
        if line.startswith("|") and not lines[n - 1].startswith("|"):
            rest = (line for line in lines[n:] if line and not line.startswith("|"))
            found.append((line, next(rest, "")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_table_says_where_it_comes_from(page: Path):
    told = re.compile(r"\*.*commits? [0-9a-f]{9}\b.*, \d{4}-\d\d-\d\d.*\*")
    silent = [table for table, below in tables(page.read_text()) if not told.fullmatch(below)]
    assert not silent


def test_a_table_that_says_nothing_is_seen():
    assert tables("| a |\n|---|\n\nText.\n\n  | b |\n  |---|\n\n  *Said.*\n") == [
        ("| a |", "Text."),
        ("| b |", "*Said.*"),
    ]


def test_all_rows_are_shown_somewhere():
    shown = {DOCS / place["file"] for _, place in PLACES}
    assert shown == {*(DOCS / "data").glob("*.jsonl")}


@pytest.mark.parametrize("path", sorted((DOCS / "data").glob("*.jsonl")), ids=named)
def test_every_row_has_a_stamp(path: Path):
    for line in path.read_text().splitlines():
        stamp = json.loads(line)["stamp"]
        assert ("commit" in stamp) != ("added" in stamp)
        assert {"date", "machine", "versions"} <= stamp.keys()


def test_versions_as_above_are_those_above():
    head, _, _ = (DOCS / "results.md").read_text().partition("\n## ")
    for version in VERSIONS.values():
        assert version in head


def test_what_differs_from_the_page_is_said():
    assert origin([STAMP, STAMP]) == "*Measured at commit abc, 2026-01-02, versions as above.*"
    dirty = STAMP | {"dirty": True}
    assert origin([dirty]).startswith("*Measured at commit abc, changed, 2026")
    other = STAMP | {"versions": STAMP["versions"] | {"jax": "9.9"}}
    assert "jax 9.9, jaxlib" in origin([other])
    there = STAMP | {"machine": {"accelerator": "H100"}}
    assert "2026-01-02, on H100, versions" in origin([there])
    old = {k: v for k, v in STAMP.items() if k not in ("commit", "dirty")} | {"added": "def"}
    assert origin([STAMP, old, old]) == (
        "*Measured at commit abc, 2026-01-02 (1 of 3 rows), "
        "kept since commit def, 2026-01-02 (2 of 3 rows), versions as above.*"
    )
    assert origin([STAMP, there]) == (
        "*Measured at commit abc, 2026-01-02 (1 of 2 rows), versions as above; "
        "measured at commit abc, 2026-01-02 (1 of 2 rows), on H100, versions as above.*"
    )


def test_a_row_of_a_page_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.md"
    mark = "<!-- table: corpus | data/corpus.jsonl | Summary -->"
    page.write_text(f"Before.\n\n{mark}\nold\n<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr(results, "PAGES", (page,))
    results.main(())
    once = page.read_text()
    assert "old" not in once
    assert once.startswith(f"Before.\n\n{mark}\n\n| target |")
    assert once.endswith("*\n<!-- end -->\n\nAfter.\n")
    results.main(())
    assert page.read_text() == once


def test_a_title_that_no_table_has_is_told():
    place = PLACE.match("<!-- table: corpus | data/corpus.jsonl | Nothing -->\n<!-- end -->")
    assert place is not None
    with pytest.raises(ValueError, match=r"no table 'Nothing' of corpus\.jsonl: expected one of"):
        body(place)


def test_a_bar_in_a_cell_does_not_end_it():
    table = Table("t", (Column("a"), Column("b", right=True)), (("x|y", "1"),))
    assert [*markdown(table)] == ["| a | b |", "|---|---:|", r"| x\|y | 1 |"]
