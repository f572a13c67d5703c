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

State that a step changes is read from one file and written to its twin, and the next step goes
the other way. So a replay is two steps, and between them, and after them, a segment on a stream of
its own commits what was written: nothing of the other file is written over before that.

    read      a0 a1 a2       b0 b1 b2       a0 ...
    compute      s0 s1 s2       s0's1's2'
    write           b0 b1 b2       a0 a1 a2
    commit                   c              c'
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hlo_passes.chains.builder import Builder
from hlo_passes.chains.chain import Chain
from hlo_passes.errors import NotReplayableError
from hlo_passes.plan import LogicalTime, Plan, Transfer

BLOCK = 4096
"""Bytes: what a disk reads in; a slot begins as far into one as its source does."""

_HOST_SKEW = 64
"""Bytes: how far into a block what comes from memory lies; XLA:CPU asks for multiples of this."""

_ON_GPU = "hbm"
"""The tier that bytes come to through buffers, and so may lie anywhere in."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """Bytes of a file that a weight is read from, from `offset` on; `checksum` is their CRC-32C, if
    it is known."""

    path: str
    offset: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """A plan as a chain.

    Attributes:
      slots: of each buffer that is fetched, the chain's slot in the arena, by index.
      bound: the buffers that the chain reads from memory, in the order of its bound spaces.
      steps: how many of the program's a replay is.
      commits: the stream that commits what was written, by index; None where nothing is.
    """

    chain: Chain
    slots: Mapping[str, int]
    bound: tuple[str, ...]
    steps: int
    commits: int | None


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


def lower(
    plan: Plan, files: Mapping[str, FileSource], twins: Mapping[str, FileSource] | None = None
) -> Lowered:
    """Lowers a plan.

    Args:
      files: where buffers are read from that are in files; all others are in memory, each a bound
        space of the chain.
      twins: of buffers in files that a step changes in their slots, where the next step finds them;
        they have whole blocks there.

    Raises:
      NotReplayableError: when the plan does more than fetch arguments in the entry.
    """
    check_replayable(plan)
    return _Lowering(plan, files, twins or {}).run()


class _Lowering:
    """The chain of one plan, as it is built."""

    def __init__(
        self, plan: Plan, files: Mapping[str, FileSource], twins: Mapping[str, FileSource]
    ) -> None:
        self._plan, self._files, self._twins = plan, files, twins
        self._arena = _Arena(plan)
        self._build = Builder()
        self._fetched = {t.buffer: t for t in plan.transfers}
        self._last = {t.buffer: t for t in sorted(plan.transfers, key=lambda t: t.end)}
        self._paths: dict[str, int] = {}
        self._here: dict[str, int] = {}

    def run(self) -> Lowered:
        build, arena = self._build, self._arena
        pool = build.arena("arena", self._plan.device_tier, arena.bytes, alignment=BLOCK)
        self._declare_files()
        there = {name: self._source(name) for name in self._fetched}
        twins = {name: self._in_file(name, at, " next") for name, at in self._twins.items()}
        for name in self._fetched:
            into = self._files[name].offset % BLOCK if name in self._files else _HOST_SKEW
            if self._plan.device_tier == _ON_GPU:
                into = 0
            label = f"{self._label(name)} here"
            at = arena.offsets[name] + into
            self._here[name] = build.slot(label, pool, at, self._bytes(name))
        read, compute = build.stream("read"), build.stream("compute")
        write, commit = (build.stream("write"), build.stream("commit")) if twins else (0, 0)
        for odd in range(2 if twins else 1):
            sources = {**there, **twins} if odd else there
            targets = {name: (there if odd else twins)[name] for name in twins}
            self._step(sources, targets, (read, compute, write), "'" * odd)
            if twins:
                # Written over, what was read: so the next step waits with that.
                over = (sources[name] for name in twins)
                segment = build.segment(f"commit{"'" * odd}", targets.values(), over)
                build.execute(commit, segment, tick=arena.segments[-1][1])
        bound = tuple(name for name in self._fetched if name not in self._files)
        digest = bytes.fromhex(self._plan.module_fingerprint)[:32].ljust(32, b"\0")
        return Lowered(
            build.build(digest), self._here, bound, 2 if twins else 1, commit if twins else None
        )

    def _step(
        self,
        sources: Mapping[str, int],
        targets: Mapping[str, int],
        streams: tuple[int, int, int],
        mark: str,
    ) -> None:
        """Appends a step that reads from the slots `sources`, and writes to `targets`."""
        build, arena, (read, compute, write) = self._build, self._arena, streams
        starting, ending = arena.starting(), arena.ending(self._last.values())
        for k, (begin, end) in enumerate(arena.segments):
            for t in starting.get(k, ()):
                size = self._bytes(t.buffer)
                build.copy(read, sources[t.buffer], self._here[t.buffer], size, tick=t.start)
            held = [t.buffer for t in self._plan.transfers if t.done <= begin and end <= t.end]
            slots = dict.fromkeys(self._here[name] for name in held)
            changed = [t.buffer for t in ending.get(k, ()) if t.buffer in targets]
            segment = build.segment(
                f"{begin}:{end}{mark}", slots, (self._here[name] for name in changed)
            )
            build.execute(compute, segment, tick=begin)
            for name in changed:
                build.copy(write, self._here[name], targets[name], self._bytes(name), tick=end)

    def _bytes(self, name: str) -> int:
        """What moves of a buffer: of what is written, whole blocks, which are its own."""
        size = self._fetched[name].size
        return -(-size // BLOCK) * BLOCK if name in self._twins else size

    def _label(self, name: str) -> str:
        return self._plan.labels.get(name, name)

    def _declare_files(self) -> None:
        """Each file with the bytes of it that are needed, from its begin."""
        ends: dict[str, int] = {}
        for of in (self._files, self._twins):
            for name, at in of.items():
                if name in self._fetched:
                    end = at.offset + self._bytes(name)
                    ends[at.path] = max(ends.get(at.path, 0), end)
        written = {of[name].path for of in (self._files, self._twins) for name in self._twins}
        for path, end in ends.items():
            self._paths[path] = self._build.file(path, "file", end, path, writable=path in written)

    def _source(self, name: str) -> int:
        if (at := self._files.get(name)) is not None:
            return self._in_file(name, at, "")
        t = self._fetched[name]
        return self._build.slot(
            self._label(name), self._build.bound(self._label(name), t.source, t.size), 0, t.size
        )

    def _in_file(self, name: str, at: FileSource, mark: str) -> int:
        label, space = f"{self._label(name)}{mark}", self._paths[at.path]
        size, checksum = self._bytes(name), at.checksum or 0
        return self._build.slot(label, space, at.offset, size, checksum)


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

    def ending(self, transfers: Iterable[Transfer]) -> Mapping[int, Sequence[Transfer]]:
        """Those of some transfers that end with each segment."""
        found: dict[int, list[Transfer]] = {}
        for t in transfers:
            found.setdefault(self._segment_of(t.end - 1), []).append(t)
        return found

    def starting(self) -> Mapping[int, Sequence[Transfer]]:
        """The transfers that start before or in each segment, in the order of the plan."""
        found: dict[int, list[Transfer]] = {}
        for t in self._plan.transfers:
            found.setdefault(self._segment_of(t.start), []).append(t)
        return found
