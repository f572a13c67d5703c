"""How long do ``memplan inspect`` and ``memplan diff`` take, beside jaxlib's own parse?

    python -m experiments.dumps [--target cpu --target h200 --target v5e] [--layers 32]
        [--instructions 75000]

A training step of so many layers, and one of a layer more, are compiled for each target with
``xla_dump_to``, and both commands are run on the two folders. Then on synthetic HLO text of so
many instructions of the entry (75,000 of them make 20 MB), and another one that is a little
longer. *parse* is jaxlib's own reading of the same text, nothing else. Seconds of the commands
are processor time of the whole process, start and imports included, so that a busy machine makes
no difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.isolated import Failure, isolated
from experiments.steps import llama_step
from experiments.synthetic import training_step_text
from hlo_passes.dump import find_modules, largest_module
from hlo_passes.units import format_seconds
from hlo_passes.xla import hlo_proto_to_text, hlo_text_to_proto
from memplan.api import jit
from memplan.report.tables import Column, Table, write_tables
from memplan.topologies import topology
from models.configs import TINY

_MORE = 25
"""Instructions by which the second synthetic module is longer."""

_COLUMNS = (
    Column("module"),
    Column("text", right=True),
    Column("instructions", right=True),
    Column("parse", right=True),
    Column("inspect", right=True),
    Column("inspect / parse", right=True),
    Column("diff", right=True),
    Column("diff / parse of both", right=True),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="experiments.dumps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", action="append", choices=("cpu", "h200", "v5e"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--instructions", type=int, nargs="*", default=[75_000])
    options = parser.parse_args(arguments)
    rows = [
        *(_dumped_row(target, options.layers) for target in options.target or ("cpu", "h200")),
        *map(_synthetic_row, options.instructions),
    ]
    write_tables([Table("Reading what XLA dumps", _COLUMNS, tuple(rows))], sys.stdout)


def _dumped_row(target: str, layers: int) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        for depth, path in ((layers, before), (layers + 1, after)):
            failure = isolated(dump, target, depth, path, timeout_s=900)
            if isinstance(failure, Failure):
                return (f"{layers} layers, {target}", failure.reason, *["–"] * 6)
        texts = [_text(path) for path in (before, after)]
        return (f"training step of {layers} layers, {target}", *_measured(before, after, texts))


def _synthetic_row(instructions: int) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.hlo"), Path(folder, "after.hlo")
        before.write_text(training_step_text(instructions, "gpu"))
        after.write_text(training_step_text(instructions + _MORE, "gpu"))
        texts = [path.read_text() for path in (before, after)]
        return ("synthetic", *_measured(before, after, texts))


def dump(target: str, layers: int, folder: Path) -> None:
    """Compiles a training step of a narrow decoder for `target`, and has XLA write down what it
    does into `folder`."""
    jax.config.update("jax_platforms", "cpu")
    config = dataclasses.replace(TINY, num_layers=layers, dtype=jnp.bfloat16)
    step, args = llama_step(None, config=config, batch=8, length=128)
    lowered = jit(step, machine=topology(target), donate_argnames="state").lower(*args)
    lowered.unplanned({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})


def _text(folder: Path) -> str:
    """That of the final module."""
    return hlo_proto_to_text(largest_module(find_modules(folder)).read().to_bytes())


def _measured(before: Path, after: Path, texts: Sequence[str]) -> Iterator[str]:
    parses: list[float] = []
    for text in texts:
        begin = time.process_time()
        proto = hlo_text_to_proto(text)
        parses.append(time.process_time() - begin)
        del proto
    inspect_s = _command_s("inspect", str(before))
    diff_s = _command_s("diff", str(before), str(after))
    yield f"{len(texts[0]) / 1e6:.1f} MB"
    yield str(sum(" = " in line for line in texts[0].splitlines()))
    yield format_seconds(parses[0])
    yield format_seconds(inspect_s)
    yield f"{inspect_s / parses[0]:.1f}"
    yield format_seconds(diff_s)
    yield f"{diff_s / sum(parses):.1f}"


def _command_s(*words: str) -> float:
    """Processor seconds of ``memplan`` with these words."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = "import sys; from memplan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


if __name__ == "__main__":
    main()
