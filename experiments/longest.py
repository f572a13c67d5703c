"""How long an input does one device take, as it is and in chunks?

    python -m experiments.longest [--program gpt] [--target v5e] [--json FILE [--resume | --show]]

The models of `experiments.split_programs` whose input has a length (tokens of a prompt, residues of
a protein, the side of a latent), on inputs ever longer by a half: XLA's own program, and memplan's
within the device's memory, until the target's compiler refuses it, or it takes more than there is.
memplan begins with the longest of XLA's. Nothing is run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from absl import flags

from experiments import split_programs
from experiments.isolated import Failure, isolated
from experiments.running import FLAGS, Experiment, Row, Rows
from experiments.split_programs import Program
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes
from memplan.api import jit
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology

_TIMEOUT_S = 600.0
_STEP = 1.5
_MULTIPLE = 64
"""Of lengths, so that there are chunks."""

SIZED: Mapping[str, tuple[Callable[[int], Program], int]] = {
    "gpt": (split_programs.gpt_of, 4096),
    "gpt-train": (split_programs.gpt_train_of, 4096),
    "evoformer": (split_programs.evoformer_of, 256),
    "latent-unet": (split_programs.latent_unet_of, 64),
}
"""The programs, and the lengths to begin with."""

_COLUMNS = (
    Column("program"),
    Column("target"),
    Column("longest as it is", right=True),
    Column("longest in chunks", right=True),
    Column("ratio", right=True),
    Column("on the device", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_enum("program", list(SIZED), list(SIZED), "which")
    flags.DEFINE_multi_string("target", ["v5e", "h200"], "topologies")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.target:
        for program in FLAGS.program:
            case = {"program": program, "target": target}
            plain = rows.of({**case, "way": "plain"}, functools.partial(_longest, case, _plain, 0))
            yield plain
            begin = plain["length"]
            planned = functools.partial(_longest, case, _planned, begin)
            yield rows.of({**case, "way": "memplan"}, planned)


def _longest(case: Row, fits: Callable[[str, str, int], int], begin: int) -> Row:
    """The longest input that is taken, and its bytes on the device."""
    found: Row = {"length": begin, "bytes": 0}
    length = round(begin * _STEP) if begin else SIZED[case["program"]][1]
    while True:
        length = -(-length // _MULTIPLE) * _MULTIPLE
        args = case["program"], case["target"], length
        taken = isolated(fits, *args, timeout_s=_TIMEOUT_S)
        if isinstance(taken, Failure):
            return {**found, "refused": length, "failure": taken.reason}
        found = {"length": length, "bytes": taken}
        length = round(length * _STEP)


def _plain(program: str, target: str, length: int) -> int:
    jax.config.update("jax_platforms", "cpu")
    of = SIZED[program][0](length)
    step = jit(of.function, hbm="1TiB", machine=topology(target))
    taken = device_bytes(step.lower(*of.args).unplanned(), 0)
    capacity = topology(target).machine.device_memory.capacity_bytes
    if taken > capacity:
        raise ValueError(f"{format_bytes(taken)} of {format_bytes(capacity)}")
    return taken


def _planned(program: str, target: str, length: int) -> int:
    jax.config.update("jax_platforms", "cpu")
    of = SIZED[program][0](length)
    try:
        lowered = jit(of.function, machine=topology(target)).lower(*of.args)
        return lowered.compile().device_bytes
    except MemoryBudgetError as error:
        raise ValueError(f"refused; the planner's least: {format_bytes(error.least)}") from None


def _tables(rows: Sequence[Row]) -> list[Table]:
    found = {(r["program"], r["target"], r["way"]): r for r in rows}
    cells: list[tuple[str, ...]] = []
    for (program, target, way), plain in found.items():
        planned = found.get((program, target, "memplan"))
        if way == "plain" and planned is not None:
            cells.append(
                (
                    program,
                    target,
                    f"{plain['length']:,}",
                    f"{planned['length']:,}",
                    f"{planned['length'] / plain['length']:.1f}x",
                    format_bytes(planned["bytes"]),
                )
            )
    return [Table("The longest input", _COLUMNS, tuple(cells))]


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
