"""FileCheck-style tests of passes, collected from `tests/**/*.hlo`.

    // RUN: <name> [options]
    // CHECK:      [[COPY:%copy-start[.0-9]*]] = {{.*}} copy-start
    // CHECK-NEXT: copy-done([[COPY]])

    HloModule fires
    ...

`<name>` is a key of `tests.hlo_passes.runs.RUNS`; the function there gets the text of the
module and the options, and its result is held against the CHECK lines by `filecheck`, a
Python clone of LLVM's FileCheck (CHECK, -NEXT, -SAME, -NOT, -DAG, -LABEL, -COUNT-n, -EMPTY;
`CHECK{LITERAL}:` where the HLO itself has double braces). A line `// -----` separates tests
in one file, so that "fires" and "leaves alone" can stand side by side; each has its own RUN
and CHECK lines. A file that has neither is data, not a test.
"""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts

_SEPARATOR = re.compile(r"^// -----\s*$")
_COMMENT = re.compile(r"^\s*//")
_CHECK = re.compile(r"^\s*//\s*CHECK[-\w{}]*:")
_RUN = re.compile(r"^\s*//\s*RUN:\s*(\S+)\s*(.*?)\s*$")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class HloTestError(Exception):
    """A test in an `.hlo` file is malformed, or its output does not match its CHECK lines."""


@dataclass(frozen=True)
class Section:
    """One test of a file. `module` and `checks` keep the line numbers of the file."""

    line: int
    run: str
    options: str
    module: str
    checks: str


def is_test(path: Path) -> bool:
    """Whether the file has RUN or CHECK lines, that is, whether it is more than data."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return any(_RUN.match(line) or _CHECK.match(line) for line in lines)


def sections(text: str) -> list[Section]:
    """Splits the text of a file into its tests.

    Raises:
      HloTestError: when a test has no RUN line, several, or no CHECK line.
    """
    lines = text.splitlines()
    cuts = [i for i, line in enumerate(lines) if _SEPARATOR.match(line)]
    spans = zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(lines)], strict=True)
    return [_section(lines, start, end) for start, end in spans]


def _section(lines: list[str], start: int, end: int) -> Section:
    own = range(start, end)
    runs = [(i, match) for i in own if (match := _RUN.match(lines[i]))]
    if len(runs) != 1:
        raise HloTestError(f"line {start + 1}: a test has one RUN line, found {len(runs)}")
    if not any(_CHECK.match(lines[i]) for i in own):
        raise HloTestError(f"line {start + 1}: no CHECK line: this test would always pass")
    line, match = runs[0]
    comments = {i for i in own if _COMMENT.match(lines[i])}
    module = [lines[i] if i in own and i not in comments else "" for i in range(end)]
    checks = [lines[i] if i in comments else "" for i in range(end)]
    return Section(line + 1, match[1], match[2], _join(module), _join(checks))


def _join(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def mismatch(section: Section, output: str, path: str) -> str | None:
    """What FileCheck says about `output`, naming the CHECK line; None where all lines hold."""
    options = Options(match_filename=path, input_file="output")
    parser = Parser(options, io.StringIO(section.checks), *pattern_for_opts(options))
    matcher = Matcher(options, FInput("output", output), parser)
    matcher.stderr = io.StringIO()
    if matcher.run() == 0:
        return None
    return _ANSI.sub("", matcher.stderr.getvalue()).strip()


class HloFile(pytest.File):
    """A file of tests: one item for each section."""

    def collect(self) -> Iterable["HloItem"]:
        try:
            found = sections(self.path.read_text(encoding="utf-8"))
        except HloTestError as error:
            raise self.CollectError(f"{self.path}: {error}") from None
        for section in found:
            name = f"{section.run}:{section.line}"
            yield HloItem.from_parent(self, name=name, section=section)


class HloItem(pytest.Item):
    """One section: run the pass, hold its output against the CHECK lines."""

    def __init__(self, *, section: Section, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.section = section

    def runtest(self) -> None:
        # Not at the top: collecting the tests must not need every pass to import.
        from tests.hlo_passes.runs import RUNS

        if self.section.run not in RUNS:
            known = ", ".join(sorted(RUNS))
            raise HloTestError(f"RUN: there is no {self.section.run!r}; there are: {known}")
        output = RUNS[self.section.run](self.section.module, self.section.options)
        if (message := mismatch(self.section, output, str(self.path))) is not None:
            numbered = (f"{i:5} {line}" for i, line in enumerate(output.splitlines(), 1))
            raise HloTestError(message + "\n\nThe output:\n" + _join(numbered))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, HloTestError):
            return f"{self.path}:{self.section.line}\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.section.line - 1, self.name
