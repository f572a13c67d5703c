"""``memplan dis``, ``as``, ``run`` and ``repack``: what the runtime reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memplan.cli.console import (
    UsageError,
    print_json,
    print_tables,
    progress,
    without_devices,
    write,
)


def run_dis(options: argparse.Namespace) -> None:
    from hlo_passes.chains.text import disassemble, windows
    from memplan.chains import read_chain

    chain = read_chain(options.chain)
    sys.stdout.write(windows(chain) if options.windows else disassemble(chain))


def run_as(options: argparse.Namespace) -> None:
    from hlo_passes.chains.binary import to_bytes
    from memplan.chains import read_chain

    options.out.write_bytes(to_bytes(read_chain(options.chain)))


def run_chain(options: argparse.Namespace) -> None:
    from memplan.chains import read_chain, replay_alone
    from memplan.report.replayed import render_replayed

    if options.replays < 1:
        raise UsageError(f"--replays: expected 1 or more, found {options.replays}")
    chain = read_chain(options.chain)
    with progress(f"Replaying {options.replays} times"):
        replayed = replay_alone(chain, options.replays)
    if options.trace:
        write(options.trace, render_replayed(chain, replayed.records))
    if options.json:
        print_json(replayed.to_dict())
    else:
        print_tables(replayed.tables())


def run_repack(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from memplan import disk

    without_devices()
    sources: list[Path] = options.sources
    columns = BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        disk.repack(
            sources[0] if len(sources) == 1 else sources,
            options.file,
            told=lambda done, of: bar.update(task, completed=done, total=of),
        )
