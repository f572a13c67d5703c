"""Is a chain right in whatever order its streams run? See `check`."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from hlo_passes.chains.chain import Chain, Copy, Extent, Release, SpaceKind, accesses, extent
from hlo_passes.chains.tables import tables_of
from hlo_passes.chains.text import describe
from hlo_passes.errors import ChainCheckError
from hlo_passes.garbage import collection_paused

_NEVER = -1


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What a chain that is right takes.

    Attributes:
      footprint: bytes of the arenas, by tier.
      used: bytes of arenas that hold something at once at most, by tier, in chain order: written,
        and not released.
    """

    footprint: Mapping[str, int]
    used: Mapping[str, int]


@collection_paused()
def check(chain: Chain) -> ChainReport:
    """Proves that a chain computes the same in every order that its waits allow, or says why not.

    Every two accesses to the same bytes, one of which writes, are ordered by streams and waits,
    within a replay and from one to the next: vector clocks over two replays tell (Fidge 1988,
    Mattern 1989), and as a stream goes on in the next replay, two stand for all. So every order
    reads what chain order reads, and that one is followed: no bytes of an arena are read that
    nothing has written, or that were released since. Writes go to arenas and to what may be
    written. No wait can hold up the chain for good, as each goes back in chain order or to the
    previous replay, which `ChainError` says. Bound spaces are taken to be the same memory in each
    replay.

    Returns:
      what it takes.

    Raises:
      ChainError: when its parts do not fit together.
      ChainCheckError: at the first thing that is wrong, in chain order.

    Time O(n (s + log n)) for n descriptors on s streams, where what is read was written in a
    bounded number of pieces; memory O(n s).
    """
    tables_of(chain)
    _check_writes(chain)
    return _Replays(chain).run()


def _check_writes(chain: Chain) -> None:
    for k, d in enumerate(chain.descriptors):
        reads, writes = accesses(d.action, chain.slots, chain.segments)
        for written in writes:
            space = chain.spaces[written.space]
            if not space.writable:
                raise ChainCheckError(
                    f"{_described(chain, k)} writes {_bytes(chain, written)}, which may not be "
                    "written",
                    "Declare the space writable, or write elsewhere.",
                )
        is_copy = isinstance(d.action, Copy)
        both = [(r, w) for r in reads for w in writes if is_copy or r != w]
        for one, other in (*both, *combinations(writes, 2)):
            if one.overlaps(other):
                raise ChainCheckError(
                    f"{_described(chain, k)} works on {_bytes(chain, one)} and writes "
                    f"{_bytes(chain, other)} at once",
                    "Take bytes apart; only a result may have exactly those of an argument.",
                )


class _Run(NamedTuple):
    """Bytes of a space with one past, half-open.

    Attributes:
      writer: key of who wrote them last; `_NEVER` if nobody has.
      readers: by stream the last who has read them since.
      dead: None, or since when they hold nothing: key of a release, or `_NEVER`.
    """

    end: int
    writer: int
    readers: Mapping[int, int]
    dead: int | None


@dataclass(slots=True)
class _Past:
    """What happened to the bytes of a space: runs, and where each begins, ascending."""

    starts: list[int]
    runs: list[_Run]

    def cut(self, start: int, end: int) -> tuple[int, int]:
        """Which runs make up these bytes, once runs are cut at both ends."""
        return self._cut(start), self._cut(end)

    def _cut(self, at: int) -> int:
        k = bisect_right(self.starts, at) - 1
        if self.starts[k] == at:
            return k
        if at >= self.runs[k].end:
            return k + 1
        self.starts.insert(k + 1, at)
        self.runs.insert(k + 1, self.runs[k])
        self.runs[k] = self.runs[k]._replace(end=at)
        return k + 1

    def of(self, first: int, last: int) -> Iterator[tuple[int, int, _Run]]:
        """Index, bytes and run of each."""
        for k in range(first, last):
            yield k, self.runs[k].end - self.starts[k], self.runs[k]


@dataclass(slots=True)
class _Replays:
    """Two replays in chain order; key k is descriptor ``k % n`` of replay ``k // n``."""

    chain: Chain
    clocks: list[tuple[int, ...]] = field(init=False)
    pasts: list[_Past] = field(init=False)

    def __post_init__(self) -> None:
        self.clocks = list(_clocks(self.chain))
        self.pasts = [
            _Past([0], [_Run(s.bytes, _NEVER, {}, _NEVER if s.kind == SpaceKind.ARENA else None)])
            for s in self.chain.spaces
        ]

    def run(self) -> ChainReport:
        chain = self.chain
        footprint, used, most = (defaultdict[str, int](int) for _ in range(3))
        arenas = {k: s.tier for k, s in enumerate(chain.spaces) if s.kind == SpaceKind.ARENA}
        for k, tier in arenas.items():
            footprint[tier] += chain.spaces[k].bytes
        for key in range(2 * len(chain.descriptors)):
            if key == len(chain.descriptors):
                self.bind()
            action = chain.descriptors[key % len(chain.descriptors)].action
            reads, writes = accesses(action, chain.slots, chain.segments)
            for read in reads:
                self.read(key, read)
            for written in writes:
                used[arenas.get(written.space, "")] += self.write(key, written)
            if isinstance(action, Release):
                released = extent(chain.slots, action.slot)
                used[arenas.get(released.space, "")] -= self.release(key, released)
            for written in writes:
                tier = arenas.get(written.space, "")
                most[tier] = max(most[tier], used[tier])
        return ChainReport(dict(footprint), {tier: most[tier] for tier in footprint})

    def bind(self) -> None:
        """The caller hands in bound spaces with something in them."""
        for space, past in zip(self.chain.spaces, self.pasts, strict=True):
            if space.kind == SpaceKind.BOUND:
                past.runs = [run._replace(dead=None) for run in past.runs]

    def read(self, key: int, read: Extent) -> None:
        past, stream = self.pasts[read.space], self.stream(key)
        for k, _, run in past.of(*past.cut(read.start, read.end)):
            if run.dead is not None:
                raise ChainCheckError(
                    f"{self.at(key)} reads {_bytes(self.chain, self.cell(past, k, read))}, which "
                    + (
                        "nothing has written" if run.dead == _NEVER else f"{self.at(run.dead)} left"
                    ),
                    "Write them before, or read what was written.",
                )
            self.expect_order(run.writer, "writes", key, "reads", self.cell(past, k, read))
            past.runs[k] = run._replace(readers={**run.readers, stream: key})

    def write(self, key: int, written: Extent) -> int:
        """Returns how many bytes hold something now, and did not before."""
        past = self.pasts[written.space]
        first, last = past.cut(written.start, written.end)
        gained = 0
        for k, size, run in past.of(first, last):
            cell = self.cell(past, k, written)
            self.expect_order(run.writer, "writes", key, "writes", cell)
            for reader in run.readers.values():
                self.expect_order(reader, "reads", key, "writes", cell)
            gained += size if run.dead is not None else 0
        past.starts[first:last] = [written.start]
        past.runs[first:last] = [_Run(written.end, key, {}, None)]
        return gained

    def release(self, key: int, released: Extent) -> int:
        """Returns how many bytes hold something no more."""
        past, lost = self.pasts[released.space], 0
        for k, size, run in past.of(*past.cut(released.start, released.end)):
            lost += size if run.dead is None else 0
            past.runs[k] = run._replace(dead=key)
        return lost

    def expect_order(self, a: int, does: str, b: int, then: str, cell: Extent) -> None:
        if a == _NEVER or a == b or self.is_before(a, b):
            return
        n = len(self.chain.descriptors)
        wait = f"{a % n}{"'" if b >= n > a else ''}"
        raise ChainCheckError(
            f"{self.at(b)} {then} {_bytes(self.chain, cell)}, which {self.at(a)} {does}"
            + (" in the previous replay" if b >= n > a else "")
            + ", and nothing orders them",
            f"Let {b % n} be after {wait}.",
        )

    def is_before(self, a: int, b: int) -> bool:
        stream = self.stream(a)
        return stream == self.stream(b) or self.clocks[b][stream] >= a

    def stream(self, key: int) -> int:
        return self.chain.descriptors[key % len(self.chain.descriptors)].stream

    def at(self, key: int) -> str:
        return _described(self.chain, key % len(self.chain.descriptors))

    def cell(self, past: _Past, k: int, of: Extent) -> Extent:
        return Extent(of.space, past.starts[k], past.runs[k].end)


def _clocks(chain: Chain) -> Iterator[tuple[int, ...]]:
    """For each key, by stream the last key that has completed when it begins; of its own stream
    what comes before it is known anyway, and need not be in it."""
    n, streams = len(chain.descriptors), len(chain.streams)
    last: list[tuple[int, ...]] = [(_NEVER,) * streams] * streams
    clocks: list[tuple[int, ...]] = []
    for key in range(2 * n):
        d = chain.descriptors[key % n]
        clock = last[d.stream]
        for wait in d.waits:
            awaited = wait.index + (key // n - wait.is_previous) * n
            if awaited < 0:
                continue
            known = list(map(max, clock, clocks[awaited]))
            stream = chain.descriptors[wait.index].stream
            known[stream] = max(known[stream], awaited)
            clock = tuple(known)
        last[d.stream] = clock
        clocks.append(clock)
        yield clock


def _described(chain: Chain, index: int) -> str:
    return f"descriptor {describe(chain, index)!r}"


def _bytes(chain: Chain, of: Extent) -> str:
    return f"bytes {of.start} to {of.end} of {chain.spaces[of.space].name!r}"
