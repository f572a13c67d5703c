"""``memplan calibrate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.console import UsageError, print_json, print_tables, write

if TYPE_CHECKING:
    from hlo_passes.hardware.machine import Machine


def run_calibrate(options: argparse.Namespace) -> None:
    if bool(options.profile) != bool(options.machine):
        raise UsageError("--profile and --machine: expected both, or none to measure what is here")
    if options.profile:
        _learn(options)
    else:
        _measure(options)


def _learn(options: argparse.Namespace) -> None:
    from hlo_passes.hardware.machine import load_machine
    from memplan.calibrate.learning import corrected
    from memplan.machine_tables import corrections_table, machine_overview
    from memplan.profiles import Profile

    profiles = {path.name: Profile.load(path) for path in options.profile}
    today = datetime.now(UTC).date().isoformat()
    machine = corrected(load_machine(options.machine), profiles, today)
    out = _written(options, machine)
    if options.json:
        print_json({"file": str(out), **machine.to_dict()})
        return
    print_tables([machine_overview([machine]), corrections_table(machine)])
    _say(out)


def _written(options: argparse.Namespace, machine: Machine) -> Path:
    from memplan.calibrate.writing import machine_text

    out: Path = options.out or Path(f"{machine.name}.toml")
    write(out, machine_text(machine))
    return out


def _say(out: Path) -> None:
    print(f"Wrote {out}: machine='{out}', or --machine {out}")


def _measure(options: argparse.Namespace) -> None:
    from memplan.calibrate.calibrating import calibrate
    from memplan.machine_tables import machine_overview, rates_table, unstable_table

    with _bar() as progress:
        found = calibrate(
            options.name, disk=options.disk, seconds=options.seconds, progress=progress
        )
    out = _written(options, found.machine)
    if options.json:
        meter = None if found.meter is None else found.meter.name
        said = {"file": str(out), "unstable": found.unstable, "energy": meter}
        print_json({**said, **found.machine.to_dict()})
        return
    print_tables([machine_overview([found.machine]), rates_table(found.machine)])
    if found.unstable:
        print_tables([unstable_table(found.unstable, len(found.spreads))])
    if found.meter is None:
        print(
            "Nothing of energy: neither nvidia-smi nor the counters of /sys/class/powercap (often "
            "root's) can be read"
        )
    _say(out)


@contextmanager
def _bar() -> Generator[Callable[[str, float], None]]:
    """A bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=done)

        yield progress
