"""Is anything read after its bytes were written over? See `verify`.

    v0 = broadcast(c)                     bytes  │ v0 ░░░░ r reads ░░░│ v1 ░░░░░░░░░
    r  = reduce(v0)                                                   ▲
    v1 = dynamic-update-slice(v0, r, i)          from here on v0 is gone

    a loop's slot    old: read ─ read │ new: start ▒▒▒ done ─► lies there in the next iteration

Some instructions must leave a result in the bytes of an operand (xla/hlo/analysis/
alias_info.cc; hlo_alias_analysis.cc for loops, branches and donated arguments). XLA inserts a
copy where the operand is read later, but does so before the hook: an order that memplan changes
has to keep what XLA made true. Where XLA merely *may* reuse an operand's bytes it decides after
the hook, on the order that it gets; nothing can go wrong.

One walk along a computation, the entry or any other, follows each write in memory. What a called
computation does to its arguments is seen at the instruction that calls it. An asynchronous
operation reads until its done, and writes from its start on. At the end the results of a loop's
body take the place of its state, those of the entry that of donated arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from custom_calls import targets
from hlo_passes.ir import Computation, Instruction, Module, ShapeIndex
from hlo_passes.verify.hlo import (
    FOLLOWING,
    PASSING,
    RUNNING,
    View,
    begun,
    brought_by,
    ends_of,
    view_of,
)

# Inside a fusion: what may leave a result in the bytes of an operand.
_WRITING = frozenset(
    ("custom-call", "dynamic-update-slice", "fusion", "scatter", "set-dimension-size")
)

# What may say itself where its results lie.
_DECLARING = frozenset(("async-start", "call", "custom-call", "fusion"))

# Whose results may lie in an operand's bytes; all others have bytes of their own.
_PLACING = (
    PASSING
    | _WRITING
    | _DECLARING
    | frozenset(
        """all-gather-done all-gather-start all-reduce-done all-reduce-start async-done async-update
        collective-permute collective-permute-done collective-permute-start copy-done copy-start
        ragged-all-to-all recv-done send while""".split()
    )
)

# XLA:TPU starts a collective on v5e in a fusion that ends in this call.
_SENDING = "AsyncCollectiveStart"

# The other operands of these calls are for the order only.
_READ_BY_CALL = {
    targets.COPY_START: 1,
    targets.COPY_DONE: 2,
    targets.GATE: 1,
    targets.STORING_GATE: 2,
}


@dataclass(slots=True, eq=False)
class Version:
    """What one write leaves in memory.

    Attributes:
      place: that of the writer in the schedule.
      reads: (reader, place of its end).
      over: the version in the same bytes that this one is written over.
      first: the one that was in these bytes at first.
    """

    writer: Instruction
    place: int
    over: Version | None = None
    reads: list[tuple[Instruction, int]] = field(default_factory=list[tuple[Instruction, int]])
    first: Version = field(init=False)

    def __post_init__(self) -> None:
        self.first = self if self.over is None else self.over.first


class Conflict(NamedTuple):
    """`writer` writes over what `written` left before `reader` has read it."""

    writer: Instruction
    written: Instruction
    reader: Instruction


class _Part(NamedTuple):
    """A part of what a called computation was given."""

    parameter: int
    at: ShapeIndex


@dataclass(frozen=True)
class _Summary:
    """What a computation does to the bytes that it is given.

    Attributes:
      lies_in: index of a result to the part in whose bytes it lies.
      unchanged: indices of results that are such a part as it was.
      overwritten: parts whose bytes are written.
    """

    lies_in: Mapping[ShapeIndex, _Part]
    unchanged: frozenset[ShapeIndex]
    overwritten: frozenset[_Part]

    def lying(self, index: ShapeIndex) -> View | None:
        part = self.lies_in.get(index)
        return None if part is None else View(*part)


class Memory:
    """A scheduled module, followed in memory. O(positions of the module)."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._summaries: dict[int, _Summary] = {}
        self._walks: dict[int, Walk] = {}
        self._loops = {
            i.called_computation_ids[0] for i in module.instructions.values() if i.opcode == "while"
        }

    def walk(self, computation: Computation) -> Walk:
        if computation.id not in self._walks:
            self._walks[computation.id] = Walk(self, computation)
        return self._walks[computation.id]

    def conflicts(self, computation: Computation) -> Iterator[Conflict]:
        """Yields each read of `computation` that may find other bytes than it should."""
        walk = self.walk(computation)
        for version in walk.versions:
            if version.over is None:
                continue
            yield from _overwrite(version.over, version)
            if version.writer.opcode == "conditional":
                continue  # Of its operands one branch sees one.
            operands = (v for o in version.writer.operand_ids for v in walk.held[o].values())
            if sum(v is version.over for v in operands) > 1:
                yield Conflict(version.writer, version.over.writer, version.writer)
        lain_in: defaultdict[Version, list[Version]] = defaultdict(list)
        for version in walk.versions:
            lain_in[version.first].append(version)
        for given, returned in self._handed_on(computation, walk):
            first = returned.first
            if first is given or first.writer.opcode in ("constant", "parameter"):
                continue  # Nothing is written over what was given.
            for version in lain_in[given.first]:
                yield from _overwrite(version, first)

    def together(self, computation: Computation) -> frozenset[frozenset[ShapeIndex]]:
        """Which results that take the place of others lie in the same bytes."""
        if computation is not self._module.entry and computation.id not in self._loops:
            return frozenset()
        results = self.walk(computation).held[computation.root.id]
        taking = {a.output_index for a in self._module.input_output_aliases}
        found: defaultdict[Version, set[ShapeIndex]] = defaultdict(set)
        for index, version in results.items():
            if computation is not self._module.entry or index in taking:
                found[version].add(index)
        return frozenset(frozenset(s) for s in found.values() if len(s) > 1)

    def part(self, i: Instruction, index: ShapeIndex) -> tuple[View | None, bool]:
        """The part of an operand in whose bytes the result at `index` must lie, if there is one,
        and whether it is written over there. Of all but conditionals."""
        if i.opcode not in _PLACING:
            return None, False
        declared = (
            {a.output_index: a for a in i.output_operand_aliasing} if i.opcode in _DECLARING else {}
        )
        if index in declared:
            part = View(declared[index].operand, declared[index].operand_index)
            return part, not self.only_sends(i)
        match i.opcode, index:
            case (("dynamic-update-slice" | "set-dimension-size"), _):
                return View(0, ()), True
            case (("scatter" | "all-reduce-start"), _):
                return View(index[0] if index else 0, ()), True
            case "ragged-all-to-all", _:
                return View(1, ()), True
            case "collective-permute", _ if len(i.operand_ids) == 4:
                return View(1, index), True
            case "collective-permute-start", (1, *rest) if len(i.operand_ids) == 4:
                return View(1, tuple(rest)), True
            case "while", _:
                body = self._by(i)[0]
                is_kept = index in body.unchanged and body.lies_in[index] == (0, index)
                return View(0, index), not is_kept
            case "call", _:
                (body,) = self._by(i)
                return body.lying(index), index not in body.unchanged
            case (("async-start" | "async-update"), (1, *rest)):
                return self._started(i, tuple(rest))
            case "async-done", _:
                return self._started(i, index)
            case "fusion", _:
                (body,) = self._by(i)  # What it only hands on it copies.
                return (None if index in body.unchanged else body.lying(index)), True
            case _:
                return view_of(i, index), False

    def only_sends(self, i: Instruction) -> bool:
        """Whether what `i` gives in the bytes of an operand is that operand, to be sent."""
        if i.opcode != "fusion":
            return False
        (body,) = (self._module.computations[c] for c in i.called_computation_ids)
        return body.root.custom_call_target == _SENDING

    def branches(self, i: Instruction, index: ShapeIndex) -> tuple[list[View], bool]:
        """The parts of operands in which branches of a conditional leave their result, and
        whether every branch hands on what it was given."""
        branches = self._by(i)
        found = [
            View(n + part.operand, part.part)
            for n, branch in enumerate(branches, start=1)
            if (part := branch.lying(index)) is not None
        ]
        return found, all(index in branch.unchanged for branch in branches)

    def overwritten(self, i: Instruction) -> Iterator[View]:
        """The parts of operands that a computation that `i` runs writes over."""
        match i.opcode:
            case "call" | "while":
                for part in self._by(i)[0].overwritten:
                    yield View(*part)
            case "async-start" | "async-update":
                brought = brought_by(i)
                for parameter, at in self._by(begun(self._module, i))[0].overwritten:
                    if parameter in brought:
                        yield View(brought[parameter], at)
            case "conditional":
                branches = self._by(i)
                for n, branch in enumerate(branches, start=1):
                    for part in branch.overwritten:
                        yield View(n + part.parameter, part.at)
                    # What another branch writes in its place is written there.
                    for index, part in branch.lies_in.items():
                        if any(index not in b.unchanged for b in branches):
                            yield View(n + part.parameter, part.at)
            case _:
                return

    def _started(self, i: Instruction, index: ShapeIndex) -> tuple[View | None, bool]:
        """Where an asynchronous operation leaves its result: with the operand that `i` brings,
        if that is the one, else where it was."""
        start, brought = begun(self._module, i), brought_by(i)
        (body,) = self._by(start)
        parts = {a.output_index: a for a in start.output_operand_aliasing}
        at = body.lies_in.get(index)
        if (1, *index) in parts:
            at = _Part(parts[1, *index].operand, parts[1, *index].operand_index)
        if at is not None and at.parameter in brought:
            return View(brought[at.parameter], at.at), index not in body.unchanged
        if i is start:
            return None, False
        before = self._module.instructions[i.operand_ids[0]].shape
        if at is not None and (1, *index) not in (leaf for leaf, _ in before.leaves()):
            # Given late, and no more than what was brought before.
            return View(0, (0, at.parameter, *at.at)), index not in body.unchanged
        return View(0, (1, *index)), False

    def _handed_on(self, computation: Computation, walk: Walk) -> Iterator[tuple[Version, Version]]:
        """Yields what a computation was given with what takes its place at the end."""
        results = walk.held[computation.root.id]
        if computation is self._module.entry:
            for alias in self._module.input_output_aliases:
                given = walk.held[computation.parameters[alias.parameter].id]
                yield given[alias.parameter_index], results[alias.output_index]
        elif computation.id in self._loops:
            (state,) = computation.parameters
            for index, given in walk.held[state.id].items():
                yield given, results[index]

    def _by(self, i: Instruction) -> list[_Summary]:
        return [self._summary(c) for c in i.called_computation_ids]

    def _summary(self, computation_id: int) -> _Summary:
        if computation_id not in self._summaries:
            computation = self._module.computations[computation_id]
            if computation.is_fusion and _WRITING.isdisjoint(
                i.opcode for i in computation.instructions
            ):
                found = _Summary({}, frozenset(), frozenset())  # Its results are its own.
            else:
                found = _summarized(computation, self.walk(computation))
            self._summaries[computation_id] = found
        return self._summaries[computation_id]


def _overwrite(old: Version, new: Version) -> Iterator[Conflict]:
    for reader, end in old.reads:
        if reader is not new.writer and end >= new.place:
            yield Conflict(new.writer, old.writer, reader)


def _summarized(computation: Computation, walk: Walk) -> _Summary:
    given = {
        version: _Part(p.parameter_number, index)
        for p in computation.parameters
        for index, version in walk.held[p.id].items()
    }
    results = walk.held[computation.root.id]
    return _Summary(
        {
            index: given[version.first]
            for index, version in results.items()
            # Through one update of a fusion XLA looks, not through a chain of them.
            if version.first in given
            and (not computation.is_fusion or version.over is None or version.over in given)
        },
        frozenset(index for index, version in results.items() if version in given),
        frozenset(given[v.over] for v in walk.versions if v.over in given),
    )


class Walk:
    """One walk along a computation.

    Attributes:
      held: of every instruction the version at each index of its shape.
      versions: in the order in which they are written.
    """

    def __init__(self, memory: Memory, computation: Computation) -> None:
        self.held: dict[int, Mapping[ShapeIndex, Version]] = {}
        self.versions: list[Version] = []
        self._memory = memory
        self._end = ends_of(computation.instructions)
        for place, i in enumerate(computation.instructions):
            self._step(i, place)
        for version in self.held[computation.root.id].values():  # The caller looks at them.
            version.reads.append((computation.root, len(computation.instructions)))

    def _step(self, i: Instruction, place: int) -> None:
        operands = [self.held[o] for o in i.operand_ids]
        if i.opcode not in PASSING:
            # What goes on with an operation reads nothing but what it brings to it.
            first = 1 if i.opcode.endswith(FOLLOWING) else 0
            for operand in operands[first : _READ_BY_CALL.get(i.custom_call_target)]:
                for version in operand.values():
                    version.reads.append((i, self._end[i.id]))
        if i.shape.is_array and i.opcode not in _PLACING and i.opcode not in RUNNING:
            self.held[i.id] = {(): self._write(i, place, None)}
            return
        overwritten = [v for part in self._memory.overwritten(i) if (v := _at(operands, part))]
        held: dict[ShapeIndex, Version] = {}
        for index, _ in i.shape.leaves():
            base, is_written = self._base(i, index, operands)
            if base is None or is_written:
                held[index] = self._write(i, place, base)
            else:
                held[index] = base
        self.held[i.id] = held
        covered = {version.over for version in held.values()}
        for version in overwritten:
            if version not in covered:
                self._write(i, place, version)

    def _write(self, i: Instruction, place: int, over: Version | None) -> Version:
        version = Version(i, place, over)
        self.versions.append(version)
        return version

    def _base(
        self, i: Instruction, index: ShapeIndex, operands: Sequence[Mapping[ShapeIndex, Version]]
    ) -> tuple[Version | None, bool]:
        """The version in whose bytes the result at `index` must lie, and whether it is written
        over there."""
        if i.opcode != "conditional":
            part, is_written = self._memory.part(i, index)
            return (None if part is None else _at(operands, part)), is_written
        parts, is_kept = self._memory.branches(i, index)
        found = [_at(operands, part) for part in parts]
        return (found[0] if found else None), not (is_kept and len(set(found)) == 1)


def _at(operands: Sequence[Mapping[ShapeIndex, Version]], part: View) -> Version | None:
    return operands[part.operand].get(part.part) if part.operand < len(operands) else None
