"""The command line: ``memplan inspect | diff | plan | curve | dis | as | run | ...``.

A command imports what it needs when it runs, so that ``memplan machines`` does not wait for
jax. What memplan refuses is one sentence on stderr and exit status 2; tables go to stdout,
progress to stderr and only to a terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hlo_passes.errors import MemplanError
from memplan import __version__

if TYPE_CHECKING:
    from hlo_passes.hardware.machine import Machine
    from hlo_passes.ir import Module
    from hlo_passes.plan import Plan, Split
    from memplan.executable import Executable
    from memplan.report.differences import Compared
    from memplan.report.tables import Table
    from memplan.report.view import Report, RunView

    type _Compiled = tuple[Module, Executable]
    type _InChunks = list[tuple[tuple[Split, ...], _Compiled]]

FAILED, REFUSED = 1, 2
"""Exit status when a condition of ``--fail-on`` holds; and when the input or a budget is refused,
as for a wrong option."""

# How many modules a sentence names.
_NAMED = 4


class UsageError(MemplanError, ValueError):
    """Options that do not go together."""


class Planned(NamedTuple):
    """What ``memplan plan`` found.

    Attributes:
      plan: None where XLA's own program keeps to the budget.
      module: the program as it will run: the rewritten module, or XLA's executable.
      machine: the one planned for.
      runs: XLA alone and memplan, or one of them.
    """

    plan: Plan | None
    module: Module
    machine: Machine
    runs: list[RunView]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words behind ``memplan``; those of the process by default.

    Returns:
      The exit status: 0, `FAILED` or `REFUSED`.
    """
    options = _parser().parse_args(argv)
    if argv is None:
        _keep_stdout()
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemplanError as error:
        print("\n".join([f"memplan: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"memplan: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    return 0


def _keep_stdout() -> None:
    """Leaves the process's stdout to what Python prints: what libraries of C++ and the program that
    is looked at write there goes to stderr. Only where the process is the command's own: it holds
    for all threads, and to the end."""
    if sys.stdout is None or sys.stderr is None or sys.stdout is not sys.__stdout__:
        return  # Closed, or somebody's own.
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(own, "w", encoding=encoding, errors=errors, closefd=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memplan", description="Plan the memory of XLA programs, byte by byte."
    )
    parser.add_argument("--version", action="version", version=f"memplan {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    inspect = commands.add_parser(
        "inspect", help="who holds the memory of a compiled program, and what moves"
    )
    inspect.add_argument(
        "source",
        help="a scheduled module: HLO text, a .pb proto, either in gzip, or an --xla_dump_to "
        "folder; or, with --machine, what is compiled then: StableHLO, HLO before optimizations, "
        "or module:function as for plan",
    )
    inspect.add_argument(
        "--machine",
        help="predict seconds on this machine (memplan machines); where it is compiled for, a "
        "topology too: v5e:2x2, h200:8",
    )
    _add_choice(inspect)
    inspect.add_argument("--list", action="store_true", help="list the modules of a folder")
    _add_outputs(inspect)
    inspect.set_defaults(run=_inspect)

    diff = commands.add_parser("diff", help="what changed between two compilations")
    diff.add_argument(
        "sources",
        nargs="*",
        metavar="A B",
        help="two scheduled modules, as for inspect; of two folders, the modules are paired",
    )
    diff.add_argument(
        "--run",
        dest="program",
        metavar="MODULE:FUNCTION",
        help="compile this twice, with --machine, instead",
    )
    diff.add_argument(
        "--with-flags",
        action="append",
        default=[],
        metavar="FLAGS",
        help="XLA options of one of the two compilations of --run: 'xla_a=1 xla_b=true', or ''; "
        "those that begin with dashes behind an equals sign: --with-flags=--xla_a=1",
    )
    diff.add_argument("--machine", help="predict seconds on this machine (memplan machines)")
    diff.add_argument(
        "--module", metavar="NAME", help="of folders, this module; a part of its name does"
    )
    diff.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with status 1 if a figure is so: 'peak>+5%%', 'temp>+100MiB', 'total>12GiB'",
    )
    _add_json(diff)
    _add_html(diff)
    diff.set_defaults(run=_diff)

    plan = commands.add_parser("plan", help="plan a program within a budget")
    plan.add_argument(
        "source",
        help="a scheduled module with its weights in host memory, as for inspect; or "
        "module:function, which returns (fun, args) or (fun, args, jit_options), args being "
        "arrays or jax.ShapeDtypeStruct",
    )
    plan.add_argument(
        "--machine",
        required=True,
        help="a machine (memplan machines); for module:function a topology too: v5e:2x2, h200:8",
    )
    _add_choice(plan)
    plan.add_argument("--hbm", required=True, help="the budget of device memory: 12GiB")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON")
    plan.add_argument(
        "--chain",
        type=Path,
        metavar="FILE",
        help="write its transfers as a descriptor chain, for dis and run",
    )
    plan.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="BUFFER",
        help="say why a buffer is kept, evicted, computed again or streamed, by HLO name or "
        "argument path, * for any part; without one, list the largest decisions",
    )
    _add_outputs(plan)
    plan.set_defaults(run=_plan)

    curve = commands.add_parser(
        "curve", help="predicted step against device memory, from all of it to the least"
    )
    curve.add_argument("source", metavar="MODULE:FUNCTION", help="a program, as for plan")
    curve.add_argument("--machine", required=True, help="a machine or a topology, as for plan")
    curve.add_argument("--points", type=int, default=8, metavar="N", help="budgets to plan for")
    curve.add_argument("--plot", type=Path, metavar="FILE", help="draw it: an .svg or .png file")
    _add_json(curve)
    curve.set_defaults(run=_curve)

    dis = commands.add_parser("dis", help="a descriptor chain as text")
    dis.add_argument("chain", type=Path, help="a chain, in its binary form or as text")
    dis.add_argument(
        "--windows",
        action="store_true",
        help="what is issued, awaited, executed and released, from one execution to the next",
    )
    dis.set_defaults(run=_disassemble)

    assembler = commands.add_parser("as", help="a descriptor chain of its text")
    assembler.add_argument("chain", type=Path, help="a chain as text, as dis prints it")
    assembler.add_argument("--out", type=Path, metavar="FILE", required=True, help="what to write")
    assembler.set_defaults(run=_assemble)

    run = commands.add_parser(
        "run", help="replay a descriptor chain without its program: is the disk as fast as that?"
    )
    run.add_argument("chain", type=Path, help="a chain, in its binary form or as text")
    run.add_argument("--replays", type=int, default=10, metavar="N", help="how often")
    run.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    _add_json(run)
    run.set_defaults(run=_run)

    repack = commands.add_parser(
        "repack", help="write weights into a file from which they can be streamed"
    )
    repack.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="SOURCE",
        help="a safetensors file, several, or a folder of them; or an Orbax checkpoint's folder",
    )
    repack.add_argument("file", type=Path, metavar="FILE", help="which is replaced when all is in")
    repack.set_defaults(run=_repack)

    passes = commands.add_parser("passes", help="list the passes in order")
    _add_json(passes)
    passes.set_defaults(run=_passes)

    machines = commands.add_parser("machines", help="list the known machines, or show one")
    machines.add_argument("name", nargs="?", help="a name, an alias, or a .toml file")
    _add_json(machines)
    machines.set_defaults(run=_machines)

    demo = commands.add_parser("demo", help="plan Llamas for accelerators that are not here")
    demo.add_argument("--full", action="store_true", help="five of them on two targets: 10 minutes")
    _add_json(demo)
    demo.set_defaults(run=_demo)
    return parser


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--module", metavar="NAME", help="of a folder's modules this one; a part of its name does"
    )
    parser.add_argument(
        "--stage",
        metavar="NAME",
        help="of a module's stages this one; by default the one "
        "with XLA's buffer assignment, or the last",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    _add_html(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")


def _add_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _inspect(options: argparse.Namespace) -> None:
    from hlo_passes.garbage import collection_paused
    from hlo_passes.hardware.machine import load_machine
    from memplan.report.advising import advise
    from memplan.report.build import target_of, view_run
    from memplan.report.finding_tables import advice_table, finding_tables
    from memplan.report.html import render_html
    from memplan.report.inspecting import Inspector
    from memplan.report.sections import report_tables
    from memplan.report.summary import summarize, summarize_findings

    _check_inspect(options)
    if options.list:
        _list(options)
        return
    machine = load_machine(options.machine.partition(":")[0]) if options.machine else None
    module, executable, in_chunks = _inspected(options)
    with _progress("Reading"), collection_paused():
        if executable is None:
            run = view_run("schedule", module, machine)
        else:
            run = view_run("XLA alone", module, machine, compiled=executable.memory_analysis())
        findings = Inspector(module, target_of(module, machine), machine).findings()
        runs = (
            (splits, view_run("in chunks", m, machine, compiled=e.memory_analysis()))
            for splits, (m, e) in in_chunks
        )
        advice = advise(run, findings, runs)
    report = _report([run], machine, None)
    if options.html:
        _write(options.html, render_html(report, findings, advice))
    _write_trace(options, report)
    if options.json:
        _print_json(summarize(report) | {"findings": summarize_findings(findings, advice)})
    else:
        figures, *rest = report_tables(report)
        _print_tables([figures, advice_table(advice), *rest, *finding_tables(findings)])


def _check_inspect(options: argparse.Namespace) -> None:
    if options.trace and not options.machine:
        raise UsageError("--trace needs --machine: a trace is made of predicted seconds")
    if options.list and any((options.module, options.stage, options.html, options.trace)):
        raise UsageError("--list shows all modules: --module, --stage, --html, --trace show one")
    _check_choice(options, options.list)


def _check_choice(options: argparse.Namespace, of_folder: bool = False) -> None:
    chosen = of_folder or options.module or options.stage
    if chosen and not Path(options.source).is_dir():
        raise UsageError(
            f"--list, --module and --stage are for the folder of a dump; {options.source} is none"
        )


def _inspected(options: argparse.Namespace) -> tuple[Module, Executable | None, _InChunks]:
    """Returns the scheduled module, and the executable where it was compiled for that; and what is
    both with parts in chunks, where there is a function to ask."""
    from memplan.reference import is_reference, load_reference

    if is_reference(options.source):
        if not options.machine:
            raise UsageError(f"{options.source} needs --machine: what to compile it for")
        with _progress("Loading"):
            _without_devices()
            program = load_reference(options.source)
        from hlo_passes.reading.reader import read_module
        from memplan.unplanned import compile_in_chunks, compile_reference

        plain = _compiled(lambda: compile_reference(program, options.machine))
        with _progress("Compiling in chunks"):
            found = compile_in_chunks(program, options.machine)
            in_chunks = [(splits, (read_module(e), e)) for splits, e in found]
        return *plain, in_chunks
    with _progress("Reading"):
        module = _read(options)
    if module.is_scheduled or not options.machine:
        return module, None, []
    _without_devices()
    from memplan.unplanned import compile_module

    return *_compiled(lambda: compile_module(module, options.machine)), []


def _compiled(compile_program: Callable[[], Executable]) -> _Compiled:
    from hlo_passes.reading.reader import read_module

    with _progress("Compiling"):
        executable = compile_program()
        return read_module(executable), executable


def _read(options: argparse.Namespace, machine: Machine | None = None) -> Module:
    """Reads a file, or the module of a folder that the options choose; with `machine`, one that
    was not compiled for another platform."""
    from hlo_passes.reading.dump import choose_module, find_modules, largest_module
    from hlo_passes.reading.reader import read_module

    path = Path(options.source)
    if not path.is_dir():
        _check_platform(path, machine)
        return read_module(path)
    modules = find_modules(path)
    chosen = choose_module(modules, options.module) if options.module else largest_module(modules)
    if len(modules) > 1 and not options.module:
        print(
            f"memplan: {chosen.key} is the largest of {len(modules)} modules in {path}; "
            "--list shows all, --module NAME chooses",
            file=sys.stderr,
        )
    _check_platform(chosen.path(options.stage), machine)
    return chosen.read(options.stage)


def _check_platform(path: Path, machine: Machine | None) -> None:
    from hlo_passes.reading.dump import platform_of

    found = platform_of(path)
    if machine is not None and found not in (None, machine.platform):
        raise UsageError(
            f"{path}: it was compiled for {found}, not for {machine.platform} ({machine.name}); "
            "memplan plan MODULE:FUNCTION compiles for the machine"
        )


def _list(options: argparse.Namespace) -> None:
    from hlo_passes.reading.dump import find_modules
    from memplan.dump_tables import dump_overview, list_modules

    with _progress("Reading"):
        listed = list_modules(find_modules(Path(options.source)))
    if options.json:
        _print_json([asdict(each) for each in listed])
    else:
        _print_tables([dump_overview(listed)])


def _diff(options: argparse.Namespace) -> int:
    from hlo_passes.garbage import collection_paused
    from hlo_passes.hardware.machine import load_machine
    from memplan.diff import compare_paths
    from memplan.report.difference_tables import difference_tables, overview_table
    from memplan.report.differences import find_differences
    from memplan.report.html import render_differences
    from memplan.report.summary import summarize_differences

    _check_diff(options)
    machine = load_machine(options.machine.partition(":")[0]) if options.machine else None
    if options.program:
        compared = (_compiled_twice(options, machine),)
    else:
        with _progress("Reading"), collection_paused():
            before, after = map(Path, options.sources)
            compared = compare_paths(before, after, options.module, machine)
    failed = _failing(options.fail_on, compared)
    first = compared[0]
    with _progress("Comparing"):
        found = None if first.sides is None else find_differences(*first.sides)
    overview = [overview_table(compared)] if len(compared) > 1 or found is None else []
    if options.html:
        if found is None:
            raise UsageError(f"--html needs two modules to compare; {first.name}: {first.problem}")
        report = _difference_report(first, machine)
        _write(options.html, render_differences(report, found, overview))
    if options.json:
        _print_json(summarize_differences(compared, found, failed))
    else:
        _print_tables([*overview, *(difference_tables(first.name, found) if found else ())])
    for sentence in failed:
        print(f"memplan: {sentence}", file=sys.stderr)
    return FAILED if failed else 0


def _check_diff(options: argparse.Namespace) -> None:
    if len(options.sources) != (0 if options.program else 2):
        raise UsageError("diff takes two modules or folders, or --run MODULE:FUNCTION")
    if options.with_flags and not options.program:
        raise UsageError("--with-flags is for --run: files and folders are compiled already")
    if options.module is not None and not any(Path(path).is_dir() for path in options.sources):
        found = " or ".join(options.sources) or "--run"
        raise UsageError(f"--module is for the folder of a dump, not for {found}")


def _difference_report(compared: Compared, machine: Machine | None) -> Report:
    from memplan.report.view import Report

    assert compared.sides is not None
    names = zip(("before", "after"), compared.sides, strict=True)
    runs = tuple(replace(side.run, name=name) for name, side in names)
    return Report(compared.name, "" if machine is None else machine.name, None, runs, __version__)


def _compiled_twice(options: argparse.Namespace, machine: Machine | None) -> Compared:
    from hlo_passes.reading.reader import read_module
    from memplan.diff import parse_flags
    from memplan.reference import load_reference
    from memplan.report.differences import compare_modules

    if not options.machine or len(options.with_flags) != 2:
        raise UsageError("--run needs --machine and two --with-flags, one of them '' for none")
    flags = [parse_flags(text) for text in options.with_flags]
    with _progress("Loading"):
        _without_devices()
        program = load_reference(options.program)
    from memplan.unplanned import compile_reference

    with _progress("Compiling twice"):
        before, after = (read_module(compile_reference(program, options.machine, f)) for f in flags)
    key = options.with_flags[0] or "no flags", options.with_flags[1] or "no flags"
    return compare_modules(key, before, after, machine)


def _failing(conditions: Sequence[str], compared: Sequence[Compared]) -> list[str]:
    """What each condition that holds says of each module.

    Raises:
      UsageError: when there are conditions, and no module was found, and read, on both sides.
    """
    from memplan.report.conditions import parse_condition
    from memplan.report.difference_tables import figure_texts

    if conditions and not any(each.figures for each in compared):
        why = "; ".join(f"{each.name}: {each.problem}" for each in compared[:_NAMED])
        raise UsageError(f"--fail-on has nothing to compare: {why}")
    failed: list[str] = []
    for each in compared:
        for text in conditions if each.figures else ():
            condition = parse_condition(text, each.figures)
            figure = next(f for f in each.figures if f.name == condition.name)
            if condition.holds(figure):
                before, after, _ = figure_texts(figure)
                failed.append(f"{each.name}: {figure.name} was {before}, is {after}: {text}")
    return failed


def _without_devices() -> None:
    """Nothing runs here: an accelerator of this machine is neither needed nor taken."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _plan(options: argparse.Namespace) -> None:
    from hlo_passes.budget import parse_bytes
    from memplan.reference import is_reference

    _check_choice(options)
    budget = parse_bytes(options.hbm)
    if is_reference(options.source):
        planned = _plan_function(options.source, options.machine, budget)
    else:
        planned = _plan_file(options, budget)
    if options.out:
        if planned.plan is None:
            raise UsageError("no plan to write: XLA's own program keeps to the budget")
        planned.plan.save(options.out)
    if options.chain:
        _write_chain(options.chain, planned)
    report = _report(planned.runs, planned.machine, budget)
    if options.explain is None:
        _show(options, report)
    else:
        _write_files(options, report)
        _explain(options, planned)


def _plan_file(options: argparse.Namespace, budget: int) -> Planned:
    from hlo_passes import pipeline
    from hlo_passes.errors import MemoryBudgetError
    from hlo_passes.hardware.machine import load_machine
    from hlo_passes.ir import HOST_MEMORY_SPACE
    from memplan.report.build import view_run

    machine = load_machine(options.machine)
    with _progress("Planning"):
        module = _read(options, machine)
        labels = {p.name: p.op_name for p in module.entry.parameters if p.op_name}
        try:
            had = min(budget, machine.device_memory.capacity_bytes)
            plan = pipeline.plan_module(module, machine, had, labels=labels)
        except MemoryBudgetError as error:
            leaves = (leaf for p in module.entry.parameters for _, leaf in p.shape.leaves())
            if all(leaf.memory_space != HOST_MEMORY_SPACE for leaf in leaves):
                error.add_note(
                    f"{module.name} has no arguments in host memory, and a plan for a compiled "
                    "module moves none there: memplan plan MODULE:FUNCTION does."
                )
            raise
        rewritten = pipeline.rewrite_module(module, plan, machine)
        runs = [
            view_run("XLA alone", module, machine),
            view_run("memplan", rewritten, machine, plan=plan),
        ]
    return Planned(plan, rewritten, machine, runs)


def _curve(options: argparse.Namespace) -> None:
    from hlo_passes.units import format_bytes, format_seconds
    from memplan.curves import Point, curve
    from memplan.reference import load_reference

    with _progress("Loading"):
        _without_devices()
        program = load_reference(options.source)
        from memplan.unplanned import target_of
    with _progress("Planning") as say:

        def found(point: Point) -> None:
            step = format_seconds(point.step_time_s)
            say(f"{format_bytes(point.budget_bytes)}: a step of {step}, {point.slowdown:.2f}x")

        step = program.jit(machine=target_of(options.machine))
        result = curve(step, *program.args, points=options.points, found=found)
    if options.json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        _print_tables([result.table])
    if options.plot:
        result.plot(options.plot)


def _write_chain(path: Path, planned: Planned) -> None:
    from hlo_passes.chains.binary import to_bytes
    from hlo_passes.chains.lowering import lower

    if planned.plan is None or not planned.plan.transfers:
        raise UsageError("no chain to write: the plan transfers nothing in the entry")
    path.write_bytes(to_bytes(lower(planned.plan, {}).chain))


def _disassemble(options: argparse.Namespace) -> None:
    from hlo_passes.chains.text import disassemble, windows
    from memplan.chains import read_chain

    chain = read_chain(options.chain)
    sys.stdout.write(windows(chain) if options.windows else disassemble(chain))


def _assemble(options: argparse.Namespace) -> None:
    from hlo_passes.chains.binary import to_bytes
    from memplan.chains import read_chain

    options.out.write_bytes(to_bytes(read_chain(options.chain)))


def _run(options: argparse.Namespace) -> None:
    from memplan.chains import read_chain, replay_alone
    from memplan.report.replayed import render_replayed

    if options.replays < 1:
        raise UsageError(f"--replays: expected 1 or more, found {options.replays}")
    chain = read_chain(options.chain)
    with _progress(f"Replaying {options.replays} times"):
        replayed = replay_alone(chain, options.replays)
    if options.trace:
        _write(options.trace, render_replayed(chain, replayed.records))
    if options.json:
        _print_json(replayed.to_dict())
    else:
        _print_tables(replayed.tables())


def _repack(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from memplan import disk

    _without_devices()
    sources: list[Path] = options.sources
    columns = BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        disk.repack(
            sources[0] if len(sources) == 1 else sources,
            options.file,
            told=lambda done, of: bar.update(task, completed=done, total=of),
        )


def _passes(options: argparse.Namespace) -> None:
    from hlo_passes.pipeline import PASSES
    from memplan.report.tables import Column, Table

    if options.json:
        _print_json([{"name": p.name, "establishes": p.establishes} for p in PASSES])
        return
    rows = tuple((str(n), p.name, p.establishes) for n, p in enumerate(PASSES, 1))
    columns = (Column("", right=True), Column("pass"), Column("establishes"))
    _print_tables([Table("", columns, rows)])


def _machines(options: argparse.Namespace) -> None:
    from hlo_passes.hardware.machine import load_machine, machine_names
    from memplan.machine_tables import machine_overview, machine_sources

    if options.name:
        machine = load_machine(options.name)
        if options.json:
            _print_json(machine.to_dict())
        else:
            _print_tables(machine_sources(machine))
        return
    machines = [load_machine(name) for name in machine_names()]
    if options.json:
        _print_json([machine.to_dict() for machine in machines])
    else:
        _print_tables([machine_overview(machines)])


def _demo(options: argparse.Namespace) -> None:
    from memplan import demo

    demo.main(full=options.full, json=options.json)


def _plan_function(source: str, machine_name: str, budget: int) -> Planned:
    from hlo_passes.hardware.machine import load_machine
    from memplan.compare import view_planned, view_unscheduled
    from memplan.reference import load_reference

    machine = load_machine(machine_name.partition(":")[0])
    with _progress("Loading"):
        _without_devices()
        program = load_reference(source)
        from memplan.unplanned import target_of
    with _progress("Compiling"):
        step = program.jit(hbm=budget, machine=target_of(machine_name))
        compiled = step.lower(*program.args).compile()
        views = [view_planned(compiled, machine)]
    if compiled.plan is not None:
        with _progress("Compiling what XLA does alone"):
            alone = view_unscheduled(compiled, machine)
        views = views if alone is None else [alone, *views]
    return Planned(compiled.plan, compiled.module, machine, views)


def _report(runs: Sequence[RunView], machine: Machine | None, budget: int | None) -> Report:
    from memplan.report.view import Report

    name = "" if machine is None else machine.name
    return Report(runs[0].module, name, budget, tuple(runs), __version__)


def _show(options: argparse.Namespace, report: Report) -> None:
    from memplan.report.sections import report_tables
    from memplan.report.summary import summarize

    _write_files(options, report)
    if options.json:
        _print_json(summarize(report))
    else:
        _print_tables(report_tables(report))


def _write_files(options: argparse.Namespace, report: Report) -> None:
    from memplan.report.html import render_html

    if options.html:
        _write(options.html, render_html(report))
    _write_trace(options, report)


def _write_trace(options: argparse.Namespace, report: Report) -> None:
    from memplan.report.trace import render_trace

    if options.trace:
        _write(options.trace, render_trace(report))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _explain(options: argparse.Namespace, planned: Planned) -> None:
    """Prints sentences, or tables where no buffer is named; as JSON always the sentences."""
    from memplan.explaining import NO_PLAN, explanations
    from memplan.report.decisions import decision_tables

    plan = planned.plan
    if plan is None:
        _print_json([]) if options.json else print(NO_PLAN)
    elif options.explain or options.json:
        pattern = options.explain or "*"
        found = explanations(plan, pattern, module=planned.module, machine=planned.machine)
        if options.json:
            _print_json([asdict(explanation) for explanation in found])
        else:
            print(*(explanation.sentence for explanation in found), sep="\n")
    else:
        _print_tables(decision_tables(plan))


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _print_tables(tables: Iterable[Table]) -> None:
    from memplan.report.tables import write_tables

    write_tables(tables, sys.stdout)


@contextmanager
def _progress(what: str) -> Generator[Callable[[str], None]]:
    """A spinner on stderr while something takes its time, beside which more can be said, and what
    is said stays; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{what}…"):
        yield lambda said: console.print(said, highlight=False)
