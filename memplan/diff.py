"""Compares programs: two files, the modules of two dump folders, or one compiled twice.

before/  module_0001.jit_step ─┐ pair  ┌─ module_0001.jit_step  after/
         module_0002.jit_init ─┘ by ───└─ module_0003.jit_init
         module_0003.jit_old     name    (only before)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hlo_passes.errors import MemplanError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.reading.dump import choose_module, find_modules, largest_module, pair_modules
from hlo_passes.reading.reader import read_module
from memplan.report.differences import Compared, compare_modules


class FlagsError(MemplanError, ValueError):
    """XLA options that cannot be read."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"--with-flags {text!r}: expected NAME=VALUE with blanks in between, as in "
            "'xla_cpu_enable_fast_math=true xla_backend_optimization_level=1'."
        )


def compare_paths(
    before: Path, after: Path, chosen: str | None, machine: Machine | None
) -> tuple[Compared, ...]:
    """Compares two files, or the modules of two folders: those that changed their total most
    first, then those that are on one side only or cannot be read. Of a folder beside a file one
    module is compared, the largest by default.

    Args:
      chosen: of folders, only the module that this names.

    Raises:
      MemplanError, OSError: when a file cannot be read; of a folder's modules, it is told.
    """
    if not (before.is_dir() and after.is_dir()):
        (a, ours), (b, theirs) = (_read(path, chosen) for path in (before, after))
        return (compare_modules((a, b), ours, theirs, machine),)
    ours, theirs = find_modules(before), find_modules(after)
    pairs, only_before, only_after = pair_modules(ours, theirs)
    if chosen is not None:
        module = choose_module(ours, chosen)
        pairs = tuple(pair for pair in pairs if pair[0] is module)
        only_before = tuple(m for m in only_before if m is module)
        only_after = ()
    found: list[Compared] = []
    for a, b in pairs:
        key = a.key, b.key
        try:
            found.append(compare_modules(key, a.read(), b.read(), machine))
        except (MemplanError, OSError) as error:
            found.append(Compared(key, None, (), str(error)))
    found += [Compared((m.key, ""), None, (), "only before") for m in only_before]
    found += [Compared(("", m.key), None, (), "only after") for m in only_after]
    return tuple(sorted(found, key=_order))


def _read(path: Path, chosen: str | None) -> tuple[str, Module]:
    """What one side is called, and its module."""
    if not path.is_dir():
        return str(path), read_module(path)
    modules = find_modules(path)
    module = largest_module(modules) if chosen is None else choose_module(modules, chosen)
    return module.key, module.read()


def _order(compared: Compared) -> tuple[bool, float, float]:
    total = max((f.after or 0.0 for f in compared.figures if f.name == "total"), default=0.0)
    return compared.sides is None, -abs(compared.change("total")), -total


# XLA itself reads numbers and names, and takes no text but "True" for true.
_BOOLS = {"true": True, "false": False}


def parse_flags(text: str) -> Mapping[str, str | bool]:
    """Reads XLA options: ``xla_a=1 xla_b=true``, with or without two dashes.

    Raises:
      FlagsError: when it is none.
    """
    options: dict[str, str | bool] = {}
    for word in text.split():
        name, equals, value = word.removeprefix("--").partition("=")
        if not (name and equals and value):
            raise FlagsError(text)
        options[name] = _BOOLS.get(value.lower(), value)
    return options
