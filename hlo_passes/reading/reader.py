"""The one way in: anything that holds an HLO module becomes a `Module`.

.hlo / .txt text ─────────────── XLA's own parser ─┐
.pb  HloModuleProto / HloProto ────────────────────┤
--xla_dump_to folder ─ its largest module's last stage ─► Module
StableHLO text, bytecode ──────── XLA's converter ─┤
jax.stages.Lowered / Compiled ─────────────────────┘
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hlo_passes.errors import UnreadableModuleError
from hlo_passes.garbage import collection_paused
from hlo_passes.ir import Module
from hlo_passes.reading.dump import find_modules, largest_module
from hlo_passes.reading.module_file import (
    from_bytes,
    from_proto,
    from_stablehlo,
    from_text,
    read_file,
)


@collection_paused()
def read_module(source: Any) -> Module:
    """Reads one HLO module.

    Args:
      source: a path (``.hlo``, ``.txt``, ``.pb``, StableHLO ``.mlir``, gzip around any of
        them, or a dump folder, of which the largest module is read; `find_modules` finds the
        others); HLO or StableHLO text; the bytes of an ``HloModuleProto``, an ``HloProto`` or
        StableHLO bytecode; a ``jax.stages.Lowered`` or ``Compiled``; or a `Module`, returned
        as it is.

    Raises:
      UnreadableModuleError: when the source is none of these, or is cut off, or too large.
      MalformedModuleError: when it is a module whose parts do not fit together.
      FileNotFoundError: when a path does not exist.
    """
    if isinstance(source, Module):
        return source
    if isinstance(source, Path):
        return _read_path(source)
    if isinstance(source, bytes):
        return from_bytes(source, "<bytes>")
    if isinstance(source, str):
        # A path is one short line; a module's text never is.
        if "\n" not in source and len(source) < 4096 and "{" not in source:
            return _read_path(Path(source))
        return from_text(source, "<text>")
    return _read_stage(source)


def _read_path(path: Path) -> Module:
    if path.is_dir():
        return largest_module(find_modules(path)).read()
    return read_file(path)


def _read_stage(stage: Any) -> Module:
    """Reads ``jax.stages.Lowered`` (StableHLO) or ``Compiled`` (optimized HLO)."""
    if hasattr(stage, "runtime_executable"):
        modules = stage.runtime_executable().hlo_modules()
        return from_proto(modules[0].as_serialized_hlo_module_proto(), repr(type(stage)))
    if hasattr(stage, "compiler_ir"):
        return from_stablehlo(str(stage.compiler_ir("stablehlo")), repr(type(stage)))
    raise UnreadableModuleError(
        f"{type(stage).__module__}.{type(stage).__qualname__}",
        "memplan cannot read a module from this object",
        "Expected a path, text, bytes, jax.stages.Lowered or jax.stages.Compiled.",
    )
