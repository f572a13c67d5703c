"""The plan: a frozen value that says on one clock what each chip computes, which wires carry
which bytes, what waits for what, and what is released.

It is a descriptor chain over all nodes (`hlo_passes.chains`), and for each of its copies and
executions when it happens and over which wires. Spaces are memories of nodes, all chips of a node
together; a slot of a bound space holds, to begin with, what it is named after. Streams are the
chips of a node, their fabric, and each way from a memory to another. The clock counts whole
nanoseconds from the beginning of a replay.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

from hlo_passes.chains.chain import Chain, Copy, Descriptor, Execute
from hlo_passes.chains.text import assemble, disassemble
from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.work import NANOSECONDS, Work
from hlo_passes.errors import ChainTextError, ClusterFileError
from hlo_passes.hardware.file_table import FileTable, is_number

FORMAT_VERSION = 1


class Span(NamedTuple):
    """A copy or an execution on the clock.

    Attributes:
      begin, end: nanoseconds, half-open.
      wires: over which it goes, by name; none of what computes.
      bytes_per_s: what it takes of each of them meanwhile.
    """

    begin: int
    end: int
    wires: tuple[str, ...] = ()
    bytes_per_s: int = 0


class Timed(NamedTuple):
    """A copy or an execution of the chain, by index, and its span."""

    at: int
    descriptor: Descriptor
    span: Span


@dataclass(frozen=True)
class ClusterPlan:
    """See the module.

    Attributes:
      clock: the span of each copy and execution of `chain`, in its order.
    """

    cluster: Cluster
    work: Work
    chain: Chain
    clock: tuple[Span, ...]

    def __repr__(self) -> str:
        return f"<ClusterPlan: {len(self.clock)} steps in {self.step_time_s:.6g} s, predicted>"

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one replay."""
        return max((span.end for span in self.clock), default=0) / NANOSECONDS

    @cached_property
    def timed(self) -> Sequence[Timed]:
        """What happens on the clock, in chain order."""
        works = (
            (k, d)
            for k, d in enumerate(self.chain.descriptors)
            if isinstance(d.action, Copy | Execute)
        )
        return [Timed(k, d, span) for (k, d), span in zip(works, self.clock, strict=True)]

    @cached_property
    def wire_bytes(self) -> Mapping[str, int]:
        """Bytes that go over each wire in a replay; none where nothing does."""
        found: defaultdict[str, int] = defaultdict(int)
        collectives = self.collective_bytes
        for timed in self.timed:
            match timed.descriptor.action:
                case Copy() as copy:
                    size = copy.bytes
                case Execute(segment):
                    size = collectives.get(self.chain.segments[segment].name, 0)
                case _:
                    size = 0
            for wire in timed.span.wires:
                found[wire] += size
        return dict(found)

    @cached_property
    def collective_bytes(self) -> Mapping[str, int]:
        """Of each collective, by the name of what is executed."""
        return {
            f"{p.name}#{run}/{t.name}": t.bytes * self.cluster.node(p.node).count
            for p in self.work.programs
            for t in p.traffic
            if t.is_collective
            for run in range(p.runs)
        }

    @cached_property
    def busy_s(self) -> Mapping[str, float]:
        """Seconds in which something of a stream is under way, by the stream's name."""
        found: defaultdict[str, int] = defaultdict(int)
        for timed in self.timed:
            name = self.chain.streams[timed.descriptor.stream].name
            found[name] += timed.span.end - timed.span.begin
        return {name: size / NANOSECONDS for name, size in found.items()}

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON-ready data: all that a checker needs."""
        return {
            "version": FORMAT_VERSION,
            "cluster": self.cluster.to_dict(),
            "work": self.work.to_dict(),
            "chain": disassemble(self.chain).splitlines(),
            "clock": [[s.begin, s.end, list(s.wires), s.bytes_per_s] for s in self.clock],
        }

    @staticmethod
    def from_dict(data: Mapping[str, object], file: str = "plan") -> ClusterPlan:
        """Reads what `to_dict` wrote.

        Raises:
          ClusterFileError: when a key is missing, unknown, or its value not as expected.
        """
        root = _Table(data, file)
        version = root.whole("version")
        if version != FORMAT_VERSION:
            raise root.error("version", str(FORMAT_VERSION), str(version))
        cluster = Cluster.from_dict(root.table("cluster").unread, f"{file}, cluster")
        work = Work.from_dict(root.table("work").unread, f"{file}, work")
        try:
            chain = assemble("\n".join(root.texts("chain")) + "\n")
        except ChainTextError as error:
            raise root.error("chain", "a descriptor chain", str(error)) from error
        clock = tuple(root.spans("clock"))
        count = sum(isinstance(d.action, Copy | Execute) for d in chain.descriptors)
        if len(clock) != count:
            raise root.error("clock", f"{count} spans, one a copy or execution", str(len(clock)))
        root.close()
        return ClusterPlan(cluster, work, chain, clock)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> ClusterPlan:
        """Reads what `save` wrote. It is not checked: `check` does that.

        Raises:
          ClusterFileError: when it is missing, or not in that form.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ClusterFileError(str(path), "", "a readable file", str(error)) from error
        return ClusterPlan.from_dict(data, str(path))


class _Table(FileTable):
    refusal = ClusterFileError

    def spans(self, key: str) -> Iterator[Span]:
        expected = "a list of [begin, end, wires, bytes a second]"
        value = self.take(key, expected)
        for row in cast("list[object]", value) if isinstance(value, list) else [value]:
            match row:
                case [int(begin), int(end), [*wires], int(rate)] if 0 <= begin <= end and rate >= 0:
                    numbers = all(map(is_number, (begin, end, rate)))
                    if numbers and all(isinstance(wire, str) for wire in wires):
                        yield Span(begin, end, tuple(cast("list[str]", wires)), rate)
                        continue
                case _:
                    pass
            raise self.error(key, expected, repr(row))
