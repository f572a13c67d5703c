"""Reports of runs, as tables, JSON, pages and traces."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan import __version__
from memplan.cli.console import print_json, print_tables, write

if TYPE_CHECKING:
    from hlo_passes.hardware.machine import Machine
    from memplan.report.view import Report, RunView


def report_of(runs: Sequence[RunView], machine: Machine | None, budget: int | None) -> Report:
    from memplan.report.view import Report

    name = "" if machine is None else machine.name
    return Report(runs[0].module, name, budget, tuple(runs), __version__)


def show(options: argparse.Namespace, report: Report) -> None:
    from memplan.report.sections import report_tables
    from memplan.report.summary import summarize

    write_files(options, report)
    if options.json:
        print_json(summarize(report))
    else:
        print_tables(report_tables(report))


def write_files(options: argparse.Namespace, report: Report) -> None:
    from memplan.report.html import render_html

    if options.html:
        write(options.html, render_html(report))
    write_trace(options, report)


def write_trace(options: argparse.Namespace, report: Report) -> None:
    from memplan.report.trace import render_trace

    if options.trace:
        write(options.trace, render_trace(report))
