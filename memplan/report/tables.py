"""Tables for people: drawn on a terminal, plain columns in a pipe.

A pipe gets every cell whole, whatever the width, and the same text on every machine. On a
terminal the middle is left out of what would fill it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

# Characters of a cell on a terminal: more than any sentence of memplan's own.
_LONGEST = 400


class Column(NamedTuple):
    """A column's heading; numbers stand to the right."""

    heading: str
    right: bool = False


class Table(NamedTuple):
    """Rows of text under a title.

    Attributes:
      note: stands below it, ``""`` for none.
      about: none, or for each row where to look in each run that the table is about: an
        instruction (``"%fusion.3"``), a part of operations' names or source lines, or ``""``.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    about: tuple[tuple[str, ...], ...] = ()


def write_tables(tables: Iterable[Table], stream: TextIO) -> None:
    """Writes tables one below the other."""
    console = Console(file=stream, highlight=False)
    for k, table in enumerate(tables):
        if console.is_terminal:
            _draw(table, console)
        else:
            stream.write("\n" * (k > 0) + plain_text(table))


def plain_text(table: Table) -> str:
    """Returns a table as aligned columns, two blanks apart, without trailing blanks."""
    headings = tuple(column.heading for column in table.columns)
    lines = [headings, *table.rows] if any(headings) else list(table.rows)
    widths = [max(map(len, cells), default=0) for cells in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        )
        return "  ".join(padded).rstrip()

    text = [table.title, *("  " + line(cells) for cells in lines), *filter(None, [table.note])]
    return "\n".join(filter(None, text)) + "\n"


def _draw(table: Table, console: Console) -> None:
    drawn = RichTable(
        title=Text(_shortened(table.title)),
        caption=Text(table.note) if table.note else None,
        box=box.ROUNDED,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        show_header=any(column.heading for column in table.columns),
    )
    for column in table.columns:
        drawn.add_column(
            column.heading, justify="right" if column.right else "left", overflow="fold"
        )
    for row in table.rows:
        # Names may hold what rich would read as markup: params['w'][0].
        drawn.add_row(*(Text(_shortened(cell)) for cell in row))
    console.print(drawn)


def _shortened(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}"
