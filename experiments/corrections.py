"""What do steps that were measured on a GPU say of its machine file?

    python -m experiments.corrections [--json FILE [--resume]] [--toml]

Steps of the corpus, of one product and of one scaled array were measured on an H100
(`experiments.on_device`), and of one that decodes others have said what it takes there. Here the
same programs are compiled for one, and what the machine file's peaks have for their kernels is
added up by kind; what the machine's corrections are learned from
(`hlo_passes.hardware.corrections`). Each step is predicted by what is learned of all others.
``--toml`` prints what is learned of all of them, for the machine file.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.hardware.corrections import AT_PEAK, Sample, learned, nearest
from hlo_passes.hardware.machine import load_machine
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator.cost import instruction_costs, kinds_of_kernels
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS
from models.workloads import decode

MACHINE = "h100"
_MEASURED = Path(__file__).parents[1] / "docs" / "data" / "on_device.jsonl"
_PRODUCT, _STREAM, _DECODE = "one product", "one scaled array", "llama3-8b-decode"

# A step of one sequence in bfloat16, launched as a graph: cloudai.pt/tag/cuda-graphs.
_DECODE_S = 5.1e-3
_TIMEOUT_S = 900.0

_SOURCE = "learned of steps that were measured on one: docs/data/corrections.jsonl"

_COLUMNS = (
    Column("step"),
    Column("measured", right=True),
    Column("by peaks", right=True),
    Column("off by", right=True),
    Column("learned of the others", right=True),
    Column("give or take", right=True),
    Column("off by", right=True),
)


def _define() -> None:
    flags.DEFINE_bool("toml", False, "print what is learned, as lines of a machine file")


def _rows(rows: Rows) -> Iterator[Row]:
    for name in (*_steps(), _DECODE, _PRODUCT, _STREAM):
        measured = partial(found_apart, measure, name, timeout_s=_TIMEOUT_S)
        yield rows.of({"machine": MACHINE, "step": name}, measured)


def _taken() -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in _MEASURED.read_text(encoding="utf-8").splitlines()]


def _steps() -> Mapping[str, float]:
    """Seconds of the steps that jax has without a plan, by program."""
    own = (row for row in _taken() if row["case"]["kind"] == "own")
    return {row["case"]["workload"]: row["found"]["step_s"] for row in own}


def measure(name: str) -> Row:
    """What was measured of a step, and what peaks have for it, by kind of kernel; seconds."""
    jax.config.update("jax_platforms", "cpu")
    machine = replace(load_machine(MACHINE), corrections=())
    links = [row["found"] for row in _taken() if row["case"]["kind"] == "links"]
    # Of these a unit of work each.
    if name == _PRODUCT:
        per_s = statistics.median(found["bf16_tflop_s"] for found in links) * 1e12
        peak = dict(machine.peak_flops)["bf16"]
        return {"seconds": 1e12 / per_s, "modelled": {"dot bf16" + AT_PEAK: 1e12 / peak}}
    if name == _STREAM:
        per_s = statistics.median(found["hbm_gb_s"] for found in links) * 1e9
        return {
            "seconds": 1e9 / per_s,
            "modelled": {"elementwise f32": 1e9 / machine.hbm_bytes_per_s},
        }
    if name == _DECODE:
        (fun, shapes), donate = decode("llama3-8b", batch=1, cache_length=512), "cache"
        seconds = _DECODE_S
    else:
        (fun, shapes), donate = CORPUS[name].planning(), CORPUS[name].donate
        seconds = _steps()[name]
    step = jit(fun, hbm="1TiB", machine=topology(MACHINE), donate_argnames=donate)
    module = read_module(step.lower(*shapes).unplanned())
    costs, kinds = instruction_costs(module, machine), kinds_of_kernels(module, machine)
    modelled: dict[str, float] = defaultdict(float)
    for i in module.entry.instructions:
        if i.id in kinds and costs[i.id]:
            modelled[kinds[i.id]] += costs[i.id]
    return {"seconds": seconds, "modelled": modelled}


def samples_of(rows: Sequence[Row]) -> list[Sample]:
    """Returns what is to be learned from."""
    return [Sample(row["modelled"], row["seconds"]) for row in rows if "failure" not in row]


def _tables(rows: Sequence[Row]) -> list[Table]:
    if "toml" in FLAGS and FLAGS.toml:
        for of in learned(samples_of(rows)):
            print(f'[corrections."{of.kind}"]')
            for name, value in (("factor", of.factor), ("spread", of.spread)):
                print(f'{name} = {{ value = {value:.3f}, source = "{_SOURCE}" }}')
    cells = tuple(_cells(row, rows) for row in rows)
    return [Table("Steps on an H100, each by what is learned of the others", _COLUMNS, cells)]


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    if "failure" in row:
        return (row["step"], row["failure"], *["–"] * 5)
    known = {of.kind: of for of in learned(samples_of([r for r in rows if r is not row]))}
    peaks_s, found_s, variance = sum(row["modelled"].values()), 0.0, 0.0
    for kind, seconds in row["modelled"].items():
        of = nearest(known, kind)
        assert of is not None
        found_s += of.factor * seconds
        variance += (of.spread * seconds) ** 2
    return (
        row["step"],
        format_seconds(row["seconds"]),
        format_seconds(peaks_s),
        f"{peaks_s / row['seconds'] - 1:+.0%}",
        format_seconds(found_s),
        f"{variance**0.5 / found_s:.0%}",
        f"{found_s / row['seconds'] - 1:+.0%}",
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
