"""What does planning cost beside XLA's own work? Llama decoders of growing depth.

    python -m experiments.planning_time [--targets v5e h200] [--layers 4 8 16 32 64]

Every row compiles a decoder as it stands, then within half the device bytes of that.
Planning is everything of ours inside that compilation: reading the modules that XLA shows,
choosing what stays, planning, checking, and writing the plan back. It is set against the
time of XLA's compilation without it; both in seconds of processor time, over all threads,
so that a busy machine makes no difference.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes import pipeline
from hlo_passes.rewrite import inject
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models import llama
from models.configs import LLAMA2_7B

BATCH, CACHE_LENGTH = 8, 512

# So that 64 layers still compile for 16 GB without a plan.
HALF_AS_WIDE = dataclasses.replace(
    LLAMA2_7B, embed_dim=2048, mlp_dim=5504, num_heads=16, num_kv_heads=16
)

_PHASES = {
    "read": (inject, "Module"),
    "choose": (pipeline, "choose_stay"),
    "plan": (pipeline, "plan_module"),
    "rewrite": (pipeline, "rewrite_module"),
}

_COLUMNS = (
    Column("target"),
    Column("layers", right=True),
    Column("instructions", right=True),
    Column("hbm=", right=True),
    *(Column(phase, right=True) for phase in _PHASES),
    Column("planning", right=True),
    Column("XLA", right=True),
    Column("planning / XLA", right=True),
    Column("compilations", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_string("targets", ["v5e"], "topologies")
    flags.DEFINE_multi_integer("layers", [4, 8, 16, 32, 64], "of the decoder")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.targets:
        for n in FLAGS.layers:
            yield rows.of({"target": target, "layers": n}, lambda t=target, n=n: measure(t, n))


def measure(target: str, layers: int) -> Row:
    """Processor seconds of each phase, and of XLA by itself."""
    config = dataclasses.replace(HALF_AS_WIDE, num_layers=layers)
    graphdef, params = nnx.split(llama.abstract_model(config))
    cache = llama.abstract_cache(config, BATCH, CACHE_LENGTH)
    tokens = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32)

    def lower(budget: str | int) -> Any:
        fun = functools.partial(llama.decode_step, graphdef)
        step = jit(fun, hbm=budget, machine=topology(target), donate_argnames="cache")
        return step.lower(params, tokens, cache)

    free = lower("1TiB")
    begin = time.process_time()
    unplanned = free.compile()
    xla_s = time.process_time() - begin

    budget = unplanned.device_bytes // 2
    with _stopwatch() as seconds:
        planned = lower(budget).compile()
    return {
        "instructions": len(planned.module.instructions),
        "budget": budget,
        **{f"{phase}_s": taken for phase, taken in seconds.items()},
        "xla_s": xla_s,
        "compilations": len(planned.rounds),
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    title = "Planning of a decoder of half the width of 7B"
    return [Table(title, _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    seconds = [row[f"{phase}_s"] for phase in _PHASES]
    return (
        row["target"],
        str(row["layers"]),
        f"{row['instructions']:,}",
        format_bytes(row["budget"]),
        *map(format_seconds, seconds),
        format_seconds(sum(seconds)),
        format_seconds(row["xla_s"]),
        f"{sum(seconds) / row['xla_s']:.1%}",
        str(row["compilations"]),
    )


@contextmanager
def _stopwatch() -> Generator[dict[str, float]]:
    """Counts the seconds that are spent in each phase, whoever calls it."""
    seconds = dict.fromkeys(_PHASES, 0.0)

    def timed(phase: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[phase] += time.process_time() - begin

        return run

    with ExitStack() as stack:
        for phase, (module, name) in _PHASES.items():
            wrapped = timed(phase, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, wrapped))
        yield seconds


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
