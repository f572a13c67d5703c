"""A chain as people read it, and back: `disassemble`, `assemble`, `windows`.

    chain 1
    spaces
      hbm      arena  16GiB  hbm  align 512
      weights  file   64GiB  ssd  "/models/a.bin"
    slots
      w0    weights  0B  64MiB
      ring  hbm      0B  64MiB
    streams
      read
      compute
    segments
      layer (ring) -> (ring)
    descriptors
      0  read     @0  copy w0 -> ring 64MiB  after 1'
      1  compute  @1  execute layer  after 0

A slot is given by its space, offset and bytes, and, where it is known, the CRC-32C of these; a
descriptor by its index, stream, tick, action and waits; ``1'`` is descriptor 1 of the previous
replay. What a file or a bound space may be written says ``writable``. A name that is no word, and
any path, stands in quotes, as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Never

from hlo_passes.chains.chain import (
    NO_FINGERPRINT,
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
from hlo_passes.chains.tables import tables_of
from hlo_passes.errors import ChainError, ChainTextError
from hlo_passes.garbage import collection_paused

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECTIONS = ("spaces", "slots", "streams", "segments", "descriptors")
_WORD = r"(?:[A-Za-z0-9_./:$%]|-(?!>))+"
# What begins no token is one of its own, which nothing expects.
_TOKEN = re.compile(rf'{_WORD}|"(?:[^"\\]|\\.)*"|->|[^ ]')


# --- writing --------------------------------------------------------------------------------


def disassemble(chain: Chain) -> str:
    """Writes a chain, a line for each of its parts; `assemble` reads it back, exactly.

    Raises:
      ChainError: when its parts do not fit together.
    """
    tables_of(chain)
    lines = [f"chain {chain.version}"]
    if chain.fingerprint != NO_FINGERPRINT:
        lines.append(f"fingerprint {chain.fingerprint.hex()}")
    rows = (
        _aligned([_space(s) for s in chain.spaces]),
        _aligned(
            [[_name(s.name), _name(chain.spaces[s.space].name), *_span(s)] for s in chain.slots]
        ),
        [_name(s.name) for s in chain.streams],
        [_segment(chain, s) for s in chain.segments],
        _aligned([_descriptor(chain, k) for k in range(len(chain.descriptors))]),
    )
    for section, of in zip(_SECTIONS, rows, strict=True):
        lines.append(section)
        lines += (f"  {row}" for row in of)
    return "\n".join(lines) + "\n"


def describe(chain: Chain, index: int) -> str:
    """A descriptor as `disassemble` writes it, in one line."""
    return " ".join(_descriptor(chain, index))


def windows(chain: Chain) -> str:
    """Writes what happens between one execution and the next: window n begins with the n-th.

    For each window what it executes; which descriptors are awaited in it, by stream; which copies
    it issues; and what it releases.

    Raises:
      ChainError: when its parts do not fit together.
    """
    tables_of(chain)
    starts = [k for k, d in enumerate(chain.descriptors) if isinstance(d.action, Execute)]
    bounds = [0, *starts, len(chain.descriptors)]
    lines: list[str] = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        window = chain.descriptors[start:end]
        ticks = sorted({d.tick for d in window})
        until = f" to {ticks[-1]}" if len(ticks) > 1 else ""
        lines.append(f"window {n}, tick {ticks[0]}{until}")
        rows: dict[str, list[str]] = {"executes": [], "awaits": [], "issues": [], "releases": []}
        for d in window:
            stream = _name(chain.streams[d.stream].name)
            rows["awaits"] += (
                f"{wait} of {_name(chain.streams[chain.descriptors[wait.index].stream].name)}"
                for wait in d.waits
            )
            match d.action:
                case Execute():
                    rows["executes"].append(f"{_action(chain, d.action)[8:]} on {stream}")
                case Copy():
                    rows["issues"].append(f"{_action(chain, d.action)[5:]} on {stream}")
                case Release(slot):
                    rows["releases"].append(_name(chain.slots[slot].name))
                case Fence():
                    pass
        for label, of in rows.items():
            if of:
                lines.append(f"  {label:8}  {f'\n{"":12}'.join(dict.fromkeys(of))}")
    return "".join(f"{line}\n" for line in lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width but for the last; rows may have fewer."""
    if not rows:
        return []
    columns = max(map(len, rows))
    widths = [max(len(row[k]) if k < len(row) else 0 for row in rows) for k in range(columns)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _name(name: str) -> str:
    return name if re.fullmatch(_WORD, name) else json.dumps(name)


def _amount(amount: int) -> str:
    unit = max((u for u in _UNITS if amount % _UNITS[u] == 0), key=_UNITS.__getitem__)
    return f"{amount // _UNITS[unit]}{unit}" if amount else "0B"


def _space(space: Space) -> list[str]:
    match space.kind:
        case SpaceKind.ARENA:
            more = [f"align {space.alignment}"]
        case SpaceKind.FILE:
            more = [json.dumps(space.path)]
        case SpaceKind.BOUND:
            more = []
    if space.writable and space.kind != SpaceKind.ARENA:
        more.append("writable")
    kind = space.kind.name.lower()
    return [_name(space.name), kind, _amount(space.bytes), _name(space.tier), " ".join(more)]


def _span(slot: Slot) -> list[str]:
    more = [f"crc32c {slot.checksum}"] if slot.checksum else []
    return [_amount(slot.offset), _amount(slot.bytes), *more]


def _segment(chain: Chain, segment: Segment) -> str:
    arguments, results = (
        f"({', '.join(_name(chain.slots[slot].name) for slot in slots)})"
        for slots in (segment.arguments, segment.results)
    )
    return f"{_name(segment.name)} {arguments} -> {results}"


def _descriptor(chain: Chain, index: int) -> list[str]:
    d = chain.descriptors[index]
    row = [str(index), _name(chain.streams[d.stream].name), f"@{d.tick}", _action(chain, d.action)]
    return [*row, f"after {', '.join(map(str, d.waits))}"] if d.waits else row


def _action(chain: Chain, action: Action) -> str:
    def at(slot: int, offset: int) -> str:
        return _name(chain.slots[slot].name) + (f" +{_amount(offset)}" if offset else "")

    match action:
        case Copy(source, destination, size, start, end):
            return f"copy {at(source, start)} -> {at(destination, end)} {_amount(size)}"
        case Execute(segment):
            return f"execute {_name(chain.segments[segment].name)}"
        case Fence():
            return "fence"
        case Release(slot):
            return f"release {_name(chain.slots[slot].name)}"


# --- reading --------------------------------------------------------------------------------


@collection_paused()
def assemble(text: str) -> Chain:
    """Reads what `disassemble` writes; spaces, and the units of amounts, are free.

    Raises:
      ChainTextError: at the first thing that is wrong.
    """
    return _Assembler(text.split("\n")).run()


class _Line:
    """The tokens of a line; `at` is the next one that is not read yet."""

    __slots__ = ("at", "number", "text", "tokens")

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.at = number, text, 0
        self.tokens = [*_TOKEN.findall(text), ""]

    def fail(self, expected: str, found: str | None = None, at: int | None = None) -> Never:
        """Raises for the next token, or the one at `at`."""
        if at is None:
            at = self.at
        if found is None:
            found = repr(self.tokens[at]) if self.tokens[at] else "the end of the line"
        starts = [*(token.start() for token in _TOKEN.finditer(self.text)), len(self.text)]
        raise ChainTextError(self.number, starts[at] + 1, self.text, expected, found)

    def peek(self) -> str:
        """The next token; ``""`` at the end."""
        return self.tokens[self.at]

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def has(self, token: str) -> bool:
        """Whether that is next; takes it."""
        if self.peek() != token:
            return False
        self.take()
        return True

    def expect(self, *tokens: str) -> str:
        if self.peek() not in tokens:
            self.fail(" or ".join(map(repr, tokens)))
        return self.take()

    def name(self, what: str) -> str:
        token = self.peek()
        if token.startswith('"'):
            return self.quoted(what)
        if not re.fullmatch(_WORD, token):
            self.fail(what)
        return self.take()

    def quoted(self, what: str) -> str:
        try:
            string = json.loads(self.peek())
            if isinstance(string, str) and 0 not in string.encode():
                self.take()
                return string
        except ValueError:  # No JSON, or a lone surrogate.
            pass
        self.fail(what)

    def number_of(self, what: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", self.peek()):
            self.fail(what)
        return int(self.take())

    def amount(self, what: str) -> int:
        found = re.fullmatch(r"([0-9]{1,20})([A-Za-z]+)", self.peek())
        if found is None or found[2] not in _UNITS:
            self.fail(f"{what} with a unit, such as 512B or 64MiB")
        self.take()
        return int(found[1]) * _UNITS[found[2]]

    def end(self) -> None:
        if self.peek():
            self.fail("the end of the line")


@dataclass(slots=True)
class _Assembler:
    lines: list[str]
    at: int = 0
    indices: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    rows: dict[tuple[str, int], _Line] = field(default_factory=dict[tuple[str, int], _Line])

    def run(self) -> Chain:
        head = self.next_line()
        head.expect("chain")
        version_at = head.at
        version = head.number_of("the version")
        if version != VERSION:
            head.fail(f"version {VERSION}", f"version {version}", version_at)
        head.end()
        fingerprint, line = NO_FINGERPRINT, self.next_line()
        if line.has("fingerprint"):
            if not re.fullmatch(r"[0-9a-f]{64}", line.peek()):
                line.fail("64 hexadecimal digits")
            fingerprint = bytes.fromhex(line.take())
            line.end()
        else:
            self.at -= 1
        chain = Chain(
            self.section("spaces", self.space),
            self.section("slots", self.slot),
            self.section("streams", lambda _, line: Stream(self.new(line, "streams"))),
            self.section("segments", self.segment),
            self.section("descriptors", self.descriptor),
            fingerprint,
        )
        while self.at < len(self.lines):
            if (rest := self.next_line()).text:
                rest.fail("the end of the text", at=0)
        try:
            tables_of(chain)
        except ChainError as error:
            line = self.rows[error.table, error.row]
            line.at = 0
            line.fail(f"{error.where} {error.expected}", str(error.found))
        return chain

    def next_line(self) -> _Line:
        """The next line; an empty one at the end of the text."""
        text = self.lines[self.at] if self.at < len(self.lines) else ""
        self.at += 1
        return _Line(self.at, text)

    def section[Row](self, name: str, read: Callable[[int, _Line], Row]) -> tuple[Row, ...]:
        head = self.next_line()
        if head.text.startswith(" "):
            head.fail(f"a line {name!r}", at=0)
        head.expect(name)
        head.end()
        self.indices[name] = {}
        rows: list[Row] = []
        while (line := self.next_line()).text.startswith(" "):
            self.rows[name, len(rows)] = line
            rows.append(read(len(rows), line))
            line.end()
        self.at -= 1
        return tuple(rows)

    def new(self, line: _Line, table: str) -> str:
        at, name = line.at, line.name("a name")
        if name in self.indices[table]:
            line.fail("a name of its own", f"that of row {self.indices[table][name]}", at)
        self.indices[table][name] = len(self.indices[table])
        return name

    def known(self, line: _Line, table: str) -> int:
        at, what = line.at, f"one of the {table}"
        index = self.indices[table].get(line.name(what))
        if index is None:
            line.fail(what, at=at)
        return index

    def space(self, _: int, line: _Line) -> Space:
        name = self.new(line, "spaces")
        kind = SpaceKind[line.expect(*(k.name.lower() for k in SpaceKind)).upper()]
        size, tier = line.amount("bytes"), line.name("a tier")
        if kind == SpaceKind.ARENA:
            line.expect("align")
            return Space(name, kind, tier, size, line.number_of("a number of bytes"), writable=True)
        path = line.quoted("a path in quotes") if kind == SpaceKind.FILE else ""
        return Space(name, kind, tier, size, path=path, writable=line.has("writable"))

    def slot(self, _: int, line: _Line) -> Slot:
        name, space = self.new(line, "slots"), self.known(line, "spaces")
        offset, size = line.amount("an offset"), line.amount("bytes")
        checksum = line.number_of("a checksum") if line.has("crc32c") else 0
        return Slot(name, space, offset, size, checksum)

    def segment(self, _: int, line: _Line) -> Segment:
        name, arguments = self.new(line, "segments"), tuple(self.operands(line))
        line.expect("->")
        return Segment(name, arguments, tuple(self.operands(line)))

    def operands(self, line: _Line) -> Iterator[int]:
        line.expect("(")
        if line.has(")"):
            return
        yield self.known(line, "slots")
        while line.expect(",", ")") == ",":
            yield self.known(line, "slots")

    def descriptor(self, index: int, line: _Line) -> Descriptor:
        at = line.at
        if (found := line.number_of(f"index {index}")) != index:
            line.fail(f"index {index}", str(found), at)
        stream = self.known(line, "streams")
        line.expect("@")
        tick = line.number_of("a tick")
        action = self.action(line)
        waits: list[Wait] = []
        if line.has("after"):
            waits.append(self.wait(line))
            while line.has(","):
                waits.append(self.wait(line))
        return Descriptor(stream, tick, action, tuple(waits))

    def action(self, line: _Line) -> Action:
        match line.expect("copy", "execute", "fence", "release"):
            case "copy":
                source, start = self.place(line)
                line.expect("->")
                destination, end = self.place(line)
                return Copy(source, destination, line.amount("bytes"), start, end)
            case "execute":
                return Execute(self.known(line, "segments"))
            case "fence":
                return Fence()
            case _:
                return Release(self.known(line, "slots"))

    def place(self, line: _Line) -> tuple[int, int]:
        slot = self.known(line, "slots")
        return slot, line.amount("an offset") if line.has("+") else 0

    def wait(self, line: _Line) -> Wait:
        return Wait(line.number_of("a descriptor"), line.has("'"))
