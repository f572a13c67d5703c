"""Which results go to host memory: the entry's stores.

A *store* is a copy of a result that the entry returns in host memory, mostly in the place of a
donated argument that lives there too. What it copies is on the device for nothing else once all
have read it.

XLA:CPU has one memory and copies nothing. There a store is a `copy` that `normalize.stores` wrote.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hlo_passes.analysis.async_chains import dones_of
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.analysis.marks import STORE_ATTRIBUTE
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE, Instruction, Module, ShapeIndex
from hlo_passes.memoize import memoized


class StoredCopy(NamedTuple):
    """What takes a result to the host.

    Attributes:
      source: the instruction whose array is copied.
      start, done: the pair that copies it; on CPU one instruction, and no start.
      home: the donated argument whose place it takes; None where it has memory of its own.
    """

    source: Instruction
    start: Instruction | None
    done: Instruction
    home: Instruction | None


@memoized
def stored_copies(module: Module) -> tuple[StoredCopy, ...]:
    """Returns the entry's stores in the order of its results.

    What is written over after it was copied is none: XLA says when that may be. Nor is the
    second of two copies of one array.
    """
    if not module.is_scheduled:
        return ()
    ranges = compute_live_ranges(analyze_dataflow(module))
    dataflow, time_of = ranges.dataflow, ranges.time_of
    parameters = {p.parameter_number: p for p in module.entry.parameters}
    homes = {
        a.output_index: parameters[a.parameter]
        for a in module.input_output_aliases
        if not a.parameter_index
    }
    results = list(returned_arrays(module))
    returned = Counter(i.id for _, i in results)
    found: dict[int, StoredCopy] = {}
    for index, done in results:
        start = _start_of(module, done)
        if start is None or returned[done.id] > 1 or len(dataflow.users.get(done.id, ())) > 1:
            continue
        source = module.instructions[start.operand_ids[0]]
        if source.id in found:
            continue
        maker = dataflow.value_at(source).instruction
        if maker.opcode in ("copy-done", "parameter"):
            continue  # It is not on the device for its readers alone.
        made = time_of[maker.id]
        if any(time_of[v.instruction.id] > made for v in dataflow.buffer_at(source).values):
            continue
        pair = None if start is done else start
        found[source.id] = StoredCopy(source, pair, done, homes.get(index))
    return tuple(found.values())


@memoized
def steady_parameters(module: Module) -> tuple[Instruction, ...]:
    """The entry's parameters that nothing but a store overwrites: those that are not donated, and
    those whose place on the host a store takes."""
    stored = {copy.home.id for copy in stored_copies(module) if copy.home is not None}
    donated = {a.parameter for a in module.input_output_aliases}
    return tuple(
        p for p in module.entry.parameters if p.parameter_number not in donated or p.id in stored
    )


@memoized
def touching(module: Module) -> Mapping[int, tuple[Instruction, ...]]:
    """The instructions of the entry that make, show or read what a store copies, and those that it
    has to stand behind: by the id of the store's source."""
    ranges = compute_live_ranges(analyze_dataflow(module))
    entry, dones = module.entry, dones_of(module, module.entry)
    line = [ranges.time_of[i.id] for i in entry.instructions]
    found: dict[int, tuple[Instruction, ...]] = {}
    for copy in stored_copies(module):
        value = ranges.dataflow.value_at(copy.source)
        halves = [i for i in (copy.start, copy.done) if i is not None]
        seen = {p.instruction.id for p in value.positions} | {u.instruction.id for u in value.uses}
        seen |= {dones[i].id for i in seen if i in dones}
        seen |= {c for half in halves for c in half.control_predecessor_ids}
        seen |= set(_copied_from(module, copy))
        seen -= {entry.root.id, *(half.id for half in halves)}
        # What a called computation does is done where it is called.
        places = {bisect_left(line, ranges.time_of[i]) for i in seen}
        found[copy.source.id] = tuple(entry.instructions[k] for k in sorted(places))
    return found


def returned_arrays(module: Module) -> Iterator[tuple[ShapeIndex, Instruction]]:
    """The arrays that the entry returns, each with its index."""
    root = module.entry.root
    if root.opcode != "tuple":
        if root.shape.is_array:
            yield (), root
        return
    for k, operand in enumerate(root.operand_ids):
        if (i := module.instructions[operand]).shape.is_array:
            yield (k,), i


def _copied_from(module: Module, copy: StoredCopy) -> Iterator[int]:
    """Ids of the first reader of each copy of the argument whose place a store takes, and of what
    reads that where it is: before, nothing may take its place."""
    if copy.home is None:
        return
    ranges, dones = compute_live_ranges(analyze_dataflow(module)), dones_of(module, module.entry)

    def readers_of(i: Instruction) -> list[Instruction]:
        users = ranges.dataflow.users.get(i.id, ())
        return sorted(users, key=lambda u: ranges.time_of[u.id])

    readers = [u for u in readers_of(copy.home) if u is not copy.done]
    if copy.start is None:  # On CPU what reads it reads a copy.
        readers = readers[:1]
    for reader in readers:
        if reader.opcode == "copy-start":
            yield from (u.id for u in readers_of(dones[reader.id])[:1])
        else:
            yield dones.get(reader.id, reader).id


def _start_of(module: Module, done: Instruction) -> Instruction | None:
    """What begins the copy that ends with `done`, if that takes an array to the host."""
    if done.opcode == "copy":
        return done if STORE_ATTRIBUTE in done.proto.frontend_attributes.map else None
    if done.opcode != "copy-done" or done.shape.memory_space != HOST_MEMORY_SPACE:
        return None
    start = module.instructions[done.operand_ids[0]]
    source = module.instructions[start.operand_ids[0]]
    return start if source.shape.memory_space == DEVICE_MEMORY_SPACE else None
