"""The entry in ticks, without the transfers that are the plan's to place. See `verify`.

    entry    p  start  a  done  b(a, done)  e = evict(a)  c  r = refetch(e)  d(r)
    tick               c0       c1                        c2                 c3
    fetched                done ─► p                             r ─► a

Each copy is a pair, a start and a done. The plan's are those that bring an argument from host
memory; those that edits have marked: they take the result of an instruction there, and
bring it back; and, where the plan says so, those that take there what the entry returns. Whoever
reads what came reads the transfer that serves its tick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hlo_passes.errors import VerificationError
from hlo_passes.ir import (
    DEVICE_MEMORY_SPACE,
    HOST_MEMORY_SPACE,
    Instruction,
    Module,
    Shape,
)
from hlo_passes.plan import Event, LogicalTime, Plan, Transfer
from hlo_passes.verify.hlo import describe

EVICTION_ATTRIBUTE = "memplan.evict"
"""Frontend attribute of the copies of a temporary that are the plan's to place."""


STORE_ATTRIBUTE = "memplan.store"
"""Frontend attribute of a copy that is one to the host where all memory looks alike (CPU)."""


class Store(NamedTuple):
    """A result that is copied to host memory.

    Attributes:
      source: the instruction whose array is copied.
      start, done: the copy, which the entry returns; one instruction where all memory looks alike.
      home: the donated argument whose place it takes, if there is one.
    """

    source: Instruction
    start: Instruction
    done: Instruction
    home: Instruction | None


@dataclass(frozen=True, eq=False)
class Program:
    """The entry in ticks, and the values that transfers bring to it.

    Attributes:
      compute: c0, c1, ...
      fetched: id of the instruction that users read, to what it is a copy of: of XLA's
        `copy-done` the parameter, or what was evicted; on CPU, where there is no copy, of the
        parameter to itself.
      evicted: what leaves the device, by name.
      stored: of these what the entry returns in host memory.
    """

    module: Module
    compute: tuple[Instruction, ...]
    fetched: Mapping[int, Instruction]
    evicted: Mapping[str, Instruction]
    stored: Mapping[str, Store]

    @classmethod
    def of(cls, module: Module, plan: Plan) -> Program:
        """Raises VerificationError when a marked pair is no eviction, or none of the host."""
        moved = {t.buffer for t in plan.transfers}
        stored = _stores(module, plan)
        # A donated argument may be overwritten before the program ends: no transfer's copy of
        # it stands for it, and the program's own copies are compute; unless it is a transfer that
        # overwrites it.
        donated = {a.parameter for a in module.input_output_aliases}
        donated -= {s.home.parameter_number for s in stored.values() if s.home is not None}
        steady = [p for p in module.entry.parameters if p.parameter_number not in donated]
        fetched = {p.id: p for p in steady if p.name in moved and on_device(p.shape)}
        # Several copies of one argument may be compute, too: XLA works on one of them in place.
        copied = Counter(
            o for i in module.entry.instructions if i.opcode == "copy-start" for o in i.operand_ids
        )
        copies = {half.id for s in stored.values() for half in (s.start, s.done)}
        evicted = {name: s.source for name, s in stored.items()}
        away: dict[int, Instruction] = {}
        for done in module.entry.instructions:
            if done.opcode != "copy-done":
                continue
            start = module.instructions[done.operand_ids[0]]
            source = module.instructions[start.operand_ids[0]]
            if EVICTION_ATTRIBUTE in start.proto.frontend_attributes.map:
                spaces = source.shape.memory_space, done.shape.memory_space
                if spaces == (HOST_MEMORY_SPACE, DEVICE_MEMORY_SPACE) and source.id in away:
                    fetched[done.id] = away[source.id]
                elif (
                    spaces == (DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE)
                    and source.opcode != "parameter"
                    and source.id not in copies
                    and source.name not in evicted
                ):
                    evicted[source.name] = away[done.id] = source
                else:
                    raise VerificationError(
                        f"%{done.name} is marked as an eviction, but copies %{source.name} from "
                        f"memory space {spaces[0]} to {spaces[1]}",
                        describe(module, start),
                        "A result goes from the device to host memory, once, and its copy comes "
                        "back.",
                    )
            elif (
                source in steady
                and (source.name in moved or copied[source.id] == 1)
                and source.shape.memory_space == HOST_MEMORY_SPACE
                and on_device(done.shape)
            ):
                fetched[done.id] = source
            else:
                continue
            copies |= {start.id, done.id}
        for user in module.entry.instructions:
            for operand in user.operand_ids:
                if operand in away and user.id not in copies:
                    raise VerificationError(
                        f"%{user.name} reads %{away[operand].name} in host memory",
                        describe(module, user),
                        "What is evicted is read when it is back on the device.",
                    )
        compute = tuple(
            i for i in module.entry.instructions if i.opcode != "parameter" and i.id not in copies
        )
        return cls(module, compute, fetched, evicted, stored)

    @property
    def end(self) -> LogicalTime:
        return len(self.compute)

    @property
    def returned_at(self) -> LogicalTime:
        """The tick by which what the entry returns has to be there."""
        return self.tick_of.get(self.module.entry.root.id, self.end)

    @cached_property
    def tick_of(self) -> Mapping[int, LogicalTime]:
        """The ticks of compute, by id."""
        return {i.id: tick for tick, i in enumerate(self.compute)}

    def moving(self, buffer: str) -> Instruction | None:
        """What a transfer of `buffer` moves: an argument, or what is evicted."""
        evicted = self.evicted.get(buffer)
        return self._parameters.get(buffer) if evicted is None else evicted

    @cached_property
    def _parameters(self) -> Mapping[str, Instruction]:
        return {p.name: p for p in self.module.entry.parameters}

    def at(self, tick: LogicalTime) -> str:
        """Names a tick's instruction, for an error."""
        return f"tick {tick}, {describe(self.module, self.compute[tick])}"


def _stores(module: Module, plan: Plan) -> dict[str, Store]:
    """The stores that the plan moves, by the name of what they copy."""
    leaving = {t.buffer for t in plan.transfers if t.kind == "evict"}
    entry, parameters = module.entry, {p.parameter_number: p for p in module.entry.parameters}
    homes = {
        a.output_index: parameters[a.parameter]
        for a in module.input_output_aliases
        if not a.parameter_index
    }
    results = [((), entry.root.id)]
    if entry.root.opcode == "tuple":
        results = [((k,), o) for k, o in enumerate(entry.root.operand_ids)]
    # What else reads a result in host memory would read it there.
    uses = Counter(o for i in entry.instructions for o in i.operand_ids)
    found: dict[str, Store] = {}
    for index, result in results:
        done = start = module.instructions[result]
        marks = done.proto.frontend_attributes.map
        if done.opcode == "copy-done":
            start = module.instructions[done.operand_ids[0]]
        elif done.opcode != "copy" or STORE_ATTRIBUTE not in marks:
            continue
        source = module.instructions[start.operand_ids[0]]
        crosses = on_device(source.shape) and (
            done.opcode == "copy" or done.shape.memory_space == HOST_MEMORY_SPACE
        )
        is_last = uses[done.id] == len(index) and EVICTION_ATTRIBUTE not in marks
        if crosses and is_last and source.name in leaving and source.name not in found:
            found[source.name] = Store(source, start, done, homes.get(index))
    return found


def on_device(shape: Shape) -> bool:
    return shape.memory_space == DEVICE_MEMORY_SPACE


def serving_transfer(transfers: Sequence[Transfer], tick: LogicalTime) -> Transfer | None:
    """The transfer whose copy a use at `tick` reads: the latest that is there."""
    there = [t for t in transfers if t.done <= tick < t.end]
    return max(there, key=lambda t: (t.done, t.id), default=None)


def unserved(
    program: Program, source: Instruction, transfers: Sequence[Transfer], tick: LogicalTime
) -> VerificationError:
    """Says why no transfer's copy of `source` is there at `tick`."""
    where = program.at(tick) if tick < program.end else describe(program.module, source)
    late = [t for t in transfers if t.done > tick]
    gone = [t for t in transfers if t.end <= tick]
    if late and not gone:
        first = min(late, key=lambda t: t.done)
        return VerificationError(
            f"%{source.name} is read at tick {tick}, before its data: "
            f"transfer {first.id} is done at tick {first.done}",
            where,
            f"Wait for it at tick {tick} or before.",
        )
    if gone:
        last = max(gone, key=lambda t: t.end)
        return VerificationError(
            f"%{source.name} is read at tick {tick}, but no copy is there: that of "
            f"transfer {last.id} ended at tick {last.end}",
            where,
            "Fetch it again before this use, or hold the copy until after it.",
        )
    return VerificationError(
        f"%{source.name} lives off the device and is read at tick {tick}, but no transfer "
        "brings it",
        where,
        "Add a transfer that is done by then.",
    )


def issue_rank(plan: Plan, event: Event) -> tuple[LogicalTime, int, int]:
    """Sorts events as the plan issues them: of one tick evictions, starts before dones; then
    fetches, starts before dones; then compute."""
    if event.kind == "compute":
        return event.index, 4, 0
    t = plan.transfers[event.index]
    late = 0 if t.kind == "evict" else 2
    return (t.start, late, t.id) if event.kind == "start" else (t.done, late + 1, t.id)
