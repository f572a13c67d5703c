"""``memplan dojo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from memplan import __version__
from memplan.cli.console import UsageError, print_json, print_tables, progress
from memplan.cli.reading import platform_of_module

if TYPE_CHECKING:
    from memplan.dojo.scenarios import Program


def run_dojo(options: argparse.Namespace) -> None:
    from hlo_passes.garbage import collection_paused
    from hlo_passes.hardware.machine import load_machine
    from memplan.dojo.agents import make_agent
    from memplan.dojo.environment import SchedulingEnv
    from memplan.dojo.leaderboard import leaderboard_tables, played, summarize_leaderboard

    if options.episodes < 1:
        raise UsageError(f"--episodes {options.episodes}: expected at least 1")
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: expected a number that is not negative")
    agents = {name: make_agent(name) for name in dict.fromkeys(options.agents)}
    machines = [load_machine(name) for name in dict.fromkeys(options.machines)]
    with progress("Reading"):
        programs = [_program(path) for path in options.sources]
    pairs = [(p, m) for p in programs for m in machines if p.platform == m.platform]
    if not pairs:
        raise UsageError(
            f"none of the programs was compiled for {', '.join(m.platform for m in machines)}: "
            + ", ".join(f"{p.name} for {p.platform}" for p in programs)
        )
    env = SchedulingEnv(pairs, variants=options.variants, shares=_shares(options.budgets))
    with progress("Playing"), collection_paused():
        rows = [
            played(env, name, agent, options.seed + k)
            for k in range(options.episodes)
            for name, agent in agents.items()
        ]
    if options.json:
        print_json(summarize_leaderboard(rows, __version__))
    else:
        print_tables(leaderboard_tables(rows))


def _program(path: Path) -> Program:
    from hlo_passes.reading.reader import read_module
    from memplan.dojo.scenarios import Program

    module = read_module(path)
    if not module.is_scheduled:
        raise UsageError(
            f"{path}: expected a scheduled module; `memplan inspect` says how to come by one"
        )
    return Program(path.name.partition(".pb")[0], module, platform_of_module(path, module) or "cpu")


def _shares(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high or low)
    except ValueError:
        found = 1.0, 0.0
    if not 0 <= found[0] <= found[1]:
        raise UsageError(f"--budgets {text!r}: expected LOW:HIGH, two shares, 0.3:0.9")
    return found
