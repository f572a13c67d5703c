"""What becomes of programs that were never meant for memplan: those of XLA's own tests?

    python -m experiments.xla_tests SOURCES [--match async] [--json outcomes.jsonl [--resume]]

*SOURCES* is a checkout of XLA, or any folder: of every ``.hlo`` file, and every string of C++ or
Python that holds HLO text. Each module is read, inspected, analysed and planned within 100, 75
and 50 % of its own device bytes, and within the least budget that an impossible one names; the
plan is written into it, and XLA reads the result. A module without a schedule is refused by
inspect, as it should be, and then has the order of its text for one: steps *as written*. XLA
inserts copies before it schedules, which such a module lacks, so that what is updated in place
may be read later: a plan of it that the checker rejects says nothing, all else does.

*ok*: it went through. *refused*: memplan said in a sentence why not. What is left are defects:
*traceback* (another exception), *rejected* (memplan's checker did not accept memplan's plan, or
the least budget it named was none), *killed* (the process died, as XLA's parser does of some
texts), *over time* and *over memory* of one module.

One process looks at one module after another, and is replaced when it dies.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, get_args

from absl import flags
from google.protobuf.message import EncodeError
from jax.errors import JaxRuntimeError

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.errors import MemoryBudgetError, MemplanError, VerificationError
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.pipeline import plan_module, rewrite_module
from hlo_passes.reading.reader import read_module
from hlo_passes.xla import hlo_proto_to_text
from memplan.report.advising import advise
from memplan.report.build import target_of, view_run
from memplan.report.finding_tables import finding_tables
from memplan.report.html import render_html
from memplan.report.inspecting import Inspector
from memplan.report.sections import report_tables
from memplan.report.tables import Column, Table
from memplan.report.view import Report

Kind = Literal["ok", "refused", "traceback", "rejected", "killed", "over time", "over memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PERCENTS = (100, 75, 50)

_OWN_PACKAGES = ("hlo_passes", "memplan")

_MODULE = re.compile(r"^\s*HloModule\s", re.MULTILINE)
_CPP_STRING = re.compile(r'R"([^()\\\s]{0,16})\((.*?)\)\1"', re.DOTALL)
_PYTHON_STRING = re.compile(r'("""|' r"''')(.*?)\1", re.DOTALL)
_STRINGS = {".cc": _CPP_STRING, ".h": _CPP_STRING, ".py": _PYTHON_STRING}
_NEXT_MODULE = re.compile(r"^\s*// -----.*$", re.MULTILINE)

_AS_WRITTEN = ", as written"

# Characters of a message that are kept.
_MESSAGE = 600


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one step.

    Attributes:
      step: which.
      kind: one of `KINDS`.
      what: the exception's class, or the exit code.
      where: the innermost function of memplan that it passed.
      message: its sentence, or the last that the process said.
    """

    step: str
    kind: Kind
    what: str = ""
    where: str = ""
    message: str = ""


def _define() -> None:
    flags.DEFINE_string("match", "", "of the modules whose path has this part")
    flags.DEFINE_float("seconds", 20.0, "for one module")
    flags.DEFINE_integer("mib", 1024, "memory for one module")


def _rows(rows: Rows, sources: str) -> Iterator[Row]:
    found = dict(find_texts(Path(sources), FLAGS.match))
    worker = Worker(FLAGS.seconds, FLAGS.mib << 20)
    # Those with a schedule first: they are what memplan reads.
    for name in sorted(found, key=lambda n: (not _is_scheduled(found[n]), n)):
        yield rows.of({"module": name}, lambda n=name: _looked(worker, n, found[n]))
    worker.end()


def _looked(worker: Worker, name: str, text: str) -> Row:
    outcomes = worker.look(name, text)
    if outcomes[-1].kind not in ("ok", "refused"):
        print(f"{name}: {outcomes[-1]}", file=sys.stderr, flush=True)
    return {"outcomes": [asdict(outcome) for outcome in outcomes]}


def _is_scheduled(text: str) -> bool:
    return re.search(r"^\s*HloModule .*is_scheduled\s*=\s*true", text, re.MULTILINE) is not None


def find_texts(sources: Path, match: str = "") -> Iterator[tuple[str, str]]:
    """Yields file and line, and the text, of every HLO module under `sources`, each text once."""
    seen: set[str] = set()
    for path in sorted(sources.rglob("*")):
        name = str(path.relative_to(sources))
        if match not in name or path.suffix not in (".hlo", *_STRINGS) or not path.is_file():
            continue
        content = path.read_text(encoding="utf-8", errors="replace")
        for start, text in _texts(path.suffix, content):
            if _MODULE.search(text) and text not in seen:
                seen.add(text)
                yield f"{name}:{content.count('\n', 0, start) + 1}", text


def _texts(suffix: str, content: str) -> Iterator[tuple[int, str]]:
    """Yields where each may begin, and what stands there."""
    if suffix in _STRINGS:
        for string in _STRINGS[suffix].finditer(content):
            yield string.start(), string[2]
        return
    start = 0
    for end in _NEXT_MODULE.finditer(content):
        yield start, content[start : end.start()]
        start = end.end()
    yield start, content[start:]


class Worker:
    """A process that looks at modules, and is replaced when it dies.

    Args:
      seconds: for one module.
      memory: bytes of address space that a module may take beyond what the process has.
    """

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds = seconds
        self._memory = memory
        self._process: SpawnProcess | None = None

    def look(self, name: str, text: str) -> tuple[Outcome, ...]:
        """Returns what becomes of each step, up to one that the process does not survive."""
        if self._process is None:
            self._start()
        done: list[Outcome] = []
        step, deadline = "read", time.monotonic() + self._seconds
        try:
            self._connection.send((name, text))
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                message = self._connection.recv()
                match message:
                    case None:
                        return tuple(done)
                    case Outcome():
                        done.append(message)
                    case _:
                        step = message
        except (EOFError, ConnectionError):
            said = self._said()
            code = self.end()
            kind: Kind = "over memory" if "bad_alloc" in said else "killed"
            return (*done, Outcome(step, kind, f"exit code {code}", "", said))
        self.end()
        return (*done, Outcome(step, "over time", f"more than {self._seconds:g} s"))

    def end(self) -> int | None:
        """Ends the process; returns the exit code."""
        if self._process is None:
            return None
        if self._process.exitcode is None:
            self._process.join(1)
        self._process.kill()
        self._process.join()
        code, self._process = self._process.exitcode, None
        self._errors.close()
        return code

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._errors = tempfile.NamedTemporaryFile("r", errors="replace")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self._errors.name, self._memory)
        self._process = process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._connection.recv()  # It is ready: its start is no module's time.

    def _said(self) -> str:
        """The last that the process wrote before it died."""
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
        return " ".join(fatal or lines[-3:])[:_MESSAGE]


def _serve(connection: Connection, errors: str, memory: int) -> None:
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    machines = {name: load_machine(name) for name in ("v5e", "h200", "cpu")}
    connection.send("ready")
    while True:
        name, text = connection.recv()
        _look(name, text, machines, connection.send)
        connection.send(None)


def _look(
    name: str, text: str, machines: Mapping[str, Machine], tell: Callable[[object], None]
) -> None:
    """Takes all steps that a module admits, and tells of each before and after."""

    def attempt[Result](step: str, call: Callable[[], Result]) -> Result | Exception:
        tell(step)
        try:
            result = call()
        except Exception as error:  # Whatever it is, it is the result of this step.
            tell(_outcome(step, error))
            return error
        tell(Outcome(step, "ok"))
        return result

    read = attempt("read", lambda: read_module(text + "\n"))
    if isinstance(read, Exception):
        return
    machine = machines[machine_of(name, read)]
    if read.is_scheduled:
        module, order = read, ""
    else:
        attempt("inspect unscheduled", lambda: _inspect(read, machine))
        module, order = scheduled(read), _AS_WRITTEN
    if isinstance(attempt(f"analyses{order}", lambda: _analyse(module)), Exception):
        return
    attempt(f"inspect{order}", lambda: _inspect(module, machine))
    total = memory_usage(module, machine.platform).total_bytes
    capacity = machine.device_memory.capacity_bytes
    failure: object = None
    for percent in PERCENTS:
        budget = min(capacity, total * percent // 100)
        failure = attempt(f"plan {percent} %{order}", lambda b=budget: _plan(module, machine, b))
    if isinstance(failure, MemoryBudgetError) and failure.least <= capacity:
        least = failure.least
        attempt(f"plan least{order}", lambda: _plan_least(module, machine, least))


def machine_of(name: str, module: Module) -> str:
    """The machine that a module of XLA's tests is planned for."""
    if target_of(module) == "tpu":
        return "v5e"
    return "cpu" if "cpu" in name else "h200"


def scheduled(module: Module) -> Module:
    """The same module with the order in which its instructions stand for a schedule."""
    proto = module.to_proto()
    for computation in proto.computations:
        # XLA schedules all but what is fused.
        if not module.computations[computation.id].is_fusion:
            sequence = proto.schedule.sequences[computation.id]
            sequence.instruction_ids.extend(i.id for i in computation.instructions)
    return Module(proto)


def _analyse(module: Module) -> None:
    compute_live_ranges(analyze_dataflow(module))
    for target in ("cpu", "gpu", "tpu"):
        memory_usage(module, target)


def _inspect(module: Module, machine: Machine) -> None:
    run = view_run("schedule", module, machine)
    findings = Inspector(module, target_of(module, machine), machine).findings()
    advice = advise(run, findings)
    report = Report(run.module, machine.name, None, (run,), "")
    render_html(report, findings, advice)
    list(report_tables(report))
    list(finding_tables(findings))


def _plan(module: Module, machine: Machine, budget: int) -> None:
    plan = plan_module(module, machine, budget)
    rewritten = rewrite_module(module, plan, machine)
    if _is_taken_by_xla(module):
        hlo_proto_to_text(rewritten.to_bytes())


def _is_taken_by_xla(module: Module) -> bool:
    """Some texts that XLA's parser takes are of modules that it does not take as protos."""
    try:
        hlo_proto_to_text(module.to_bytes())
    except JaxRuntimeError:
        return False
    return True


def _plan_least(module: Module, machine: Machine, budget: int) -> None:
    try:
        _plan(module, machine, budget)
    except MemoryBudgetError as error:
        raise VerificationError(f"hbm={budget} was the least budget", str(error)) from error


def _outcome(step: str, error: Exception) -> Outcome:
    match error:
        case VerificationError():
            kind: Kind = "rejected"
        case MemplanError():
            kind = "refused"
        case MemoryError() | EncodeError():  # protobuf's, for want of memory
            kind = "over memory"
        case _:
            kind = "traceback"
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(Path(__file__).parents[1]) and set(_OWN_PACKAGES) & set(path.parts):
            where = f"{path.name}:{frame.lineno} {frame.name}"
    message = " ".join(str(error).split())[:_MESSAGE]
    return Outcome(step, kind, type(error).__name__, where, message)


def _tables(rows: Sequence[Row]) -> list[Table]:
    found = [(row["module"], Outcome(**o)) for row in rows for o in row["outcomes"]]
    counts = Counter((o.step, o.kind) for _, o in found)
    steps = sorted(dict.fromkeys(o.step for _, o in found), key=lambda s: _AS_WRITTEN in s)
    cells = tuple((step, *(str(counts[step, kind]) for kind in KINDS)) for step in steps)
    columns = (Column("step"), *(Column(kind, right=True) for kind in KINDS))
    refused = [(m, o) for m, o in found if o.kind == "refused"]
    failed = [(m, o) for m, o in found if o.kind not in ("ok", "refused")]
    unsure = [(m, o) for m, o in failed if o.kind == "rejected" and _AS_WRITTEN in o.step]
    return [
        Table("Outcomes", columns, cells),
        _by_place("Refused", refused),
        _by_place("Rejected as written", unsure),
        _by_place("Defects", [each for each in failed if each not in unsure]),
    ]


def _by_place(title: str, found: Iterable[tuple[str, Outcome]]) -> Table:
    """Where they happened, the most frequent first, each with the first module."""
    groups: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for module, o in found:
        key = (o.kind, o.what, o.where or o.step)
        groups.setdefault(key, []).append((module, o.message))
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = tuple((str(len(of)), str(len({m for m, _ in of})), *key, *of[0]) for key, of in ordered)
    headings = ("kind", "what", "where", "first module", "message")
    counts = (Column("times", right=True), Column("modules", right=True))
    return Table(title, (*counts, *map(Column, headings)), rows)


EXPERIMENT = Experiment(_rows, _tables, _define, words=("SOURCES",))

if __name__ == "__main__":
    EXPERIMENT.main()
