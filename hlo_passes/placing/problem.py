"""What the planner has to solve, as numbers: ticks, loads, seconds, and what may move.

    tick        0     1     2     3
    load       [t0    t1    t2    t3]      temporaries live at each tick, bytes
    clock      [0  s0   s1    s2    s3]    seconds of compute before each tick
    movable w        read        read      a weight that lives on the host

Everything else on the device is one number, `fixed_bytes`: arguments that stay, outputs,
less what is aliased.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from hlo_passes.analysis.async_chains import dones_of
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.analysis.marks import RECOMPUTE_ATTRIBUTE
from hlo_passes.hardware.machine import Link, Machine
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Instruction, Module, Shape
from hlo_passes.memory.assignment import assign_offsets
from hlo_passes.memory.usage import measure_memory
from hlo_passes.placing.arena import Arena, live_load
from hlo_passes.placing.prefetch import LINK_MARGIN, Fetch
from hlo_passes.placing.prices import FREE, Prices
from hlo_passes.placing.ticks import EntryTicks, ManagedTransfer, Resident, entry_ticks
from hlo_passes.plan import LiveRange, LogicalTime
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.energy import instruction_joules
from hlo_passes.simulator.events import queue_of
from hlo_passes.simulator.loop_floor import busy_s, floor_costs, link_floor_s


@dataclass(frozen=True, slots=True)
class Movable:
    """What is copied from the host to the device for its readers.

    Attributes:
      buffer: HLO name of the parameter instruction, or of the evicted temporary.
      size: bytes on the device.
      reads: ticks, half-open, one range for each direct reader, in order; all of them in
        one when a copy cannot be dropped and made again.
      parameter: its number; −1 of a temporary.
      eviction: of a temporary, the number in ``Problem.evictions`` of what brought it there.
      store: of a donated argument, the number there of what takes its place: where the one
        stays on the device, so does the other.
    """

    buffer: str
    size: int
    reads: tuple[LiveRange, ...]
    parameter: int = -1
    eviction: int | None = None
    store: int | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """A temporary or a result that is copied to the host and leaves the device.

    Attributes:
      buffer: HLO name of the instruction whose result it is.
      size: bytes on the device.
      written: the tick from which it can be copied: when it is there, and, where it takes the
        place of an argument, that has been read.
      free: the earliest tick from which its bytes can be free.
      holder: the resident of the arena, or the argument that was fetched, in whose bytes it lies,
        which end at `free`, and later where the copy takes longer; ``""`` where that may not be.
      returned: of a result, the tick at which the program returns it; None of a temporary.
    """

    buffer: str
    size: int
    written: LogicalTime
    free: LogicalTime
    holder: str
    returned: LogicalTime | None = None


class Departure(NamedTuple):
    """The ticks at which an eviction is issued and waited for."""

    start: LogicalTime
    done: LogicalTime


@dataclass(frozen=True, slots=True)
class Boundary:
    """Device bytes of the arguments, of the outputs, and of the outputs that take the place
    of a donated argument; named as in ``memory_analysis()``."""

    arguments: int
    outputs: int
    aliased: int


@dataclass(frozen=True, eq=False)
class Problem:
    """One module on one machine.

    Attributes:
      ranges, ticks: of the module.
      arena: what transferred weights share their memory with.
      load: int64[ticks], bytes of temporaries; clock: float64[ticks + 1], seconds of
        compute before each tick; costs: float64[ticks], seconds of each. A loop that moves
        bytes takes no less than they do.
      in_busy, out_busy: float64[ticks], seconds for which such a loop occupies `link`, and the
        one away from the device; of one queue for both each has all.
      movables: in the order of their first read; `evictions` in that of their definition.
      boundary: device bytes of what goes in and comes out.
      link: from the host tier to the device's.
      link_floor_s: seconds for which other transfers than the movables' occupy it.
      in_place: numbers of the arguments on the host that are read where they are (CPU).
      on_chip: what XLA is known to hold on the chip, and where; no bytes of the device's.
      prices: what a plan is charged for beside seconds.
      charges: float64[ticks], what it is to run each once more, in seconds; `charged_s`: of those
        that do so already.
      margin: how much slower than it says a link may be before a transfer is late.
    """

    module: Module
    machine: Machine
    ranges: LiveRanges
    ticks: EntryTicks
    boundary: Boundary
    arena: Arena
    load: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    clock: npt.NDArray[np.float64]
    in_busy: npt.NDArray[np.float64]
    out_busy: npt.NDArray[np.float64]
    movables: tuple[Movable, ...]
    evictions: tuple[Evicted, ...]
    link: Link
    link_floor_s: float = 0.0
    in_place: frozenset[int] = frozenset()
    on_chip: tuple[tuple[Resident, int], ...] = ()
    prices: Prices = FREE
    charges: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    charged_s: float = 0.0
    margin: float = LINK_MARGIN

    def staying(self, stay: Collection[str]) -> Problem:
        """Returns the problem in which some arguments are on the device, and what takes their
        place on the host is not taken there. No temporary is evicted yet."""
        if not stay:
            return self
        assert all(m.eviction is None for m in self.movables)
        moving = [m for m in self.movables if m.buffer not in stay]
        stored = {m.store for m in self.movables if m.buffer in stay}
        kept = [n for n in range(len(self.evictions)) if n not in stored]
        number = {n: k for k, n in enumerate(kept)}
        return replace(
            self,
            movables=tuple(
                m if m.store is None else replace(m, store=number[m.store]) for m in moving
            ),
            evictions=tuple(self.evictions[n] for n in kept),
        )

    @property
    def stored_load(self) -> npt.NDArray[np.int64]:
        """int64[ticks], bytes of `load` that results on their way to the host take at least, and
        that they need not where what they take the place of stays on the device."""
        homes = {m.store for m in self.movables}
        names = {e.holder for n, e in enumerate(self.evictions) if n in homes}
        stored = (t for t in self.arena.temporaries if t.kind == "temp" and t.name in names)
        return live_load(stored, self.ticks.end)

    def fetched_until(
        self, fetches: Sequence[Fetch], departures: Sequence[Departure]
    ) -> tuple[Fetch, ...]:
        """Returns the fetches of which each is held until what was made in its bytes, in place, has
        been copied."""
        until = self._until(departures)
        last = {f.buffer: n for n, f in enumerate(fetches) if f.buffer in until}
        found = list(fetches)
        for buffer, n in last.items():
            start, end = found[n].reads
            found[n] = replace(found[n], reads=LiveRange(start, max(end, until[buffer])))
        return tuple(found)

    def arena_until(self, departures: Sequence[Departure]) -> Arena:
        """Returns the arena in which each evicted temporary is held until its copy is done."""
        until = self._until(departures)
        return self.arena.until(until) if until else self.arena

    def _until(self, departures: Sequence[Departure]) -> dict[str, LogicalTime]:
        """Of each holder the tick at which what lies in it has been copied."""
        pairs = zip(self.evictions, departures, strict=True)
        return {e.holder: departure.done for e, departure in pairs if e.holder}

    @property
    def link_out(self) -> Link:
        """From the device's memory to where `link` comes from."""
        return self.machine.link(self.link.destination, self.link.source)

    @property
    def can_evict(self) -> bool:
        """Whether temporaries can be taken away."""
        return not self.machine.has_one_memory

    def moving_s(self, size: int) -> float:
        """Seconds of links to take `size` bytes away and back."""
        return sum(k.latency_s + size / k.bytes_per_s for k in (self.link, self.link_out))

    @property
    def fixed_bytes(self) -> int:
        """Device bytes outside the arena."""
        return self.boundary.arguments + self.boundary.outputs - self.boundary.aliased


def pose(
    module: Module,
    machine: Machine,
    host_parameters: Collection[int],
    sliced_parameters: Collection[int] = (),
    prices: Prices = FREE,
) -> Problem:
    """Analyses a scheduled module.

    Args:
      host_parameters: numbers of the entry parameters that live on the host. Read with one
        memory only, where the module does not say it; elsewhere the module's own copies count.
      sliced_parameters: numbers of those that live there and are read where they are, by the
        slice. Read with one memory only.
      prices: what a plan is charged for beside seconds.

    Raises:
      UnscheduledModuleError: when the module has no schedule.
    """
    one_memory = machine.has_one_memory
    ranges = compute_live_ranges(analyze_dataflow(module))
    ticks = entry_ticks(ranges, machine.platform, host_parameters if one_memory else None)
    on_chip = _on_chip(ticks, machine)
    held = {id(r) for r, _ in on_chip}
    kinds = ("temp", "workspace", "on_chip")
    temporaries = tuple(
        replace(r, kind="temp") if r.kind == "on_chip" else r
        for r in ticks.residents
        if r.kind in kinds and r.size and id(r) not in held
    )
    arena = Arena.of(temporaries, ticks.end, machine, _tables(ranges, machine), module.learned)
    evictions = _evictions(ranges, ticks, arena.smallest)
    movables = sorted(_movables(ticks, evictions), key=lambda m: (m.reads[0], m.parameter))
    sliced = frozenset(sliced_parameters if one_memory else ())
    on_host = set(sliced)
    if one_memory:
        on_host |= {m.parameter for m in movables}
        on_host |= {t.home.parameter_number for t in ticks.transfers if t.home is not None}
    return Problem(
        module=module,
        machine=machine,
        ranges=ranges,
        ticks=ticks,
        boundary=_boundary(module, on_host),
        arena=arena,
        load=live_load(temporaries, ticks.end),
        movables=tuple(movables),
        evictions=evictions,
        in_place=sliced,
        on_chip=on_chip,
        prices=prices,
        **_timed(module, machine, ticks, prices),
    )


def on_machine(problem: Problem, machine: Machine) -> Problem:
    """Returns the problem on a machine whose memories are the same ones, and whose bandwidths,
    latencies and kernels are not: bytes and places stay, seconds are counted anew."""
    timed = _timed(problem.module, machine, problem.ticks, problem.prices)
    return replace(problem, machine=machine, **timed)


class _Timed(TypedDict):
    """What of a `Problem` is in seconds."""

    costs: npt.NDArray[np.float64]
    clock: npt.NDArray[np.float64]
    in_busy: npt.NDArray[np.float64]
    out_busy: npt.NDArray[np.float64]
    link: Link
    link_floor_s: float
    charges: npt.NDArray[np.float64]
    charged_s: float


def _timed(module: Module, machine: Machine, ticks: EntryTicks, prices: Prices) -> _Timed:
    seconds = floor_costs(module, machine, instruction_costs(module, machine))
    costs = np.array([seconds.get(i.id, 0.0) for i in ticks.instructions])
    link = machine.host_link
    in_busy, out_busy = (
        busy_s(module, machine, queue_of(of), ticks.instructions)
        for of in (link, machine.link(link.destination, link.source))
    )
    charges, charged_s = _charges(module, ticks, machine, prices)
    return {
        "charges": charges,
        "charged_s": charged_s,
        "costs": costs,
        "clock": np.concatenate([[0.0], np.cumsum(costs)]),
        "in_busy": in_busy,
        "out_busy": out_busy,
        "link": link,
        "link_floor_s": link_floor_s(module, machine).get(queue_of(link), 0.0),
    }


def _charges(
    module: Module, ticks: EntryTicks, machine: Machine, prices: Prices
) -> tuple[npt.NDArray[np.float64], float]:
    """See `Problem`."""
    count = len(ticks.instructions)
    if not prices:
        return np.zeros(count), 0.0
    joules = np.zeros(count)
    if prices.joule_s:
        of = instruction_joules(module, machine)
        joules = np.array([of[i.id] for i in ticks.instructions])
    again = np.array(
        [RECOMPUTE_ATTRIBUTE in i.proto.frontend_attributes.map for i in ticks.instructions], bool
    )
    return prices.joule_s * joules, prices.joule_s * float(joules[again].sum())


def resident(problem: Problem, parameters: Collection[int]) -> Problem:
    """Returns the problem with these arguments, by number, on the device, and counted there."""
    left = problem.staying({m.buffer for m in problem.movables if m.parameter in parameters})
    shapes = {p.parameter_number: p.shape for p in problem.module.entry.parameters}
    more = sum(shapes[n].byte_size for n in parameters)
    boundary = replace(problem.boundary, arguments=problem.boundary.arguments + more)
    return replace(left, boundary=boundary)


def _on_chip(ticks: EntryTicks, machine: Machine) -> tuple[tuple[Resident, int], ...]:
    """What XLA holds on the chip, as far as there is room for it, and offsets there."""
    held = [r for r in ticks.residents if r.kind == "on_chip" and r.size]
    if not held:
        return ()
    tier = machine.on_chip_memory
    capacity = 0 if tier is None else tier.capacity_bytes
    packing = assign_offsets([r.size for r in held], [r.live_range for r in held])
    placed = zip(held, packing.offsets, strict=True)
    return tuple((r, offset) for r, offset in placed if offset + r.size <= capacity)


def _tables(ranges: LiveRanges, machine: Machine) -> int | None:
    """Bytes of tables, where XLA:TPU has moved to VMEM what it wants there; None before that.

    It notes then what each fusion takes of VMEM.
    """
    instructions = ranges.dataflow.module.instructions.values()
    if machine.platform != "tpu" or not any(
        b'"used_scoped_memory_configs":[{' in i.proto.backend_config for i in instructions
    ):
        return None
    return measure_memory(ranges, machine.platform).table_bytes


def streamed_load(posed: Problem) -> npt.NDArray[np.int64]:
    """int64[ticks], bytes of the temporaries, and of all that may move while it is read."""
    load = posed.arena.load.copy()
    for fetch in fetches(posed.movables):
        load[fetch.reads.start : fetch.reads.end] += fetch.size
    return load


def fetches(movables: Sequence[Movable], room: npt.NDArray[np.int64] | None = None) -> list[Fetch]:
    """Groups the reads of each movable into fetches, ordered by first read. Between two reads a
    copy is dropped and fetched again (it is clean: no write back).

    Args:
      room: int64[ticks], bytes beside all that is read: where there is room for a copy, it is kept,
        the shortest time first. The rest is left in it.
    """
    parts = [list(disjoint(m.reads)) for m in movables]
    gaps = [
        (after.start - before.end, n, before.end, after.start)
        for n, reads in enumerate(parts if room is not None else ())
        for before, after in pairwise(reads)
    ]
    for _, n, start, end in sorted(gaps):
        assert room is not None
        if room[start:end].min() < movables[n].size:
            continue
        room[start:end] -= movables[n].size
        at = next(k for k, r in enumerate(parts[n]) if r.end == start)
        before, after = parts[n][at : at + 2]
        parts[n][at : at + 2] = [LiveRange(before.start, after.end)]
    found = [
        Fetch(m.buffer, m.size, reads, m.eviction)
        for m, fetched in zip(movables, parts, strict=True)
        for reads in fetched
    ]
    return sorted(found, key=lambda f: f.reads)


def disjoint(reads: Sequence[LiveRange]) -> Iterator[LiveRange]:
    """The same ticks in ranges that do not touch."""
    start, end = reads[0]
    for read in reads[1:]:
        if read.start <= end:
            end = max(end, read.end)
            continue
        yield LiveRange(start, end)
        start, end = read
    yield LiveRange(start, end)


def device_sizes(shape: Shape) -> list[int]:
    """Bytes of each array in a shape that is in device memory."""
    return [s.byte_size for _, s in shape.leaves() if s.memory_space == DEVICE_MEMORY_SPACE]


def _boundary(module: Module, on_host: Collection[int]) -> Boundary:
    def device_bytes(shape: Shape) -> int:
        return sum(device_sizes(shape))

    parameters = {p.parameter_number: p.shape for p in module.entry.parameters}
    # XLA:CPU calls all arguments the device's: its host memory is the same memory.
    arguments = sum(device_bytes(s) for n, s in parameters.items() if n not in on_host)
    results = module.entry.root.shape
    # A result on the host takes no place on the device, whatever argument it is said to replace.
    aliased = sum(
        min(
            device_bytes(parameters[a.parameter].at(a.parameter_index)),
            device_bytes(results.at(a.output_index)),
        )
        for a in module.input_output_aliases
    )
    return Boundary(arguments, device_bytes(results), aliased)


def _evictions(ranges: LiveRanges, ticks: EntryTicks, smallest: int) -> tuple[Evicted, ...]:
    found: list[Evicted] = []
    for transfer in ticks.transfers:
        if not transfer.evicts:
            continue
        value = ranges.dataflow.value_at(transfer.source)
        made = ranges.dataflow.value_at(transfer.source).instruction
        written = max(ticks.tick_of[i.id] for i in (made, transfer.source)) + 1
        # Where it lies in others' bytes, or in the arena's base, the copy is waited for at once.
        holder = ticks.holders.get(value.id)
        assert transfer.done is not None
        free = ticks.tick_of[transfer.done.id]
        is_alone = holder is not None and holder.live_range.end == free
        is_alone = is_alone and transfer.size >= smallest
        name = holder.name if holder is not None and is_alone else ""
        if transfer.lies_in is not None:
            name = transfer.lies_in.name
        returned = None
        if transfer.lives_out:
            root = ranges.dataflow.module.entry.root
            returned = ticks.end if root is transfer.done else ticks.tick_of[root.id]
            written = max([written, *_copied_from(ranges, ticks, transfer.home)])
        found.append(Evicted(transfer.source.name, transfer.size, written, free, name, returned))
    return tuple(sorted(found, key=lambda e: (e.written, e.free, e.buffer)))


def _copied_from(
    ranges: LiveRanges, ticks: EntryTicks, home: Instruction | None
) -> Iterator[LogicalTime]:
    """The ticks from which the copies of an argument are on the device, and those behind what reads
    it where it is: before, nothing may take its place."""
    if home is None:
        return
    users, dataflow = ranges.dataflow.users, ranges.dataflow
    dones = dones_of(dataflow.module, dataflow.module.entry)
    copies = [t for t in ticks.transfers if t.source is home and not t.evicts]
    for copy in copies:
        yield from (r.tick + 1 for r in copy.reads[:1] if r.user is not dataflow.module.entry.root)
    halves = {h.id for t in ticks.transfers for h in (t.start, t.done) if h is not None}
    for reader in users.get(home.id, ()) if all(c.start for c in copies) else ():
        if reader.id not in halves:
            yield ticks.tick_of[dones.get(reader.id, reader).id] + 1


def _movables(ticks: EntryTicks, evictions: Sequence[Evicted]) -> Iterator[Movable]:
    """An argument is one movable, however often XLA copies it; each refetch is one."""
    number = {e.buffer: n for n, e in enumerate(evictions)}
    stores = {t.home.id: number[t.source.name] for t in ticks.transfers if t.home is not None}
    copies: defaultdict[int, list[ManagedTransfer]] = defaultdict(list)
    for transfer in ticks.transfers:
        if transfer.evicts or not (transfer.reads or (transfer.lives_out and ticks.end)):
            continue
        if transfer.source.opcode == "parameter":
            copies[transfer.source.id].append(transfer)
            continue
        name = transfer.source.name
        end = max(r.last + 1 for r in transfer.reads)
        reads = (LiveRange(transfer.reads[0].tick, ticks.end if transfer.lives_out else end),)
        yield Movable(name, transfer.size, reads, eviction=number[name])
    for argument, found in copies.items():
        store = stores.get(argument)
        written = ticks.end if store is None else evictions[store].written
        yield replace(_movable(found, ticks.end, written), store=store)


def _movable(copies: Sequence[ManagedTransfer], end: int, written: LogicalTime) -> Movable:
    """One argument; XLA may copy it several times.

    Args:
      written: the tick from which something else takes its place.
    """
    reads = sorted(LiveRange(r.tick, r.last + 1) for copy in copies for r in copy.reads)
    if not reads:  # The copy itself is the result.
        reads = [LiveRange(end - 1, end)]
    if any(copy.is_written or copy.lives_out for copy in copies):
        lives_out = any(copy.lives_out for copy in copies)
        reads = [LiveRange(reads[0].start, end if lives_out else max(r.end for r in reads))]
    if reads[-1].start >= written:  # One copy, made before, serves them all.
        first = min(reads[0].start, written - 1)
        reads = [LiveRange(first, max(r.end for r in reads))]
    p = copies[0].source
    return Movable(p.name, copies[0].size, tuple(reads), p.parameter_number)
