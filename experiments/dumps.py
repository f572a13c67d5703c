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
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from experiments.steps import llama_step
from experiments.synthetic import training_step_text
from hlo_passes.reading.dump import find_modules, largest_module
from hlo_passes.units import format_seconds
from hlo_passes.xla import hlo_proto_to_text, hlo_text_to_proto
from memplan.api import jit
from memplan.report.tables import Column, Table
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


def _define() -> None:
    targets = ["cpu", "h200", "v5e"]
    flags.DEFINE_multi_enum("target", ["cpu", "h200"], targets, "whose compiler dumps")
    flags.DEFINE_integer("layers", 32, "of the step that it dumps")
    flags.DEFINE_multi_integer("instructions", [75_000], "of the synthetic entries")


def _rows(rows: Rows) -> Iterator[Row]:
    layers = FLAGS.layers
    for target in FLAGS.target:
        name = f"training step of {layers} layers, {target}"
        yield rows.of({"module": name}, lambda t=target: _of_dumps(t, layers))
    for n in FLAGS.instructions:
        yield rows.of({"module": f"synthetic, {n:,}"}, lambda n=n: _of_texts(n))


def _of_dumps(target: str, layers: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        for depth, path in ((layers, before), (layers + 1, after)):
            found = found_apart(dump, target, depth, path, timeout_s=900)
            if found:
                return found
        return _measured(before, after, [_text(path) for path in (before, after)])


def _of_texts(instructions: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.hlo"), Path(folder, "after.hlo")
        before.write_text(training_step_text(instructions, "gpu"))
        after.write_text(training_step_text(instructions + _MORE, "gpu"))
        return _measured(before, after, [path.read_text() for path in (before, after)])


def dump(target: str, layers: int, folder: Path) -> Row:
    """Compiles a training step of a narrow decoder for `target`, and has XLA write down what it
    does into `folder`."""
    jax.config.update("jax_platforms", "cpu")
    config = dataclasses.replace(TINY, num_layers=layers, dtype=jnp.bfloat16)
    step, args = llama_step(None, config=config, batch=8, length=128)
    lowered = jit(step, machine=topology(target), donate_argnames="state").lower(*args)
    lowered.unplanned({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
    return {}


def _text(folder: Path) -> str:
    """That of the final module."""
    return hlo_proto_to_text(largest_module(find_modules(folder)).read().to_bytes())


def _measured(before: Path, after: Path, texts: Sequence[str]) -> Row:
    parses: list[float] = []
    for text in texts:
        begin = time.process_time()
        proto = hlo_text_to_proto(text)
        parses.append(time.process_time() - begin)
        del proto
    return {
        "text_bytes": len(texts[0]),
        "instructions": sum(" = " in line for line in texts[0].splitlines()),
        "parse_s": parses[0],
        "inspect_s": _command_s("inspect", str(before)),
        "parse_both_s": sum(parses),
        "diff_s": _command_s("diff", str(before), str(after)),
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("Reading what XLA dumps", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    if "failure" in row:
        return (row["module"], row["failure"], *["–"] * (len(_COLUMNS) - 2))
    return (
        row["module"],
        f"{row['text_bytes'] / 1e6:.1f} MB",
        f"{row['instructions']:,}",
        format_seconds(row["parse_s"]),
        format_seconds(row["inspect_s"]),
        f"{row['inspect_s'] / row['parse_s']:.1f}",
        format_seconds(row["diff_s"]),
        f"{row['diff_s'] / row['parse_both_s']:.1f}",
    )


def _command_s(*words: str) -> float:
    """Processor seconds of ``memplan`` with these words."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = "import sys; from memplan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
