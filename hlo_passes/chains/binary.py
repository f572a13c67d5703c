"""A chain as bytes, and back: the records of `hlo_passes.chains.layout`."""

from __future__ import annotations

import zlib

import numpy as np

from hlo_passes.chains.chain import VERSION, Chain
from hlo_passes.chains.layout import HEADER, MAGIC, TABLES
from hlo_passes.chains.tables import Problem, Records, Tables, chain_of, first_problem, tables_of
from hlo_passes.errors import ChainFormatError
from hlo_passes.garbage import collection_paused

_CRC = HEADER.offset("crc32")


def to_bytes(chain: Chain) -> bytes:
    """Writes a chain; equal chains give equal bytes.

    Raises:
      ChainError: when its parts do not fit together.
    """
    tables = tables_of(chain)
    parts = [getattr(tables, name).tobytes() for name in TABLES] + [tables.strings]
    header = np.zeros((), HEADER.dtype)
    header["magic"] = np.frombuffer(MAGIC, np.uint8)
    header["version"] = chain.version
    header["header_bytes"] = HEADER.bytes
    header["file_bytes"] = HEADER.bytes + sum(map(len, parts))
    header["fingerprint"] = np.frombuffer(chain.fingerprint, np.uint8)
    for name in TABLES:
        header[name] = len(getattr(tables, name))
    header["strings"] = len(tables.strings)
    return sealed(header.tobytes() + b"".join(parts))


def sealed(data: bytes) -> bytes:
    """The same bytes with the CRC-32 that they should have; as they are if there is no room."""
    if len(data) < _CRC + 4:
        return data
    return data[:_CRC] + _crc32(data).to_bytes(4, "little") + data[_CRC + 4 :]


@collection_paused()
def from_bytes(data: bytes) -> Chain:
    """Reads a chain.

    Counts and lengths are taken for what they say only after they were seen to fit the bytes.

    Raises:
      ChainFormatError: at the first thing that is wrong.
    """
    header = _read_header(data)
    offset, bases, tables = HEADER.bytes, {"header": 0}, dict[str, Records]()
    for name, record in TABLES.items():
        count, bases[name] = int(header[name]), offset
        tables[name] = np.frombuffer(data, record.dtype, count, offset)
        offset += count * record.bytes
    read = Tables(**tables, strings=bytes(data[offset:]))
    if problem := first_problem(read):
        bases["strings"] = offset
        raise ChainFormatError(_offset(problem, bases), str(problem))
    return chain_of(read, header["fingerprint"].tobytes())


def _offset(problem: Problem, bases: dict[str, int]) -> int:
    if problem.table == "strings":
        return bases["strings"] + problem.row
    record = TABLES.get(problem.table, HEADER)
    return bases[problem.table] + problem.row * record.bytes + record.offset(problem.field)


def _read_header(data: bytes) -> np.void:
    if len(data) < HEADER.bytes:
        raise ChainFormatError(
            len(data), f"expected a header of {HEADER.bytes} bytes, found {len(data)}"
        )
    header = np.frombuffer(data, HEADER.dtype, 1)[0]
    if header["magic"].tobytes() != MAGIC:
        raise ChainFormatError(0, "header.magic: expected MPCHAIN, found other bytes")
    for field, expected in (
        ("version", VERSION),
        ("header_bytes", HEADER.bytes),
        ("file_bytes", len(data)),
        ("crc32", _crc32(data)),
        ("reserved", 0),
        ("reserved_end", 0),
    ):
        _expect(header, field, expected, str(expected))
    # Indices are of 32 bits; and so the sum below is of 64.
    for name in (*TABLES, "strings"):
        if header[name] >= 2**32:
            _expect(header, name, None, f"below {2**32}")
    size = sum(int(header[name]) * record.bytes for name, record in TABLES.items())
    size += HEADER.bytes + int(header["strings"])
    _expect(header, "file_bytes", size, str(size))
    return header


def _expect(header: np.void, field: str, value: int | None, expected: str) -> None:
    if header[field] != value:
        problem = Problem("header", 0, field, expected, int(header[field]))
        raise ChainFormatError(HEADER.offset(field), str(problem))


def _crc32(data: bytes) -> int:
    return zlib.crc32(data[_CRC + 4 :], zlib.crc32(bytes(4), zlib.crc32(data[:_CRC])))
