"""``memplan calibrate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from memplan.cli.console import print_json, print_tables, write


def run_calibrate(options: argparse.Namespace) -> None:
    from memplan.calibrate.calibrating import calibrate
    from memplan.calibrate.writing import machine_text
    from memplan.machine_tables import machine_overview, rates_table, unstable_table

    with _bar() as progress:
        found = calibrate(
            options.name, disk=options.disk, seconds=options.seconds, progress=progress
        )
    out = options.out or Path(f"{found.machine.name}.toml")
    write(out, machine_text(found.machine))
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
    print(f"Wrote {out}: machine='{out}', or --machine {out}")


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
