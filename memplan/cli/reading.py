"""Modules from files and the folders of dumps, as options choose them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.console import UsageError, progress, without_devices

if TYPE_CHECKING:
    from hlo_passes.hardware.machine import Machine, Platform
    from hlo_passes.ir import Module
    from memplan.executable import Executable


def check_choice(options: argparse.Namespace, of_folder: bool = False) -> None:
    chosen = of_folder or options.module or options.stage
    if chosen and not Path(options.source).is_dir():
        raise UsageError(
            f"--list, --module and --stage are for the folder of a dump; {options.source} is none"
        )


def read(options: argparse.Namespace, machine: Machine | None = None) -> Module:
    """Reads a file, or the module of a folder that the options choose; with `machine`, one that
    was not compiled for another platform."""
    from hlo_passes.reading.dump import choose_module, find_modules, largest_module
    from hlo_passes.reading.reader import read_module

    path = Path(options.source)
    if not path.is_dir():
        check_platform(path, machine)
        return read_module(path)
    modules = find_modules(path)
    chosen = choose_module(modules, options.module) if options.module else largest_module(modules)
    if len(modules) > 1 and not options.module:
        print(
            f"memplan: {chosen.key} is the largest of {len(modules)} modules in {path}; "
            "--list shows all, --module NAME chooses",
            file=sys.stderr,
        )
    check_platform(chosen.path(options.stage), machine)
    return chosen.read(options.stage)


def chosen_path(options: argparse.Namespace) -> Path:
    """Returns the file of the module that `read` reads."""
    from hlo_passes.reading.dump import choose_module, find_modules, largest_module

    path = Path(options.source)
    if not path.is_dir():
        return path
    modules = find_modules(path)
    chosen = choose_module(modules, options.module) if options.module else largest_module(modules)
    return chosen.path(options.stage)


def read_scheduled(options: argparse.Namespace) -> tuple[Module, Executable | None]:
    """Reads as `read`; what is not compiled yet is, for ``--machine``, and comes with its
    executable."""
    with progress("Reading"):
        module = read(options)
    if module.is_scheduled or not options.machine:
        return module, None
    without_devices()
    from memplan.unplanned import compile_module

    return compiled(lambda: compile_module(module, options.machine))


def compiled(compile_program: Callable[[], Executable]) -> tuple[Module, Executable]:
    """Compiles, and reads what became of it."""
    from hlo_passes.reading.reader import read_module

    with progress("Compiling"):
        executable = compile_program()
        return read_module(executable), executable


def check_platform(path: Path, machine: Machine | None) -> None:
    """Refuses a machine of another platform than that which a file's name says."""
    from hlo_passes.reading.dump import platform_of

    found = platform_of(path)
    if machine is not None and found not in (None, machine.platform):
        raise UsageError(
            f"{path}: it was compiled for {found}, not for {machine.platform} ({machine.name}); "
            "memplan plan MODULE:FUNCTION compiles for the machine"
        )


def platform_of_module(path: Path, module: Module) -> Platform | None:
    """What a scheduled module was compiled for, if its file's name or its text tells."""
    from hlo_passes.reading.dump import platform_of
    from memplan.report.build import target_of

    found = platform_of(path)
    if found is not None:
        return found
    # Nothing in a module says that it is for a CPU: it only has nothing of the others.
    target = target_of(module)
    return None if target == "cpu" else target
