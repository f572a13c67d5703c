"""The page is one file, well formed, and shows names as text whatever they hold."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

import memplan.report.html as html
from hlo_passes.reading.reader import read_module
from memplan.report.build import view_run
from memplan.report.view import Report
from tests.memplan.programs import streamed_text

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags are balanced; keeps attributes and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        if self.open[-1:] == ["title"]:
            self.title += data


def data_of(page: Page):
    return json.loads(page.scripts[0])


def test_the_page_holds_the_report(report):
    data = data_of(Page(html.render_html(report)))
    assert [run["name"] for run in data["runs"]] == ["XLA alone", "memplan"]
    assert data["budget_bytes"] == 850 * 1024
    for run, shown in zip(report.runs, data["runs"], strict=True):
        assert len(shown["steps"]) == len(run.steps)
        name, op, line = shown["steps"][run.tiers[0].peak_time]
        peak = run.tiers[0].peak
        assert (name, data["strings"][op], data["strings"][line]) == tuple(peak)
        assert shown["tiers"][0]["peak_bytes"] == run.tiers[0].peak_bytes
    labels = [label for label, *_ in data["figures"]]
    assert set(data["cards"]) <= set(labels)
    # Whatever a machine model made says so.
    timed = [label for label in labels if re.search("time|Compute|Stalls|Link", label)]
    assert timed
    assert all(label.endswith(", predicted") for label in timed)


def test_the_page_asks_for_nothing(report):
    text = html.render_html(report)
    page = Page(text)
    addresses = re.findall(r"\b(?:https?:)?//[\w.-]+\.\w+[^\s\"'<]*", text)
    assert [a for a in addresses if "www.w3.org" not in a] == []
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object", "base")]
    assert not [a for _, a in page.tags if "src" in a or "href" in a]
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    (policy,) = (a for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in str(policy["content"])


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "</script><img onerror=x>", "<!--<script>", "&lt;@DATA@"]
)
def test_names_are_text(name):
    run = view_run("<b>run</b>", read_module(streamed_text(label=name)))
    page = Page(html.render_html(Report(name, "<i>", None, (run,), "0.0")))
    assert page.title == name
    assert len(page.scripts) == 2
    data = data_of(page)
    assert data["title"] == name
    assert data["runs"][0]["transfers"][0]["name"] == f"{name}[0]"
    assert "innerHTML" not in page.scripts[1]
    assert not [tag for tag, _ in page.tags if tag in ("img", "b", "i")]


def test_the_script_parses(report, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    script = tmp_path / "page.js"
    script.write_text(Page(html.render_html(report)).scripts[1])
    checked = subprocess.run([node, "--check", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_a_large_program_stays_small():
    run = view_run("schedule", read_module(streamed_text(layers=1000)))
    assert len(run.steps) > 5000
    assert len(html.render_html(Report("t", "", None, (run,), "0"))) < 400 * len(run.steps)
