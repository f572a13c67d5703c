"""The modules of a dump as a table: a line each, also of those that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlo_passes.errors import MemplanError
from hlo_passes.reading.dump import DumpedModule
from hlo_passes.units import format_bytes
from memplan.report.tables import Column, Table


@dataclass(frozen=True)
class ListedModule:
    """What ``memplan inspect FOLDER --list`` tells of a module.

    Attributes:
      key, name: as in `DumpedModule`.
      stages: in the order of compilation; the last one is what was read.
      file: of the last stage.
      bytes: of the file; None when it cannot be opened.
      instructions: of all computations; None when the module cannot be read.
      error: why it cannot be read.
    """

    key: str
    name: str
    stages: tuple[str, ...]
    file: str
    bytes: int | None
    instructions: int | None
    error: str | None


def list_modules(modules: Sequence[DumpedModule]) -> tuple[ListedModule, ...]:
    """Reads the last stage of each module, one after the other."""
    return tuple(map(_listed, modules))


def dump_overview(listed: Sequence[ListedModule]) -> Table:
    """Returns one row a module. Numbered passes are counted, not named."""
    columns = (
        Column("module"),
        Column("instructions", right=True),
        Column("file", right=True),
        Column("stages"),
    )
    return Table("", columns, tuple(map(_overview, listed)))


def _listed(dumped: DumpedModule) -> ListedModule:
    path, name = dumped.path(), dumped.name
    size = instructions = error = None
    try:
        size = path.stat().st_size
        module = dumped.read()
        name, instructions = name or module.name, len(module.instructions)
    except (MemplanError, OSError) as reason:
        error = str(reason)
    return ListedModule(
        dumped.key, name, tuple(dumped.stages), str(path), size, instructions, error
    )


def _overview(module: ListedModule) -> tuple[str, ...]:
    passes = sum(stage[0].isdigit() for stage in module.stages)
    stages = [stage for stage in module.stages if not stage[0].isdigit()]
    stages += [f"passes: {passes}"] if passes else []
    return (
        module.key,
        "–" if module.instructions is None else f"{module.instructions:,}",
        "–" if module.bytes is None else format_bytes(module.bytes),
        module.error or ", ".join(stages),
    )
