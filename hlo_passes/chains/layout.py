"""The binary form of a chain: the one definition of its records.

Little-endian, of fixed size, each field at a multiple of its own size. A file is a header, then
the tables in the order of `TABLES`, then the strings, UTF-8, without anything in between: names
follow one another in the order of their records, and so do the operands of segments. A field
that a record does not use is 0. So a chain has one file, and a file one chain.

``python -m hlo_passes.chains.layout`` writes `chain_layout.h`, which has the same for C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from hlo_passes.chains.chain import MAX_WAITS, VERSION, SpaceKind

MAGIC = b"MPCHAIN\0"


class Op(IntEnum):
    """What a descriptor does."""

    COPY = 0
    EXECUTE = 1
    FENCE = 2
    RELEASE = 3


@dataclass(frozen=True, slots=True)
class Field:
    """Unsigned numbers of `size` bytes, `count` of them if that is given."""

    name: str
    size: int
    note: str = ""
    count: int = 0

    @property
    def bytes(self) -> int:
        return self.size * max(1, self.count)


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    fields: tuple[Field, ...]

    @property
    def bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    def offset(self, name: str) -> int:
        """At which byte of the record a field begins; ``waits[2]`` is an element of one."""
        of, _, element = name.partition("[")
        offset = 0
        for field in self.fields:
            if field.name == of:
                return offset + field.size * int(element.rstrip("]") or 0)
            offset += field.bytes
        raise KeyError(name)

    @property
    def dtype(self) -> np.dtype[np.void]:
        return np.dtype(
            [
                (f.name, f"<u{f.size}", (f.count,)) if f.count else (f.name, f"<u{f.size}")
                for f in self.fields
            ]
        )


def _text(name: str) -> tuple[Field, Field]:
    return Field(f"{name}_begin", 4, "in the strings"), Field(f"{name}_bytes", 4)


DESCRIPTOR = Record(
    "Descriptor",
    (
        Field("source_offset", 8, "COPY: within the slot"),
        Field("destination_offset", 8, "COPY: within the slot"),
        Field("bytes", 8, "COPY"),
        Field("stream", 4),
        Field("tick", 4, "logical time, for people"),
        Field("source", 4, "COPY: slot that is read; RELEASE: slot"),
        Field("destination", 4, "COPY: slot that is written"),
        Field("segment", 4, "EXECUTE"),
        Field("op", 1),
        Field("wait_count", 1),
        Field("previous", 1, "bit k: waits[k] is of the previous replay"),
        Field("reserved", 1),
        Field("waits", 4, "descriptors", count=MAX_WAITS),
    ),
)
SPACE = Record(
    "Space",
    (
        Field("bytes", 8),
        Field("alignment", 8, "ARENA: a power of two"),
        *_text("name"),
        *_text("tier"),
        *_text("path"),
        Field("kind", 4),
        Field("writable", 4, "0 or 1"),
    ),
)
SLOT = Record(
    "Slot",
    (
        Field("offset", 8, "within the space"),
        Field("bytes", 8),
        Field("space", 4),
        *_text("name"),
        Field("checksum", 4, "FILE that is not written: CRC-32C of the bytes; 0 for none"),
    ),
)
STREAM = Record("Stream", _text("name"))
SEGMENT = Record(
    "Segment",
    (
        *_text("name"),
        Field("first_operand", 4, "arguments, then results"),
        Field("arguments", 4, "how many"),
        Field("results", 4, "how many"),
        Field("reserved", 4),
    ),
)
OPERAND = Record("Operand", (Field("slot", 4),))

TABLES = {
    "descriptors": DESCRIPTOR,
    "spaces": SPACE,
    "slots": SLOT,
    "streams": STREAM,
    "segments": SEGMENT,
    "operands": OPERAND,
}
"""In the order of the file; the strings follow."""

STRINGS = {
    "spaces": ("name", "tier", "path"),
    "slots": ("name",),
    "streams": ("name",),
    "segments": ("name",),
}
"""The texts of each record, in the order of the strings."""

HEADER = Record(
    "Header",
    (
        Field("magic", 1, count=len(MAGIC)),
        Field("version", 4),
        Field("header_bytes", 4),
        Field("file_bytes", 8),
        Field("crc32", 4, "zlib's, over the file with this field 0"),
        Field("reserved", 4),
        Field("fingerprint", 1, "of the module; zeros for none", count=32),
        *(Field(table, 8, "how many") for table in TABLES),
        Field("strings", 8, "bytes"),
        Field("reserved_end", 8),
    ),
)


def header_text() -> str:
    """The definitions for C and C++."""
    return "\n".join(_header_lines()) + "\n"


def _header_lines() -> Iterator[str]:
    yield "// The binary form of a descriptor chain, as hlo_passes/chains/layout.py defines it."
    yield "// Written by `python -m hlo_passes.chains.layout`: change that, not this."
    yield ""
    yield "#ifndef MEMPLAN_HLO_PASSES_CHAINS_CHAIN_LAYOUT_H_"
    yield "#define MEMPLAN_HLO_PASSES_CHAINS_CHAIN_LAYOUT_H_"
    yield ""
    yield "#include <assert.h>"
    yield "#include <stddef.h>"
    yield "#include <stdint.h>"
    yield ""
    magic = "".join(f"\\{byte:03o}" if byte < 32 else chr(byte) for byte in MAGIC)
    yield f'#define MEMPLAN_CHAIN_MAGIC "{magic}"  // {len(MAGIC)} bytes'
    yield ""
    yield "enum {"
    yield f"  kMemplanChainVersion = {VERSION},"
    yield f"  kMemplanChainMaxWaits = {MAX_WAITS},"
    yield "};"
    for of in (Op, SpaceKind):
        yield ""
        yield f"enum MemplanChain{of.__name__} {{"
        for member in of:
            yield f"  kMemplanChain{of.__name__}{member.name.title()} = {member.value},"
        yield "};"
    yield ""
    yield "#pragma pack(push, 1)"
    for record in (HEADER, *TABLES.values()):
        yield ""
        name = f"MemplanChain{record.name}"
        yield f"struct {name} {{"
        for field in record.fields:
            count = f"[{field.count}]" if field.count else ""
            note = f"  // {field.note}" if field.note else ""
            yield f"  uint{8 * field.size}_t {field.name}{count};{note}"
        yield "};"
        yield f'static_assert(sizeof(struct {name}) == {record.bytes}, "{record.name}");'
        for field in record.fields:
            at, full = f"offsetof(struct {name}, {field.name})", f"{record.name}.{field.name}"
            yield f'static_assert({at} == {record.offset(field.name)}, "{full}");'
    yield ""
    yield "#pragma pack(pop)"
    yield ""
    yield "#endif  // MEMPLAN_HLO_PASSES_CHAINS_CHAIN_LAYOUT_H_"


if __name__ == "__main__":
    (Path(__file__).parent / "chain_layout.h").write_text(header_text(), encoding="utf-8")
