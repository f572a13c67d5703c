"""Intents: what one step of a program does with each buffer and page, and when.

    ticks       0      1      2      3      4      5        instructions as they run
    params.w           read          read                   idle in [2, 3), 4 ms
    a                  written              read            dead after 5
    cache.k            pages written, then read             which: `PageIntent.pages`

A cache manager that evicts by what was used last knows none of that; whoever reads these does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from hlo_passes.analysis.pages import PageAccess
from hlo_passes.plan import LiveRange, LogicalTime
from memplan.sidecar.errors import PageTableError

__all__ = ["KINDS", "Buffer", "Gap", "Intents", "Kind", "Loop", "PageIntent", "Pool", "Tick"]

Kind = Literal[
    "argument", "state", "kv_pool", "copy", "constant", "output", "residual", "activation"
]
"""What a program says of its buffers. An ``"argument"`` is only read: weights and inputs, which no
program tells apart. ``"state"`` is an argument whose place a result takes: trained weights, an
optimizer's moments, a cache; of a ``"kv_pool"`` pages are declared. A ``"copy"`` is one of an
argument, or of a slice of it. An ``"output"`` is what else is returned. A ``"residual"`` is made by
a forward pass and read by the backward pass, as jax names operations; what else the step makes is
an ``"activation"``."""

KINDS: tuple[Kind, ...] = get_args(Kind)

type _Table = Sequence[Sequence[int]] | npt.NDArray[np.integer]
type _Numbers = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Tick:
    """An instruction as it runs.

    Attributes:
      instruction: its HLO name.
      op_name: the framework's name of the operation, ``""`` where XLA made it up: where layers
        stand one after the other, it says which.
      source_line: ``file:line``, or ``""``.
      loop: index of the innermost loop that it is in; None for none.
      begin_s: predicted seconds of the step until it begins, in a loop for the first time; None
        without a machine.
    """

    instruction: str
    op_name: str
    source_line: str
    loop: int | None
    begin_s: float | None


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, whose layers are its iterations where layers are scanned.

    Attributes:
      tick: of the instruction that runs it, behind its body.
      body: the ticks of one iteration.
      outer: index of the loop around it; None for none.
      trip_count: iterations each time; None if that is not known.
      executions: iterations in a step; a loop of unknown count is counted once.
    """

    tick: LogicalTime
    body: LiveRange
    outer: int | None
    trip_count: int | None
    executions: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Ticks between two accesses, half-open. Where `start` is above `end` it goes around the end of
    a loop: from one iteration's last access to the next one's first.

    Attributes:
      seconds: predicted; None without a machine.
    """

    start: LogicalTime
    end: LogicalTime
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that hold one thing, or what follows on each other in its place.

    Attributes:
      name: the HLO instruction that defines it, with the part's index if any.
      label: the user's name of an argument, or of the one that this is a copy of; else ``""``.
      source_line: of who makes it; of an argument, of who reads it first.
      kind: see `Kind`.
      shape: as XLA writes it.
      size: bytes.
      tier: the memory that it is in, where the plan puts it.
      block: index of the first buffer that lies in the same bytes: XLA writes one over another
        that nobody reads any more. Its own for most.
      live: when it holds bytes, in order.
      writes, reads: ticks, in order. What is updated in place is written.
      dead_after: the tick from which on nobody reads it; None for what the caller has afterwards.
      idle: its longest gap between two accesses; None without two.
      next_read_s: of an argument, predicted seconds from its last access to the first in the next
        step, if that follows at once and gets it again.
      load_s, evict_s: predicted seconds for which bringing it from the next tier, and taking it
        there, occupies the link; 0 to take away what is still there. None where it cannot be
        moved; of what is off the device, nothing is taken further.
      recompute_s: predicted seconds of compute to make it again when it is read after `idle`, with
        what it is made from; None where that is not possible.
      fallback: what costs least where its tier is full: the name of the tier to take it to,
        ``"recompute"``, or ``""``: it stays.
    """

    name: str
    label: str
    source_line: str
    kind: Kind
    shape: str
    size: int
    tier: str
    block: int
    live: tuple[LiveRange, ...]
    writes: tuple[LogicalTime, ...]
    reads: tuple[LogicalTime, ...]
    dead_after: LogicalTime | None
    idle: Gap | None
    next_read_s: float | None
    load_s: float | None
    evict_s: float | None
    recompute_s: float | None
    fallback: str

    @property
    def eviction_cost_s(self) -> float | None:
        """Predicted seconds that its cheapest absence takes: away and back, or made again."""
        known = [] if self.recompute_s is None else [self.recompute_s]
        if self.load_s is not None and self.evict_s is not None:
            known.append(self.evict_s + self.load_s)
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class PageIntent:
    """An instruction that reads or writes pages of a pool.

    Attributes:
      tick: when.
      access: what it declares: how many sequences, of how many pages, and its window.
    """

    tick: LogicalTime
    access: PageAccess

    def pages(
        self, tables: _Table | None, lengths: _Numbers, counts: _Numbers | None = None
    ) -> frozenset[int]:
        """Returns the pages that it reads or writes in one call of the program.

        Args:
          tables: int[sequences, pages], the pages of each sequence in order; None where sequence b
            has page b.
          lengths: int[sequences], tokens of each after the call; 0 for a row that is not in use.
          counts: int[sequences], how many of them are written; by default as many as there may
            be. Only of a write.

        Raises:
          PageTableError: for another number of sequences, or too short a table.
        """
        return frozenset(page for row in _rows(self, tables, lengths, counts) for page in row[1])


def _rows(
    intent: PageIntent, tables: _Table | None, lengths: _Numbers, counts: _Numbers | None = None
) -> Iterator[tuple[list[int], list[int]]]:
    """Of each sequence the pages before those that are touched, and these."""
    access = intent.access
    for name, given in (("tables", tables), ("lengths", lengths), ("counts", counts)):
        if given is not None and len(given) != access.sequences:
            raise PageTableError(name, f"{len(given)} rows", f"{access.sequences}")
    for row, length in enumerate(lengths):
        touched = access.touched(int(length), None if counts is None else int(counts[row]))
        pages = [row] if tables is None else [int(page) for page in tables[row]]
        if len(pages) < touched.stop:
            expected = f"{touched.stop}, as it has {length} tokens in pages of {access.tokens}"
            raise PageTableError(f"tables[{row}]", f"{len(pages)} pages", expected)
        yield pages[: touched.start], pages[touched.start : touched.stop]


@dataclass(frozen=True, slots=True)
class Pool:
    """A buffer of pages that operations declare to read or write.

    Attributes:
      buffer: its index; of pages that XLA copies before they are read, that of the argument.
      is_stack: it holds a pool for each layer, and accesses are of one layer each.
      page_bytes: of a page of one layer.
      reads, writes: in order.
    """

    buffer: int
    is_stack: bool
    page_bytes: int
    reads: tuple[PageIntent, ...]
    writes: tuple[PageIntent, ...]

    def dead(self, tables: _Table | None, lengths: _Numbers) -> frozenset[int]:
        """Returns the pages of these sequences that windows have passed: this program reads them
        no more, as long as each call adds as many tokens as it has queries.

        Args:
          tables, lengths: as of `PageIntent.pages`.

        Raises:
          PageTableError: as `PageIntent.pages`.
        """
        rows = [list(_rows(intent, tables, lengths)) for intent in self.reads]
        passed = [frozenset(page for before, _ in of for page in before) for of in rows]
        read = frozenset(page for of in rows for _, touched in of for page in touched)
        return frozenset.intersection(*passed) - read if passed else frozenset()


@dataclass(frozen=True, repr=False)
class Intents:
    """What one step of a program does with its memory.

    Attributes:
      module: the program's name.
      module_fingerprint: of the scheduled program that this was read off.
      plan_fingerprint: `Plan.fingerprint` of the plan that it follows; ``""`` for none.
      machine: whose model predicts seconds; ``""`` for none.
      device_tier: the memory that it computes in.
      step_s: predicted seconds of a step; None without a machine.
      ticks: instructions as they run; a loop's body stands before the instruction that runs it.
      loops: inner ones before outer ones.
      buffers: all that have bytes in a tier.
      pools: of pages, in the order of their first access.
    """

    module: str
    module_fingerprint: str
    plan_fingerprint: str
    machine: str
    device_tier: str
    step_s: float | None
    ticks: tuple[Tick, ...]
    loops: tuple[Loop, ...]
    buffers: tuple[Buffer, ...]
    pools: tuple[Pool, ...]

    def __repr__(self) -> str:
        return f"<Intents of {self.module}: {len(self.buffers)} buffers, {len(self.pools)} pools>"

    @property
    def key(self) -> str:
        """What it is found by: the plan's fingerprint, else the module's."""
        return self.plan_fingerprint or self.module_fingerprint

    def live_bytes(self, tier: str) -> list[int]:
        """Returns what a tier holds at each tick. Bytes that several buffers have are counted
        once."""
        changes = np.zeros(len(self.ticks) + 1, np.int64)
        blocks: dict[int, list[Buffer]] = {}
        for buffer in self.buffers:
            if buffer.tier == tier:
                blocks.setdefault(buffer.block, []).append(buffer)
        for sharing in blocks.values():
            held = np.zeros(len(self.ticks) + 1, np.int64)
            for buffer in sharing:
                for start, end in buffer.live:
                    held[start:end] = np.maximum(held[start:end], buffer.size)
            changes += held
        return changes[:-1].tolist()

    def to_bytes(self) -> bytes:
        """Writes the binary form; equal intents give equal bytes."""
        from memplan.sidecar import forms

        return forms.to_bytes(self)

    def to_json(self) -> str:
        """Writes protobuf's JSON form, in which numbers of bytes are strings."""
        from memplan.sidecar import forms

        return forms.to_json(self)

    def to_text(self) -> str:
        """Writes protobuf's text form."""
        from memplan.sidecar import forms

        return forms.to_text(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads any of the three forms.

        Raises:
          IntentsFormatError: for what is none of them, of another version, or damaged.
        """
        from memplan.sidecar import forms

        return forms.read(cls, data, "intents")

    def save(self, path: Path | str) -> None:
        """Writes the binary form."""
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Reads a file of any of the three forms.

        Raises:
          OSError: when there is no such file.
          IntentsFormatError: as `from_bytes`.
        """
        from memplan.sidecar import forms

        return forms.read(cls, Path(path).read_bytes(), str(path))
