"""``memplan intents``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.console import UsageError, print_tables, progress, without_devices
from memplan.cli.reading import check_choice, compiled, read_scheduled

if TYPE_CHECKING:
    from memplan.sidecar.intents import Intents


def run_intents(options: argparse.Namespace) -> None:
    from memplan.sidecar.forms import is_intents
    from memplan.sidecar.tables import intents_tables

    check_choice(options)
    if options.json and options.text:
        raise UsageError("--json and --text: expected one of them")
    path = Path(options.source)
    if path.is_file() and is_intents(path):
        intents = _read(options, path)
    else:
        intents = _built(options)
    if options.out:
        intents.save(options.out)
    if options.json or options.text:
        sys.stdout.write((intents.to_json() if options.json else intents.to_text()).rstrip() + "\n")
    else:
        print_tables(intents_tables(intents))


def _read(options: argparse.Namespace, path: Path) -> Intents:
    from memplan.sidecar.intents import Intents

    if options.machine or options.plan:
        raise UsageError(f"{path} has intents already: --machine and --plan are for a program")
    return Intents.load(path)


def _built(options: argparse.Namespace) -> Intents:
    from hlo_passes.hardware.machine import load_machine
    from hlo_passes.plan import Plan
    from hlo_passes.reading.reader import read_module
    from memplan.reference import is_reference, load_reference
    from memplan.sidecar.building import intents

    is_function = is_reference(options.source)
    if not options.machine and (is_function or options.plan):
        what = options.source if is_function else "--plan"
        raise UsageError(f"{what} needs --machine: what it is compiled for")
    machine = load_machine(options.machine.partition(":")[0]) if options.machine else None
    plan = Plan.load(options.plan) if options.plan else None
    if not is_function:
        module, _ = read_scheduled(options)
        with progress("Reading"):
            return intents(module, machine=machine, plan=plan)
    with progress("Loading"):
        without_devices()
        program = load_reference(options.source)
    from memplan.unplanned import compile_reference, target_of

    if plan is None:
        module, _ = compiled(lambda: compile_reference(program, options.machine))
        return intents(read_module(module), machine=machine)
    with progress("Compiling"):
        step = program.jit(machine=target_of(options.machine), plan=plan)
        return intents(step.lower(*program.args).compile())
