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

import argparse
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax

from experiments import kernel_programs
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="on the GPU that is here")
    parser.add_argument("--only", default="", help="a part of the names of shapes")
    parser.add_argument("--kernel", default="", help="a part of the names of kernels")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows to write")
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    options = parser.parse_args()
    method = search_gpu.by_evidence()
    if options.measure:
        jax.config.update("jax_platforms", "cuda,cpu")
        method = measured(search_gpu.versions())
    run(jobs(options.only, options.kernel), method, options.rows, options.again)


if __name__ == "__main__":
    main()
