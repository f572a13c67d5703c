"""The modules of an ``--xla_dump_to`` folder, told by the names of its files.

    module_0001.jit_f.before_optimizations.hlo.pb          ┐
    module_0001.jit_f.0007.fusion.after_cse.before_dce.txt ├─ one module, three stages of it
    module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt  ┘
    module_0001.jit_f.thunk_sequence.txt                      no module: what its executable does
    ───────┬───────── ─────────────┬──────────────────────
          key                    stage

The names are those of xla/service/dump.cc. Before ``module_`` may stand a time
(``--xla_dump_include_timestamp``), before the stage XLA:TPU's change list (``cl_123.``) or the
platform. Where a file's name would be too long, the module's is left out of it:
module_0001.before_optimizations.txt.
"""

from __future__ import annotations

import gzip
import re
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hlo_passes.errors import (
    DumpChoiceError,
    MalformedModuleError,
    MemplanError,
    UnreadableModuleError,
)
from hlo_passes.garbage import collection_paused
from hlo_passes.hardware.machine import Platform
from hlo_passes.ir import Module
from hlo_passes.reading.assignment_text import read_assignment
from hlo_passes.reading.module_file import read_file
from hlo_passes.reading.thunks import read_thunks

BEFORE_OPTIMIZATIONS, AFTER_OPTIMIZATIONS = "before_optimizations", "after_optimizations"

# The numbered passes of --xla_dump_hlo_pass_re come between the two lines: from the scheduler's
# on, modules have a schedule. What XLA:GPU writes among the passes has none, and stands first.
_EARLY = (BEFORE_OPTIMIZATIONS, "after_spmd_partitioner", "before_config_assignment")
_LATE = (
    "after_optimizations_before_buffer_assignment",
    AFTER_OPTIMIZATIONS,
    "after_optimizations_after_buffer_assignment",
    "after_codegen",
)
_BUFFER_ASSIGNMENT = "after_optimizations-buffer-assignment"
# The one after XLA's passes over thunks, if these changed anything.
_THUNKS = ("thunk_sequence_after_thunk_passes", "thunk_sequence")
_THUNK_METADATA = "thunk_metadata"

# A module's name may have dots in it and end in a number, as main.1234.
_FILE = re.compile(
    r"(?P<key>(?:(?P<time>\d+)\.)?module_(?P<number>\d+)(?:\.(?P<name>.+?))??)\."
    r"(?P<tpu>cl_\d+\.)?(?:"
    r"(?:(?P<target>sm_\d+\.\w+|\w+)_)?"
    rf"(?P<stage>{'|'.join((*_EARLY, *_LATE, _BUFFER_ASSIGNMENT, *_THUNKS, _THUNK_METADATA))})"
    r"|(?P<step>\d{4,}\.[^.]+\.(?:after|before)_.+?)"
    r")\.(?P<kind>hlo\.pb|pb|txt)(?P<packing>|\.gz|\.zst)"
)


class AssignmentWarning(UserWarning):
    """The text of a buffer assignment, or of thunks, cannot be read, and its module is read without
    it."""


@dataclass(frozen=True)
class DumpedModule:
    """One module of a dump; its files are not read yet.

    Attributes:
      key: what its files begin with, unique in the folder: ``module_0001.jit_f``.
      name: the module's own, ``jit_f``; ``""`` where it is too long for the name of a file.
      stages: the file of each stage, in the order of compilation; proto before text. Stages
        between passes are called by number, pipeline and passes:
        ``0007.fusion.after_cse.before_dce``.
      assignment_text: XLA's buffer assignment as text, if it was written.
      thunks: what XLA:GPU's executable does, and the names of the instructions that it does it for,
        if they were written.
    """

    key: str
    name: str
    stages: Mapping[str, Path]
    assignment_text: Path | None
    thunks: tuple[Path | None, Path | None]

    @property
    def default_stage(self) -> str:
        """The stage that is read by default: the one with XLA's buffer assignment, else the
        last. It has a schedule if any of them has."""
        has_text = self.assignment_text is not None and AFTER_OPTIMIZATIONS in self.stages
        if self.assignment_proto or has_text:
            return AFTER_OPTIMIZATIONS
        return next(reversed(tuple(self.stages)))

    @property
    def assignment_proto(self) -> Path | None:
        """The ``HloProto`` that has XLA's buffer assignment beside the module, if there is
        one. XLA:TPU leaves it out of the stages behind this one."""
        path = self.stages.get(AFTER_OPTIMIZATIONS)
        is_proto = path is not None and path.name.removesuffix(".gz").endswith(".pb")
        return path if is_proto else None

    def path(self, stage: str | None = None) -> Path:
        """Returns the file of a stage; by default, of `default_stage`.

        Args:
          stage: its name, or a part of it that no other stage has.

        Raises:
          DumpChoiceError: when no stage is called that, or several are.
        """
        if stage is None:
            return self.stages[self.default_stage]
        return self.stages[_choose("stage", stage, self.key, {s: (s,) for s in self.stages})]

    @collection_paused()
    def read(self, stage: str | None = None) -> Module:
        """Reads a stage, as `path` finds it; with XLA's buffer assignment, where the dump has it
        of that stage. One that cannot be read is an `AssignmentWarning`.

        Raises:
          DumpChoiceError: as `path`.
          UnreadableModuleError, MalformedModuleError, OSError: as `read_file`.
        """
        path = self.path(stage)
        module = read_file(path)
        if path != self.stages.get(AFTER_OPTIMIZATIONS):
            return module
        try:
            if module.assigned is None and self.assignment_text is not None:
                module.assigned = read_assignment(self.assignment_text, module)
        except MalformedModuleError as error:
            warnings.warn(str(error), AssignmentWarning, stacklevel=2)
        try:
            if self.thunks[0] is not None:
                module.thunks = read_thunks(self.thunks[0], self.thunks[1])
        except (MalformedModuleError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            warnings.warn(str(error), AssignmentWarning, stacklevel=2)
        return module


class ModulePairs(NamedTuple):
    """The same programs in two dumps, each in the order of the first; and what is in one only."""

    pairs: tuple[tuple[DumpedModule, DumpedModule], ...]
    only_before: tuple[DumpedModule, ...]
    only_after: tuple[DumpedModule, ...]


def find_modules(folder: Path) -> tuple[DumpedModule, ...]:
    """Finds the modules of a dump, in the order in which XLA numbered them.

    No file is read. One that cannot be read is an error when it is, of its module alone::

        for dumped in find_modules(folder):
            try:
                module = dumped.read()
            except MemplanError as error:
                ...

    Raises:
      UnreadableModuleError: when the folder holds no module.
      OSError: when it cannot be listed.
    """
    files: dict[str, dict[str, list[tuple[tuple[bool, bool, str], Path]]]] = defaultdict(dict)
    names: dict[str, tuple[int, int, str]] = {}
    for path in folder.iterdir():
        found = _FILE.fullmatch(path.name)
        if found is None:
            continue
        # What cannot be unpacked comes last; then text, and what is packed.
        rank = (found["packing"] == ".zst", found["kind"] == "txt", found["packing"])
        stage = found["stage"] or found["step"]
        files[found["key"]].setdefault(stage, []).append((rank, path))
        names[found["key"]] = (int(found["time"] or 0), int(found["number"]), found["name"] or "")
    _join_unnamed(files, names)
    modules = (
        _module(key, names[key][-1], {stage: min(of)[1] for stage, of in files[key].items()})
        for key in sorted(files, key=lambda key: (names[key], key))
    )
    if with_stages := tuple(module for module in modules if module.stages):
        return with_stages
    raise UnreadableModuleError(
        str(folder),
        "no module dump in this folder",
        "Expected files like module_0001.jit_f.*after_optimizations.txt; make them with "
        "XLA_FLAGS=--xla_dump_to=DIR (and --xla_dump_hlo_as_proto for exact copies).",
    )


def platform_of(path: Path) -> Platform | None:
    """Returns the platform that a file's module was compiled for, if the file's name tells."""
    found = _FILE.fullmatch(path.name)
    if found is None:
        return None
    if found["tpu"]:
        return "tpu"
    platforms: dict[str, Platform] = {"cpu": "cpu", "gpu": "gpu"}
    return platforms.get((found["target"] or "").rpartition("_")[2])


def largest_module(modules: Sequence[DumpedModule]) -> DumpedModule:
    """Returns the module with the largest file: all but always the user's own step."""
    return max(modules, key=lambda module: module.path().stat().st_size)


def choose_module(modules: Sequence[DumpedModule], text: str) -> DumpedModule:
    """Returns the module that `text` names: a key, a name, or a part of a key that no other has.

    Raises:
      DumpChoiceError: when it is none or several of them.
    """
    folder = str(modules[0].path().parent)
    key = _choose("module", text, folder, {m.key: (m.key, m.name) for m in modules})
    return next(m for m in modules if m.key == key)


def pair_modules(before: Sequence[DumpedModule], after: Sequence[DumpedModule]) -> ModulePairs:
    """Pairs the modules of two dumps that stand for the same program.

    Modules of one name are the same program. Where several have it (``jit__lambda``), first
    those of equal content are paired, then those of equal outline (how often each opcode, and
    the shapes of parameters and result), then the others; always in their order. Only then is
    anything read: the first stage that all modules of the name have.

    Complexity: linear in the bytes read, and in modules but for sorting them.
    """
    found: list[tuple[int, int]] = []
    places: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, modules in enumerate((before, after)):
        for n, module in enumerate(modules):
            places[module.name][side].append(n)
    for ours, theirs in places.values():
        if len(ours) <= 1 and len(theirs) <= 1:
            found += zip(ours, theirs, strict=False)
            continue
        if ours and theirs:
            found += _paired(before, ours, after, theirs)
    found.sort()
    paired_before, paired_after = {n for n, _ in found}, {m for _, m in found}
    return ModulePairs(
        tuple((before[n], after[m]) for n, m in found),
        tuple(module for n, module in enumerate(before) if n not in paired_before),
        tuple(module for m, module in enumerate(after) if m not in paired_after),
    )


def _join_unnamed(
    files: dict[str, dict[str, list[tuple[tuple[bool, bool, str], Path]]]],
    names: Mapping[str, tuple[int, int, str]],
) -> None:
    """Puts the files without a name to those of their module that are short enough to have it."""
    for unnamed in [key for key in files if not names[key][-1]]:
        named = [key for key in files if key.startswith(f"{unnamed}.")]
        if len(named) == 1:
            for stage, of in files.pop(unnamed).items():
                files[named[0]].setdefault(stage, []).extend(of)


def _module(key: str, name: str, files: dict[str, Path]) -> DumpedModule:
    assignment = files.pop(_BUFFER_ASSIGNMENT, None)
    thunks = [file for file in (files.pop(stage, None) for stage in _THUNKS) if file is not None]
    metadata = files.pop(_THUNK_METADATA, None)
    passes = sorted(files.keys() - {*_EARLY, *_LATE}, key=lambda s: (int(s.partition(".")[0]), s))
    stages = {s: files[s] for s in (*_EARLY, *passes, *_LATE) if s in files}
    return DumpedModule(key, name, stages, assignment, (thunks[0] if thunks else None, metadata))


def _choose(kind: str, text: str, where: str, names: Mapping[str, tuple[str, ...]]) -> str:
    """Returns what `text` is a name of; else what it is a part of."""
    exact = [key for key, of in names.items() if text in of]
    found = exact or [key for key in names if text in key]
    if len(found) != 1:
        raise DumpChoiceError(kind, text, where, found, tuple(names))
    return found[0]


def _paired(
    before: Sequence[DumpedModule],
    ours: Sequence[int],
    after: Sequence[DumpedModule],
    theirs: Sequence[int],
) -> list[tuple[int, int]]:
    """Pairs places of modules of one name by content, then by outline, then in order."""
    modules = [before[n] for n in ours] + [after[n] for n in theirs]
    common = [s for s in modules[0].stages if all(s in m.stages for m in modules)]
    stage = common[0] if common else None
    keys = {(0, n): _content(before[n], stage) for n in ours}
    keys |= {(1, n): _content(after[n], stage) for n in theirs}
    found: list[tuple[int, int]] = []
    for level in range(3):
        waiting: dict[Hashable, list[int]] = defaultdict(list)
        for n in reversed(ours):
            waiting[keys[0, n][level]].append(n)
        for n in theirs:
            if waiting[keys[1, n][level]]:
                found.append((waiting[keys[1, n][level]].pop(), n))
        done, taken = {n for n, _ in found}, {n for _, n in found}
        ours, theirs = [n for n in ours if n not in done], [n for n in theirs if n not in taken]
    return found


def _content(dumped: DumpedModule, stage: str | None) -> tuple[Hashable, Hashable, None]:
    """What equal modules have in common: content, outline, and nothing."""
    if stage is None:
        return object(), object(), None
    try:
        module = dumped.read(stage)
    except (MemplanError, OSError):
        # It has a name all the same, and whoever reads it is told.
        return object(), object(), None
    opcodes = Counter(i.opcode for i in module.instructions.values())
    shapes = tuple(str(p.shape) for p in module.entry.parameters), str(module.entry.root.shape)
    return module.fingerprint, (frozenset(opcodes.items()), shapes), None
