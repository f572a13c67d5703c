"""``memplan passes``, ``machines`` and ``demo``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from memplan.cli.console import print_json, print_tables

if TYPE_CHECKING:
    pass


def run_passes(options: argparse.Namespace) -> None:
    from hlo_passes.pipeline import PASSES
    from memplan.report.tables import Column, Table

    if options.json:
        print_json([{"name": p.name, "establishes": p.establishes} for p in PASSES])
        return
    rows = tuple((str(n), p.name, p.establishes) for n, p in enumerate(PASSES, 1))
    columns = (Column("", right=True), Column("pass"), Column("establishes"))
    print_tables([Table("", columns, rows)])


def run_machines(options: argparse.Namespace) -> None:
    from hlo_passes.hardware.machine import load_machine, machine_names
    from memplan.machine_tables import machine_overview, machine_sources

    if options.name:
        machine = load_machine(options.name)
        if options.json:
            print_json(machine.to_dict())
        else:
            print_tables(machine_sources(machine))
        return
    machines = [load_machine(name) for name in machine_names()]
    if options.json:
        print_json([machine.to_dict() for machine in machines])
    else:
        print_tables([machine_overview(machines)])


def run_demo(options: argparse.Namespace) -> None:
    from memplan import demo

    demo.main(full=options.full, json=options.json)
