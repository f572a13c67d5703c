"""Which configurations should the kernels take? Every candidate is tried; the best become rows.

    python -m experiments.autotune                       by evidence: compiled for an H200
    python -m experiments.autotune --measure             timed on the GPU that is here
    python -m experiments.autotune --only gemma          shapes whose name has that in it
    python -m experiments.autotune --kernel decode       kernels, likewise
    python -m experiments.autotune --rows mine.json      into a file of one's own

Rows go to `pallas_kernels/tuned.json`, one by one: what is interrupted goes on when it is started
again. All that was tried is printed, with why it lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import kernel_programs
from experiments.running import FLAGS, command
from memplan.kernels import search_gpu
from memplan.kernels.autotune import Method, NoCandidateError, Search, measured, table, tune
from pallas_kernels.attention.shapes import SHAPES, Shape
from pallas_kernels.decode.shapes import SHAPES as DECODE_SHAPES
from pallas_kernels.decode.shapes import Shape as DecodeShape

ROWS = Path(str(files("pallas_kernels") / "tuned.json"))

ATTENTION = (search_gpu.FORWARD, search_gpu.QUERY_GRADIENT, search_gpu.KEY_GRADIENTS)


type Job = tuple[Search[Any, Any], Any]


def jobs(only: str = "", kernel: str = "") -> Iterator[Job]:
    """Every kernel of every shape, or those whose names have that in them."""
    for shape in (*SHAPES, *DECODE_SHAPES):
        if only not in shape.name:
            continue
        is_decode = isinstance(shape, DecodeShape)
        problem = _problem(shape)
        for search in (search_gpu.DECODE,) if is_decode else ATTENTION:
            if kernel in search.tunable.kernel:
                yield search, problem


def _problem(shape: Shape | DecodeShape) -> Any:
    if isinstance(shape, DecodeShape):
        return kernel_programs.decode_problem_of(shape)
    return kernel_programs.attention_problem_of(shape)


def run(jobs: Iterable[Job], method: Method, rows: Path, again: bool = False) -> None:
    """Searches, and prints what was tried."""
    for found in tune(jobs, method, rows, again=again):
        if isinstance(found, NoCandidateError):
            print(f"\n{found}", flush=True)
            continue
        row, trials = found
        fields = {**row.problem, **row.size}
        print(f"\n{row.kernel}, " + ", ".join(f"{k} {v}" for k, v in fields.items()), end="\n\n")
        print("\n".join(table(trials)), flush=True)


def _define() -> None:
    flags.DEFINE_bool("measure", False, "on the GPU that is here")
    flags.DEFINE_string("only", "", "a part of the names of shapes")
    flags.DEFINE_string("kernel", "", "a part of the names of kernels")
    flags.DEFINE_string("rows", str(ROWS), "the file of rows to write")
    flags.DEFINE_bool("again", False, "also what the file has already")


def main(_: Sequence[str]) -> None:
    method = search_gpu.by_evidence()
    if FLAGS.measure:
        jax.config.update("jax_platforms", "cuda,cpu")
        method = measured(search_gpu.versions())
    run(jobs(FLAGS.only, FLAGS.kernel), method, Path(FLAGS.rows), FLAGS.again)


if __name__ == "__main__":
    command(main, _define)
