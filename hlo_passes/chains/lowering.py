"""A plan's transfers as a descriptor chain, which a runtime replays beside the compute.

    ticks      0     1     2     3     4     5        of the entry
    compute    c0    c1    c2    c3    c4
    w0         done ──────end                         what arrives and what is dead cut compute
    w1               start   done ──────end           into segments
    cuts       0           2  2  3     5
    segments   ───── 0 ───── ─ 1 ─ ─ 2 ─              execute 0, execute 1, execute 2

A segment waits for what it reads, and what takes the place of that in the arena waits for the
segment. Nothing else is ordered, so transfers start as early as their bytes are free, those of
the next replay too; the plan's ticks say in which order, and what may share bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hlo_passes.chains.builder import Builder
from hlo_passes.chains.chain import Chain
from hlo_passes.errors import NotReplayableError
from hlo_passes.plan import LogicalTime, Plan, Transfer

BLOCK = 4096
"""Bytes: what a disk reads in; a slot begins as far into one as its source does."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """Bytes of a file that a weight is read from, from `offset` on."""

    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class Lowered:
    """A plan as a chain.

    Attributes:
      slots: of each buffer that is fetched, the chain's slot in the arena, by index.
      bound: the buffers that the chain reads from memory, in the order of its bound spaces.
    """

    chain: Chain
    slots: Mapping[str, int]
    bound: tuple[str, ...]


def cuts(plan: Plan) -> tuple[LogicalTime, ...]:
    """The ticks at which something arrives or is dead; segments lie between them."""
    return tuple(sorted({tick for t in plan.transfers for tick in (t.done, t.end)}))


def check_replayable(plan: Plan) -> None:
    """
    Raises:
      NotReplayableError: when the plan does more than fetch arguments in the entry.
    """
    for t in plan.transfers:
        if t.kind != "prefetch":
            raise NotReplayableError(
                f"%{t.buffer} ({plan.labels.get(t.buffer, 'a temporary')}) leaves the device",
            )
    for loop in plan.loops:
        if loop.transfers:
            raise NotReplayableError(f"the loop in %{loop.computation} brings slices")
    for body in plan.bodies:
        if body.plan.transfers:
            raise NotReplayableError(f"the loop in %{body.computation} brings what it reads")


def arena_bytes(plan: Plan) -> int:
    """Bytes of the arena that the chain of a plan has on the device."""
    return _Arena(plan).bytes


def lower(plan: Plan, files: Mapping[str, FileSource]) -> Lowered:
    """Lowers a plan.

    Args:
      files: where buffers are read from that are in files; all others are in memory, each a bound
        space of the chain.

    Raises:
      NotReplayableError: when the plan does more than fetch arguments in the entry.
    """
    check_replayable(plan)
    arena = _Arena(plan)
    fetched = {t.buffer: t for t in plan.transfers}
    labels = {name: plan.labels.get(name, name) for name in fetched}
    build = Builder()
    pool = build.arena("arena", plan.device_tier, arena.bytes, alignment=BLOCK)
    paths = {
        path: build.file(path, "file", _end_of(path, files, fetched), path)
        for path in dict.fromkeys(files[name].path for name in fetched if name in files)
    }
    sources, slots = dict[str, int](), dict[str, int]()
    for name, t in fetched.items():
        into = _HOST_SKEW
        if (file := files.get(name)) is not None:
            into = file.offset % BLOCK
            sources[name] = build.slot(labels[name], paths[file.path], file.offset, t.size)
        else:
            space = build.bound(labels[name], t.source, t.size)
            sources[name] = build.slot(labels[name], space, 0, t.size)
        slots[name] = build.slot(f"{labels[name]} here", pool, arena.offsets[name] + into, t.size)
    read, compute = build.stream("read"), build.stream("compute")
    starting = arena.starting()
    for k, (begin, end) in enumerate(arena.segments):
        for t in starting.get(k, ()):
            build.copy(read, sources[t.buffer], slots[t.buffer], t.size, tick=t.start)
        held = [slots[t.buffer] for t in plan.transfers if t.done <= begin and end <= t.end]
        segment = build.segment(f"{begin}:{end}", dict.fromkeys(held), ())
        build.execute(compute, segment, tick=begin)
    bound = tuple(name for name in fetched if name not in files)
    digest = bytes.fromhex(plan.module_fingerprint)[:32].ljust(32, b"\0")
    return Lowered(build.build(digest), slots, bound)


_HOST_SKEW = 64
"""Bytes: how far into a block what comes from memory lies; XLA:CPU asks for multiples of this."""


def _end_of(path: str, files: Mapping[str, FileSource], fetched: Mapping[str, Transfer]) -> int:
    """Bytes of a file that are needed, from its begin."""
    return max(
        files[name].offset + t.size
        for name, t in fetched.items()
        if name in files and files[name].path == path
    )


class _Arena:
    """Where in the arena each buffer lies, the same place whenever it is fetched.

    First fit, the largest first: of buffers that repeat, layer by layer, as many as are there at
    once have places, and the others take those.
    """

    def __init__(self, plan: Plan) -> None:
        check_replayable(plan)
        self._plan = plan
        at = cuts(plan)
        self.segments: Sequence[tuple[LogicalTime, LogicalTime]] = list(pairwise(at))
        held: dict[str, list[tuple[int, int]]] = {}
        sizes: dict[str, int] = {}
        for t in plan.transfers:
            span = self._segment_of(t.start), self._segment_of(t.end - 1) + 1
            held.setdefault(t.buffer, []).append(span)
            # A source may begin anywhere in a block.
            sizes[t.buffer] = -(-t.size // BLOCK) * BLOCK + BLOCK
        self.offsets: dict[str, int] = {}
        self.bytes = 0
        placed: list[tuple[int, int, list[tuple[int, int]]]] = []
        for name in sorted(held, key=lambda name: (-sizes[name], held[name], name)):
            spans, offset = held[name], 0
            for begin, end, others in sorted(placed, key=lambda of: of[0]):
                if any(a < d and c < b for a, b in spans for c, d in others):
                    if begin - offset >= sizes[name]:
                        break
                    offset = max(offset, end)
            self.offsets[name] = offset
            placed.append((offset, offset + sizes[name], spans))
            self.bytes = max(self.bytes, offset + sizes[name])

    def _segment_of(self, tick: LogicalTime) -> int:
        """The segment that a tick lies in; of what is before all of them the first."""
        return max(0, bisect_right([begin for begin, _ in self.segments], tick) - 1)

    def starting(self) -> Mapping[int, Sequence[Transfer]]:
        """The transfers that start before or in each segment, in the order of the plan."""
        found: dict[int, list[Transfer]] = {}
        for t in self._plan.transfers:
            found.setdefault(self._segment_of(t.start), []).append(t)
        return found
