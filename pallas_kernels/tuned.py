"""Configurations that were looked for: which one a kernel takes where a row says so.

    {"target": "sm90", "kernel": "attention_forward",
     "problem": {"head_dim": 128, "mask": "causal", ...}, "size": {"kv_len": 4096, ...},
     "config": {"block_q": 64, "block_kv": 128, "slots": 3},
     "found": {"by": "evidence", ...}, "versions": {"jax": "0.12.0", ...}}

A row serves every problem of its kind: `problem` has what changes the kernel's code or which
configurations there are, and has to be equal; `size` has what only changes how well one does, and
the row of the nearest size is taken. Batches and numbers of heads are in neither where they do
not matter. `tuned.json` beside has the rows that come with the package, one a line, written by
``python -m experiments.autotune``. A user adds others, from a file like it:

    with tuned.using("rows.json"):
        jax.jit(step).lower(...)

    rows of `using`, the innermost first ─► tuned.json ─► the kernel's default
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pallas_kernels.errors import TunedFileError, TunedRowError

type Value = str | int | float | bool | None
type Fields = Mapping[str, Value]

_FIELDS = ("target", "kernel", "problem", "size", "config", "found", "versions")
_BY = ("measured", "evidence")


@dataclass(frozen=True)
class Key:
    """What of a problem a choice depends on.

    Attributes:
      problem: has to be equal: what changes the kernel's code, or its candidates.
      size: positive numbers, of which the nearest will do, by ratio.
    """

    problem: Fields
    size: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One configuration that was looked for.

    Attributes:
      target: generation of the hardware, as of `targets.Target`.
      kernel: its name.
      problem, size: as of `Key`.
      config: fields of the kernel's configuration; those that it has besides follow from the
        problem.
      found: "by", which is "measured" or "evidence", and the figures: of what was measured,
        "seconds".
      versions: of jax and of the compiler.
      source: the file, for errors.
    """

    target: str
    kernel: str
    problem: Fields
    size: Mapping[str, int]
    config: Fields
    found: Mapping[str, Any]
    versions: Mapping[str, str]
    source: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """Rows that have it in common say the same thing, and one of them is kept."""
        fields = (frozenset(each.items()) for each in (self.problem, self.size))
        return self.target, self.kernel, *fields

    def as_json(self) -> dict[str, Any]:
        """What a file has of it."""
        return {name: getattr(self, name) for name in _FIELDS}

    def distance(self, key: Key) -> float:
        """How far its size is from another: the powers of two between them, added up."""
        if self.size.keys() != key.size.keys():
            return math.inf
        return sum(abs(math.log2(self.size[name] / key.size[name])) for name in key.size)


@dataclass(frozen=True)
class Tunable[Problem, Config]:
    """A kernel on a kind of hardware, whose configuration can be looked for.

    Attributes:
      target: generation of the hardware, as of `targets.Target`.
      kernel: its name.
      key: what of a problem the choice depends on.
      candidates: configurations of a problem, frozen dataclasses; the first is the default.
      derived: fields of a configuration that follow from the problem: no row has them.
    """

    target: str
    kernel: str
    key: Callable[[Problem], Key]
    candidates: Callable[[Problem], Iterable[Config]]
    derived: tuple[str, ...] = ()

    def choose(self, problem: Problem) -> Config:
        """The configuration of the row that is nearest to a problem, or the default.

        Raises:
          TunedRowError: if that row is of just this size, and no candidate is what it says.
        """
        key = self.key(problem)
        row = nearest(self.target, self.kernel, key)
        if row is None:
            return self.default(problem)
        for config in self.candidates(problem):
            if self.tuned_fields(config) == row.config:
                return config
        if row.distance(key) > 0:
            # Of another size; what fits there need not fit here.
            return self.default(problem)
        raise TunedRowError(row.source, row.kernel, row.target, row.config, row.problem, row.size)

    def default(self, problem: Problem) -> Config:
        """What is taken where no row is near."""
        return next(iter(self.candidates(problem)))

    def tuned_fields(self, config: Config) -> dict[str, Value]:
        """What a row has of a configuration."""
        fields: Any = config
        named = {each.name: getattr(config, each.name) for each in dataclasses.fields(fields)}
        return {
            name: value.value if isinstance(value, enum.Enum) else value
            for name, value in named.items()
            if name not in self.derived
        }


# --- which row --------------------------------------------------------------------------------

type _Index = Mapping[tuple[str, str, frozenset[tuple[str, Value]]], Sequence[Row]]

_of_user: ContextVar[tuple[_Index, ...]] = ContextVar("tuned rows", default=())


@contextlib.contextmanager
def using(*paths: str | os.PathLike[str]) -> Generator[None]:
    """Has kernels ask the rows of files first, in what is traced inside, by this thread.

    A jitted function that was traced before keeps its configurations.

    Args:
      paths: of files like `tuned.json`; of equal rows, that of the last is taken.

    Raises:
      TunedFileError: if one is not such a file.
    """
    index = _index(merge(*(read(path) for path in paths)))
    token = _of_user.set((index, *_of_user.get()))
    try:
        yield
    finally:
        _of_user.reset(token)


def nearest(target: str, kernel: str, key: Key) -> Row | None:
    """The row of the nearest size, of the user's if any of those is of this kind of problem."""
    of_kind = (target, kernel, frozenset(key.problem.items()))
    for index in (*_of_user.get(), _of_package()):
        # Of two that are as near the first in the order of the file: that is deterministic.
        rows = [row for row in index.get(of_kind, ()) if row.distance(key) < math.inf]
        if rows:
            return min(rows, key=lambda row: row.distance(key))
    return None


@cache
def _of_package() -> _Index:
    return _index(package_rows())


def _index(rows: Iterable[Row]) -> _Index:
    index: dict[tuple[str, str, frozenset[tuple[str, Value]]], list[Row]] = {}
    for row in rows:
        of_kind = (row.target, row.kernel, frozenset(row.problem.items()))
        index.setdefault(of_kind, []).append(row)
    return index


# --- files ------------------------------------------------------------------------------------


def package_rows() -> tuple[Row, ...]:
    """The rows that come with the package."""
    name = "tuned.json"
    return _parse(name, (files("pallas_kernels") / name).read_text(encoding="utf-8"))


def read(path: str | os.PathLike[str]) -> tuple[Row, ...]:
    """The rows of a file.

    Raises:
      TunedFileError: if it is not one of rows.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TunedFileError(str(path), error.strerror or str(error)) from error
    return _parse(str(path), text)


def write(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Writes a file anew, sorted, one row a line; whoever interrupts it leaves the old one."""
    lines = sorted(json.dumps(row.as_json()) for row in rows)
    to = Path(path)
    draft = to.with_name(f"{to.name}.draft")
    draft.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    draft.replace(to)


def merge(*tables: Iterable[Row]) -> tuple[Row, ...]:
    """All rows; of equal ones the last, but what was measured stands against mere evidence."""
    kept: dict[tuple[object, ...], Row] = {}
    for row in (row for rows in tables for row in rows):
        old = kept.get(row.identity)
        if old is None or old.found["by"] != "measured" or row.found["by"] == "measured":
            kept[row.identity] = row
    return tuple(kept.values())


def _parse(source: str, text: str) -> tuple[Row, ...]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise TunedFileError(source, f"it is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise TunedFileError(source, "it is not a list of rows")
    rows = [_row(source, number, entry) for number, entry in enumerate(entries)]
    seen: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(rows):
        first = seen.setdefault(row.identity, number)
        if first != number:
            raise TunedFileError(source, f"rows {first} and {number} are of the same problem")
    return tuple(rows)


def _row(source: str, number: int, entry: Any) -> Row:
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise TunedFileError(source, f"row {number} does not have the fields {', '.join(_FIELDS)}")
    wrong = [name for name in _FIELDS[:2] if not isinstance(entry[name], str)]
    wrong += [name for name in _FIELDS[2:] if not isinstance(entry[name], dict)]
    if wrong:
        raise TunedFileError(source, f"{wrong[0]} of row {number} is of the wrong type")
    if entry["found"].get("by") not in _BY:
        raise TunedFileError(source, f"found.by of row {number} is not one of {', '.join(_BY)}")
    if not all(isinstance(size, int) and size > 0 for size in entry["size"].values()):
        raise TunedFileError(source, f"a size of row {number} is not a positive integer")
    return Row(**entry, source=source)
