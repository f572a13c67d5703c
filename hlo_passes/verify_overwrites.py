"""Is anything read after its bytes were written over? See `verify`.

    v0 = broadcast(c)                     bytes  │ v0 ░░░░ r reads ░░░│ v1 ░░░░░░░░░
    r  = reduce(v0)                                                   ▲
    v1 = dynamic-update-slice(v0, r, i)          from here on v0 is gone

Some instructions must leave a result in the bytes of an operand (xla/hlo/analysis/
alias_info.cc; xla/hlo/analysis/hlo_alias_analysis.cc for loops, branches and donated
arguments). XLA inserts a copy where the operand is read later, but does so before the hook:
an order that memplan changes has to keep what XLA made true. Where XLA merely *may* reuse an
operand's bytes it decides after the hook, on the order that it gets; nothing can go wrong.

One walk along the schedule follows each write in memory. What a called computation does to
its arguments is seen at the instruction that calls it. An asynchronous operation reads until
its done, and writes from its start on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from custom_calls import targets
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Computation, Instruction, Module, ShapeIndex
from hlo_passes.verify_hlo import View, describe, view_of

# Hand bytes on without a look at them. So does all that follows an asynchronous start, whose
# read lasts until the end.
_PASSING = frozenset(
    ("add-dependency", "bitcast", "domain", "get-tuple-element", "opt-barrier", "tuple")
)
_FOLLOWING = ("-done", "-update")

# Inside a fusion: what may leave a result in the bytes of an operand.
_WRITING = frozenset(
    ("custom-call", "dynamic-update-slice", "fusion", "scatter", "set-dimension-size")
)

# XLA:TPU starts a collective on v5e in a fusion that ends in this call.
_SENDING = "AsyncCollectiveStart"

# The other operands of these calls are for the order only.
_READ_BY_CALL = {targets.COPY_START: 1, targets.COPY_DONE: 2}


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


class EntryMemory:
    """The entry of a scheduled module, followed in memory. O(positions of the module)."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._walk = _Walk(Called(module), module.entry)
        self._next = {v.over: v for v in self._walk.versions if v.over is not None}

    def overwriter(self, i: Instruction, index: ShapeIndex = ()) -> Instruction | None:
        """The instruction that writes over part `index` of what `i` gives, if there is one."""
        following = self._next.get(self._walk.held[i.id][index])
        return None if following is None else following.writer

    def check(self) -> None:
        """Checks that every read comes before what is read is written over.

        Raises:
          VerificationError: at the first read that may find other bytes.
        """
        entry, end = self._module.entry, len(self._module.entry.instructions)
        for version in self._walk.held[entry.root.id].values():
            version.reads.append((entry.root, end))
        for version in self._walk.versions:
            if version.over is not None:
                self._check_overwrite(version.over, version)
        lain_in: defaultdict[Version, list[Version]] = defaultdict(list)
        for version in self._walk.versions:
            lain_in[version.first].append(version)
        for alias in self._module.input_output_aliases:
            given = self._walk.held[entry.parameters[alias.parameter].id][alias.parameter_index]
            returned = self._walk.held[entry.root.id][alias.output_index]
            first = returned.first
            if first is given or first.writer.opcode in ("constant", "parameter"):
                continue  # Nothing is written over the argument.
            for version in lain_in[given.first]:
                self._check_overwrite(version, first)

    def _check_overwrite(self, old: Version, new: Version) -> None:
        for reader, end in old.reads:
            if reader is not new.writer and end >= new.place:
                raise VerificationError(
                    f"%{new.writer.name} writes over what %{old.writer.name} left, which "
                    f"%{reader.name} reads later",
                    describe(self._module, reader),
                    "All readers come before what works in place; an asynchronous one is done.",
                )


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


class Called:
    """Summaries of the computations that a module calls, each made once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._summaries: dict[int, _Summary] = {}

    def by(self, i: Instruction) -> list[_Summary]:
        return [self._summary(c) for c in i.called_computation_ids]

    def lying(self, call: Instruction, index: ShapeIndex) -> tuple[View | None, bool]:
        """The part of an operand in whose bytes a call leaves its result at `index`, if it must,
        and whether they are still what they were."""
        (body,) = self.by(call)
        return _lying(body, index), index in body.unchanged

    def only_sends(self, i: Instruction) -> bool:
        """Whether what `i` gives in the bytes of an operand is that operand, to be sent."""
        if i.opcode != "fusion":
            return False
        (body,) = (self.module.computations[c] for c in i.called_computation_ids)
        return body.root.custom_call_target == _SENDING

    def _summary(self, computation_id: int) -> _Summary:
        if computation_id not in self._summaries:
            computation = self.module.computations[computation_id]
            if computation.is_fusion and _WRITING.isdisjoint(
                i.opcode for i in computation.instructions
            ):
                found = _Summary({}, frozenset(), frozenset())  # Its results are its own.
            else:
                found = _summarized(computation, _Walk(self, computation))
            self._summaries[computation_id] = found
        return self._summaries[computation_id]


def _summarized(computation: Computation, walk: _Walk) -> _Summary:
    given = {
        version: _Part(p.parameter_number, index)
        for p in computation.parameters
        for index, version in walk.held[p.id].items()
    }
    results = walk.held[computation.root.id]
    lies_in = {
        index: given[version.first] for index, version in results.items() if version.first in given
    }
    overwritten = (given[v.over] for v in walk.versions if v.over in given)
    return _Summary(
        lies_in,
        frozenset(index for index, version in results.items() if version in given),
        frozenset(overwritten),
    )


class _Walk:
    """One walk along a computation.

    Attributes:
      held: of every instruction the version at each index of its shape.
      versions: in the order in which they are written.
    """

    def __init__(self, called: Called, computation: Computation) -> None:
        self.held: dict[int, Mapping[ShapeIndex, Version]] = {}
        self.versions: list[Version] = []
        self._called = called
        self._end = {i.id: place for place, i in enumerate(computation.instructions)}
        for i in reversed(computation.instructions):
            if i.opcode.endswith(_FOLLOWING) and i.operand_ids:
                self._end[i.operand_ids[0]] = self._end[i.id]
        for place, i in enumerate(computation.instructions):
            self._step(i, place)

    def _step(self, i: Instruction, place: int) -> None:
        operands = [self.held[o] for o in i.operand_ids]
        if i.opcode not in _PASSING and not i.opcode.endswith(_FOLLOWING):
            for operand in operands[: _READ_BY_CALL.get(i.custom_call_target)]:
                for version in operand.values():
                    version.reads.append((i, self._end[i.id]))
        overwritten = [v for part in self._overwritten(i) if (v := _at(operands, part))]
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
        if i.opcode == "conditional":
            return self._branched(i, index, operands)
        part, is_written = self._part(i, index)
        return (None if part is None else _at(operands, part)), is_written

    def _part(self, i: Instruction, index: ShapeIndex) -> tuple[View | None, bool]:
        declared = {a.output_index: a for a in i.output_operand_aliasing}
        if index in declared and i.opcode in ("async-start", "custom-call", "fusion"):
            part = View(declared[index].operand, declared[index].operand_index)
            return part, not self._called.only_sends(i)
        match i.opcode, index:
            case (("dynamic-update-slice" | "set-dimension-size"), _):
                return View(0, ()), True
            case (("scatter" | "all-reduce-start"), _):
                return View(index[0] if index else 0, ()), True
            case "ragged-all-to-all", _:
                return View(1, ()), True
            case ("collective-permute", ()) | ("collective-permute-start", (1,)) if (
                len(i.operand_ids) == 4
            ):
                return View(1, ()), True
            case "while", _:
                body = self._called.by(i)[0]
                is_kept = index in body.unchanged and body.lies_in[index] == (0, index)
                return View(0, index), not is_kept
            case "call", _:
                (body,) = self._called.by(i)
                return _lying(body, index), index not in body.unchanged
            case "async-start", (1, *_):
                (body,) = self._called.by(i)
                return _lying(body, index[1:]), index[1:] not in body.unchanged
            case "fusion", _:
                (body,) = self._called.by(i)  # What it only hands on it copies.
                return (None if index in body.unchanged else _lying(body, index)), True
            case "custom-call", _:
                return None, True
            case _:
                return view_of(i, index), False

    def _branched(
        self, i: Instruction, index: ShapeIndex, operands: Sequence[Mapping[ShapeIndex, Version]]
    ) -> tuple[Version | None, bool]:
        branches = self._called.by(i)
        found = [
            _at(operands[n:], part)
            for n, branch in enumerate(branches, start=1)
            if (part := _lying(branch, index)) is not None
        ]
        is_kept = len(set(found)) == 1 and all(index in branch.unchanged for branch in branches)
        return (found[0] if found else None), not is_kept

    def _overwritten(self, i: Instruction) -> Iterator[View]:
        """The parts of operands that a computation that `i` runs writes over."""
        match i.opcode:
            case "call" | "while" | "async-start":
                for part in self._called.by(i)[0].overwritten:
                    yield View(*part)
            case "conditional":
                branches = self._called.by(i)
                for n, branch in enumerate(branches, start=1):
                    for part in branch.overwritten:
                        yield View(n + part.parameter, part.at)
                    # What another branch writes in its place is written there.
                    for index, part in branch.lies_in.items():
                        if any(index not in b.unchanged for b in branches):
                            yield View(n + part.parameter, part.at)
            case _:
                return


def _lying(body: _Summary, index: ShapeIndex) -> View | None:
    part = body.lies_in.get(index)
    return None if part is None else View(*part)


def _at(operands: Sequence[Mapping[ShapeIndex, Version]], part: View) -> Version | None:
    # XLA:TPU starts work of its sparse cores without operands: an update brings them.
    return operands[part.operand].get(part.part) if part.operand < len(operands) else None
