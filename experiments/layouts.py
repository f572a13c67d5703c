"""What does a step convert, as jax has its arguments, as XLA would, and as memplan does?

    python -m experiments.layouts [--target v5e h200] [--program "attention hdk" ...]
        [--json layouts.jsonl [--resume | --show]]

Each program is compiled four times by the target's own compiler, nothing is run: with the
layouts that jax gives to arguments and results, with ``Layout.AUTO`` for all of them, and by
``memplan.jit`` with ``layouts="arguments"`` and ``layouts="all"``. Scanned layers twice more, their
stacks streamed from the host. Columns:

    converted     bytes that a step reads and writes to bring arrays into other layouts
    of arguments  those of them whose array is an argument of the program, or a slice of one
    inside        what would be saved of it by other orders of what the program itself makes, if
                  its products took and gave what they do: predicted
    temp          bytes, as XLA reports them
    step          seconds of all kernels, one after another: on TPUs by XLA's own estimates, else
                  of a roofline
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from experiments.isolated import Failure, isolated
from experiments.layout_programs import PROGRAMS
from hlo_passes import cost, inject, xla
from hlo_passes.ir import Module
from hlo_passes.layout_plan import converted, plan_layouts
from hlo_passes.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.executable import Executable, TopologyExecutable
from memplan.report.tables import Column, Table, write_tables
from memplan.topologies import topology

WAYS = ("jax", "AUTO", "arguments", "all")
# With all that may be there in host memory; stacks come slice by slice.
STREAMED = ("streamed, jax", "streamed, arguments")

# No program needs a plan of its memory for this.
_UNLIMITED = "1TiB"


@dataclass(frozen=True, slots=True)
class Row:
    """A program, compiled in one way.

    Attributes:
      program, target, way: which.
      failure: why there is nothing.
      converted, of_arguments: bytes, in a step, read and written.
      inside: of `converted`, what other orders of what the program makes would save, if the
        compiler's kernels took and gave what they do: predicted.
      temp, arguments: bytes, as XLA reports them.
      step_s: seconds of all kernels, predicted.
    """

    program: str
    target: str
    way: str
    failure: str = ""
    converted: int = 0
    of_arguments: int = 0
    inside: int = 0
    temp: int = 0
    arguments: int = 0
    step_s: float = 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", nargs="+", default=["v5e", "h200"])
    parser.add_argument("--program", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--timeout", type=float, default=900.0)
    options = parser.parse_args(arguments)
    wanted = [
        Row(program, target, way)
        for target in options.target
        for program in options.program
        for way in (*WAYS, *(STREAMED if program.startswith("attention") else ()))
    ]
    rows = list(_measured(wanted, options))
    tables: list[Table] = []
    for target in options.target:
        of_target = [r for r in rows if r.target == target]
        tables.append(Table(target, _COLUMNS, tuple(_lines(of_target))))
        streamed = tuple(_streamed_lines(of_target))
        tables.append(Table(f"{target}, streamed", _STREAMED_COLUMNS, streamed))
    write_tables([t for t in tables if t.rows], sys.stdout)


def _measured(wanted: Sequence[Row], options: argparse.Namespace) -> Iterator[Row]:
    path: Path | None = options.json
    known: dict[tuple[str, str, str], Row] = {}
    if path is not None and path.exists() and (options.resume or options.show):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = Row(**json.loads(line))
            known[row.program, row.target, row.way] = row
    elif path is not None:
        path.write_text("", encoding="utf-8")
    for row in wanted:
        found = known.get((row.program, row.target, row.way))
        if found is None and not options.show:
            answer = isolated(measure, row, timeout_s=options.timeout)
            found = _failed(row, answer) if isinstance(answer, Failure) else answer
            print(found, file=sys.stderr, flush=True)
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
        if found is not None:
            yield found


def _failed(row: Row, failure: Failure) -> Row:
    return Row(row.program, row.target, row.way, failure.reason)


def measure(wanted: Row) -> Row:
    """Compiles a program in one way."""
    # An accelerator of this machine is neither needed nor taken.
    jax.config.update("jax_platforms", "cpu")
    make, donated = PROGRAMS[wanted.program]
    fun, args = make()
    if wanted.way in STREAMED:
        return _streamed(fun, args, donated, wanted)
    if wanted.way == "AUTO":
        executable = _left_to_xla(fun, args, donated, wanted.target)
        module = read_module(executable)
    else:
        layouts: Any = None if wanted.way == "jax" else wanted.way
        step = jit(
            fun,
            hbm=_UNLIMITED,
            machine=topology(wanted.target),
            layouts=layouts,
            donate_argnames=donated,
        )
        executable = step.lower(*args).compile()
        module = executable.module
    memory = executable.memory_analysis()
    row = _row(wanted, module)
    return replace(row, temp=memory.temp_size_in_bytes, arguments=memory.argument_size_in_bytes)


def _streamed(fun: Any, args: Any, donated: str | None, wanted: Row) -> Row:
    """Compiled up to XLA's scheduler, with rings of two slots."""
    layouts: Any = "arguments" if wanted.way == STREAMED[1] else None
    where = topology(wanted.target)
    step = jit(fun, hbm=_UNLIMITED, machine=where, layouts=layouts, donate_argnames=donated)
    placing = step.lower(*args).placing
    program = placing.placed(placing.everything(2, 1.0))
    return _row(wanted, inject.capture(where.platform, program.stablehlo, program.compiler(None)))


def _left_to_xla(fun: Any, args: Any, donated: str | None, target: str) -> Executable:
    """With ``Layout.AUTO`` for all arguments and results, as a user of jax has it."""
    where = topology(target)
    auto = Format(Layout.AUTO, where.sharding())
    jitted = jax.jit(fun, in_shardings=auto, out_shardings=auto, donate_argnames=donated)
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where.sharding()), args
    )
    platform = {"gpu": "cuda"}.get(where.platform, where.platform)
    lowered = jitted.trace(*structs).lower(lowering_platforms=(platform,))
    stablehlo = lowered.compiler_ir("stablehlo")
    return TopologyExecutable(xla.compile_for_topology(stablehlo, where.devices[:1], {}))


def _row(wanted: Row, module: Module) -> Row:
    found, plan = converted(module), plan_layouts(module)
    return replace(
        wanted,
        converted=sum(c.size for c in found),
        of_arguments=sum(c.size for c in found if c.argument is not None),
        # Where padding is what is saved, more is converted.
        inside=max(0, plan.bytes_before - plan.bytes_after),
        step_s=cost.step_seconds(module, topology(wanted.target).machine),
    )


_COLUMNS = (
    Column("program"),
    *(Column(f"converted, {way}", right=True) for way in WAYS),
    *(Column(f"of arguments, {way}", right=True) for way in WAYS),
    Column("inside, all", right=True),
    *(Column(f"temp, {way}", right=True) for way in WAYS),
    *(Column(f"step, {way}", right=True) for way in WAYS),
)


_STREAMED_COLUMNS = (
    Column("program"),
    *(Column(f"converted, {way}", right=True) for way in STREAMED),
    *(Column(f"of arguments, {way}", right=True) for way in STREAMED),
)


def _streamed_lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for program in dict.fromkeys(row.program for row in rows if row.way in STREAMED):
        found = {row.way: row for row in rows if row.program == program and not row.failure}
        if found.keys() >= set(STREAMED):
            both = [found[way] for way in STREAMED]
            yield (
                program,
                *(format_bytes(row.converted) for row in both),
                *(format_bytes(row.of_arguments) for row in both),
            )


def _lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for program in dict.fromkeys(row.program for row in rows if row.way in WAYS):
        by_way = {row.way: row for row in rows if row.program == program}
        found = [by_way.get(way) for way in WAYS]

        def cells(
            name: str,
            found: Sequence[Row | None] = found,
            write: Callable[[Any], str] = format_bytes,
        ) -> Iterator[str]:
            for row in found:
                lacks = row is None or row.failure
                yield "–" if lacks else write(getattr(row, name))

        yield (
            program,
            *cells("converted"),
            *cells("of_arguments"),
            *cells("inside", found[-1:]),
            *cells("temp"),
            *cells("step_s", write=format_seconds),
        )


if __name__ == "__main__":
    main()
