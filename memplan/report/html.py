"""One HTML page that needs nothing but itself: no network, no library, one file to send.

``page.html`` beside this file holds the style and the script; a report fills two holes in
it. Its script puts every text on the page as text, never as markup.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from memplan.report.sections import edit_tables, loop_tables
from memplan.report.view import Report, RunView, Step, figures

_CARDS = ("temp", "total", "Overlapped", "Step time, predicted")


def render_html(report: Report) -> str:
    """Returns the page. Some 100 bytes an instruction."""
    template = resources.files("memplan.report").joinpath("page.html").read_text(encoding="utf-8")
    head, tail = template.split("@DATA@")
    return head.replace("@TITLE@", html.escape(report.title)) + _embedded(report) + tail


def _embedded(report: Report) -> str:
    strings = _Strings()
    rows = figures(report)
    data = {
        "title": report.title,
        "machine": report.machine,
        "budget_bytes": report.budget_bytes,
        "note": report.note,
        "version": report.version,
        "figures": rows,
        "cards": [row.label for row in rows if row.label.endswith(_CARDS)],
        "runs": [_run(run, strings) for run in report.runs],
        "strings": strings.all,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # In a script element only "<" can begin something that ends it; JSON allows the escape.
    return text.replace("<", "\\u003c")


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
        "edits": [table._asdict() for table in edit_tables("", run)],
        "loops": [table._asdict() for table in loop_tables("", run)],
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
