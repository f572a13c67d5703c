"""How do analyses and planning grow with a module? Synthetic training steps up to 100,000
instructions.

    python -m experiments.scale [--targets v5e h200 cpu] [--sizes 12500 50000 100000]
    python -m experiments.scale --analyses          # without the plan

Seconds are of processor time, so that a busy machine makes little difference. The last column
is what the largest module took over what the smallest did, as a multiple of what n log n
would have: at 1 or below, the stage scales. Each module is measured in a process of its own,
for its peak of memory.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from experiments.synthetic import training_step_text
from hlo_passes import pipeline
from hlo_passes.analysis import sharing
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.garbage import collection_paused
from hlo_passes.hardware.machine import load_machine
from hlo_passes.loops.rewrite import rewrite_loops
from hlo_passes.loops.schedule import schedule_loops
from hlo_passes.memory.allocations import find_allocations
from hlo_passes.memory.assignment import assign_offsets
from hlo_passes.memory.usage import BACKENDS
from hlo_passes.normalize.sink import sink_weight_work
from hlo_passes.placing.prefetch import least_capacity
from hlo_passes.placing.problem import fetches, pose
from hlo_passes.placing.ticks import entry_ticks
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import edits
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.units import format_bytes, format_seconds
from hlo_passes.verify import verify_equivalent, verify_plan, verify_schedule
from hlo_passes.xla import hlo_text_to_proto
from memplan.report.tables import Column, Table

_MACHINES = {"cpu": "cpu_cxl"}

# Of what streaming every weight needs at the least, so that there is something to choose.
_BUDGET = 1.25


def _define() -> None:
    flags.DEFINE_multi_string("targets", ["v5e", "h200", "cpu"], "machines")
    flags.DEFINE_multi_integer("sizes", [12_500, 50_000, 100_000], "instructions of the entry")
    flags.DEFINE_bool("analyses", False, "leave the plan out")


def _rows(rows: Rows) -> Iterator[Row]:
    with_plan = not FLAGS.analyses
    for target in FLAGS.targets:
        for n in FLAGS.sizes:
            case = {"target": target, "instructions": n, "with_plan": with_plan}
            yield rows.of(case, lambda t=target, n=n: _measured_apart(t, n, with_plan))


def _tables(rows: Sequence[Row]) -> list[Table]:
    targets = dict.fromkeys(row["target"] for row in rows)
    return [_table(t, [row for row in rows if row["target"] == t]) for t in targets]


def _table(target: str, found: Sequence[Row]) -> Table:
    first, last = found[0], found[-1]
    grown = _n_log_n(last) / _n_log_n(first)
    stages = [
        (
            stage,
            *(format_seconds(row["seconds"][stage]) for row in found),
            f"{last['seconds'][stage] / first['seconds'][stage] / grown:.2f}",
        )
        for stage in first["seconds"]
    ]
    peaks = ("peak of memory", *(format_bytes(row["peak_bytes"]) for row in found), "")
    sizes = (Column(f"{row['instructions']:,}", right=True) for row in found)
    return Table(
        f"Training steps on {target}, by instructions of the entry",
        (Column("stage"), *sizes, Column("growth / n log n", right=True)),
        (*stages, peaks),
    )


def _n_log_n(row: Row) -> float:
    return row["instructions"] * math.log(row["instructions"])


def _measured_apart(target: str, instructions: int, with_plan: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pb"
        _apart(_write, target, instructions, path)
        return _apart(_measure, target, path, with_plan)


def _apart[**P, T](run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        return process.submit(run, *args, **kwargs).result()


def _write(target: str, instructions: int, path: Path) -> None:
    platform = load_machine(_MACHINES.get(target, target)).platform
    path.write_bytes(hlo_text_to_proto(training_step_text(instructions, platform)))


@collection_paused()
def _measure(target: str, path: Path, with_plan: bool) -> Row:
    """Returns the seconds of each stage, and the process's peak of memory in bytes."""
    machine = load_machine(_MACHINES.get(target, target))
    platform: sharing.Target = machine.platform
    seconds: dict[str, float] = {}

    def timed[T](stage: str, run: Callable[[], T]) -> T:
        begin = time.process_time()
        result = run()
        seconds[stage] = time.process_time() - begin
        return result

    read = timed("read", lambda: read_module(path))
    timed("fingerprint", lambda: read.fingerprint)
    module = timed("sink", lambda: sink_weight_work(read))
    timed("loop schedule", lambda: schedule_loops(module, machine))
    dataflow = timed("dataflow", lambda: analyze_dataflow(module))
    ranges = timed("live ranges", lambda: compute_live_ranges(dataflow))
    heap = timed("allocations", lambda: find_allocations(ranges, platform)).heap
    backend = BACKENDS[platform]
    timed(
        "assignment",
        lambda: assign_offsets(
            [h.size for h in heap],
            [h.events for h in heap],
            backend.alignment,
            groups=[h.group for h in heap],
            strategies=backend.strategies,
        ),
    )
    weights = [p.parameter_number for p in module.entry.parameters if p.name.startswith("w")]
    hosted = weights if platform == "cpu" else None
    timed("ticks", lambda: entry_ticks(ranges, platform, hosted))
    timed("cost", lambda: instruction_costs(module, machine))
    posed = timed("problem", lambda: pose(module, machine, weights))
    streamed = fetches(posed.movables)
    timed("arena", lambda: posed.arena.pack(streamed, [f.reads.start for f in streamed]))
    capacity, _ = least_capacity(streamed, posed.arena.load)
    budget = posed.fixed_bytes + posed.arena.base + int(_BUDGET * capacity)
    if with_plan:
        plan = timed(
            "plan",
            lambda: pipeline.plan_module(read, machine, budget, host_parameters=weights),
        )
        edited = edits.apply(rewrite_loops(module, plan.loops, machine), plan.edits)
        rewritten = timed("rewrite", lambda: pipeline.rewrite_module(read, plan, machine))
        timed("of both, plan checked", lambda: verify_plan(edited, plan, machine))
        timed("of both, equivalence", lambda: verify_equivalent(read, rewritten))
        timed("of both, schedule", lambda: verify_schedule(edited, plan, rewritten))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak}


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
