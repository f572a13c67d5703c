"""A chain as the tables of its binary form, and the rules that make tables a chain.

The one place where indices and ranges are checked, of chains that come from bytes, from text and
from a program. `reader.cc` applies the same rules in the same order: a column is checked from its
first row to its last before the next one is, so what a rule follows was checked before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.chains.chain import (
    MAX_WAITS,
    VERSION,
    Action,
    Chain,
    Copy,
    Descriptor,
    Execute,
    Fence,
    Release,
    Segment,
    Slot,
    Space,
    SpaceKind,
    Stream,
    Wait,
)
from hlo_passes.chains.layout import STRINGS, TABLES, Op
from hlo_passes.errors import ChainError

type Records = npt.NDArray[np.void]
type _Column = npt.NDArray[np.uint64]

_MOST = 2**63  # Sums of two offsets fit 64 bits.


@dataclass(frozen=True, slots=True)
class Tables:
    """The records of each table, and the strings."""

    descriptors: Records
    spaces: Records
    slots: Records
    streams: Records
    segments: Records
    operands: Records
    strings: bytes


class Problem(NamedTuple):
    """A field that is not as it has to be; `element` counts bytes where the table is strings."""

    table: str
    row: int
    field: str
    expected: str
    found: object

    @property
    def where(self) -> str:
        of = self.table if self.table == "header" else f"{self.table}[{self.row}]"
        return f"{of}.{self.field}" if self.field else of

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"

    def error(self) -> ChainError:
        return ChainError(self.where, self.expected, self.found, self.table, self.row)


# --- what is wrong --------------------------------------------------------------------------


class _Range(NamedTuple):
    """A column whose values have to lie in half-open ranges."""

    table: str
    field: str
    values: _Column
    low: _Column | int
    high: _Column | int


def first_problem(tables: Tables) -> Problem | None:
    """The first rule that tables break, at the first row where they do; None if they are a chain.

    Time O(n) for n bytes, vectorised but for names that are not ASCII.
    """
    for rule in _rules(tables):
        if isinstance(rule, Problem):
            return rule
        table, field, values, low, high = rule
        is_bad = (values < low) | (values >= high)
        if is_bad.any():
            row = int(is_bad.argmax())
            least = int(np.broadcast_to(np.uint64(low), values.shape)[row])
            limit = int(np.broadcast_to(np.uint64(high), values.shape)[row])
            return Problem(table, row, field, _range_text(least, limit), int(values[row]))
    return None


def _range_text(low: int, high: int) -> str:
    if high - low == 1:
        return str(low)
    return f"{low} to {high - 1}" if low else f"below {high}"


def _column(records: Records, field: str) -> _Column:
    return records[field].astype(np.uint64)


def _rules(t: Tables) -> Iterator[_Range | Problem]:
    yield from _space_rules(t.spaces)
    yield from _slot_rules(t)
    yield from _segment_rules(t)
    yield from _descriptor_rules(t)
    yield from _extents_of_strings(t)
    yield from _strings_rules(t)


def _space_rules(spaces: Records) -> Iterator[_Range | Problem]:
    kinds, alignments = _column(spaces, "kind"), _column(spaces, "alignment")
    is_arena = kinds == SpaceKind.ARENA
    yield _Range("spaces", "kind", kinds, 0, len(SpaceKind))
    yield _Range("spaces", "writable", _column(spaces, "writable"), is_arena.astype(np.uint64), 2)
    yield _Range("spaces", "bytes", _column(spaces, "bytes"), 1, _MOST)
    yield _Range("spaces", "alignment", alignments, *_used(is_arena, 1, _MOST))
    is_odd = alignments & (alignments - np.uint64(1)) != 0
    is_odd &= is_arena
    if is_odd.any():
        row = int(is_odd.argmax())
        yield Problem("spaces", row, "alignment", "a power of two", int(alignments[row]))


def _slot_rules(t: Tables) -> Iterator[_Range]:
    is_read = (_column(t.spaces, "kind") == SpaceKind.FILE) & (t.spaces["writable"] == 0)
    sizes, spaces = _column(t.slots, "bytes"), _column(t.slots, "space")
    yield _Range("slots", "space", spaces, 0, len(t.spaces))
    room = _column(t.spaces, "bytes")[t.slots["space"]]
    yield _Range("slots", "bytes", sizes, 1, room + np.uint64(1))
    yield _Range("slots", "offset", _column(t.slots, "offset"), 0, room - sizes + np.uint64(1))
    checksums = _column(t.slots, "checksum")
    yield _Range("slots", "checksum", checksums, *_used(is_read[t.slots["space"]], 0, 2**32))


def _segment_rules(t: Tables) -> Iterator[_Range | Problem]:
    counts = _column(t.segments, "arguments") + _column(t.segments, "results")
    ends = counts.cumsum(dtype=np.uint64)
    firsts = ends - counts
    first_operands = _column(t.segments, "first_operand")
    yield _Range("segments", "first_operand", first_operands, firsts, firsts + np.uint64(1))
    yield _Range("segments", "reserved", _column(t.segments, "reserved"), 0, 1)
    used = int(ends[-1]) if len(ends) else 0
    if used != len(t.operands):
        yield Problem("header", 0, "operands", str(used), len(t.operands))
    yield _Range("operands", "slot", _column(t.operands, "slot"), 0, len(t.slots))


def _used(
    is_used: npt.NDArray[np.bool], low: _Column | int, high: _Column | int
) -> tuple[_Column, _Column]:
    """A range for what uses a field; what does not has 0 there."""
    low, high = np.asarray(low, np.uint64), np.asarray(high, np.uint64)
    return np.where(is_used, low, np.uint64(0)), np.where(is_used, high, np.uint64(1))


def _descriptor_rules(t: Tables) -> Iterator[_Range]:
    def of(field: str) -> _Column:
        return _column(t.descriptors, field)

    def rule(field: str, values: _Column, low: _Column | int, high: _Column | int) -> _Range:
        return _Range("descriptors", field, values, low, high)

    ops, counts, sizes, one = of("op"), of("wait_count"), of("bytes"), np.uint64(1)
    is_copy = ops == Op.COPY
    yield rule("op", ops, 0, len(Op))
    yield rule("stream", of("stream"), 0, len(t.streams))
    yield rule("wait_count", counts, 0, MAX_WAITS + 1)
    yield rule("previous", of("previous"), 0, one << counts)
    yield rule("reserved", of("reserved"), 0, 1)
    has_source = is_copy | (ops == Op.RELEASE)
    yield rule("source", of("source"), *_used(has_source, 0, len(t.slots)))
    yield rule("destination", of("destination"), *_used(is_copy, 0, len(t.slots)))
    yield rule("segment", of("segment"), *_used(ops == Op.EXECUTE, 0, len(t.segments)))
    source = _column(t.slots, "bytes")[np.where(is_copy, of("source"), 0)] if is_copy.any() else one
    to = (
        _column(t.slots, "bytes")[np.where(is_copy, of("destination"), 0)] if is_copy.any() else one
    )
    yield rule("bytes", sizes, *_used(is_copy, 1, np.minimum(source, to) + one))
    yield rule("source_offset", of("source_offset"), *_used(is_copy, 0, source - sizes + one))
    offsets = of("destination_offset")
    yield rule("destination_offset", offsets, *_used(is_copy, 0, to - sizes + one))
    rows, previous = np.arange(len(ops), dtype=np.uint64), of("previous")
    for k in range(MAX_WAITS):
        limits = np.where(previous >> np.uint64(k) & one, np.uint64(len(ops)), rows)
        column = t.descriptors["waits"][:, k].astype(np.uint64)
        yield rule(f"waits[{k}]", column, *_used(counts > k, 0, limits))


def _items(t: Tables) -> Iterator[tuple[str, int, str]]:
    """Table, row and field of each string."""
    for table, fields in STRINGS.items():
        for row in range(len(getattr(t, table))):
            for field in fields:
                yield table, row, field


def _texts(t: Tables, part: str) -> _Column:
    """``begin`` or ``bytes`` of each string, as `_items` has them."""
    parts = [
        np.stack([_column(getattr(t, table), f"{field}_{part}") for field in fields], axis=1)
        for table, fields in STRINGS.items()
    ]
    return np.concatenate([p.ravel() for p in parts])


def _extents_of_strings(t: Tables) -> Iterator[Problem]:
    begins, sizes = _texts(t, "begin"), _texts(t, "bytes")
    ends = sizes.cumsum(dtype=np.uint64)
    is_bad = (begins != ends - sizes) | (ends > len(t.strings))
    if is_bad.any():
        k = int(is_bad.argmax())
        table, row, field = list(_items(t))[k]
        begin, size = int(ends[k] - sizes[k]), int(sizes[k])
        if begins[k] != begin:
            yield Problem(table, row, f"{field}_begin", str(begin), int(begins[k]))
        expected = _range_text(0, len(t.strings) - begin + 1)
        yield Problem(table, row, f"{field}_bytes", expected, size)
    used = int(ends[-1]) if len(ends) else 0
    if used != len(t.strings):
        yield Problem("header", 0, "strings", str(used), len(t.strings))


def _strings_rules(t: Tables) -> Iterator[_Range | Problem]:
    is_file = _column(t.spaces, "kind") == SpaceKind.FILE
    for table, fields in STRINGS.items():
        for field in fields:
            sizes = _column(getattr(t, table), f"{field}_bytes")
            limits = _used(is_file, 1, 2**32) if field == "path" else (1, 2**32)
            yield _Range(table, f"{field}_bytes", sizes, *limits)
    begins, sizes = _texts(t, "begin").tolist(), _texts(t, "bytes").tolist()
    if not t.strings.isascii() or 0 in t.strings:
        for begin, size in zip(begins, sizes, strict=True):
            bad = _first_bad(t.strings[begin : begin + size])
            if bad is not None:
                at = begin + bad
                yield Problem("strings", at, "", "UTF-8 without NUL", f"byte {t.strings[at]}")
    firsts: dict[tuple[str, bytes], tuple[str, int]] = {}
    for (table, row, field), begin, size in zip(_items(t), begins, sizes, strict=True):
        if field == "tier" or not size:
            continue
        # Names are of a table; the path of a file, by which it is opened, is too.
        key = f"{table}.{field}", t.strings[begin : begin + size]
        before = firsts.setdefault(key, (table, row))
        if before[1] != row:
            expected = f"another {field} than that of {table}[{before[1]}]"
            yield Problem(table, row, f"{field}_begin", expected, "the same")


def _first_bad(text: bytes) -> int | None:
    nul = text.find(0)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start if nul < 0 else min(nul, error.start)
    return None if nul < 0 else nul


# --- there and back -------------------------------------------------------------------------


def tables_of(chain: Chain) -> Tables:
    """Writes a chain as tables.

    Raises:
      ChainError: when its parts do not fit together.
    """
    if chain.version != VERSION:
        raise ChainError("version", str(VERSION), chain.version)
    if len(chain.fingerprint) != 32:
        raise ChainError("fingerprint", "32 bytes", len(chain.fingerprint))
    strings = bytearray()

    def text(string: str) -> tuple[int, int]:
        # A lone surrogate, which UTF-8 has not, is for the rules to find.
        encoded = string.encode(errors="surrogatepass")
        strings.extend(encoded)
        return len(strings) - len(encoded), len(encoded)

    spaces = [
        (s.bytes, s.alignment, *text(s.name), *text(s.tier), *text(s.path), s.kind, s.writable)
        for s in chain.spaces
    ]
    slots = [(s.offset, s.bytes, s.space, *text(s.name), s.checksum) for s in chain.slots]
    streams = [text(s.name) for s in chain.streams]
    segments: list[tuple[int, ...]] = []
    operands: list[tuple[int]] = []
    for s in chain.segments:
        segments.append((*text(s.name), len(operands), len(s.arguments), len(s.results), 0))
        operands += ((slot,) for slot in (*s.arguments, *s.results))
    tables = Tables(
        _records("descriptors", [_descriptor_row(d) for d in chain.descriptors]),
        _records("spaces", spaces),
        _records("slots", slots),
        _records("streams", streams),
        _records("segments", segments),
        _records("operands", operands),
        bytes(strings),
    )
    if problem := first_problem(tables):
        raise problem.error()
    return tables


def _records(table: str, rows: Sequence[tuple[Any, ...]]) -> Records:
    dtype = TABLES[table].dtype
    try:
        return np.array(rows, dtype)
    except OverflowError:
        for k, row in enumerate(rows):
            for name, value in zip(dtype.names or (), row, strict=True):
                bits = 8 * dtype[name].base.itemsize
                for number in value if isinstance(value, tuple) else (value,):
                    if not 0 <= number < 2**bits:
                        problem = Problem(table, k, name, f"0 to {2**bits - 1}", number)
                        raise problem.error() from None
        raise


def _descriptor_row(d: Descriptor) -> tuple[Any, ...]:
    source = destination = segment = size = source_offset = destination_offset = 0
    match d.action:
        case Copy(source, destination, size, source_offset, destination_offset):
            op = Op.COPY
        case Execute(segment):
            op = Op.EXECUTE
        case Fence():
            op = Op.FENCE
        case Release(source):
            op = Op.RELEASE
    previous, waits = 0, [0] * MAX_WAITS
    # Of more waits than there may be, the count tells.
    for k, wait in enumerate(d.waits[:MAX_WAITS]):
        previous |= wait.is_previous << k
        waits[k] = wait.index
    return (
        *(source_offset, destination_offset, size, d.stream, d.tick, source, destination, segment),
        *(op, len(d.waits), previous, 0, tuple(waits)),
    )


def chain_of(tables: Tables, fingerprint: bytes) -> Chain:
    """Reads tables that have no problem."""

    def text(begin: int, size: int) -> str:
        return tables.strings[begin : begin + size].decode()

    spaces = tuple(
        Space(text(*of[:2]), SpaceKind(kind), text(*of[2:4]), size, align, text(*of[4:]), bool(w))
        for size, align, *of, kind, w in tables.spaces.tolist()
    )
    slots = tuple(
        Slot(text(begin, length), space, offset, size, checksum)
        for offset, size, space, begin, length, checksum in tables.slots.tolist()
    )
    operands = tables.operands["slot"].tolist()
    segments = tuple(
        Segment(
            text(begin, length),
            tuple(operands[first : first + arguments]),
            tuple(operands[first + arguments : first + arguments + results]),
        )
        for begin, length, first, arguments, results, _ in tables.segments.tolist()
    )
    return Chain(
        spaces,
        slots,
        tuple(Stream(text(*of)) for of in tables.streams.tolist()),
        segments,
        tuple(map(_descriptor, tables.descriptors.tolist())),
        fingerprint,
    )


def _descriptor(row: tuple[Any, ...]) -> Descriptor:
    (start, end, size, stream, tick, source, destination, segment, op, count, previous, _, to) = row
    action: Action
    match op:
        case Op.COPY:
            action = Copy(source, destination, size, start, end)
        case Op.EXECUTE:
            action = Execute(segment)
        case Op.FENCE:
            action = Fence()
        case _:
            action = Release(source)
    waits = tuple(Wait(int(to[k]), bool(previous >> k & 1)) for k in range(count))
    return Descriptor(stream, tick, action, waits)
