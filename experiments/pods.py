"""What do training steps on pods take in less memory than they ask for, by hand and planned?

    python -m experiments.pods [--models llama3-8b ...] [--targets v5e:16x16 ...] [--share 75]

AdamW with float32 moments and clipping by the global norm; each layer computed again in the
backward pass; fully sharded over "fsdp" and, on TPUs, tensor parallel (of experts: expert
parallel) over the eight chips of "model", with eight rows of 2048 tokens for each of the former.
The budget is a share of what XLA takes alone, or where that does not fit, of the device.

*By hand* the optimizer's state is on the hosts, as MaxText's switch has it. Bytes are of one
device, by XLA's report; seconds are predictions of the machine model for the executables'
schedules.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
from absl import flags
from jax.tree_util import GetAttrKey

from experiments.by_hand import compiled_by_hand
from experiments.corpus import planning
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import compared, view_planned
from memplan.out_of_memory import is_exhausted
from memplan.report.build import view_run
from memplan.report.tables import Column, Table
from memplan.topologies import Topology, topology
from models.workloads import Workload, train

_MODELS = "llama3-8b", "llama3-70b", "dbrx"
# Devices of "model".
_TARGETS = {"v5e:16x16": 8, "v5p:8x8x16": 8, "v6e:16x16": 8, "tpu7x:4x4x8": 8, "h200:8": 1}
_ROWS, _TOKENS = 8, 2048
# Of a device's memory, where XLA alone takes more than it has: what runtimes keep is less.
_OF_DEVICE = 0.95

_COLUMNS = (
    Column("target"),
    Column("by"),
    Column("budget", right=True),
    Column("takes", right=True),
    Column("moved", right=True),
    Column("overlapped", right=True),
    Column("step", right=True),
    Column("lower bound", right=True),
    Column("processor time", right=True),
    Column("of it planning", right=True),
    Column("memory", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_enum("models", _MODELS, _MODELS, "which")
    flags.DEFINE_multi_enum("targets", [*_TARGETS], [*_TARGETS], "compiled for")
    flags.DEFINE_integer("share", 75, "percent of what XLA takes alone")
    flags.DEFINE_float("timeout_s", 3600, "for a row")


def _rows(rows: Rows) -> Iterator[Row]:
    for model, target in itertools.product(FLAGS.models, FLAGS.targets):
        of = {"model": model, "target": target}

        def row(way: str, budget: int | None = None, of: Row = of) -> Row:
            case = {**of, "way": way}
            if budget is not None:
                case["share"] = FLAGS.share
            measured = partial(found_apart, measure, *of.values(), way, budget)
            return rows.of(case, partial(measured, timeout_s=FLAGS.timeout_s))

        alone = row("XLA alone")
        yield alone
        machine = load_machine(target.partition(":")[0])
        # To jax GPUs that are not here have no other memory than theirs.
        if machine.platform == "tpu":
            yield row("by hand")
        if "total" in alone:
            yield row("memplan", alone["total"] * FLAGS.share // 100)
        elif "exhausted" in alone:
            yield row("memplan", int(_OF_DEVICE * machine.device_memory.capacity_bytes))


def measure(model: str, name: str, way: str, budget: int | None) -> Row:
    """Figures of a model's step on devices, by XLA alone, by hand, or within a budget."""
    target = topology(name)
    step, args = _step(model, target, _TARGETS[name])
    begin = time.process_time()
    with planning() as planned:
        try:
            found = _measured(step, args, target, way, budget)
        except MemoryBudgetError as error:
            found = {"least": error.least_budget()}
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            found = {"exhausted": True}
    return {
        **found,
        "budget": budget,
        "taken_s": time.process_time() - begin,
        "planning_s": sum(planned),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _step(model: str, target: Topology, parts: int) -> Workload:
    rows = len(target.devices) // parts
    mesh = target.mesh((rows, parts), ("fsdp", "model"))
    return train(model, batch=_ROWS * rows, tokens=_TOKENS, mesh=mesh)


def _measured(
    step: Any, args: tuple[Any, ...], target: Topology, way: str, budget: int | None
) -> Row:
    if way != "by hand":
        lowered = jit(step, hbm=budget, machine=target, donate_argnums=0).lower(*args)
        return compared(view_planned(lowered.compile(), target.machine))
    executable = compiled_by_hand(step, args, lambda path: GetAttrKey("optimizer") in path)
    memory, module = executable.memory_analysis(), read_module(executable)
    return compared(view_run(way, module, target.machine, compiled=memory))


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = (row for row in rows if row["model"] == model)
        yield Table(f"{model} on pods", _COLUMNS, tuple(map(_cells, of_model)))


def _cells(row: Row) -> tuple[str, ...]:
    asked = row.get("budget")
    case = row["target"], row["way"], "–" if asked is None else format_bytes(asked)
    if "failure" in row:
        return (*case, row["failure"], *["–"] * 7)
    taken = (
        format_seconds(row["taken_s"]),
        format_seconds(row["planning_s"]) if row["way"] == "memplan" else "–",
        format_bytes(row["resident"]),
    )
    if "total" not in row:
        told = f"refused, least {format_bytes(row['least'])}" if "least" in row else "out of memory"
        return (*case, told, *["–"] * 4, *taken)
    return (
        *case,
        format_bytes(row["total"]),
        format_bytes(row["moved"]),
        "–" if row["overlapped"] is None else f"{row['overlapped']:.1%}",
        format_seconds(row["step_s"]),
        format_seconds(row["bound_s"]),
        *taken,
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
