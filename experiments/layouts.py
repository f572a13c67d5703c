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

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import flags
from jax.experimental.layout import Format, Layout

from experiments.layout_programs import PROGRAMS
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes import xla
from hlo_passes.ir import Module
from hlo_passes.layouts.plan import converted, plan_layouts
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from hlo_passes.simulator import cost
from memplan.api import jit
from memplan.executable import Executable, TopologyExecutable
from memplan.report.tables import Column, Table
from memplan.topologies import topology

WAYS = ("jax", "AUTO", "arguments", "all")
# With all that may be there in host memory; stacks come slice by slice.
STREAMED = ("streamed, jax", "streamed, arguments")

# No program needs a plan of its memory for this.
_UNLIMITED = "1TiB"


_ORDER = [*PROGRAMS]


def _define() -> None:
    flags.DEFINE_multi_string("target", ["v5e", "h200"], "topologies")
    flags.DEFINE_multi_enum("program", _ORDER, _ORDER, "which")
    flags.DEFINE_float("timeout", 900.0, "seconds for each compilation")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.target:
        for program in FLAGS.program:
            for way in (*WAYS, *(STREAMED if program.startswith("attention") else ())):
                case = {"program": program, "target": target, "way": way}
                yield rows.of(case, lambda c=case: _measured(c))


def _measured(case: Row) -> Row:
    return found_apart(measure, *case.values(), timeout_s=FLAGS.timeout)


def measure(program: str, target: str, way: str) -> Row:
    """Compiles a program in one way.

    Returns:
      ``converted``, ``of_arguments``, and of those what other orders would save (``inside``), in
      bytes that a step reads and writes; ``temp`` and ``arguments`` in bytes as XLA reports them;
      ``step_s``, predicted seconds of all kernels.
    """
    # An accelerator of this machine is neither needed nor taken.
    jax.config.update("jax_platforms", "cpu")
    make, donated = PROGRAMS[program]
    fun, args = make()
    if way in STREAMED:
        return _streamed(fun, args, donated, target, way)
    if way == "AUTO":
        executable = _left_to_xla(fun, args, donated, target)
        module = read_module(executable)
    else:
        layouts: Any = None if way == "jax" else way
        step = jit(
            fun,
            hbm=_UNLIMITED,
            machine=topology(target),
            layouts=layouts,
            donate_argnames=donated,
        )
        executable = step.lower(*args).compile()
        module = executable.module
    memory = executable.memory_analysis()
    return {
        **_conversions(target, module),
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
    }


def _streamed(fun: Any, args: Any, donated: str | None, target: str, way: str) -> Row:
    """Compiled up to XLA's scheduler, with rings of two slots."""
    layouts: Any = "arguments" if way == STREAMED[1] else None
    where = topology(target)
    step = jit(fun, hbm=_UNLIMITED, machine=where, layouts=layouts, donate_argnames=donated)
    placing = step.lower(*args).placing
    program = placing.placed(placing.everything(2, 1.0))
    module = inject.capture(where.platform, program.stablehlo, program.compiler(None))
    return _conversions(target, module)


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


def _conversions(target: str, module: Module) -> Row:
    found, plan = converted(module), plan_layouts(module)
    return {
        "converted": sum(c.size for c in found),
        "of_arguments": sum(c.size for c in found if c.argument is not None),
        # Where padding is what is saved, more is converted.
        "inside": max(0, plan.bytes_before - plan.bytes_after),
        "step_s": cost.step_seconds(module, topology(target).machine),
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    """Programs of which the same is to be said share a row."""
    brief = [way for way in WAYS if way != "arguments"]
    headings = [f"converted, {way}" for way in WAYS]
    headings += ["inside, all", *(f"{what}, {way}" for what in ("temp", "step") for way in brief)]
    note = (
        "MiB, in brackets those of arguments or slices of them; milliseconds. Inside: what other "
        "orders of what the program makes would save."
    )
    return [
        _table("What a step converts", headings, rows, WAYS, _cells, note),
        _table("Streamed from the host", STREAMED, rows, STREAMED, _streamed_cells),
    ]


def _table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Row],
    ways: Sequence[str],
    cells: Callable[[Sequence[Row | None]], tuple[str, ...]],
    note: str = "",
) -> Table:
    found: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["way"] in ways:
            found[row["program"], row["target"]][row["way"]] = row
    merged: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for program, target in sorted(found, key=lambda case: (_ORDER.index(case[0]), case[1])):
        family, _, which = program.partition(" ")
        by_way = found[program, target]
        merged[family, target, *cells([by_way.get(way) for way in ways])].append(which)
    lines = (
        (f"{family} {', '.join(which)}".strip(), *rest) for (family, *rest), which in merged.items()
    )
    columns = (Column("program"), Column("target"), *(Column(h, right=True) for h in headings))
    return Table(title, columns, tuple(lines), note)


def _cells(found: Sequence[Row | None]) -> tuple[str, ...]:
    jax_, auto, _, all_ = found
    return (
        *map(_converted, found),
        _figure(all_, "inside", _mib),
        *(_figure(row, "temp", _mib) for row in (jax_, auto, all_)),
        *(_figure(row, "step_s", lambda s: f"{1e3 * s:.3g}") for row in (jax_, auto, all_)),
    )


def _streamed_cells(found: Sequence[Row | None]) -> tuple[str, ...]:
    return tuple(map(_converted, found))


def _converted(row: Row | None) -> str:
    own = _figure(row, "of_arguments", _mib)
    return _figure(row, "converted", _mib) + (f" ({own})" if own not in ("0", "–") else "")


def _figure(row: Row | None, name: str, write: Callable[[float], str]) -> str:
    return "–" if row is None or row.get("failure") else write(row[name])


def _mib(n: float) -> str:
    mib = n / 2**20
    return "0" if mib < 0.05 else f"{mib:,.1f}" if mib < 100 else f"{mib:,.0f}"


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
