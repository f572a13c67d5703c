"""A replay of plans on bytes: is what an instruction reads still there, whenever transfers come?

    bytes of an arena     w0 w0 w0 w0 │ a a │ ? ? ?        what they show, written by whom

Every value is written where its slot says, and a read has to find it there. Compute runs in its
order; a start or a done runs as early as the plan's fences allow, or as late: `faults` tries all
early, all late, and each transfer alone the other way. From its start to its done a transfer's
target holds nothing, and its source must hold what it moves. A value without a slot lies in an
operand that it may be written over, or in the donated argument whose place it takes.

Live ranges of slots only tell which of several is meant: whether bytes are free, the bytes say.
Nothing here is the checker's; what HLO says of cells and aliases comes from `symbolic`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from experiments.symbolic import handed, in_place, started_in
from hlo_passes.ir import (
    DEVICE_MEMORY_SPACE,
    HOST_MEMORY_SPACE,
    Computation,
    Instruction,
    Module,
    Shape,
    ShapeIndex,
)
from hlo_passes.plan import Event, Plan, Slot, Transfer

_PASSING = frozenset("add-dependency bitcast domain get-tuple-element opt-barrier tuple".split())
_RUNNING = frozenset(("async-start", "call", "conditional", "while"))

# What computes each element of its result from the same element of its operands.
_ELEMENTWISE = frozenset(
    """abs add and atan2 bitcast-convert cbrt ceil clamp clz compare complex convert copy cosine
    count-leading-zeros divide erf exponential exponential-minus-one floor imag is-finite log
    log-plus-one logistic map maximum minimum multiply negate not or popcnt power real
    reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left
    shift-right-arithmetic shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh
    xor""".split()
)


@dataclass(frozen=True, slots=True)
class _Place:
    allocation: str
    offset: int


@dataclass(eq=False, slots=True)
class _Cell:
    """The bytes of a value, and of what is written over it.

    Attributes:
      last: the last tick at which they are read.
      over: operands' cells in which it may lie.
      home: the donated argument whose place it takes.
    """

    name: str
    size: int
    written: int
    last: int = -1
    place: _Place | None = None
    until: int = -1
    over: list[_Cell] = field(default_factory=list["_Cell"])
    home: _Cell | None = None


type _Version = tuple[_Cell, int]
"""What the n-th write leaves in a cell."""


@dataclass(slots=True)
class _Step:
    """What one instruction does to memory.

    Attributes:
      scratch: places that what it runs writes as it likes, with their sizes.
    """

    name: str
    reads: list[_Version]
    writes: list[_Version]
    scratch: list[tuple[_Place, int]]


class Fault(Exception):
    """The plan is wrong: why."""


def first_fault(
    module: Module, plan: Plan, moved: Collection[str] | None = None, most: int = 12
) -> str:
    """What goes wrong first in any of the timings that are tried; ``""`` if nothing does.

    Args:
      module: the one that the plan is for, edited.
      moved: the buffers that the plan's ticks count as moved; by default those that it moves.
      most: so many transfers, evenly chosen, are tried alone.
    """
    try:
        program = _Program(
            module, plan, {t.buffer for t in plan.transfers} if moved is None else moved
        )
        everything = frozenset(t.id for t in plan.transfers)
        picked = [t.id for t in plan.transfers][:: max(1, -(-len(plan.transfers) // most))]
        alone = [frozenset((n,)) for n in picked] if len(everything) > 1 else []
        for eager in (everything, frozenset[int](), *alone, *(everything - a for a in alone)):
            program.run(_sequence(plan, len(program.steps), program.makers, eager))
    except Fault as fault:
        return str(fault)
    return ""


def _sequence(
    plan: Plan, ticks: int, makers: Mapping[int, int], eager: Collection[int]
) -> Iterator[Event]:
    """An order that keeps to the fences: the transfers in `eager` run as soon as they can, the
    others when something waits for them.

    Args:
      makers: by transfer the tick at which is made what it takes away.
    """
    needs: defaultdict[Event, list[Event]] = defaultdict(list)
    for fence in plan.fences:
        needs[fence.after].append(fence.before)
    for t in plan.transfers:
        needs[Event("done", t.id)].append(Event("start", t.id))
    for n, tick in makers.items():
        needs[Event("start", n)].append(Event("compute", tick))
    for tick in range(1, ticks):
        needs[Event("compute", tick)].append(Event("compute", tick - 1))
    events = [Event(kind, t.id) for t in plan.transfers for kind in ("start", "done")]
    events.sort(key=lambda e: _issued(plan.transfers[e.index], e))
    if any(t.kind == "evict" for t in plan.transfers):  # They are issued in one sequence.
        for before, after in pairwise(events):
            needs[after].append(before)
    ran: set[Event] = set()
    waiting = [e for e in events if e.index in eager]

    def run(event: Event) -> Iterator[Event]:
        pending, entered = [event], set[Event]()
        while pending:
            e = pending[-1]
            missing = [n for n in needs[e] if n not in ran]
            if e in ran or not missing:
                pending.pop()
                if e not in ran:
                    ran.add(e)
                    yield e
            elif e in entered:
                raise Fault(f"{e} waits for itself")
            else:
                entered.add(e)
                pending += missing

    for tick in range(ticks):
        held_up: list[Event] = []
        for e in waiting:
            if e not in ran and ran.issuperset(needs[e]):
                yield from run(e)
            elif e not in ran:
                held_up.append(e)
        waiting = held_up
        yield from run(Event("compute", tick))
    for e in events:
        yield from run(e)


def _issued(t: Transfer, e: Event) -> tuple[int, bool, bool, int]:
    """Of one tick evictions come first, of each kind the starts."""
    tick = t.start if e.kind == "start" else t.done
    return tick, t.kind != "evict", e.kind == "done", t.id


class _Program:
    """The entry as reads and writes of cells, and where they lie."""

    def __init__(self, module: Module, plan: Plan, moved: Collection[str]) -> None:
        self._module, self._plan = module, plan
        self._tier = {a.name: a.tier for a in plan.allocations}
        self._sizes = {a.name: a.size for a in plan.allocations}
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)
        for slot in plan.slots:
            self._slots[slot.buffer].append(slot)
        self._taken: set[Slot] = set()
        self._held: dict[int, Mapping[ShapeIndex, _Version]] = {}
        self._counts: dict[_Cell, int] = {}
        self._cells: list[_Cell] = []
        self.steps: list[_Step] = []
        self._arguments: list[_Version] = []
        self._copies = [_Cell(f"{t.buffer}#{t.id}", 0, t.start) for t in plan.transfers]
        self._sources: list[_Version] = []
        self.makers: dict[int, int] = {}
        self._fetched, managed = _managed(module, moved)
        self._read_arguments()
        pending: dict[int, list[_Version]] = {}
        for i in module.entry.instructions:
            if i.opcode != "parameter" and i.id not in managed:
                self._add(i, pending)
        self._finish()

    def _read_arguments(self) -> None:
        plan, module = self._plan, self._module
        placed = {p.parameter: p for p in plan.placements}
        for p in module.entry.parameters:
            where = placed.get(p.parameter_number)
            leaves = [*p.shape.leaves()]
            size = sum(s.byte_size for _, s in leaves)
            if where is None or where.buffer != p.name or where.size != size:
                raise Fault(f"argument {p.name} is placed as {where}")
            on_host = HOST_MEMORY_SPACE in (
                s.memory_space
                for shape in (p.shape, *module.entry_parameter_shapes[p.parameter_number :][:1])
                for _, s in shape.leaves()
            )
            away = where.tier != plan.device_tier
            takes = p.shape.memory_space == HOST_MEMORY_SPACE or p.name in self._fetched.values()
            if (takes and not away) or (away and not takes and not (where.in_place and on_host)):
                raise Fault(f"the program does not take argument {p.name} from {where.tier}")
            held: dict[ShapeIndex, _Version] = {}
            for at, shape in leaves:
                cell = self._cell(_position(p, at), shape.byte_size, -1)
                self._find_slot(cell, [cell.name], 0, plan.device_tier if not away else where.tier)
                if cell.place is None:
                    cell.place = _Place(f"argument {cell.name}", 0)
                    self._sizes[f"argument {cell.name}"] = cell.size
                held[at] = cell, 0
            self._held[p.id] = held

    def _cell(self, name: str, size: int, tick: int) -> _Cell:
        cell = _Cell(name, size, tick)
        self._cells.append(cell)
        self._counts[cell] = 0
        return cell

    def _find_slot(self, cell: _Cell, names: Iterable[str], tick: int, tier: str) -> None:
        found = [s for name in names for s in self._slots.get(name, ()) if s not in self._taken]
        found.sort(key=lambda s: (s.size != cell.size, not _lasts(s, tick)))
        for slot in found[:1]:
            if slot.allocation not in self._tier:
                raise Fault(f"there is no allocation {slot.allocation}")
            if self._tier[slot.allocation] != tier:
                raise Fault(f"{cell.name} lies in {self._tier[slot.allocation]}")
            self._taken.add(slot)
            cell.place, cell.until = _Place(slot.allocation, slot.offset), slot.live_range.end

    def _look_up(self, operand: int, tick: int) -> Mapping[ShapeIndex, _Version]:
        buffer = self._fetched.get(operand)
        if buffer is None:
            return self._held[operand]
        there = [
            t
            for t in self._plan.transfers
            if t.buffer == buffer and t.kind == "prefetch" and t.done <= tick
        ]
        if not there:
            raise Fault(f"{buffer} is read at tick {tick}, and nothing brings it")
        return {(): (self._copies[max(there, key=lambda t: (t.done, t.id)).id], 0)}

    def _add(self, i: Instruction, pending: dict[int, list[_Version]]) -> None:
        tick = len(self.steps)
        operands = [self._look_up(o, tick) for o in i.operand_ids]
        reads: list[_Version] = []
        if i.opcode not in _PASSING:
            reads = [v for o in operands for v in o.values()]
        if i.opcode.endswith(("-done", "-update")):
            newest = dict(sorted(reads, key=lambda v: v[1]))  # It may have worked in place.
            reads = [*newest.items(), *pending.get(i.operand_ids[0], [])]
        for cell, _ in reads:
            cell.last = max(cell.last, tick)
        writes: list[_Version] = []
        held: dict[ShapeIndex, _Version] = {}
        for at, shape in i.shape.leaves():
            before, is_written = self._before(i, at, operands)
            if before is None:
                cell = self._cell(_position(i, at), _bytes(i, shape), tick)
                if i.opcode != "constant":
                    writes.append((cell, 0))
                    self._place(cell, i, at, operands, tick)
                held[at] = cell, 0
            elif is_written:
                cell = before[0]
                if not any(c is cell for c, _ in writes):  # TPUs have fusions that say so twice.
                    self._counts[cell] += 1
                    writes.append((cell, self._counts[cell]))
                held[at] = cell, self._counts[cell]
            else:
                held[at] = before
        self._held[i.id] = held
        if i.opcode.endswith(("-start", "-update")):
            over = {cell for cell, _ in writes}
            pending[i.id] = [version for version in reads if version[0] not in over]
        scratch = [
            (_Place(s.allocation, s.offset), s.size)
            for s in (self._slots.get(i.name, ()) if i.opcode in _RUNNING else ())
            if s not in self._taken
            and _lasts(s, tick)
            and self._tier.get(s.allocation) == self._plan.device_tier
        ]
        results = sum(cell.size for cell, _ in writes)  # What runs may use their bytes before.
        self._check_scratch(i, tick, results + sum(size for _, size in scratch))
        self.steps.append(_Step(i.name, reads, writes, scratch))

    def _check_scratch(self, i: Instruction, tick: int, given: int) -> None:
        """Results of other computations may lie there, too, where nothing is yet."""
        need = _least_scratch(self._module, i)
        if need <= given:
            return
        for a in self._plan.allocations:
            if a.tier == self._plan.device_tier and a.name in ("arguments", "outputs"):
                there = [s for s in self._plan.slots if s.allocation == a.name and _lasts(s, tick)]
                given += a.size - sum(s.size for s in there)
        if need > given:
            raise Fault(f"what {i.name} runs needs {need} bytes and has {given}")

    def _before(
        self, i: Instruction, at: ShapeIndex, operands: Sequence[Mapping[ShapeIndex, _Version]]
    ) -> tuple[_Version | None, bool]:
        """What lay where a result lies, and whether the result is written over it."""
        is_written = False
        part = handed(i, at)
        if part is None and i.opcode.endswith("-done"):
            part = 0, at
        elif part is None and i.opcode.endswith("-start"):
            part = started_in(self._module, i, at)
            is_written = i.opcode == "all-reduce-start" or at[:1] == (1,)
            is_written &= i.opcode != "copy-start"
        elif part is None and i.opcode == "while":
            body = self._module.computations[i.called_computation_ids[0]]
            part, is_written = (0, at), _given(self._module, body, at) != ((0, at), False)
        elif part is None and i.opcode == "call":
            body = self._module.computations[i.called_computation_ids[0]]
            found = _given(self._module, body, at)
            part, is_written = (None, False) if found is None else found
        elif part is None:
            part, is_written = in_place(self._module, i, at), True
        if part is None or part[0] >= len(operands):
            return None, False
        return operands[part[0]].get(part[1]), is_written

    def _place(
        self,
        cell: _Cell,
        i: Instruction,
        at: ShapeIndex,
        operands: Sequence[Mapping[ShapeIndex, _Version]],
        tick: int,
    ) -> None:
        if not cell.size:
            return
        self._find_slot(cell, _names(self._module, i, at), tick, self._plan.device_tier)
        cell.over = [
            old
            for n, operand in enumerate(operands)
            for old, _ in operand.values()
            if old.size == cell.size and _may_take(self._module, i, at, n)
        ]

    def _finish(self) -> None:
        """Places what transfers bring, and what has no slot of its own."""
        module, plan = self._module, self._plan
        end = len(self.steps)
        names = {i.name: i for i in module.entry.instructions}
        away: dict[str, Transfer] = {}
        for t, cell in zip(plan.transfers, self._copies, strict=True):
            source = self._held[names[t.buffer].id][()]
            there = {p.buffer: p.tier for p in plan.placements}.get(t.buffer, plan.device_tier)
            if t.kind == "prefetch" and t.buffer in away:
                taken = away[t.buffer]
                source, there = (self._copies[taken.id], 0), taken.destination
            if t.source != there:
                raise Fault(f"{t.buffer} is in {there}, not in {t.source}")
            if t.kind == "evict":
                away[t.buffer] = t
                self.makers[t.id] = source[0].written
            elif t.destination != plan.device_tier:
                raise Fault(f"{t.buffer} is brought to {t.destination}")
            cell.size = names[t.buffer].shape.byte_size
            self._counts[cell] = 0
            self._find_slot(cell, [cell.name], t.start, t.destination)
            if cell.place is None:
                raise Fault(f"{cell.name} has no slot")
            source[0].last = max(source[0].last, t.done - 1)
            self._sources.append(source)
        self._results = [*self._look_up(module.entry.root.id, max(end - 1, 0)).items()]
        for _, (cell, _) in self._results:
            cell.last = max(end - 1, 0)
        donated = {
            (a.parameter, a.parameter_index): a.output_index for a in module.input_output_aliases
        }
        results = dict(self._results)
        for p in module.entry.parameters:
            for at, (cell, _) in self._held[p.id].items():
                if (p.parameter_number, at) not in donated:
                    cell.last = end
                    self._arguments.append((cell, 0))
                else:
                    results[donated[p.parameter_number, at]][0].home = cell
        for cell in reversed(self._cells):
            if cell.home is not None and cell.place is None:
                for old in cell.over:
                    old.home = old.home or cell.home
        for cell in self._cells:
            if cell.size and cell.place is None:
                self._take_over(cell)

    def _take_over(self, cell: _Cell) -> None:
        """Lies in an operand that dies here, and whose slot lasts."""
        free = [
            c
            for c in cell.over
            if c.last <= cell.written and c.place is not None and c.until > cell.last
        ]
        home = cell.home
        is_free = home is not None and home.last <= cell.written
        is_returned = any(c is cell for _, (c, _) in self._results)
        if home is not None and is_free and (is_returned or not free):
            cell.place, cell.until = home.place, len(self.steps) + 1
        elif free:
            old = min(free, key=lambda c: c.until)
            cell.place, cell.until = old.place, old.until
            old.until = -1  # Nothing else comes to lie there.
        elif cell in self._written():
            raise Fault(f"{cell.name} has no place")

    def _written(self) -> set[_Cell]:
        return {cell for step in self.steps for cell, _ in step.writes}

    def run(self, sequence: Iterable[Event]) -> None:
        """Runs once. Raises Fault."""
        memory = {name: _Bytes(size, name) for name, size in self._sizes.items()}

        def write(cell: _Cell, token: object) -> None:
            if cell.place is not None and cell.size:
                memory[cell.place.allocation].write(cell.place.offset, cell.size, token)

        def read(version: _Version, reader: str) -> None:
            cell, _ = version
            if cell.place is None or not cell.size:
                return
            shown = memory[cell.place.allocation].shown(cell.place.offset, cell.size)
            if shown != {version}:
                raise Fault(f"{reader} reads {cell.name}, which is not there")

        for p in self._module.entry.parameters:
            for version in self._held[p.id].values():
                write(version[0], version)
        for e in sequence:
            if e.kind == "compute":
                step = self.steps[e.index]
                for version in step.reads:
                    read(version, step.name)
                for place, size in step.scratch:
                    memory[place.allocation].write(place.offset, size, step)
                for version in step.writes:
                    write(version[0], version)
                for version in step.reads:
                    if not _is_taken(version, step.writes):
                        read(version, step.name)
                continue
            t, cell, source = (
                self._plan.transfers[e.index],
                self._copies[e.index],
                self._sources[e.index],
            )
            read(source, f"{e} of {t.buffer}")
            assert cell.place is not None
            target = memory[cell.place.allocation]
            if e.kind == "start":
                target.write(cell.place.offset, t.size, _Flight(e.index))
                continue
            if target.shown(cell.place.offset, t.size) != {_Flight(e.index)}:
                raise Fault(f"something is written where {t.buffer} is coming")
            target.write(cell.place.offset, t.size, (cell, 0))
        for _, version in self._results:
            read(version, "the caller")
        for version in self._arguments:
            read(version, "the caller")


def _is_taken(version: _Version, writes: Sequence[_Version]) -> bool:
    """Whether a result may be written over a value that the instruction reads."""
    cell = version[0]
    return any(
        new is cell or (new.place == cell.place and (cell in new.over or new.home is cell))
        for new, _ in writes
    )


@dataclass(frozen=True, slots=True)
class _Flight:
    """What shows where a transfer may write at any moment."""

    transfer: int


class _Bytes:
    """An allocation, and what its bytes show."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._cuts: list[int] = [0]  # segment k is [cuts[k], cuts[k + 1])
        self._shown: list[object] = [None]

    def write(self, low: int, size: int, token: object) -> None:
        high = low + size
        if low < 0 or high > self._size:
            raise Fault(f"bytes [{low}, {high}) of {self._name} are written, it has {self._size}")
        first, after = self._cut(low), self._cut(high)
        tokens = [
            None if isinstance(old, _Flight) and not _brings(token, old) else token
            for old in self._shown[first:after]
        ]
        self._shown[first:after] = tokens

    def shown(self, low: int, size: int) -> set[object]:
        first, after = bisect_right(self._cuts, low) - 1, bisect_left(self._cuts, low + size)
        return {*self._shown[first:after]}

    def _cut(self, at: int) -> int:
        """The number of the segment that begins at `at`."""
        k = bisect_left(self._cuts, at)
        if k == len(self._cuts) or self._cuts[k] != at:
            self._cuts.insert(k, at)
            self._shown.insert(k, self._shown[k - 1])
        return k


def _brings(token: object, flight: _Flight) -> bool:
    return isinstance(token, tuple) and token[0].name.endswith(f"#{flight.transfer}")


def _managed(module: Module, moved: Collection[str]) -> tuple[dict[int, str], set[int]]:
    """What reads as a copy of which buffer, and the ids of copies that the plan places."""
    entry = module.entry.instructions
    donated = {a.parameter for a in module.input_output_aliases}
    fetched = {
        p.id: p.name
        for p in module.entry.parameters
        if p.name in moved
        and p.shape.memory_space == DEVICE_MEMORY_SPACE
        and p.parameter_number not in donated
    }
    managed: set[int] = set()
    away: dict[int, str] = {}
    for done in entry:
        if done.opcode != "copy-done":
            continue
        start = module.instructions[done.operand_ids[0]]
        source = module.instructions[start.operand_ids[0]]
        if "memplan.evict" in start.proto.frontend_attributes.map:
            if done.shape.memory_space == HOST_MEMORY_SPACE:
                away[done.id] = source.name
            else:
                fetched[done.id] = away[source.id]
        elif (
            source.opcode == "parameter"
            and source.name in moved
            and source.parameter_number not in donated
            and source.shape.memory_space == HOST_MEMORY_SPACE
        ):
            fetched[done.id] = source.name
        else:
            continue
        managed |= {start.id, done.id}
    return fetched, managed


def _lasts(slot: Slot, tick: int) -> bool:
    return slot.live_range.start <= tick < slot.live_range.end


def _position(i: Instruction, at: ShapeIndex) -> str:
    return f"{i.name}{{{','.join(map(str, at))}}}" if at else i.name


def _bytes(i: Instruction, shape: Shape) -> int:
    """What a result takes up of the device's memory."""
    is_semaphore = i.opcode.endswith("-start") or i.opcode in ("send", "recv")
    if shape.memory_space != DEVICE_MEMORY_SPACE or (
        is_semaphore and i.shape.is_tuple and str(shape) in ("u32[]", "s32[]")
    ):
        return 0
    return shape.byte_size


def _names(module: Module, i: Instruction, at: ShapeIndex) -> Iterator[str]:
    """What the slot of a result may be called."""
    if i.opcode in ("call", "conditional") or (i.opcode == "async-start" and at[:1] == (1,)):
        inner = at[1:] if i.opcode == "async-start" else at
        for c in i.called_computation_ids:
            root, index = module.computations[c].root, inner
            while (part := handed(root, index)) is not None:
                root, index = module.instructions[root.operand_ids[part[0]]], part[1]
            yield from _names(module, root, index)
    yield _position(i, at)


def _given(
    module: Module, body: Computation, at: ShapeIndex
) -> tuple[tuple[int, ShapeIndex], bool] | None:
    """The argument's part in which a computation leaves a result, and whether it writes there."""
    i, is_written = body.root, False
    while i.opcode != "parameter":
        part = handed(i, at)
        if part is None:
            part, is_written = ((0, at) if i.opcode == "while" else in_place(module, i, at)), True
        if part is None:
            return None
        i, at = module.instructions[i.operand_ids[part[0]]], part[1]
    return (i.parameter_number, at), is_written


def _least_scratch(module: Module, i: Instruction) -> int:
    """Bytes that what `i` runs needs at the very least, its results among them: what one
    instruction reads of what others made there, and makes."""
    most = 0
    for c in i.called_computation_ids if i.opcode in _RUNNING else ():
        made: dict[int, int] = {}
        lies_in: dict[int, set[int]] = {}
        for j in module.computations[c].instructions:
            there = set[int]().union(*(lies_in[o] for o in j.operand_ids))
            is_same = j.opcode in _PASSING or j.opcode in ("constant", "parameter", "while")
            new = 0
            if not is_same and not j.opcode.endswith(("-start", "-update", "-done")):
                new = sum(_bytes(j, s) for at, s in j.shape.leaves() if _is_new(module, j, at, s))
            held = sum(made[o] for o in there)
            most = max(most, held + new, _least_scratch(module, j))
            made[j.id] = new
            lies_in[j.id] = {j.id} if new else there
    return most


def _is_new(module: Module, i: Instruction, at: ShapeIndex, shape: Shape) -> bool:
    """Whether a result cannot lie where an operand does."""
    return in_place(module, i, at) is None and not any(
        _may_take(module, i, at, n) and s.byte_size == shape.byte_size
        for n, o in enumerate(i.operand_ids)
        for _, s in module.instructions[o].shape.leaves()
    )


def _may_take(module: Module, i: Instruction, at: ShapeIndex, n: int) -> bool:
    """Whether a result may be written over an operand while that is read."""
    match i.opcode:
        case "call" | "conditional" | "while" | "async-start":
            return True
        case "sort":
            return not at or n == at[0]
        case "triangular-solve":
            return n == 1
        case "all-reduce" | "collective-broadcast":
            return not at or n == at[0]
        case "custom-call":
            return (n == 2 and "matmul" in i.custom_call_target) or (
                "cholesky" in i.custom_call_target
            )
        case "fusion":
            body = module.computations[i.called_computation_ids[0]]
            return _goes_through(module, body, body.parameters[n])
        case opcode:
            operand = module.instructions[i.operand_ids[n]].shape
            return opcode in _ELEMENTWISE and operand.dimensions == i.shape.dimensions


def _goes_through(module: Module, body: Computation, parameter: Instruction) -> bool:
    """Whether a fusion reads each element of a parameter for that element of its results only."""
    reached = {parameter.id}
    for i in body.instructions:
        if reached.isdisjoint(i.operand_ids) or i.opcode == "reduce":
            continue  # An emitter of reductions reads all before it writes.
        if i.opcode not in ("bitcast", "tuple", "get-tuple-element"):
            dimensions = {
                module.instructions[o].shape.dimensions for o in i.operand_ids if o in reached
            }
            updates = i.opcode in ("dynamic-slice", "dynamic-update-slice", "scatter")
            if not updates and (i.opcode not in _ELEMENTWISE or dimensions != {i.shape.dimensions}):
                return False
        reached.add(i.id)
    return True
