"""One HTML page that needs nothing but itself: no network, no library, one file to send.

``page.html`` beside this file holds the style and the script; a report fills two holes in
it. Its script puts every text on the page as text, never as markup.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from memplan.report.advising import Advice
from memplan.report.difference_tables import change_tables, figure_texts, summary_table
from memplan.report.differences import Differences
from memplan.report.finding_tables import advice_table, finding_tables
from memplan.report.findings import Findings
from memplan.report.sections import edit_tables, loop_tables, transfer_tables
from memplan.report.tables import Table
from memplan.report.view import Figure, Report, RunView, Step, figures

ROWS = 50
"""How many rows of a table a page has: it scrolls, a terminal does not."""

_CARDS = ("temp", "total", "Overlapped", "Step time, predicted")
_DIFFERENCE_CARDS = ("peak", "total", "step", "moved")


def render_html(
    report: Report, findings: Findings | None = None, advice: Sequence[Advice] = ()
) -> str:
    """Returns the page of a program, or of one with and without a plan. Some 100 bytes an
    instruction.

    Args:
      findings, advice: what there is to say of the only run.
    """
    rows = figures(report)
    return _page(
        report,
        rows,
        [row.label for row in rows if row.label.endswith(_CARDS)],
        {
            "advice": [advice_table(advice, ROWS)._replace(title="")] if advice else [],
            "findings": () if findings is None else finding_tables(findings, ROWS),
        },
    )


def render_differences(report: Report, found: Differences, overview: Sequence[Table] = ()) -> str:
    """Returns the page of two compilations. Some 100 bytes an instruction of both.

    Args:
      report: of the runs before and after.
      found: what differs.
      overview: tables about more than these two.
    """
    rows = [
        Figure(f.name, figure_texts(f)[:2], (f.before, f.after), "")
        for f in found.figures
        if f.before is not None or f.after is not None
    ]
    summary = [summary_table("", found), *overview]
    tables = {"summary": summary, "differences": change_tables(found, ROWS)}
    return _page(report, rows, _DIFFERENCE_CARDS, tables, _matched(report, found))


def _page(
    report: Report,
    rows: Sequence[Figure],
    cards: Sequence[str],
    tables: Mapping[str, Iterable[Table]],
    matched: Mapping[str, Any] | None = None,
) -> str:
    strings = _Strings()
    data = {
        "title": report.title,
        "machine": report.machine,
        "budget_bytes": report.budget_bytes,
        "note": report.note,
        "version": report.version,
        "figures": rows,
        "cards": cards,
        "runs": [_run(run, strings) for run in report.runs],
        "strings": strings.all,
        "tables": {section: _plain(found) for section, found in tables.items()},
        "matched": matched,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    template = resources.files("memplan.report").joinpath("page.html").read_text(encoding="utf-8")
    head, tail = template.split("@DATA@")
    # In a script element only "<" can begin something that ends it; JSON allows the escape.
    return head.replace("@TITLE@", html.escape(report.title)) + text.replace("<", "\\u003c") + tail


def _matched(report: Report, found: Differences) -> dict[str, Any]:
    """The tick after for each tick before, -1 for none; and in what they differ, by tick before."""
    before, after = (
        {step.instruction: tick for tick, step in enumerate(run.steps)} for run in report.runs
    )
    partners = [-1] * len(before)
    for a, b in found.matching.pairs:
        if a.name in before:
            partners[before[a.name]] = after.get(b.name, -1)
    differs = {
        before[c.before.instruction]: ", ".join(sorted(c.aspects))
        for c in found.instructions
        if c.before is not None and c.aspects and c.before.instruction in before
    }
    return {"partners": partners, "differs": differs}


def _plain(tables: Iterable[Table]) -> list[dict[str, Any]]:
    return [table._asdict() for table in tables]


def _run(run: RunView, strings: _Strings) -> dict[str, Any]:
    def step(step: Step) -> tuple[str, int, int]:
        return step.instruction, strings.index(step.op_name), strings.index(step.source_line)

    return {
        "name": run.name,
        "steps": list(map(step, run.steps)),
        "tiers": [
            {
                **asdict(tier),
                "peak_time": tier.peak_time,
                "peak_bytes": tier.peak_bytes,
                "held": [{**asdict(held), "name": held.name} for held in tier.held],
            }
            for tier in run.tiers
        ],
        "transfers": [
            {**asdict(t), "name": t.name, "route": t.route}
            for t in (*run.transfers, *run.collectives)
        ],
        "recomputed": dict(run.recomputed),
        "moves": _plain(transfer_tables("", run, ROWS)),
        "edits": _plain(edit_tables("", run)),
        "loops": _plain(loop_tables("", run)),
        "clock": None if run.clock is None else asdict(run.clock),
    }


class _Strings:
    """Thousands of instructions share a few hundred op names and source lines."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {"": 0}

    def index(self, text: str) -> int:
        return self._index.setdefault(text, len(self._index))

    @property
    def all(self) -> list[str]:
        return list(self._index)
