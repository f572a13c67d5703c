"""The chain: a frozen value that says which bytes move, what runs, and what waits for what.

A chain is replayed again and again. Its descriptors stand in *chain order*, which is right if
they run one by one; at run time a descriptor waits for the one before it on its stream, and for
its waits, and for nothing else.

    read      copy w0 → ring0 ──┐        copy w1 → ring0 ──┐
                                ▼        ▲                 ▼
    compute                  execute s0 ─┘              execute s1      time →

A wait of the previous replay, written ``7'``, is for descriptor 7 of the replay before; in the
first one it holds at once. Replays overlap as far as streams and waits let them: what a stream
has in the next replay follows what it has in this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
MAX_WAITS = 4
NO_FINGERPRINT = bytes(32)


class SpaceKind(IntEnum):
    """Where a space comes from: allocated once by the runtime, a file that it opens, or memory
    that the caller hands in at each replay, the same or another."""

    ARENA = 0
    FILE = 1
    BOUND = 2


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes that slots lie in.

    Attributes:
      tier: what memory it is in, such as ``"hbm"``, ``"host"`` or ``"ssd"``.
      alignment: of an arena's first byte, a power of two; 0 of others.
      path: of a file; ``""`` of others.
      writable: whether it may be written; an arena always.
    """

    name: str
    kind: SpaceKind
    tier: str
    bytes: int
    alignment: int = 0
    path: str = ""
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """`bytes` at `offset` of a space, by the space's index. Slots that overlap are reuse.

    Attributes:
      checksum: CRC-32C of the bytes, in a file that is not written; 0 where it is not known. A copy
        of all of the slot has to find it.
    """

    name: str
    space: int
    offset: int
    bytes: int
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """A queue: its descriptors run in chain order, each after the one before has completed."""

    name: str


@dataclass(frozen=True, slots=True)
class Segment:
    """An executable that reads its argument slots and writes its result slots, by index."""

    name: str
    arguments: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """`bytes` go from one slot to another, from and to an offset within each."""

    source: int
    destination: int
    bytes: int
    source_offset: int = 0
    destination_offset: int = 0


@dataclass(frozen=True, slots=True)
class Execute:
    """A segment runs."""

    segment: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Nothing but waits."""


@dataclass(frozen=True, slots=True)
class Release:
    """A slot's bytes are dead from here on, in chain order. Nothing happens at run time."""

    slot: int


type Action = Copy | Execute | Fence | Release


@dataclass(frozen=True, slots=True)
class Wait:
    """A descriptor that has to have completed, by index: of this replay or of the previous."""

    index: int
    is_previous: bool = False

    def __str__(self) -> str:
        return f"{self.index}{"'" if self.is_previous else ''}"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One thing to do.

    Attributes:
      stream: by index.
      tick: logical time, for people; below 2**32.
      waits: at most `MAX_WAITS`; those of the same replay come earlier in the chain.
    """

    stream: int
    tick: int
    action: Action
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """The whole; what refers to another table does so by index.

    `hlo_passes.chains.tables` says whether the parts fit together, whenever a chain is written,
    shown or checked.

    Attributes:
      fingerprint: 32 bytes that identify the module, or `NO_FINGERPRINT`.
    """

    spaces: tuple[Space, ...]
    slots: tuple[Slot, ...]
    streams: tuple[Stream, ...]
    segments: tuple[Segment, ...]
    descriptors: tuple[Descriptor, ...]
    fingerprint: bytes = NO_FINGERPRINT
    version: int = VERSION


class Extent(NamedTuple):
    """Bytes of a space, half-open."""

    space: int
    start: int
    end: int

    def overlaps(self, other: Extent) -> bool:
        return self.space == other.space and self.start < other.end and other.start < self.end


def extent(slots: Sequence[Slot], slot: int, offset: int = 0, size: int | None = None) -> Extent:
    """Where `size` bytes at an offset of a slot lie in its space; without it, the whole slot."""
    start = slots[slot].offset + offset
    return Extent(slots[slot].space, start, start + (slots[slot].bytes if size is None else size))


def accesses(
    action: Action, slots: Sequence[Slot], segments: Sequence[Segment]
) -> tuple[list[Extent], list[Extent]]:
    """What an action reads, and what it writes after that."""
    match action:
        case Copy(source, destination, size, start, end):
            return [extent(slots, source, start, size)], [extent(slots, destination, end, size)]
        case Execute(k):
            return (
                [extent(slots, slot) for slot in segments[k].arguments],
                [extent(slots, slot) for slot in segments[k].results],
            )
        case _:
            return [], []


def touched(action: Action, segments: Sequence[Segment]) -> Iterator[int]:
    """The slots that an action names."""
    match action:
        case Copy(source, destination):
            yield from (source, destination)
        case Execute(k):
            yield from segments[k].arguments
            yield from segments[k].results
        case Release(slot):
            yield slot
        case Fence():
            pass
