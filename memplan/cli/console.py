"""What all commands share: errors, progress, and what they print and write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hlo_passes.errors import MemplanError

if TYPE_CHECKING:
    from memplan.report.tables import Table

FAILED, REFUSED = 1, 2
"""Exit status when a condition of ``--fail-on`` holds; and when the input or a budget is refused,
as for a wrong option."""


class UsageError(MemplanError, ValueError):
    """Options that do not go together."""


def without_devices() -> None:
    """Nothing runs here: an accelerator of this machine is neither needed nor taken."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_tables(tables: Iterable[Table]) -> None:
    from memplan.report.tables import write_tables

    write_tables(tables, sys.stdout)


@contextmanager
def progress(what: str) -> Generator[Callable[[str], None]]:
    """A spinner on stderr while something takes its time, beside which more can be said, and what
    is said stays; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{what}…"):
        yield lambda said: console.print(said, highlight=False)
