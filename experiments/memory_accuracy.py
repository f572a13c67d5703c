"""Are the bytes that `memory_usage` predicts those of XLA's own `memory_analysis`?

    python -m experiments.memory_accuracy --cache FOLDER [--count 300] [--target v5e ...]

Programs drawn at random (`drawn_programs`) are compiled by each target's own compiler, without
memplan, and of each final module the arguments, outputs, aliases and temporaries are compared
with XLA's report. *Close* is within 0.1 %, below 1 MiB within 4 KiB. The modules and reports are
kept in the cache, and what is there is not compiled again: after a change of the analyses, the
same command compares anew. After a change of the programs the cache has to go. A compilation
that ends its process or takes too long is a line that says so, and a new process goes on.
"""

from __future__ import annotations

import json
import lzma
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from experiments.drawn_programs import DEVICES, draw, kind
from experiments.isolated import Failure, Worker
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.memory.usage import memory_usage
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from hlo_passes.xla import compile_for_topology
from memplan.report.tables import Column, Table
from memplan.topologies import Topology, topology

TARGETS = {
    "v5e": "v5e:2x2",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
    "h200": f"h200:{DEVICES}",
    "cpu": "cpu-cxl",
}

SIZES = ("argument", "output", "alias", "temp")


@dataclass(frozen=True, slots=True)
class Report:
    """What XLA says of a program on a target.

    Attributes:
      failure: why there is none; then the numbers are 0.
      argument, output, alias, temp: bytes, as in ``memory_analysis()``.
      compile_s: seconds of the wall clock, tracing included.
    """

    number: int
    target: str
    failure: str = ""
    argument: int = 0
    output: int = 0
    alias: int = 0
    temp: int = 0
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A report beside what `memory_usage` says of the same module."""

    report: Report
    argument: int
    output: int
    alias: int
    temp: int

    def error(self, size: str) -> int:
        return getattr(self, size) - getattr(self.report, size)

    @property
    def is_exact(self) -> bool:
        return not any(self.error(size) for size in SIZES)

    @property
    def is_close(self) -> bool:
        temp = self.report.temp
        allowed = 4096 if temp < 2**20 else temp // 1000
        others_are_equal = not any(self.error(size) for size in SIZES if size != "temp")
        return others_are_equal and abs(self.error("temp")) <= allowed


def _define() -> None:
    flags.DEFINE_multi_enum("target", list(TARGETS), list(TARGETS), "whose compiler")
    flags.DEFINE_integer("count", 300, "of programs")
    flags.DEFINE_string("cache", None, "folder of modules and reports", required=True)
    flags.DEFINE_float("timeout", 120.0, "seconds for one compilation")
    flags.DEFINE_integer("worst", 12, "programs a target that are told one by one")


def _rows(rows: Rows) -> Iterator[Row]:
    cache = Path(FLAGS.cache)
    cache.mkdir(parents=True, exist_ok=True)
    for target in FLAGS.target:
        case = {"target": target, "count": FLAGS.count}
        yield rows.of(case, lambda t=target: _measured(t, cache))


def _measured(target: str, cache: Path) -> Row:
    reports = list(reported(target, range(FLAGS.count), cache, FLAGS.timeout))
    compared = [compare(r, cache) for r in reports if not r.failure]
    seconds = sorted(c.report.compile_s for c in compared) or [0.0]
    wrong = sorted((c for c in compared if not c.is_close), key=_relative_error, reverse=True)
    return {
        "compiled": len(compared),
        "exact": sum(c.is_exact for c in compared),
        "close": sum(c.is_close for c in compared),
        "median_s": seconds[len(seconds) // 2],
        "longest_s": seconds[-1],
        "worst": [asdict(c) for c in wrong[: FLAGS.worst]],
    }


def reported(
    target: str, numbers: Iterable[int], cache: Path, timeout_s: float
) -> Iterator[Report]:
    """Yields XLA's reports, those that are in the cache first read from there."""
    path = cache / f"{target}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {r.number: r for r in (Report(**json.loads(line)) for line in lines)}
    with Worker(timeout_s) as worker, path.open("a", encoding="utf-8") as log:
        for number in numbers:
            if number not in known:
                result = worker.call(
                    compile_drawn, number, target, module_path(number, target, cache)
                )
                if isinstance(result, Failure):
                    result = Report(number, target, failure=result.reason[:500])
                log.write(json.dumps(asdict(result)) + "\n")
                log.flush()
                known[number] = result
            yield known[number]


def module_path(number: int, target: str, cache: Path) -> Path:
    return cache / f"{number}.{target}.pb.xz"


def compile_drawn(number: int, target: str, path: Path) -> Report:
    """Compiles program `number`, writes its final module to `path` and returns XLA's report."""
    begin = time.monotonic()
    executable = compile_program(number, topology(TARGETS[target]))
    stats = executable.get_compiled_memory_stats()
    compile_s = time.monotonic() - begin
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    path.write_bytes(lzma.compress(module, preset=0))
    sizes = {size: getattr(stats, f"{size}_size_in_bytes") for size in SIZES}
    return Report(number, target, compile_s=compile_s, **sizes)


def compile_program(number: int, devices: Topology, options: dict[str, Any] | None = None) -> Any:
    """Compiles program `number` as ``jax.jit`` does.

    Returns:
      A ``jaxlib._jax.Executable`` or ``LoadedExecutable``.
    """
    jax.config.update("jax_platforms", "cpu")
    program = draw(number)
    mesh = devices.mesh((DEVICES,) if program.partitions else (1,))
    partitions = program.partitions or (PartitionSpec(),) * len(program.arguments)
    function = partial(program.function, mesh=mesh) if program.partitions else program.function

    def placed(argument: Any, partition: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, partition)
        shape = jax.ShapeDtypeStruct
        return jax.tree.map(lambda a: shape(a.shape, a.dtype, sharding=sharding), argument)

    arguments = map(placed, program.arguments, partitions)
    traced = jax.jit(function, donate_argnums=program.donate).trace(*arguments)
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    if devices.platform != "gpu":
        return traced.lower().compile(options).runtime_executable()
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    return compile_for_topology(module, devices.devices[: mesh.size], options or {})


def compare(report: Report, cache: Path) -> Comparison:
    """Predicts what is in the report, from the module in the cache."""
    data = lzma.decompress(module_path(report.number, report.target, cache).read_bytes())
    machine = topology(TARGETS[report.target]).machine
    usage = memory_usage(read_module(data), machine.platform, machine=machine)
    return Comparison(report, *(getattr(usage, f"{size}_bytes") for size in SIZES))


def _tables(rows: Sequence[Row]) -> list[Table]:
    headings = ("compiled", "refused", "exact", "close", "median compilation", "longest")
    columns = (Column("target"), *(Column(h, right=True) for h in headings))
    note = "Refused: what the compiler does not take, or not in time."
    cells = tuple(map(_cells, rows))
    return [Table("Predicted memory", columns, cells, note), *map(_worst, rows)]


def _cells(row: Row) -> tuple[str, ...]:
    compiled = row["compiled"]
    counts = (compiled, row["count"] - compiled, row["exact"], row["close"])
    seconds = (row["median_s"], row["longest_s"])
    return (row["target"], *map(str, counts), *map(format_seconds, seconds))


def _worst(row: Row) -> Table:
    columns = ("program", "kind", "XLA's temp", "error", "error", *SIZES[:3])
    found = [Comparison(**{**c, "report": Report(**c["report"])}) for c in row["worst"]]
    cells = (
        (
            str(c.report.number),
            kind(c.report.number),
            format_bytes(c.report.temp),
            f"{c.error('temp'):+,} B",
            f"{c.error('temp') / max(1, c.report.temp):+.2%}",
            *(f"{c.error(size):+,} B" for size in SIZES[:3]),
        )
        for c in found
    )
    title = f"Furthest off, {row['target']}"
    return Table(title, tuple(Column(c, right=c != "kind") for c in columns), tuple(cells))


def _relative_error(c: Comparison) -> float:
    return max(abs(c.error(size)) / max(1, getattr(c.report, size)) for size in SIZES)


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    # Before a process starts jax: the CPU stands for as many devices as a mesh has.
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    EXPERIMENT.main()
