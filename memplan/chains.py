"""Chains as files: read, written, and replayed without the program that they were made for."""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from custom_calls.runtime import Runtime, events
from hlo_passes.chains.binary import from_bytes, to_bytes
from hlo_passes.chains.chain import Chain, Copy, Execute, SpaceKind
from hlo_passes.chains.check import check
from hlo_passes.chains.layout import MAGIC
from hlo_passes.chains.text import assemble
from hlo_passes.errors import ChainReplayError
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.tables import Column, Table


def read_chain(path: Path) -> Chain:
    """Reads a chain in its binary form, or in its text.

    Raises:
      ChainFormatError, ChainTextError: at the first thing that is wrong.
      OSError: when the file cannot be read.
    """
    data = path.read_bytes()
    if data.startswith(MAGIC):
        return from_bytes(data)
    try:
        return assemble(data.decode())
    except UnicodeDecodeError:
        return from_bytes(data)  # Which says what is wrong with its first bytes.


@dataclass(frozen=True)
class Replayed:
    """What became of replays.

    Attributes:
      chain: that was replayed.
      seconds: of each replay, from the end of the one before.
      records: what its descriptors did in them, as of `custom_calls.runtime.events`.
      arena_bytes: that were allocated.
    """

    chain: Chain
    seconds: Sequence[float]
    records: npt.NDArray[np.void]
    arena_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it, in bytes and seconds."""
        copied: defaultdict[int, int] = defaultdict(int)
        copies: defaultdict[int, int] = defaultdict(int)
        for d in self.chain.descriptors:
            if isinstance(d.action, Copy):
                copied[d.stream] += d.action.bytes
                copies[d.stream] += 1
        streams = [
            {"stream": s.name, "copies": copies[k], "bytes": copied[k], "busy_s": self._busy_s(k)}
            for k, s in enumerate(self.chain.streams)
        ]
        seconds = list(self.seconds)
        return {"streams": streams, "seconds": seconds, "arena_bytes": self.arena_bytes}

    def tables(self) -> Iterator[Table]:
        """Seconds and bytes of a replay, and of its streams."""
        median = statistics.median(self.seconds)
        rows = [
            (
                of["stream"],
                str(of["copies"]),
                format_bytes(of["bytes"]),
                f"{of['bytes'] / median / 1e9:.2f} GB/s" if of["bytes"] else "",
                format_seconds(of["busy_s"]),
            )
            for of in self.to_dict()["streams"]
        ]
        columns = (
            Column("stream"),
            Column("copies", right=True),
            Column("bytes", right=True),
            Column("rate", right=True),
            Column("busy", right=True),
        )
        yield Table("A replay, by stream", columns, tuple(rows))
        summary = (
            ("replays", f"{len(self.seconds):,}"),
            ("arenas", format_bytes(self.arena_bytes)),
            ("median", format_seconds(median)),
            ("fastest", format_seconds(min(self.seconds))),
            ("slowest", format_seconds(max(self.seconds))),
        )
        yield Table("Replays", (Column(""), Column("", right=True)), summary)

    def _busy_s(self, stream: int) -> float:
        """Seconds of a replay in which something of a stream was under way."""
        of = np.array([d.stream == stream for d in self.chain.descriptors])
        own = self.records[of[self.records["descriptor"]]]
        own = own[np.argsort(own["began"], kind="stable")]
        if not own.size:
            return 0.0
        reached = np.maximum.accumulate(own["ended"])
        begins = np.maximum(own["began"], np.concatenate(([0], reached[:-1])))
        return float(np.maximum(own["ended"] - begins, 0).sum()) / 1e9 / len(self.seconds)


def replay_alone(
    chain: Chain, replays: int, *, told: Callable[[int], None] = lambda _: None
) -> Replayed:
    """Replays a chain; its segments take no time, and memory that its caller would bind is zeros.

    Args:
      told: called with how many replays have ended, after each.

    Raises:
      ChainCheckError: when it is not right in every order.
      ChainReplayError: when it writes into files, which without its program would be ruined.
      OSError: when an arena cannot be allocated, or a file is not what it should be.
    """
    report = check(chain)
    for space in chain.spaces:
        if space.kind == SpaceKind.FILE and space.writable:
            raise ChainReplayError(space.path)
    sizes = [max(s.bytes, 1) for s in chain.spaces if s.kind == SpaceKind.BOUND]
    memory = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for size in sizes]
    per_stream = np.bincount([d.stream for d in chain.descriptors], minlength=1)
    log = min(int(per_stream.max()) * replays, 1 << 24)
    run = Runtime(to_bytes(chain), [m.ctypes.data for m in memory], log=log)
    assert run.allocated_bytes() >= sum(report.footprint.values())
    executing = sorted({d.stream for d in chain.descriptors if isinstance(d.action, Execute)})
    seconds = list[float]()
    begin = time.perf_counter()
    try:
        for n in range(replays):
            run.start(1)
            _drive(run, executing)
            run.wait()
            end = time.perf_counter()
            seconds.append(end - begin)
            begin = end
            told(n + 1)
    except BaseException:
        run.cancel()
        with suppress(OSError):
            run.wait()
        raise
    return Replayed(chain, seconds, events(run), run.allocated_bytes())


def _drive(run: Runtime, streams: Sequence[int]) -> None:
    """Runs the segments of streams, which do nothing, until the replay has no more."""
    if len(streams) == 1:
        while run.enter(streams[0]) is not None:
            run.leave(streams[0])
        return
    threads = [threading.Thread(target=_drive, args=(run, [k])) for k in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
