"""Does a plan hide as much on many chips as on one that moves the same bytes?

    python -m experiments.sharded [--targets v5e:2x2 v5e:4x4 ...] [--share 75]

A training step, fully sharded (`experiments.mesh_programs`), is planned with a part of its state
off the chips. Beside it is planned what one of them does, alone: the same examples, the same rows
of weights and moments, as many bytes copied as are gathered there, the same products; no
collectives. Bytes are of one chip, by XLA's report; seconds are predictions of the machine model
for the executables' schedules. The *gap* is what a step takes beyond its lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from absl import flags

from experiments.mesh_programs import MeshStep, Size, mesh_step, one_chip_of
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import compared, view_planned
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import Topology, topology

_TIMEOUT_S = 3600
_LAYERS, _WIDTH, _HIDDEN, _TOKENS = 8, 2048, 8192, 512
_EXAMPLES = 8  # Of each chip.

# Of the state: weights, and two moments of each.
_ARRAYS = 3

_COLUMNS = (
    Column("target"),
    Column("by"),
    Column("takes", right=True),
    Column("budget", right=True),
    Column("used", right=True),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("step", right=True),
    Column("all on the device", right=True),
    Column("lower bound", right=True),
    Column("gap", right=True),
)


def _define() -> None:
    slices = ["v5e:2x2", "v5e:4x4", "v5e:8x8", "v5e:16x16"]
    flags.DEFINE_multi_string("targets", slices, "compiled for")
    flags.DEFINE_integer("share", 75, "percent of a chip's state that is to be off it")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.targets:
        for chips in ("all", "one"):
            case = {"target": target, "chips": chips, "share": FLAGS.share}
            measured = partial(found_apart, measure, *case.values(), timeout_s=_TIMEOUT_S)
            yield rows.of(case, measured)


def measure(target: str, chips: str, share: int) -> Row:
    """Figures of the step on all chips of a slice, or on one alone that does what each does."""
    where = topology(target)
    count = len(where.devices)
    size = Size(_LAYERS, _WIDTH, _HIDDEN, _EXAMPLES * count, _TOKENS)
    if chips == "all":
        step = mesh_step("fsdp", where.devices, size)
    else:
        step = one_chip_of(count, where.devices[0], size)
    weights = _LAYERS * (4 * _WIDTH * _WIDTH + 2 * _WIDTH * _HIDDEN) * 4 // count
    return _planned(step, where, _ARRAYS * weights * share // 100)


def _planned(step: MeshStep, where: Topology, less: int) -> Row:
    given: Row = {"donate_argnums": 0, "out_shardings": step.out_shardings, "machine": where}
    plain = jit(step.step, **given).lower(*step.args).compile()
    taken = device_bytes(plain, 0)
    compiled = jit(step.step, hbm=taken - less, **given).lower(*step.args).compile()
    unplanned = compared(view_planned(plain, where.machine))
    found = compared(view_planned(compiled, where.machine))
    return {"taken": taken, "budget": taken - less, "plain_s": unplanned["step_s"], **found}


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("All chips, and what one of them does", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    case = row["target"], {"all": "all chips", "one": "one, alone"}[row["chips"]]
    if "failure" in row:
        return (*case, row["failure"], *["–"] * 8)
    return (
        *case,
        format_bytes(row["taken"]),
        format_bytes(row["budget"]),
        format_bytes(row["total"]),
        format_bytes(row["moved"]),
        f"{row['overlapped']:.1%}",
        format_seconds(row["step_s"]),
        format_seconds(row["plain_s"]),
        format_seconds(row["bound_s"]),
        f"{row['gap']:.1%}",
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
