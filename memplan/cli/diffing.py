"""``memplan diff``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memplan import __version__
from memplan.cli.console import (
    FAILED,
    UsageError,
    print_json,
    print_tables,
    progress,
    without_devices,
    write,
)

if TYPE_CHECKING:
    from hlo_passes.hardware.machine import Machine
    from memplan.report.differences import Compared
    from memplan.report.view import Report

# How many modules a sentence names.
_NAMED = 4


def run_diff(options: argparse.Namespace) -> int:
    from hlo_passes.garbage import collection_paused
    from hlo_passes.hardware.machine import load_machine
    from memplan.diff import compare_paths
    from memplan.report.difference_tables import difference_tables, overview_table
    from memplan.report.differences import find_differences
    from memplan.report.html import render_differences
    from memplan.report.summary import summarize_differences

    _check_diff(options)
    machine = load_machine(options.machine.partition(":")[0]) if options.machine else None
    if options.program:
        compared = (_compiled_twice(options, machine),)
    else:
        with progress("Reading"), collection_paused():
            before, after = map(Path, options.sources)
            compared = compare_paths(before, after, options.module, machine)
    failed = _failing(options.fail_on, compared)
    first = compared[0]
    with progress("Comparing"):
        found = None if first.sides is None else find_differences(*first.sides)
    overview = [overview_table(compared)] if len(compared) > 1 or found is None else []
    if options.html:
        if found is None:
            raise UsageError(f"--html needs two modules to compare; {first.name}: {first.problem}")
        report = _difference_report(first, machine)
        write(options.html, render_differences(report, found, overview))
    if options.json:
        print_json(summarize_differences(compared, found, failed))
    else:
        print_tables([*overview, *(difference_tables(first.name, found) if found else ())])
    for sentence in failed:
        print(f"memplan: {sentence}", file=sys.stderr)
    return FAILED if failed else 0


def _check_diff(options: argparse.Namespace) -> None:
    if len(options.sources) != (0 if options.program else 2):
        raise UsageError("diff takes two modules or folders, or --run MODULE:FUNCTION")
    if options.with_flags and not options.program:
        raise UsageError("--with-flags is for --run: files and folders are compiled already")
    if options.module is not None and not any(Path(path).is_dir() for path in options.sources):
        found = " or ".join(options.sources) or "--run"
        raise UsageError(f"--module is for the folder of a dump, not for {found}")


def _difference_report(compared: Compared, machine: Machine | None) -> Report:
    from memplan.report.view import Report

    assert compared.sides is not None
    names = zip(("before", "after"), compared.sides, strict=True)
    runs = tuple(replace(side.run, name=name) for name, side in names)
    return Report(compared.name, "" if machine is None else machine.name, None, runs, __version__)


def _compiled_twice(options: argparse.Namespace, machine: Machine | None) -> Compared:
    from hlo_passes.reading.reader import read_module
    from memplan.diff import parse_flags
    from memplan.reference import load_reference
    from memplan.report.differences import compare_modules

    if not options.machine or len(options.with_flags) != 2:
        raise UsageError("--run needs --machine and two --with-flags, one of them '' for none")
    flags = [parse_flags(text) for text in options.with_flags]
    with progress("Loading"):
        without_devices()
        program = load_reference(options.program)
    from memplan.unplanned import compile_reference

    with progress("Compiling twice"):
        before, after = (read_module(compile_reference(program, options.machine, f)) for f in flags)
    key = options.with_flags[0] or "no flags", options.with_flags[1] or "no flags"
    return compare_modules(key, before, after, machine)


def _failing(conditions: Sequence[str], compared: Sequence[Compared]) -> list[str]:
    """What each condition that holds says of each module.

    Raises:
      UsageError: when there are conditions, and no module was found, and read, on both sides.
    """
    from memplan.report.conditions import parse_condition
    from memplan.report.difference_tables import figure_texts

    if conditions and not any(each.figures for each in compared):
        why = "; ".join(f"{each.name}: {each.problem}" for each in compared[:_NAMED])
        raise UsageError(f"--fail-on has nothing to compare: {why}")
    failed: list[str] = []
    for each in compared:
        for text in conditions if each.figures else ():
            condition = parse_condition(text, each.figures)
            figure = next(f for f in each.figures if f.name == condition.name)
            if condition.holds(figure):
                before, after, _ = figure_texts(figure)
                failed.append(f"{each.name}: {figure.name} was {before}, is {after}: {text}")
    return failed
