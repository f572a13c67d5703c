"""``memplan simulate`` and ``memplan whatif``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hlo_passes.errors import (
    CompilationError,
    CompilerMissingError,
    NotOnMachineError,
    TopologyError,
)
from memplan import __version__
from memplan.cli.console import UsageError, print_json, print_tables, progress, without_devices
from memplan.cli.reading import (
    check_choice,
    check_platform,
    chosen_path,
    compiled,
    platform_of_module,
    read,
)

if TYPE_CHECKING:
    from hlo_passes.hardware.machine import Machine, Platform
    from hlo_passes.ir import Module
    from hlo_passes.simulator.timeline import Jitter
    from memplan.whatif import Fuse, Split

_ALL = "all"
_STEPS = 1000


def run_simulate(options: argparse.Namespace) -> None:
    from hlo_passes.garbage import collection_paused
    from memplan.report.simulated import (
        SimulatedView,
        hosted_at,
        simulated,
        simulated_tables,
        summarize_simulated,
    )

    jitter = _jitter(options)
    check_choice(options)
    module_for, names = _source(options)
    views: list[SimulatedView] = []
    skipped: dict[str, str] = {}
    for name in names:
        try:
            machine = _machine(name)
            if options.tier:
                machine = hosted_at(machine, options.tier)
            module = module_for(name)
        except (CompilationError, CompilerMissingError, NotOnMachineError, TopologyError) as error:
            if _ALL not in options.machine:
                raise
            skipped[name] = str(error)
            continue
        with progress("Simulating"), collection_paused():
            _, colon, extent = name.partition(":")
            views.append(simulated(module, machine, machine.name + colon + extent, jitter))
    if options.json:
        print_json(summarize_simulated(views, jitter, skipped, __version__))
    else:
        print_tables(simulated_tables(views, jitter, skipped))


def run_whatif(options: argparse.Namespace) -> None:
    from hlo_passes.garbage import collection_paused
    from memplan.whatif import best_edits, summarize_what_if, what_if, what_if_tables

    if options.best < 1:
        raise UsageError(f"--best {options.best}: expected at least 1")
    edits = [_edit(*wanted) for wanted in options.edits]
    check_choice(options)
    options.machine = [options.machine]
    module_for, (name,) = _source(options)
    machine = _machine(name)
    module = module_for(name)
    with progress("Simulating"), collection_paused():
        if edits:
            found = what_if(module, machine, edits)
        else:
            found = best_edits(module, machine, options.best)
    if options.json:
        print_json(summarize_what_if(found, __version__))
    else:
        print_tables(what_if_tables(found))


def _edit(kind: str, text: str) -> Fuse | Split:
    """What ``--fuse`` or ``--split`` asks for."""
    from memplan.whatif import Fuse, Split

    between = "," if kind == "fuse" else ":"
    first, _, second = (part.strip() for part in text.replace("%", "").rpartition(between))
    if kind == "fuse" and first and second:
        return Fuse(first, second)
    if kind == "split" and first and second.isdecimal():
        return Split(first, int(second))
    expected = "the names of two kernels, A,B" if kind == "fuse" else "a kernel and a number, A:8"
    raise UsageError(f"--{kind} {text!r}: expected {expected}")


def _source(options: argparse.Namespace) -> tuple[Callable[[str], Module], Sequence[str]]:
    """Returns what gives the scheduled module for a machine, and the names of the machines."""
    from memplan.reference import is_reference, load_reference

    if is_reference(options.source):
        with progress("Loading"):
            without_devices()
            program = load_reference(options.source)
        from memplan.unplanned import compile_reference

        return lambda name: compiled(lambda: compile_reference(program, name))[0], _names(options)

    with progress("Reading"):
        module = read(options)
    if not module.is_scheduled:
        without_devices()
        from memplan.unplanned import compile_module

        return lambda name: compiled(lambda: compile_module(module, name))[0], _names(options)

    path = chosen_path(options)
    names = _names(options, platform_of_module(path, module))
    for name in names:
        check_platform(path, _machine(name))
    return lambda _: module, names


def _names(options: argparse.Namespace, platform: Platform | None = None) -> Sequence[str]:
    """The machines that are asked for; of all, those of the platform, if it is known."""
    from hlo_passes.hardware.machine import load_machine, machine_names

    names: list[str] = []
    for name in options.machine:
        if name != _ALL:
            names.append(name)
            continue
        machines = map(load_machine, machine_names())
        names += [m.name for m in machines if platform in (None, m.platform)]
    return list(dict.fromkeys(names))


def _machine(name: str) -> Machine:
    """The machine of a topology."""
    from hlo_passes.hardware.machine import load_machine

    return load_machine(name.partition(":")[0])


def _jitter(options: argparse.Namespace) -> Jitter | None:
    from hlo_passes.simulator.timeline import Jitter

    if options.jitter is None:
        if options.steps is not None or options.seed is not None:
            raise UsageError("--steps and --seed are of the steps that --jitter draws")
        return None
    steps = _STEPS if options.steps is None else options.steps
    seed = 0 if options.seed is None else options.seed
    if steps < 1:
        raise UsageError(f"--steps {steps}: expected at least 1")
    if seed < 0:
        raise UsageError(f"--seed {seed}: expected a number that is not negative")
    return Jitter(_variation(options.jitter), steps, seed)


def _variation(text: str) -> float:
    number, percent, rest = text.strip().partition("%")
    try:
        variation = float(number) / (100 if percent else 1)
    except ValueError:
        variation = math.nan
    if rest or not 0 <= variation < math.inf:
        raise UsageError(f"--jitter {text!r}: expected a percentage, 5%, or a fraction, 0.05")
    return variation
