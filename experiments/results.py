"""Writes the tables of the pages in docs/ from the rows in docs/data/.

    python -m experiments.results

A page says between which lines a table stands, which experiment makes it, of which file, and its
title; what is between them is written anew, and below the table where its rows come from:

    <!-- table: dispatch | data/dispatch.jsonl | A call, without the program's own time -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from experiments.running import Experiment, Row, command, kept, stamps
from memplan.report.tables import Table

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "results.md", DOCS / "corpus.md")

VERSIONS = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "libtpu": "0.0.51", "cuda_plugin": "0.12.0.1"}
"""Those of rows of which nothing else is said."""

PLACE = re.compile(
    r"^<!-- table: (?P<experiment>\w+) \| (?P<file>\S+) \| (?P<title>.+?) -->\n"
    r"(?P<body>.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)


def main(_: Sequence[str]) -> None:
    for page in PAGES:
        page.write_text(PLACE.sub(_placed, page.read_text(encoding="utf-8")), encoding="utf-8")


def _placed(place: re.Match[str]) -> str:
    head = place[0].partition("\n")[0]
    return f"{head}\n{body(place)}<!-- end -->"


def body(place: re.Match[str]) -> str:
    """What belongs between the lines of a place: the table, and where its rows come from."""
    module = import_module(f"experiments.{place['experiment']}")
    experiment: Experiment = module.EXPERIMENT
    path = DOCS / place["file"]
    tables = {table.title: table for table in experiment.tables(kept(path))}
    if place["title"] not in tables:
        raise ValueError(
            f"{place['experiment']} makes no table {place['title']!r} of {path.name}: "
            f"expected one of {[*tables]}"
        )
    return "\n".join(["", *markdown(tables[place["title"]]), "", origin(stamps(path)), ""])


def markdown(table: Table) -> Iterator[str]:
    """The lines of a table."""
    yield _line(column.heading for column in table.columns)
    yield "|" + "|".join("---:" if column.right else "---" for column in table.columns) + "|"
    yield from map(_line, table.rows)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def origin(found: Sequence[Row]) -> str:
    """By which commits rows were measured, or came into the repository where only that is known,
    when, on what accelerator, with which versions."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for stamp in found:
        accelerator = stamp["machine"].get("accelerator")
        where = f"on {accelerator}, " if accelerator else ""
        groups[where + _versions(stamp["versions"])][_commit(stamp)] += 1
    texts: list[str] = []
    for versions, commits in groups.items():
        parts = [
            commit if count == len(found) else f"{commit} ({count} of {len(found)} rows)"
            for commit, count in commits.items()
        ]
        texts.append(f"{', '.join(parts)}, {versions}")
    text = "; ".join(texts)
    return f"*{text[0].upper()}{text[1:]}.*"


def _commit(stamp: Row) -> str:
    if "added" in stamp:
        return f"kept since commit {stamp['added']}, {stamp['date'][:10]}"
    changed = ", changed" if stamp["dirty"] else ""
    return f"measured at commit {stamp['commit']}{changed}, {stamp['date'][:10]}"


def _versions(versions: Row) -> str:
    names = [name for name in VERSIONS if name in versions]
    if all(versions[name] == VERSIONS[name] for name in names):
        return "versions as above"
    return ", ".join(f"{name} {versions[name]}" for name in names)


if __name__ == "__main__":
    command(main, lambda: None)
