"""Chains to test with: a fixed one that has everything, and drawn ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hlo_passes.chains.builder import Builder
from hlo_passes.chains.chain import (
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


def sample_builder(unit: int = 512) -> Builder:
    """Two weights through a ring of one slot, and an activation that is worked on in place."""
    b = Builder()
    hbm = b.arena("hbm", "hbm", 8 * unit, alignment=512)
    weights = b.file("weights", "ssd", 4 * unit, "/models/größe 7b.bin")
    cache = b.file("cache", "ssd", 2 * unit, "/mnt/cache", writable=True)
    x, y = b.bound("x", "hbm", unit), b.bound("y", "hbm", unit, writable=True)
    w0, w1 = (b.slot(f"w{k}", weights, 2 * unit * k, 2 * unit) for k in range(2))
    ring, act = b.slot("ring", hbm, 0, 2 * unit), b.slot("act of layer", hbm, 2 * unit, unit)
    kept = b.slot("kept", cache, unit, unit)
    given, result = b.slot("x", x, 0, unit), b.slot("y", y, 0, unit)
    read, write, compute = b.stream("read"), b.stream("write"), b.stream("compute")
    layer = b.segment("layer", (ring, act), (act,))
    b.copy(read, w0, ring, 2 * unit, tick=1)
    b.copy(read, given, act, unit, tick=1)
    b.execute(compute, layer, tick=2)
    b.copy(read, w1, ring, unit, source_offset=unit, destination_offset=unit // 2, tick=3)
    b.execute(compute, layer, tick=4)
    b.copy(write, act, kept, unit, tick=5)
    b.copy(write, act, result, unit, tick=5)
    return b


def fenced_builder() -> Builder:
    """Six streams whose copies one execution awaits, and so do their next ones in turn."""
    b = Builder()
    hbm, x = b.arena("hbm", "hbm", 96, alignment=1), b.bound("x", "host", 16)
    given, slots = b.slot("x", x, 0, 16), [b.slot(f"s{k}", hbm, 16 * k, 16) for k in range(6)]
    segment, compute = b.segment("all", slots, ()), b.stream("compute")
    for k, slot in enumerate(slots):
        b.copy(b.stream(f"read{k}"), given, slot, 16)
    b.execute(compute, segment)
    return b


def sample() -> Chain:
    return sample_builder().build(bytes(range(32)), release=True)


_NAMES = st.text(min_size=1, max_size=6).filter(
    lambda s: "\0" not in s and not any("\ud800" <= c <= "\udfff" for c in s)
) | st.sampled_from(["after", "copy", "7", "spaces", "->", "-", "'", '"', "a-b", "ring.0"])


def _names(least: int, most: int) -> st.SearchStrategy[list[str]]:
    return st.lists(_NAMES, min_size=least, max_size=most, unique=True)


_TIERS = st.sampled_from(["hbm", "host", "nvme ssd"])


ANY_SIZE = st.integers(1, 2**63 - 1)


@st.composite
def spaces(draw: st.DrawFn, size: st.SearchStrategy[int], least: int) -> tuple[Space, ...]:
    drawn: list[Space] = []
    for k, name in enumerate(draw(_names(least, 3))):
        kind, writable = draw(st.sampled_from(SpaceKind)), draw(st.booleans())
        is_arena = kind == SpaceKind.ARENA
        drawn.append(
            Space(
                name,
                kind,
                draw(_TIERS),
                draw(size),
                1 << draw(st.integers(0, 62)) if is_arena else 0,
                f"/{k}/{draw(_NAMES)}" if kind == SpaceKind.FILE else "",
                writable or is_arena,
            )
        )
    return tuple(drawn)


@st.composite
def slots(draw: st.DrawFn, of: Sequence[Space], least: int) -> tuple[Slot, ...]:
    drawn: list[Slot] = []
    for name in draw(_names(least, 5)) if of else ():
        space = draw(st.integers(0, len(of) - 1))
        offset = draw(st.integers(0, of[space].bytes - 1))
        size = draw(st.integers(1, of[space].bytes - offset))
        is_read = of[space].kind == SpaceKind.FILE and not of[space].writable
        checksum = draw(st.integers(0, 2**32 - 1)) if is_read else 0
        drawn.append(Slot(name, space, offset, size, checksum))
    return tuple(drawn)


@st.composite
def copies(draw: st.DrawFn, of: Sequence[Slot]) -> Copy:
    source, destination = (draw(st.integers(0, len(of) - 1)) for _ in range(2))
    size = draw(st.integers(1, min(of[source].bytes, of[destination].bytes)))
    start = draw(st.integers(0, of[source].bytes - size))
    return Copy(
        source, destination, size, start, draw(st.integers(0, of[destination].bytes - size))
    )


@st.composite
def chains(draw: st.DrawFn, size: st.SearchStrategy[int] = ANY_SIZE, least: int = 0) -> Chain:
    """Any chain whose parts fit together, right or not; of `least` spaces, slots and streams."""
    in_spaces = draw(spaces(size, least))
    in_slots = draw(slots(in_spaces, least))
    operands = st.lists(st.integers(0, len(in_slots) - 1), max_size=3) if in_slots else st.just([])
    segments = tuple(
        Segment(name, tuple(draw(operands)), tuple(draw(operands))) for name in draw(_names(0, 3))
    )
    streams = tuple(map(Stream, draw(_names(least, 3))))
    actions: list[st.SearchStrategy[Action]] = [st.just(Fence())]
    if in_slots:
        actions += [copies(in_slots), st.builds(Release, st.integers(0, len(in_slots) - 1))]
    if segments:
        actions.append(st.builds(Execute, st.integers(0, len(segments) - 1)))
    count = draw(st.integers(0, 8)) if streams else 0
    descriptors: list[Descriptor] = []
    for k in range(count):
        waits = st.builds(Wait, st.integers(0, count - 1), st.just(True))
        if k:
            waits |= st.builds(Wait, st.integers(0, k - 1))
        descriptors.append(
            Descriptor(
                draw(st.integers(0, len(streams) - 1)),
                draw(st.integers(0, 2**32 - 1)),
                draw(st.one_of(actions)),
                tuple(draw(st.lists(waits, max_size=4))),
            )
        )
    fingerprint = draw(st.sampled_from([bytes(32), bytes(range(32))]))
    return Chain(in_spaces, in_slots, streams, segments, tuple(descriptors), fingerprint)


@st.composite
def programs(draw: st.DrawFn) -> Builder:
    """What is right one by one, on few bytes that are reused a lot."""
    b = Builder()
    x = b.bound("x", "host", 8)
    y = b.bound("y", "host", 8, writable=True)
    arenas = [b.arena(f"arena{k}", draw(_TIERS), 12, alignment=1) for k in range(2)]
    held: dict[int, set[int]] = {x: set(range(8)), y: set(range(8)), **{a: set() for a in arenas}}
    extents: list[tuple[int, set[int]]] = []

    def slot(space: int, offset: int, size: int) -> None:
        b.slot(f"s{len(extents)}", space, offset, size)
        extents.append((space, set(range(offset, offset + size))))

    slot(x, 0, 8)
    slot(y, 0, 8)
    for _ in range(draw(st.integers(2, 6))):
        offset = draw(st.integers(0, 10))
        slot(draw(st.sampled_from(arenas)), offset, draw(st.integers(1, min(6, 12 - offset))))
    streams = [b.stream(f"t{k}") for k in range(draw(st.integers(1, 7)))]
    for tick in range(draw(st.integers(1, 12))):
        readable = [k for k, (space, of) in enumerate(extents) if of <= held[space]]
        to = draw(st.integers(1, len(extents) - 1))
        space, of = extents[to]
        stream = draw(st.sampled_from(streams))
        if draw(st.booleans()):
            source = draw(st.sampled_from(readable))
            size = min(len(extents[source][1]), len(of))
            if extents[source][0] != space or not extents[source][1] & of:
                b.copy(stream, source, to, size, tick=tick)
                held[space] |= set(sorted(of)[:size])
        else:
            # An argument shares bytes with the result only where it has exactly those.
            reads = draw(st.lists(st.sampled_from(readable), max_size=5, unique=True))
            reads = [
                k for k in reads if k == to or extents[k][0] != space or not extents[k][1] & of
            ]
            b.execute(stream, b.segment(f"g{tick}", reads, [to]), tick=tick)
            held[space] |= of
    return b
