"""What differs between two compilations of a program.

before ─┐            ┌─ figures       bytes, seconds and counts of both
        │            ├─ held          what is live at the peak, by line and element type
        ├─ matching ─┼─ buffers       at the peak: came, went, of another size
        │            ├─ instructions  only in one; changed, and in what
after ──┘            ├─ transfers     hidden less or more than before
                     └─ relayouts, donations
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hlo_passes.analysis.donation import Fate
from hlo_passes.diff.matching import Aspect, Matching, match_modules
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Instruction, Module
from memplan.report.build import target_of, view_run
from memplan.report.findings import Findings, HeapView, RelayoutView
from memplan.report.inspecting import Inspector
from memplan.report.view import Clock, RunView, Step, TransferView

# They name bytes, and do nothing with them.
_NAMING = frozenset({"parameter", "constant", "bitcast", "get-tuple-element", "tuple"})

Unit = Literal["bytes", "seconds", "count", "share"]


class Side(NamedTuple):
    """One of two compilations."""

    run: RunView
    inspector: Inspector
    findings: Findings

    @classmethod
    def of(cls, name: str, module: Module, machine: Machine | None = None) -> Side:
        """Looks into a scheduled module.

        Args:
          name: what the side is called.
          machine: predicts seconds; without it there are none.

        Raises:
          UnscheduledModuleError: when the module has no schedule.
        """
        inspector = Inspector(module, target_of(module, machine), machine)
        return cls(view_run(name, module, machine), inspector, inspector.findings())


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of both sides.

    Attributes:
      name: as ``--fail-on`` has it.
      before, after: None where a side has no such number.
      unit: of both.
    """

    name: str
    before: float | None
    after: float | None
    unit: Unit

    @property
    def change(self) -> float:
        return (self.after or 0.0) - (self.before or 0.0)

    @property
    def ratio(self) -> float | None:
        """By what share it grew; None where there was nothing before."""
        return self.change / self.before if self.before else None


@dataclass(frozen=True, eq=False)
class Compared:
    """The same program in two compilations.

    Attributes:
      key: what it is called, before and after.
      sides: None where one is missing or cannot be read.
      figures: of both sides; none without them.
      problem: why there are no sides, or ``""``.
    """

    key: tuple[str, str]
    sides: tuple[Side, Side] | None
    figures: tuple[Figure, ...]
    problem: str

    @property
    def name(self) -> str:
        before, after = self.key
        return before if before == after or not after else f"{before} → {after}".strip(" →")

    def change(self, figure: str) -> float:
        return next((f.change for f in self.figures if f.name == figure), 0.0)


def compare_modules(
    key: tuple[str, str], before: Module, after: Module, machine: Machine | None
) -> Compared:
    """Looks into two scheduled modules.

    Raises:
      UnscheduledModuleError: when one of them has no schedule.
    """
    sides = Side.of(key[0], before, machine), Side.of(key[1], after, machine)
    return Compared(key, sides, figures(*sides), "")


@dataclass(frozen=True, slots=True)
class Change[What]:
    """Something on both sides, or on one of them.

    Attributes:
      before, after: None on the side that has it not.
      size_before, size_after: bytes; 0 there.
    """

    before: What | None
    after: What | None
    size_before: int
    size_after: int

    @property
    def change(self) -> int:
        return self.size_after - self.size_before

    @property
    def what(self) -> What:
        """As it is after, if it is there still."""
        either = self.before if self.after is None else self.after
        assert either is not None
        return either


@dataclass(frozen=True, slots=True)
class Changed:
    """An instruction that is only in one, or differs.

    Attributes:
      before, after: None on the side that has none.
      shapes: of both, ``""`` where there is none.
      aspects: what differs.
    """

    before: Step | None
    after: Step | None
    shapes: tuple[str, str]
    aspects: frozenset[Aspect]


class FateChange(NamedTuple):
    """An argument of which something else became."""

    name: str
    size: int
    before: Fate | None
    after: Fate | None


@dataclass(frozen=True)
class Differences:
    """What differs; of each kind, the largest change first.

    Attributes:
      matching: which instruction is which.
      figures: all, also those that are equal.
      held, dtypes: what is live at the peak by source line, and by element type.
      buffers: what is live at one peak and not, or with another size, at the other.
      instructions: those that work and are on one side only, or differ in more than what they
        are fused with; the largest first.
      transfers: with bytes that compute does not hide.
      relayouts: with bytes moved in a step.
      donations: arguments given away.
    """

    matching: Matching
    figures: tuple[Figure, ...]
    held: tuple[Change[str], ...]
    dtypes: tuple[Change[str], ...]
    buffers: tuple[Change[Step], ...]
    instructions: tuple[Changed, ...]
    transfers: tuple[Change[TransferView], ...]
    relayouts: tuple[Change[Step], ...]
    donations: tuple[FateChange, ...]

    def figure(self, name: str) -> Figure:
        """Returns the figure of that name; raises `KeyError` when there is none."""
        return {f.name: f for f in self.figures}[name]


def find_differences(before: Side, after: Side) -> Differences:
    """Compares two compilations.

    Complexity: that of `match_modules`.
    """
    return _Comparison(before, after).all()


class _Comparison:
    def __init__(self, before: Side, after: Side) -> None:
        self._before, self._after = before, after
        self._matching = match_modules(before.inspector.module, after.inspector.module)

    def all(self) -> Differences:
        before, after = self._before, self._after
        return Differences(
            self._matching,
            figures(before, after),
            _by_name(_lines(before), _lines(after)),
            _by_name(_dtypes(before), _dtypes(after)),
            self._buffers(),
            tuple(self._instructions()),
            self._transfers(),
            self._relayouts(),
            tuple(self._donations()),
        )

    def _partner(self, i: Instruction) -> Instruction | None:
        """Of an instruction of the first side, that of the other one."""
        return self._matching.after_of.get(i.id)

    def _buffers(self) -> tuple[Change[Step], ...]:
        ours, theirs = self._before.inspector, self._after.inspector
        left = {(v.instruction.id, v.index): (v, size) for v, size in theirs.held}
        found: list[Change[Step]] = []
        for value, size in ours.held:
            partner = self._partner(value.instruction)
            other = left.pop((partner.id, value.index), None) if partner is not None else None
            step = ours.names.step(value.instruction)
            if other is None:
                found.append(Change(step, None, size, 0))
            elif other[1] != size:
                after = theirs.names.step(other[0].instruction)
                found.append(Change(step, after, size, other[1]))
        for value, size in left.values():
            found.append(Change(None, theirs.names.step(value.instruction), 0, size))
        return _largest(found)

    def _instructions(self) -> Iterator[Changed]:
        """By what they hold: the largest first."""
        ours, theirs = self._before.inspector.names.step, self._after.inspector.names.step
        found: list[tuple[int, Changed]] = []
        for i in _working(self._matching.only_before):
            change = Changed(ours(i), None, (str(i.shape), ""), frozenset())
            found.append((_size(i), change))
        for i in _working(self._matching.only_after):
            change = Changed(None, theirs(i), ("", str(i.shape)), frozenset())
            found.append((_size(i), change))
        for pair in self._matching.pairs:
            aspects = self._matching.changes(pair) - {"fused with"}
            if aspects and pair.before.opcode not in _NAMING:
                shapes = str(pair.before.shape), str(pair.after.shape)
                change = Changed(ours(pair.before), theirs(pair.after), shapes, aspects)
                found.append((max(_size(pair.before), _size(pair.after)), change))
        found.sort(key=lambda f: -f[0])
        yield from (change for _, change in found)

    def _transfers(self) -> tuple[Change[TransferView], ...]:
        def moving(run: RunView) -> dict[str, TransferView]:
            return {t.buffer: t for t in (*run.off_device, *run.collectives)}

        ours, theirs = moving(self._before.run), moving(self._after.run)
        partner = {a.name: b.name for a, b in self._matching.pairs if a.name in ours}
        found = [
            Change(t, other, _exposed(t), _exposed(other))
            for name, t in ours.items()
            for other in [theirs.pop(partner.get(name, ""), None)]
        ]
        found += [Change(None, t, 0, _exposed(t)) for t in theirs.values()]
        return _largest(c for c in found if c.change or c.before is None or c.after is None)

    def _relayouts(self) -> tuple[Change[Step], ...]:
        ours = {r.step.instruction: r for r in self._before.findings.relayouts}
        theirs = {r.step.instruction: r for r in self._after.findings.relayouts}
        found: list[Change[Step]] = []
        for pair in self._matching.pairs:
            a, b = ours.pop(pair.before.name, None), theirs.pop(pair.after.name, None)
            if a is not None or b is not None:
                found.append(_moved(a, b))
        found += [_moved(a, None) for a in ours.values()]
        found += [_moved(None, b) for b in theirs.values()]
        return _largest(c for c in found if c.change)

    def _donations(self) -> Iterator[FateChange]:
        ours = {d.name: d for d in self._before.findings.donations}
        theirs = {d.name: d for d in self._after.findings.donations}
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name), theirs.get(name)
            fates = (a.fate if a is not None else None), (b.fate if b is not None else None)
            if fates[0] != fates[1]:
                size = max(d.size for d in (a, b) if d is not None)
                yield FateChange(name, size, *fates)


def figures(before: Side, after: Side) -> tuple[Figure, ...]:
    """Returns the numbers of both sides, in the order of interest."""
    return tuple(_figures(before, after))


def _figures(before: Side, after: Side) -> Iterator[Figure]:
    def figure(name: str, unit: Unit, read: Callable[[Side], float | None]) -> Figure:
        return Figure(name, read(before), read(after), unit)

    yield figure("peak", "bytes", lambda s: s.run.tiers[0].peak_bytes if s.run.tiers else None)
    yield figure("total", "bytes", lambda s: s.run.device.total)
    yield figure("temp", "bytes", lambda s: s.run.device.temp)
    yield figure("arguments", "bytes", lambda s: s.run.device.arguments)
    yield figure("outputs", "bytes", lambda s: s.run.device.outputs)
    yield figure("aliased", "bytes", lambda s: s.run.device.aliased)
    yield figure("packing", "bytes", _of_heap(lambda heap: heap.fragmentation))
    yield figure("padding", "bytes", _of_heap(lambda heap: heap.padding))
    yield figure("step", "seconds", _of_clock(lambda clock: clock.step_time_s))
    yield figure("compute", "seconds", _of_clock(lambda clock: clock.compute_s))
    yield figure("stalls", "seconds", _of_clock(lambda clock: clock.stall_s))
    yield figure("moved", "bytes", lambda s: s.run.moved_bytes)
    yield figure("overlapped", "share", lambda s: s.run.overlapped)
    yield figure("copies", "bytes", lambda s: sum(r.moved_bytes for r in s.findings.relayouts))
    yield figure("collectives", "count", lambda s: len(s.run.collectives))
    yield figure("fusions", "count", lambda s: _count(s, "fusion"))
    yield figure("instructions", "count", lambda s: len(s.inspector.module.instructions))


def _of_heap(read: Callable[[HeapView], float]) -> Callable[[Side], float]:
    return lambda s: 0 if s.findings.heap is None else read(s.findings.heap)


def _of_clock(read: Callable[[Clock], float]) -> Callable[[Side], float | None]:
    return lambda s: None if s.run.clock is None else read(s.run.clock)


def _count(side: Side, opcode: str) -> int:
    return sum(i.opcode == opcode for i in side.inspector.module.instructions.values())


def _lines(side: Side) -> Mapping[str, int]:
    return {group.name: group.size for group in side.findings.held["source"]}


def _dtypes(side: Side) -> Mapping[str, int]:
    sizes: defaultdict[str, int] = defaultdict(int)
    for value, size in side.inspector.held:
        sizes[value.shape.dtype] += size
    return sizes


def _by_name(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change[str], ...]:
    names = sorted(before.keys() | after.keys())
    found = (
        Change(
            name if name in before else None,
            name if name in after else None,
            before.get(name, 0),
            after.get(name, 0),
        )
        for name in names
    )
    return _largest(c for c in found if c.change)


def _largest[What](changes: Iterable[Change[What]]) -> tuple[Change[What], ...]:
    return tuple(sorted(changes, key=lambda c: -abs(c.change)))


def _working(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    return (i for i in instructions if i.opcode not in _NAMING)


def _size(i: Instruction) -> int:
    return sum(shape.byte_size for _, shape in i.shape.leaves())


def _exposed(t: TransferView | None) -> int:
    """Bytes of a step that compute does not hide."""
    return 0 if t is None else round(t.moved_bytes - t.hidden_bytes)


def _moved(before: RelayoutView | None, after: RelayoutView | None) -> Change[Step]:
    return Change(
        None if before is None else before.step,
        None if after is None else after.step,
        0 if before is None else before.moved_bytes,
        0 if after is None else after.moved_bytes,
    )
