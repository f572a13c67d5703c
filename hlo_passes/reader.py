"""The one way in: anything that holds an HLO module becomes a `Module`.

.hlo / .txt text ──────── XLA's own parser ─┐
.pb  HloModuleProto / HloProto ─────────────┤
--xla_dump_to folder ─ the best stage of each ─► Module
StableHLO text, bytecode ─ XLA's converter ─┤
jax.stages.Lowered / Compiled ──────────────┘
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from hlo_passes import xla
from hlo_passes.errors import UnreadableModuleError
from hlo_passes.garbage import collection_paused
from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2

_MLIR_BYTECODE = b"ML\xefR"

# Dump stages, best last: the plan needs the scheduled module. File names look like
# module_0001.jit_f.sm_9.0_gpu_after_optimizations.txt (xla/service/dump.cc).
_STAGES = ("before_optimizations", "after_optimizations", "after_codegen")


@collection_paused()
def read_module(source: Any) -> Module:
    """Reads one HLO module.

    Args:
      source: a path (``.hlo``, ``.txt``, ``.pb``, StableHLO ``.mlir``, or a dump folder
        that holds one module); HLO or StableHLO text; the bytes of an
        ``HloModuleProto``, an ``HloProto`` or StableHLO bytecode; a
        ``jax.stages.Lowered`` or ``Compiled``; or a `Module`, returned as it is.

    Raises:
      UnreadableModuleError: when the source is none of these, or is cut off.
      MalformedModuleError: when it is a module whose parts do not fit together.
      FileNotFoundError: when a path does not exist.
    """
    if isinstance(source, Module):
        return source
    if isinstance(source, Path):
        return _read_path(source)
    if isinstance(source, bytes):
        return _read_bytes(source, "<bytes>")
    if isinstance(source, str):
        # A path is one short line; a module's text never is.
        if "\n" not in source and len(source) < 4096 and "{" not in source:
            return _read_path(Path(source))
        return _read_text(source, "<text>")
    return _read_stage(source)


def read_dump(folder: Path) -> dict[str, Module]:
    """Reads every module of an ``--xla_dump_to`` folder.

    Returns:
      ``{"module_0001.jit_f": Module}``: of each module its latest stage, proto before
      text; modules in the folder's order.

    Raises:
      UnreadableModuleError: when the folder holds no module dump.
    """
    return {key: _read_path(path) for key, path in sorted(_dump_files(folder).items())}


def _dump_files(folder: Path) -> dict[str, Path]:
    best: dict[str, tuple[tuple[int, int], Path]] = {}
    for path in folder.iterdir():
        match = re.match(r"(module_\d+\.[^/]*?)\.(?:[^/]*?)(" + "|".join(_STAGES) + r")", path.name)
        suffix = "".join(path.suffixes[-2:])
        if match is None or not (suffix.endswith((".pb", ".txt"))):
            continue
        if any(s in path.name for s in ("buffer-assignment", "memory-usage", "live-range")):
            continue
        rank = (_STAGES.index(match[2]), int(path.suffix == ".pb"))
        if match[1] not in best or rank > best[match[1]][0]:
            best[match[1]] = (rank, path)
    if not best:
        raise UnreadableModuleError(
            str(folder),
            "no module dump in this folder",
            "Expected files like module_0001.jit_f.*after_optimizations.txt; make them with "
            "XLA_FLAGS=--xla_dump_to=DIR (and --xla_dump_hlo_as_proto for exact copies).",
        )
    return {key: path for key, (_, path) in best.items()}


def _read_path(path: Path) -> Module:
    if path.is_dir():
        files = _dump_files(path)
        if len(files) > 1:
            # The user's step is all but always the largest program of the process.
            largest = max(files.values(), key=lambda p: p.stat().st_size)
            return _read_path(largest)
        return _read_path(next(iter(files.values())))
    return _read_bytes(path.read_bytes(), str(path))


def _read_bytes(data: bytes, where: str) -> Module:
    if not data:
        raise UnreadableModuleError(where, "the input is empty", "Expected an HLO module.")
    if data.startswith(_MLIR_BYTECODE):
        return _from_stablehlo(data, where)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return _from_proto_bytes(data, where)
    # A small proto can be valid UTF-8 by chance; text never holds a NUL or a lone control byte.
    if re.search(r"[\x00-\x08\x0e-\x1f]", text):
        return _from_proto_bytes(data, where)
    return _read_text(text, where)


def _read_text(text: str, where: str) -> Module:
    if re.search(r"^\s*(?:#\w+ = .*\n\s*)*(?:module\b|func\.func\b)", text):
        return _from_stablehlo(text, where)
    if "HloModule" not in text:
        raise UnreadableModuleError(
            where,
            "this is neither HLO text (no 'HloModule' line) nor StableHLO (no 'module' op)",
            "Expected a file from --xla_dump_to, Compiled.as_text() or Lowered.as_text().",
        )
    try:
        data = xla.hlo_text_to_proto(text)
    except Exception as error:  # XLA raises several types; its sentence names line and column.
        raise UnreadableModuleError(
            where,
            f"XLA's parser rejects this HLO text: {_first_lines(error)}",
            "A text from a newer XLA may hold attributes that the installed jaxlib does not "
            "know: dump with --xla_dump_hlo_as_proto, which memplan reads whatever its "
            "version, or install the jaxlib that wrote it.",
        ) from error
    return _from_proto_bytes(data, where)


def _from_proto_bytes(data: bytes, where: str) -> Module:
    module = _parse(hlo_pb2.HloModuleProto, data)
    if module is not None and any(
        c.id == module.entry_computation_id and c.instructions for c in module.computations
    ):
        return Module(module)
    wrapper = _parse(hlo_pb2.HloProto, data)
    if wrapper is not None and wrapper.hlo_module.computations:
        return Module(wrapper.hlo_module)
    raise UnreadableModuleError(
        where,
        f"these {len(data)} bytes are no HloModuleProto or HloProto (truncated, or another format)",
        "Expected a .pb file from --xla_dump_hlo_as_proto; check that it was copied whole.",
    )


def _parse[M: (hlo_pb2.HloModuleProto, hlo_pb2.HloProto)](kind: type[M], data: bytes) -> M | None:
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _from_stablehlo(source: str | bytes, where: str) -> Module:
    try:
        data = xla.stablehlo_to_proto(source)
    except Exception as error:  # MLIR diagnostics reach Python as several types.
        raise UnreadableModuleError(
            where,
            f"XLA cannot convert this StableHLO: {_first_lines(error)}",
            "Expected Lowered.as_text() or its bytecode, of a version that the installed "
            "jaxlib supports.",
        ) from error
    return _from_proto_bytes(data, where)


def _read_stage(stage: Any) -> Module:
    """Reads ``jax.stages.Lowered`` (StableHLO) or ``Compiled`` (optimized HLO)."""
    if hasattr(stage, "runtime_executable"):
        modules = stage.runtime_executable().hlo_modules()
        return _from_proto_bytes(modules[0].as_serialized_hlo_module_proto(), repr(type(stage)))
    if hasattr(stage, "compiler_ir"):
        return _from_stablehlo(str(stage.compiler_ir("stablehlo")), repr(type(stage)))
    raise UnreadableModuleError(
        f"{type(stage).__module__}.{type(stage).__qualname__}",
        "memplan cannot read a module from this object",
        "Expected a path, text, bytes, jax.stages.Lowered or jax.stages.Compiled.",
    )


def _first_lines(error: Exception, limit: int = 400) -> str:
    return " ".join(str(error).split())[:limit]
