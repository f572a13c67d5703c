"""What the bytes of a file are, told by how they begin; then they become a `Module`.

1f 8b ........... gzip: what is inside, by the same rules
ML ef R ......... StableHLO bytecode ─► XLA's converter ─┐
text, module .... StableHLO ──────────► XLA's converter ─┤
text, HloModule . HLO ────────────────► hlo_text.py ─────┼─► HloModuleProto ─► Module
0a, 12 or 1a .... HloProto or HloModuleProto ────────────┘
anything else ... refused, before more than the head is read
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from pathlib import Path
from typing import Literal

from google.protobuf.message import DecodeError

from hlo_passes import xla
from hlo_passes.errors import UnreadableModuleError
from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading import hlo_text
from hlo_passes.units import format_bytes

_GZIP, _ZSTD, _MLIR_BYTECODE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"ML\xefR"

# Protobuf writes fields in the order of their numbers. Both messages begin with a string or
# message: the module of an HloProto, or of an HloModuleProto its name; the latter may be empty.
_PROTO_TAGS = (b"\x0a", b"\x12", b"\x1a")

_Form = Literal["bytecode", "text", "proto"]

_STABLEHLO = re.compile(r"\s*(?:(?:#\w+ = |//).*\n\s*)*(?:module\b|func\.func\b)")

_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 24

# The most that protobuf takes for a number (protobuf.dev, "Encoding").
_VARINT_BYTES = 10

MOST_BYTES = (1 << 31) - 1
"""The largest message that protobuf can hold, and so the largest module."""

_EXPECTED = "Expected a file from --xla_dump_to, Compiled.as_text() or Lowered.as_text()."


def read_file(path: Path) -> Module:
    """Reads the module of one file: HLO or StableHLO, text or binary, gzip around it or not.

    Raises:
      UnreadableModuleError: when it holds something else, or is cut off, or too large.
      MalformedModuleError: when it is a module whose parts do not fit together.
      OSError: when it cannot be opened or read.
    """
    with path.open("rb") as file:
        _check_size(os.fstat(file.fileno()).st_size, str(path))
        return _from_stream(file, str(path))


def from_bytes(data: bytes, where: str) -> Module:
    """Reads the module of a file's content; `where` is what errors call it."""
    return _from_stream(io.BufferedReader(io.BytesIO(data)), where)


def from_text(text: str, where: str) -> Module:
    """Reads HLO or StableHLO text; `where` is what errors call it."""
    _check_text(text, where)
    if _STABLEHLO.match(text):
        return from_stablehlo(text, where)
    return Module(hlo_text.parse(text, where))


def from_stablehlo(source: str | bytes, where: str) -> Module:
    """Reads StableHLO text or bytecode; `where` is what errors call it."""
    try:
        data = xla.stablehlo_to_proto(source)
    except Exception as error:  # MLIR diagnostics reach Python as several types.
        raise UnreadableModuleError(
            where,
            f"XLA cannot convert this StableHLO: {_first_lines(error)}",
            "Expected Lowered.as_text() or its bytecode, whole, and of a version that the "
            "installed jaxlib supports.",
        ) from error
    return from_proto(data, where)


def from_proto(data: bytes, where: str) -> Module:
    """Reads a serialized ``HloModuleProto`` or ``HloProto``; `where` is what errors call it."""
    module = _parse(hlo_pb2.HloModuleProto, data)
    if module is not None and any(
        c.id == module.entry_computation_id and c.instructions for c in module.computations
    ):
        return Module(module)
    wrapper = _parse(hlo_pb2.HloProto, data)
    if wrapper is not None and wrapper.hlo_module.computations:
        has_assignment = wrapper.HasField("buffer_assignment")
        return Module(
            wrapper.hlo_module, assigned=wrapper.buffer_assignment if has_assignment else None
        )
    raise UnreadableModuleError(
        where,
        f"these {len(data)} bytes are no HloModuleProto or HloProto (truncated, or another format)",
        "Expected a .pb file from --xla_dump_hlo_as_proto; check that it was copied whole.",
    )


def _from_stream(stream: io.BufferedReader, where: str) -> Module:
    form, data = _load(stream, where)
    if form == "proto":
        return from_proto(data, where)
    if form == "bytecode":
        return from_stablehlo(data, where)
    try:
        return from_text(data.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise UnreadableModuleError(
            where,
            f"it begins as text, but byte {error.start} of {len(data)} is no UTF-8",
            "Check that it was copied whole, and as it was.",
        ) from error


def _load(stream: io.BufferedReader, where: str) -> tuple[_Form, bytes]:
    """Returns all of a stream whose head may be that of a module."""
    packed = stream.peek(len(_GZIP)).startswith(_GZIP)
    source = gzip.GzipFile(fileobj=stream) if packed else stream
    try:
        head = source.read(_HEAD_BYTES)
        form = _find_form(head, where)
        if form == "proto" and not packed and stream.seekable():
            _check_fields(stream, where)
            stream.seek(len(head))
        chunks, size, chunk = [], 0, head
        while chunk:
            if form == "text" and b"\0" in chunk:
                raise UnreadableModuleError(
                    where,
                    f"it begins as text, but byte {size + chunk.index(0)} is a NUL",
                    "Check that it was written and copied whole.",
                )
            chunks.append(chunk)
            size += len(chunk)
            _check_size(size, where)
            chunk = source.read(_CHUNK_BYTES)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnreadableModuleError(
            where,
            f"this gzip file cannot be unpacked: {error}",
            "Check that it was copied whole; `gzip -t` tells.",
        ) from error
    return form, b"".join(chunks)


def _check_size(size: int, where: str) -> None:
    if size > MOST_BYTES:
        raise UnreadableModuleError(
            where,
            f"it has {format_bytes(size)} or more, and protobuf holds modules of at most 2 GiB",
            _EXPECTED,
        )


def _find_form(head: bytes, where: str) -> _Form:
    """Refuses what no module begins with."""
    if not head:
        raise UnreadableModuleError(
            where,
            "the input is empty",
            "Expected an HLO module; a compilation that was ended leaves such files.",
        )
    if head.startswith(_ZSTD):
        raise UnreadableModuleError(
            where,
            "it is packed with zstd, which memplan does not unpack",
            "Unpack it (`zstd -d FILE`), or pack it with gzip.",
        )
    if head.startswith(_MLIR_BYTECODE):
        return "bytecode"
    if head.startswith(b"HloModule") or _is_text(head):
        _check_text(head.decode("utf-8", errors="ignore"), where)
        return "text"
    if head.startswith(_PROTO_TAGS):
        return "proto"
    raise UnreadableModuleError(
        where,
        f"it begins with the bytes {head[:8].hex(' ')}, and no HloModuleProto or HloProto does",
        _EXPECTED,
    )


def _check_fields(stream: io.BufferedReader, where: str) -> None:
    """Refuses a message whose fields do not end where it does: one that is cut off, or whose
    rest was never written. Only the lengths are read."""
    size, end = stream.seek(0, io.SEEK_END), 0
    while end < size:
        begin = stream.seek(end)
        head = stream.read(2 * _VARINT_BYTES)
        tag, used = _varint(head)
        length, digits = _varint(head[used:])
        match tag & 7:
            case 0:
                end = begin + used + digits
            case 1:
                end = begin + used + 8
            case 2:
                end = begin + used + digits + length
            case 5:
                end = begin + used + 4
            case _:
                used = 0
        if tag < 8 or not used:
            raise UnreadableModuleError(
                where,
                f"no HloModuleProto or HloProto goes on as byte {begin} of {size} does",
                "Check that it was written and copied whole.",
            )
    if end > size:
        raise UnreadableModuleError(
            where,
            f"it is cut off: it has {size} bytes, and at least {end} were written",
            "Check that it was copied whole.",
        )


def _varint(data: bytes) -> tuple[int, int]:
    """Returns the number that `data` begins with, and how many bytes it takes: more than there
    are where it is cut off."""
    value = 0
    for n, byte in enumerate(data[:_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return value, n + 1
    return value, len(data) + 1


def _check_text(head: str, where: str) -> None:
    if "HloModule" not in head and not _STABLEHLO.match(head):
        raise UnreadableModuleError(
            where,
            "this is neither HLO text (no 'HloModule' line) nor StableHLO (no 'module' op)",
            _EXPECTED,
        )


def _is_text(head: bytes) -> bool:
    # Text never holds a NUL or another control character. The head of a proto does: names and
    # lengths stand behind tags that are some.
    if re.search(rb"[\x00-\x08\x0e-\x1f]", head):
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The head may end within a character.
        return error.start >= len(head) - 3
    return True


def _parse[M: (hlo_pb2.HloModuleProto, hlo_pb2.HloProto)](kind: type[M], data: bytes) -> M | None:
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _first_lines(error: Exception, limit: int = 400) -> str:
    return " ".join(str(error).split())[:limit]
