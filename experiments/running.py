"""What every experiment is: flags, rows that are measured once and kept, tables, a picture.

    command line ─► measure ─► rows ─► tables, on the standard output
                        ▲       ├─► a line each of --json FILE, as soon as it is measured
                        └───────┘   --resume: what FILE has is not measured again

A row is a *case*, what was *found*, and a *stamp*: by which commit, when, on what machine, with
which versions. Flags are absl's, defined when an experiment starts and gone when it has ended,
so that several can run in one process. A flag that takes several values takes the words that follow
it: ``--budget 75 50``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from experiments.isolated import Failure, isolated
from hlo_passes.units import format_seconds
from memplan.report.tables import Table, write_tables

FLAGS = flags.FLAGS
# Those that are defined here are told by ``--help`` as the experiment's own.
flags.disclaim_key_flags()

_ROOT = Path(__file__).parents[1]

# What a figure may depend on: the package by the name it has in a stamp.
_PACKAGES = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "libtpu": "libtpu",
    "cuda_plugin": "jax-cuda13-plugin",
}

type Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A question, and how it is answered.

    Attributes:
      measure: yields rows, each from `Rows.of`; it is given the command line's words, too.
      tables: of rows.
      define: defines the flags of its own.
      plot: of rows, a ``matplotlib.figure.Figure``; None where there is no picture.
      words: what the command line has beside flags, by name.
    """

    measure: Callable[..., Iterable[Row]]
    tables: Callable[[Sequence[Row]], Iterable[Table]]
    define: Callable[[], None] = lambda: None
    plot: Callable[[Sequence[Row]], Any] | None = None
    words: tuple[str, ...] = ()

    def main(self) -> None:
        """Runs it as this process's command line says, and ends the process."""
        command(self._run, self._define)

    def run(self, *words: str) -> None:
        """Runs it within a process that goes on; what it does not take ends that."""
        before = set(FLAGS)
        try:
            self._define()
            self._run(_parse(("", *words)))
        finally:
            _forget(before)

    def _define(self) -> None:
        flags.DEFINE_string("json", None, "file to which rows are appended, a line each")
        flags.DEFINE_bool("resume", False, "do not measure again what the file has")
        flags.DEFINE_bool("show", False, "measure nothing: the tables of the file")
        if self.plot is not None:
            flags.DEFINE_string("plot", None, "file to draw the picture into, .svg or .png")
        self.define()

    def _run(self, words: Sequence[str]) -> None:
        if len(words) - 1 != len(self.words):
            expected = " ".join(self.words) or "flags only"
            raise app.UsageError(f"expected {expected}, found {' '.join(words[1:]) or 'nothing'}")
        if (FLAGS.resume or FLAGS.show) and FLAGS.json is None:
            raise app.UsageError("--resume and --show need --json FILE")
        path = None if FLAGS.json is None else Path(FLAGS.json)
        if FLAGS.show:
            rows = kept(path)
        else:
            rows = list(self.measure(Rows(path, FLAGS.resume), *words[1:]))
        write_tables(self.tables(rows), sys.stdout)
        if self.plot is not None and FLAGS.plot is not None:
            _draw(self.plot(rows), FLAGS.plot)


def command(run: Callable[[Sequence[str]], None], define: Callable[[], None]) -> None:
    """Runs `run` as this process's command line says, and ends the process.

    Args:
      run: takes the program's name and what of the command line are no flags.
      define: defines the flags.
    """
    define()
    app.run(run, flags_parser=_parse)


class Rows:
    """Rows as they are measured.

    Args:
      path: of the file to which each is appended; None keeps nothing.
      resume: take what is in it for measured.
    """

    def __init__(self, path: Path | None = None, resume: bool = False) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known = _lines(path) if resume else {}

    def of(self, case: Row, measure: Callable[[], Row]) -> Row:
        """The row of a case: known already, or what `measure` returns, which JSON can hold."""
        if (line := self._known.get(_key(case))) is None:
            begin = time.monotonic()
            line = json.dumps({"case": case, "found": measure(), "stamp": stamp()})
            taken = format_seconds(time.monotonic() - begin)
            line = json.loads(line)
            with self._lock:
                failure = line["found"].get("failure", "")
                print(*case.values(), taken, failure, file=sys.stderr, flush=True)
                if self._path is not None:
                    with self._path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
        return {**line["case"], **line["found"]}


def kept(path: Path | None) -> list[Row]:
    """The rows of a file; of a case that was measured again, the last."""
    return [{**line["case"], **line["found"]} for line in _lines(path).values()]


def stamps(path: Path) -> list[Row]:
    """The stamps of a file's rows; see `stamp`."""
    return [line["stamp"] for line in _lines(path).values()]


def _lines(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {_key(line["case"]): line for line in lines}


def _key(case: Row) -> str:
    return json.dumps(case, sort_keys=True)


def found_apart(measure: Callable[..., Row], *args: Any, timeout_s: float) -> Row:
    """What `measure` finds in a process of its own, or ``failure`` and why there is nothing."""
    found = isolated(measure, *args, timeout_s=timeout_s)
    return {"failure": found.reason} if isinstance(found, Failure) else found


def stamp() -> Row:
    """How a row came about: ``commit`` and whether what it ran was that (``dirty``), ``date`` in
    UTC, ``machine`` and ``versions``."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {**_code(), "date": date, "machine": _machine(), "versions": _versions()}


@cache
def _code() -> Row:
    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        # Rows themselves may be among what has changed.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
        return {"commit": git("rev-parse", "--short=9", "HEAD"), "dirty": bool(changed)}
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}  # No checkout: an unpacked source archive.


@cache
def _machine() -> Row:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: Row = {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
    }
    # Elsewhere there may be one that is not used, and not to be taken.
    if jax.config.jax_platforms != "cpu":
        found["accelerator"] = jax.devices()[0].device_kind
    return found


@cache
def _versions() -> Row:
    found = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:  # Not every platform has the compilers.
            continue
    return found


def _forget(before: Container[str]) -> None:
    """Flags that were defined since, so that another experiment can define its own."""
    for name in [name for name in FLAGS if name not in before]:
        delattr(FLAGS, name)


def _parse(words: Sequence[str]) -> list[str]:
    """Sets the flags; returns the program's name and what are no flags.

    A flag of several values is written once, before all of them: absl has it before each.
    """
    FLAGS.set_gnu_getopt(True)
    single: list[str] = []
    counts: dict[str, int] = {}
    several = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            several = name if name in FLAGS and isinstance(FLAGS[name], flags.MultiFlag) else ""
            if several:
                counts.setdefault(name, 0)
            else:
                single.append(word)
        elif several:
            counts[several] += 1
            single.append(f"--{several}={word}")
        else:
            single.append(word)
    rest = app.parse_flags_with_usage(single)
    for name, count in counts.items():
        if not count:
            setattr(FLAGS, name, [])
    if FLAGS["verbosity"].using_default_value:
        FLAGS.verbosity = logging.WARNING
    return rest


def _draw(figure: Any, path: str) -> None:
    import matplotlib

    # The same rows give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "memplan", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
