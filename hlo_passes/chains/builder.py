"""Makes chains of what is to happen one after the other: see `Builder`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hlo_passes.chains.chain import (
    MAX_WAITS,
    NO_FINGERPRINT,
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
    accesses,
    extent,
    touched,
)
from hlo_passes.chains.runs import Runs
from hlo_passes.chains.tables import tables_of
from hlo_passes.garbage import collection_paused


@dataclass(slots=True)
class Builder:
    """Derives the waits of a chain.

    Spaces, slots, streams and segments are declared, and are referred to by the index that is
    returned. Copies, executions and releases are appended in an order that is right if they run
    one by one; it becomes chain order. `build` gives each the waits that keep every order that
    matters, within a replay and from one to the next, and no wait that streams and other waits
    imply: the transitive reduction (Aho, Garey, Ullman 1972).
    """

    _spaces: list[Space] = field(default_factory=list[Space], init=False)
    _slots: list[Slot] = field(default_factory=list[Slot], init=False)
    _streams: list[Stream] = field(default_factory=list[Stream], init=False)
    _segments: list[Segment] = field(default_factory=list[Segment], init=False)
    _serial: list[Descriptor] = field(default_factory=list[Descriptor], init=False)

    def arena(self, name: str, tier: str, size: int, *, alignment: int) -> int:
        """Declares `size` bytes that the runtime allocates."""
        return self._declare(
            self._spaces, Space(name, SpaceKind.ARENA, tier, size, alignment, writable=True)
        )

    def file(self, name: str, tier: str, size: int, path: str, *, writable: bool = False) -> int:
        """Declares a file of `size` bytes."""
        return self._declare(
            self._spaces, Space(name, SpaceKind.FILE, tier, size, path=path, writable=writable)
        )

    def bound(self, name: str, tier: str, size: int, *, writable: bool = False) -> int:
        """Declares `size` bytes that the caller hands in."""
        return self._declare(
            self._spaces, Space(name, SpaceKind.BOUND, tier, size, writable=writable)
        )

    def slot(self, name: str, space: int, offset: int, size: int, checksum: int = 0) -> int:
        return self._declare(self._slots, Slot(name, space, offset, size, checksum))

    def stream(self, name: str) -> int:
        return self._declare(self._streams, Stream(name))

    def segment(self, name: str, arguments: Iterable[int], results: Iterable[int]) -> int:
        return self._declare(self._segments, Segment(name, tuple(arguments), tuple(results)))

    def copy(
        self,
        stream: int,
        source: int,
        destination: int,
        size: int,
        *,
        source_offset: int = 0,
        destination_offset: int = 0,
        tick: int = 0,
    ) -> None:
        """Appends a copy of `size` bytes."""
        copy = Copy(source, destination, size, source_offset, destination_offset)
        self._serial.append(Descriptor(stream, tick, copy))

    def execute(self, stream: int, segment: int, *, tick: int = 0) -> None:
        self._serial.append(Descriptor(stream, tick, Execute(segment)))

    def release(self, stream: int, slot: int, *, tick: int = 0) -> None:
        self._serial.append(Descriptor(stream, tick, Release(slot)))

    @collection_paused()
    def build(self, fingerprint: bytes = NO_FINGERPRINT, *, release: bool = False) -> Chain:
        """Makes the chain.

        A descriptor that needs more than `MAX_WAITS` has fences before it, on its stream.

        Args:
          fingerprint: of the module, 32 bytes.
          release: release each slot of an arena after its last access, where none of its bytes
            are read under another name before they are written again.

        Raises:
          ChainError: when what was declared and appended does not fit together.

        Time O(n (log n + s + w²)) for n descriptors on s streams with at most w waits, where what
        is read was written in a bounded number of pieces.
        """
        chain = Chain(
            tuple(self._spaces),
            tuple(self._slots),
            tuple(self._streams),
            tuple(self._segments),
            tuple(self._serial),
            fingerprint,
        )
        tables_of(chain)
        releases = _last_accesses(chain) if release else {}
        return replace(chain, descriptors=_emit(chain, _waits(chain), releases))

    def _declare[Item](self, table: list[Item], item: Item) -> int:
        table.append(item)
        return len(table) - 1


@dataclass(frozen=True, slots=True)
class _Held:
    """Who has touched bytes: the last writer's key, and by stream the last reader since."""

    writer: int | None = None
    readers: tuple[tuple[int, int], ...] = ()

    def read_by(self, stream: int, key: int) -> _Held:
        others = tuple(reader for reader in self.readers if reader[0] != stream)
        return _Held(self.writer, (*others, (stream, key)))


def _orders(chain: Chain) -> list[dict[int, int]]:
    """For each key of two replays, by stream the last key that has to have completed before."""
    n = len(chain.descriptors)
    stream_of = [d.stream for d in chain.descriptors]
    held = [Runs(space.bytes, _Held()) for space in chain.spaces]
    orders: list[dict[int, int]] = []
    for key in range(2 * n):
        stream, before = stream_of[key % n], dict[int, int]()

        def expect(other: int, key: int = key, before: dict[int, int] = before) -> None:
            if other != key:
                before[stream_of[other % n]] = max(before.get(stream_of[other % n], -1), other)

        reads, writes = accesses(chain.descriptors[key % n].action, chain.slots, chain.segments)
        for space, start, end in reads:
            for of in held[space].between(start, end):
                if of.value.writer is not None:
                    expect(of.value.writer)
                of.value = of.value.read_by(stream, key)
        for space, start, end in writes:
            for of in held[space].between(start, end):
                for _, reader in of.value.readers:
                    expect(reader)
                if of.value.writer is not None:
                    expect(of.value.writer)
            held[space].set(start, end, _Held(key))
        before.pop(stream, None)
        orders.append(before)
    return orders


def _waits(chain: Chain) -> list[list[Wait]]:
    """The waits of each descriptor; those of the previous replay are seen in the second."""
    n, streams = len(chain.descriptors), len(chain.streams)
    last: list[tuple[int, ...]] = [(-1,) * streams] * streams
    clocks: list[tuple[int, ...]] = []
    waits: list[list[Wait]] = []
    for key, before in enumerate(_orders(chain)):
        replay, k = divmod(key, n)
        own = chain.descriptors[k].stream
        clock, kept = last[own], list[int]()
        # What another wait of this replay implies is never one of the previous replay that does,
        # so those of this replay are settled first.
        for group in (
            [other for other in before.values() if other >= replay * n],
            [other for other in before.values() if other < replay * n],
        ):
            reached = {other: clocks[other] for other in group}
            needed = [
                other
                for other in group
                if clock[s := chain.descriptors[other % n].stream] < other
                and all(to[s] < other for by, to in reached.items() if by != other)
            ]
            for other in needed:
                s = chain.descriptors[other % n].stream
                known = list(map(max, clock, clocks[other]))
                known[s] = max(known[s], other)
                clock = tuple(known)
            kept += needed
        last[own] = clock
        clocks.append(clock)
        if replay:
            waits.append(sorted((Wait(o % n, o < n) for o in kept), key=_order_of_wait))
    return waits


def _order_of_wait(wait: Wait) -> tuple[bool, int]:
    return wait.is_previous, wait.index


def _last_accesses(chain: Chain) -> dict[int, list[int]]:
    """Which slots of arenas can be released after which descriptor."""
    last: dict[int, int] = {}
    for k, d in enumerate(chain.descriptors):
        last.update((slot, k) for slot in touched(d.action, chain.segments))
    is_arena = [space.kind == SpaceKind.ARENA for space in chain.spaces]
    after: dict[int, list[int]] = {}
    for slot, k in last.items():
        is_released = isinstance(chain.descriptors[k].action, Release)
        if is_arena[chain.slots[slot].space] and not is_released:
            after.setdefault(k, []).append(slot)
    # Of bytes, the slots that were released since they were written: a read takes that back.
    released = [Runs(space.bytes, frozenset[int]()) for space in chain.spaces]
    needed: set[int] = set()
    for k, d in enumerate(chain.descriptors):
        reads, writes = accesses(d.action, chain.slots, chain.segments)
        for space, start, end in reads:
            for of in released[space].between(start, end):
                needed |= of.value
        for space, start, end in writes:
            released[space].set(start, end, frozenset())
        for slot in after.get(k, ()):
            for of in released[chain.slots[slot].space].between(*extent(chain.slots, slot)[1:]):
                of.value |= {slot}
    return {k: sorted(set(slots) - needed) for k, slots in after.items()}


def _emit(
    chain: Chain, waits: Sequence[Sequence[Wait]], releases: dict[int, list[int]]
) -> tuple[Descriptor, ...]:
    fences = [max(0, -(-len(of) // MAX_WAITS) - 1) for of in waits]
    index, end = list[int](), 0
    for k, count in enumerate(fences):
        index.append(end + count)
        end += count + 1 + len(releases.get(k, ()))
    emitted: list[Descriptor] = []
    for k, d in enumerate(chain.descriptors):
        left = [replace(wait, index=index[wait.index]) for wait in waits[k]]

        def put(action: Action, count: int, d: Descriptor = d, left: list[Wait] = left) -> None:
            emitted.append(Descriptor(d.stream, d.tick, action, tuple(left[:count])))
            del left[:count]

        for _ in range(fences[k]):
            put(Fence(), MAX_WAITS)
        put(d.action, MAX_WAITS)
        for slot in releases.get(k, ()):
            put(Release(slot), 0)
    return tuple(emitted)
