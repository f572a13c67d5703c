"""How far is a simulated step from what others have measured? Tokens of Llamas, one by one.

    python -m experiments.simulate [--machine a100 rtx-4090] [--json FILE [--resume]]

A decode step of a whole Llama, one sequence, bfloat16, compiled by the real compiler for each
machine and simulated with all that is in its way (`memplan simulate`), beside tokens per second
that others have published of the same weights in 16 bits on the same machine. Their programs are
not XLA's: what both have to do is to read all weights once for each token. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.report.simulated import simulated
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.workloads import decode

CACHE_LENGTH = 512
"""Tokens of the cache that a step reads: what was published is for some hundreds."""

_LLAMA_CPP = "llama.cpp: github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference"
_TORCHAO = "torch.compile: torchao's README, 105.14 and 95.64 tokens/s"
_GPT_FAST = "torch.compile: github.com/pytorch-labs/gpt-fast/issues/27"
_GRAPHS = "CUDA graphs, 5.1 ms a step: cloudai.pt/tag/cuda-graphs"
_TGI = "TGI on a g6e.2xlarge: huggingface.co/spaces/arcee-ai/Benchmarks"

PUBLISHED: tuple[tuple[str, str, float, str], ...] = (
    ("rtx-3090", "llama2-7b", 51.85, _LLAMA_CPP),
    ("rtx-3090", "llama3-8b", 47.40, _LLAMA_CPP),
    ("rtx-4090", "llama2-7b", 60.78, _LLAMA_CPP),
    ("rtx-4090", "llama2-7b", 65.0, _GPT_FAST),
    ("rtx-4090", "llama3-8b", 54.84, _LLAMA_CPP),
    ("a100", "llama2-7b", 73.83, _LLAMA_CPP),
    ("a100", "llama2-7b", 105.14, _TORCHAO),
    ("a100", "llama3-8b", 95.64, _TORCHAO),
    ("l40s", "llama3-8b", 42.1, _TGI),
    ("h100", "llama3-8b", 196.1, _GRAPHS),
)
"""Machine, model, tokens per second of one sequence, and who says so."""

_COLUMNS = (
    Column("machine"),
    Column("model"),
    *(
        Column(heading, right=True)
        for heading in ("simulated", "launching", "published", "simulated of published")
    ),
    Column("by"),
)


def _define() -> None:
    machines = list(dict.fromkeys(machine for machine, *_ in PUBLISHED))
    flags.DEFINE_multi_enum("machine", machines, machines, "machines")
    flags.DEFINE_float("timeout", 900.0, "seconds for each compilation")


def _rows(rows: Rows) -> Iterator[Row]:
    for machine, model in dict.fromkeys((machine, model) for machine, model, *_ in PUBLISHED):
        if machine in FLAGS.machine:
            case = {"machine": machine, "model": model}
            yield rows.of(
                case,
                lambda c=case: found_apart(simulate_step, *c.values(), timeout_s=FLAGS.timeout),
            )


def simulate_step(machine: str, model: str) -> Row:
    """Compiles a step as ``jax.jit`` does, and simulates it."""
    jax.config.update("jax_platforms", "cpu")
    fun, args = decode(model, batch=1, cache_length=CACHE_LENGTH)
    where = topology(machine)
    step = jit(fun, hbm="1TiB", machine=where, donate_argnames="cache")
    module = read_module(step.lower(*args).unplanned())
    view = simulated(module, where.machine, machine)
    return {"step_s": view.step_s, "undisturbed_s": view.undisturbed_s, "launch_s": view.launch_s}


def _tables(rows: Sequence[Row]) -> list[Table]:
    of = {(row["machine"], row["model"]): row for row in rows}
    cells = [
        _cells(of[machine, model], 1 / tokens_per_s, source)
        for machine, model, tokens_per_s, source in PUBLISHED
        if (machine, model) in of
    ]
    return [Table("Steps that others have measured", _COLUMNS, tuple(cells))]


def _cells(row: Row, published_s: float, source: str) -> tuple[str, ...]:
    named = row["machine"], row["model"]
    if "failure" in row:
        return (*named, "–", "–", format_seconds(published_s), row["failure"], source)
    return (
        *named,
        format_seconds(row["step_s"]),
        format_seconds(row["launch_s"]),
        format_seconds(published_s),
        f"{row['step_s'] / published_s:.2f}",
        source,
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
