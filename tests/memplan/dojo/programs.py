"""Small programs that are short of memory for weights and for temporaries."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from experiments.synthetic import training_step_text
from hlo_passes.hardware.machine import load_machine
from hlo_passes.reading.reader import read_module
from memplan.dojo import Program, SchedulingEnv
from memplan.dojo.scenarios import Situations


@cache
def program(name: str, instructions: int) -> Program:
    return Program(name, read_module(training_step_text(instructions, "gpu")), "gpu")


@cache
def _situations() -> Situations:
    programs = program("short", 60), program("long", 160)
    # By their peaks: what is learned of kernels moves choices, and not all are played to the tick.
    machines = [replace(load_machine(name), corrections=()) for name in ("h100", "l4")]
    return Situations([(p, machine) for p in programs for machine in machines])


def env(**options) -> SchedulingEnv:
    """Two programs on two machines, posed once."""
    known = _situations()
    return SchedulingEnv(known.pairs, situations=known, **options)
