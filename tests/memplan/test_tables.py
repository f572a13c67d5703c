"""Tables in a pipe and on a terminal."""

import io

import pytest

from memplan.report.sections import report_tables
from memplan.report.tables import Column, Table, plain_text, write_tables

TABLE = Table(
    "what moves",
    (Column("buffer"), Column("bytes", right=True)),
    (("params['w'][0]", "1.0 KiB"), ("[bold]x[/bold]", "8 B")),
    "and 3 more",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_aligned_columns():
    assert plain_text(TABLE) == (
        "what moves\n"
        "  buffer            bytes\n"
        "  params['w'][0]  1.0 KiB\n"
        "  [bold]x[/bold]      8 B\n"
        "and 3 more\n"
    )


def test_a_table_without_headings_has_no_heading_line():
    assert plain_text(Table("", (Column(""),), (("a",), ("b",)))) == "  a\n  b\n"


def test_a_pipe_gets_long_cells_whole():
    stream = io.StringIO()
    write_tables([Table("", (Column("name"),), (("x" * 500,),))], stream)
    assert "x" * 500 in stream.getvalue()


def test_a_terminal_gets_a_drawing_and_names_as_they_are(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    write_tables([TABLE], stream)
    drawn = stream.getvalue()
    assert "╭" in drawn
    assert "params['w'][0]" in drawn
    assert "[bold]x[/bold]" in drawn


def test_a_terminal_gets_both_ends_of_long_names(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    name = "begin" + "x" * 5000 + "end"
    write_tables([Table(name, (Column("name"),), ((name,), ("y" * 300,)))], stream)
    drawn = stream.getvalue()
    assert len(drawn) < 3000
    assert drawn.count("…") == 2
    assert "begin" in drawn
    assert "end" in drawn
    assert drawn.count("y") == 300


def test_a_report_of_two_runs_names_them(report, golden):
    golden("report.txt", "\n".join(map(plain_text, report_tables(report))))


def test_what_is_left_out_is_counted(report):
    run = report.runs[0]
    (held,) = (t for t in report_tables(report) if t.title == f"{run.name}: held at the hbm peak")
    assert len(held.rows) == min(10, run.tiers[0].held_count)
    assert bool(held.note) == (run.tiers[0].held_count > 10)


@pytest.mark.parametrize("limit", [0, 1])
def test_long_lists_say_how_much_more_there_is(report, monkeypatch, limit):
    monkeypatch.setattr("memplan.report.sections.TRANSFER_LIMIT", limit)
    (table, *_) = (t for t in report_tables(report) if "least hidden" in t.title)
    assert len(table.rows) == limit
    assert table.note == f"and {3 - limit} more"
