"""``memplan inspect``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.console import (
    UsageError,
    print_json,
    print_tables,
    progress,
    without_devices,
    write,
)
from memplan.cli.reading import check_choice, compiled, read_scheduled
from memplan.cli.reports import report_of, write_trace

if TYPE_CHECKING:
    from hlo_passes.ir import Module
    from hlo_passes.plan import Split
    from memplan.executable import Executable

    type _Compiled = tuple[Module, Executable]
    type _InChunks = list[tuple[tuple[Split, ...], _Compiled]]


def run_inspect(options: argparse.Namespace) -> None:
    from hlo_passes.garbage import collection_paused
    from hlo_passes.hardware.machine import load_machine
    from memplan.report.advising import advise
    from memplan.report.build import target_of, view_run
    from memplan.report.finding_tables import advice_table, finding_tables
    from memplan.report.html import render_html
    from memplan.report.inspecting import Inspector
    from memplan.report.sections import report_tables
    from memplan.report.summary import summarize, summarize_findings

    _check_inspect(options)
    if options.list:
        _list(options)
        return
    machine = load_machine(options.machine.partition(":")[0]) if options.machine else None
    module, executable, in_chunks = _inspected(options)
    with progress("Reading"), collection_paused():
        if executable is None:
            run = view_run("schedule", module, machine)
        else:
            run = view_run("XLA alone", module, machine, compiled=executable.memory_analysis())
        findings = Inspector(module, target_of(module, machine), machine).findings()
        runs = (
            (splits, view_run("in chunks", m, machine, compiled=e.memory_analysis()))
            for splits, (m, e) in in_chunks
        )
        advice = advise(run, findings, runs)
    report = report_of([run], machine, None)
    if options.html:
        write(options.html, render_html(report, findings, advice))
    write_trace(options, report)
    if options.json:
        print_json(summarize(report) | {"findings": summarize_findings(findings, advice)})
    else:
        figures, *rest = report_tables(report)
        print_tables([figures, advice_table(advice), *rest, *finding_tables(findings)])


def _check_inspect(options: argparse.Namespace) -> None:
    if options.trace and not options.machine:
        raise UsageError("--trace needs --machine: a trace is made of predicted seconds")
    if options.list and any((options.module, options.stage, options.html, options.trace)):
        raise UsageError("--list shows all modules: --module, --stage, --html, --trace show one")
    check_choice(options, options.list)


def _inspected(options: argparse.Namespace) -> tuple[Module, Executable | None, _InChunks]:
    """Returns the scheduled module, and the executable where it was compiled for that; and what is
    both with parts in chunks, where there is a function to ask."""
    from memplan.reference import is_reference, load_reference

    if is_reference(options.source):
        if not options.machine:
            raise UsageError(f"{options.source} needs --machine: what to compile it for")
        with progress("Loading"):
            without_devices()
            program = load_reference(options.source)
        from hlo_passes.reading.reader import read_module
        from memplan.unplanned import compile_in_chunks, compile_reference

        plain = compiled(lambda: compile_reference(program, options.machine))
        with progress("Compiling in chunks"):
            found = compile_in_chunks(program, options.machine)
            in_chunks = [(splits, (read_module(e), e)) for splits, e in found]
        return *plain, in_chunks
    return *read_scheduled(options), []


def _list(options: argparse.Namespace) -> None:
    from hlo_passes.reading.dump import find_modules
    from memplan.dump_tables import dump_overview, list_modules

    with progress("Reading"):
        listed = list_modules(find_modules(Path(options.source)))
    if options.json:
        print_json([asdict(each) for each in listed])
    else:
        print_tables([dump_overview(listed)])
