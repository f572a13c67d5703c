"""Which temporaries are idle for a while, and what each could be made from again.

    entry        a = fusion(p)    b = ...(a)    ...    d = ...(a)
    tick         0                1                    7
    temporary a  written          read                 read           a gap: ticks [2, 7)

A *temporary* is the array that one instruction of the entry makes (or one element of the
tuple that it makes) and that nothing writes again. What is carried by a loop, updated in
place, part of a tuple that others read, or in flight in an asynchronous operation stays where
it is: those bytes belong together with others. Bitcasts show a temporary under another name;
who reads one reads the temporary.

An instruction is *repeatable* when running it once more gives the same and does nothing else:
no random numbers, no side effects, no communication, no control flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlo_passes.analysis.dataflow import Dataflow, Value
from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.analysis.sharing import Target, can_share
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Instruction, Module
from hlo_passes.memoize import memoized
from hlo_passes.placing.ticks import EntryTicks
from hlo_passes.plan import LogicalTime

_REPEATABLE = frozenset(
    """abs add and atan2 bitcast bitcast-convert broadcast cbrt ceil clamp compare complex
    concatenate convert convolution copy cosine count-leading-zeros custom-call divide dot
    dynamic-slice erf exponential exponential-minus-one floor fusion gather get-tuple-element
    imag iota is-finite log log-plus-one logistic map maximum minimum multiply negate not or
    pad popcnt power real reduce reduce-precision reduce-window remainder reshape reverse
    round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine slice sqrt subtract tan tanh transpose xor""".split()
)

# In a fusion these say nothing against running it again.
_HARMLESS_INSIDE = _REPEATABLE | frozenset(
    "constant dynamic-update-slice parameter scatter select-and-scatter sort tuple".split()
)


@dataclass(frozen=True, slots=True)
class Read:
    """`reader` runs at `tick` and has `via`, the temporary or a bitcast of it, as operand.

    A bitcast counts as a reader: as long as it stands there, it names the bytes.
    """

    tick: LogicalTime
    reader: str
    via: str


@dataclass(frozen=True, slots=True)
class Operand:
    """What an instruction needs to run again.

    Attributes:
      via: HLO name of the instruction that is its operand.
      temporary: number of the temporary that this is, or is a bitcast of; None of what stays
        where it is.
      until: of that, the tick from which on it is not there any more.
      weight: HLO name of the argument on the host that this is a copy of; ``""`` where it is none.
    """

    via: str
    temporary: int | None
    until: LogicalTime
    weight: str


@dataclass(frozen=True, slots=True, eq=False)
class Temporary:
    """An array that the entry makes and reads.

    Attributes:
      number: its place in the list of all.
      handle: the instruction whose result it is.
      maker: the instruction that computes it: `handle`, or what `handle` takes an element of.
      size: bytes.
      added: bytes that are taken from `written` on: `size`, or 0 where it lies in those of an
        operand that `maker` reads last, or in some that are there anyway.
      written: tick of `maker`.
      reads: by tick.
      operands: of `maker`, if that is repeatable; else None.
      beside: bytes of the other arrays that `maker` makes.
      obstacle: why its bytes cannot be given to others while it is idle; ``""`` if they can.
    """

    number: int
    handle: Instruction
    maker: Instruction
    size: int
    added: int
    written: LogicalTime
    reads: tuple[Read, ...]
    operands: tuple[Operand, ...] | None
    beside: int
    obstacle: str

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def accesses(self) -> list[LogicalTime]:
        """The ticks at which it is written or read."""
        return sorted({self.written, *(r.tick for r in self.reads)})


def find_temporaries(ranges: LiveRanges, ticks: EntryTicks) -> tuple[Temporary, ...]:
    """Returns the entry's temporaries in the order in which they are written. O(module)."""
    return _Finder(ranges, ticks).all()


@memoized
def written_over(
    dataflow: Dataflow, target: Target, temporaries: tuple[Temporary, ...]
) -> list[tuple[int, ...]]:
    """Of each temporary the numbers of those operands of its maker in whose bytes it may lie, where
    they are read there for the last time; as `allocations` has it."""
    number = {dataflow.value_at(t.handle).id: t.number for t in temporaries}

    def of(t: Temporary) -> Iterator[int]:
        value = dataflow.value_at(t.handle)
        for o in t.maker.operand_ids if t.maker.opcode != "copy" else ():
            operand = dataflow.value_at(dataflow.module.instructions[o])
            if operand.id not in number or operand.instruction.id not in t.maker.operand_ids:
                continue
            if can_share(dataflow, target, operand.positions[0], t.maker, value.index):
                yield number[operand.id]

    return [tuple(of(t)) for t in temporaries]


def is_repeatable(module: Module, i: Instruction) -> bool:
    """Whether `i` may run once more."""
    if i.opcode not in _REPEATABLE or i.output_operand_aliasing:
        return False
    if i.opcode == "custom-call" and (i.proto.custom_call_has_side_effect or not i.operand_ids):
        return False
    pending = list(i.called_computation_ids)
    while pending:
        for inner in module.computations[pending.pop()].instructions:
            if inner.opcode not in _HARMLESS_INSIDE:
                return False
            if inner.opcode == "custom-call" and inner.proto.custom_call_has_side_effect:
                return False
            pending += inner.called_computation_ids
    return True


class _Finder:
    def __init__(self, ranges: LiveRanges, ticks: EntryTicks) -> None:
        self._ranges = ranges
        self._dataflow: Dataflow = ranges.dataflow
        self._module = ranges.dataflow.module
        self._ticks = ticks
        self._entry = self._module.entry
        self._repeatable: dict[int, bool] = {}
        # Value to its temporary's number.
        self._number: dict[int, int] = {}
        self._copies = {t.done.id for t in ticks.transfers if t.done is not None}
        # Of the value that a copy makes, the argument.
        self._weights = {
            self._dataflow.value_at(t.done).id: t.source.name
            for t in ticks.transfers
            if t.done is not None and t.source.opcode == "parameter"
        }

    def all(self) -> tuple[Temporary, ...]:
        found: list[tuple[Value, Instruction, str]] = []
        for buffer in self._dataflow.buffers:
            if buffer.kind != "temp" or buffer.memory_space != DEVICE_MEMORY_SPACE:
                continue
            for value in buffer.values:
                if value.instruction.computation_id != self._entry.id or not value.shape.is_array:
                    continue
                handle = self._handle(value)
                if handle is None or value.instruction.id in self._copies:
                    continue
                obstacle = self._obstacle(value, handle, is_alone=len(buffer.values) == 1)
                found.append((value, handle, obstacle))
        found.sort(key=lambda f: self._ticks.tick_of[f[0].instruction.id])
        # Only what is made once is the same when it is read again.
        tracked = [f for f in found if not f[2] or f[2] == _ELSEWHERE]
        self._number = {value.id: n for n, (value, _, _) in enumerate(tracked)}
        return tuple(
            self._temporary(n, value, handle, obstacle)
            for n, (value, handle, obstacle) in enumerate(tracked)
        )

    def _handle(self, value: Value) -> Instruction | None:
        """The instruction whose whole result `value` is."""
        if value.index == ():
            return value.instruction
        if len(value.index) != 1:
            return None
        for p in value.positions:
            if p.index == () and p.instruction.opcode == "get-tuple-element":
                return p.instruction
        return None

    def _obstacle(self, value: Value, handle: Instruction, *, is_alone: bool) -> str:
        if not is_alone:
            return "it is updated in place, or carried by a loop"
        known = {value.instruction.id, handle.id}
        for p in value.positions:
            i = p.instruction
            if i.id in known:
                continue
            if i.computation_id != self._entry.id or i.opcode not in _BITCASTS:
                return f"%{i.name} hands it on"
            if i.opcode == "get-tuple-element" and i.operand_ids[0] != value.instruction.id:
                return f"%{i.name} hands it on"
        if value.id not in self._ticks.holders:
            return _ELSEWHERE
        return ""

    def _temporary(
        self, number: int, value: Value, handle: Instruction, obstacle: str
    ) -> Temporary:
        maker = value.instruction
        others = (
            self._dataflow.value_at(maker, index)
            for index, shape in maker.shape.leaves()
            if index != value.index and shape.memory_space == DEVICE_MEMORY_SPACE
        )
        written = self._ticks.tick_of[maker.id]
        holder = self._ticks.holders.get(value.id)
        is_new = holder is not None and holder.live_range.start == written
        return Temporary(
            number,
            handle,
            maker,
            value.shape.byte_size,
            value.shape.byte_size if is_new else 0,
            written,
            tuple(sorted(self._reads(value, handle), key=lambda r: r.tick)),
            self._operands(maker),
            sum(v.shape.byte_size for v in others),
            obstacle,
        )

    def _reads(self, value: Value, handle: Instruction) -> list[Read]:
        shown = [handle, *(p.instruction for p in value.positions if p.index == ())]
        names = {i.id: i for i in shown if i.id == handle.id or i.opcode == "bitcast"}
        users = self._dataflow.users
        return [
            Read(self._ticks.tick_of[u.id], u.name, via.name)
            for via in names.values()
            for u in users.get(via.id, ())
        ]

    def _operands(self, maker: Instruction) -> tuple[Operand, ...] | None:
        if maker.id not in self._repeatable:
            self._repeatable[maker.id] = is_repeatable(self._module, maker)
        if not self._repeatable[maker.id]:
            return None
        found: list[Operand] = []
        for o in maker.operand_ids:
            operand = self._module.instructions[o]
            if not operand.shape.is_array:
                return None
            value = self._dataflow.value_at(operand)
            number = self._number.get(value.id)
            until = 0 if number is not None else self._until(value)
            weight = self._weights.get(value.id, "")
            found.append(Operand(operand.name, number, until, weight))
        return tuple(found)

    def _until(self, value: Value) -> LogicalTime:
        """The tick from which on `value` cannot be read any more."""
        if value.instruction.id in self._copies:
            return 0  # A weight on the host is there for its readers only.
        buffer = self._dataflow.buffer_of(value)
        if buffer.kind == "constant":
            return self._ticks.end
        later = [
            self._ticks.tick_of[v.instruction.id] + 1
            for v in buffer.values
            if v is not value and self._is_behind(v, value)
        ]
        if buffer.kind == "parameter":
            return min(later, default=self._ticks.end)
        last = self._ranges.of_value[value.id].end - 1
        if last < len(self._ranges.sequence):
            later.append(self._ticks.tick_of[self._ranges.sequence[last].id] + 1)
        return min(later, default=self._ticks.end)

    def _is_behind(self, one: Value, other: Value) -> bool:
        time = self._ranges.time_of
        return time[one.instruction.id] > time[other.instruction.id]


_ELSEWHERE = "it lies in bytes that are there anyway"

_BITCASTS = frozenset({"bitcast", "get-tuple-element"})


def bitcast_sources(module: Module, temporaries: Sequence[Temporary]) -> Mapping[str, str]:
    """Maps each bitcast through which a temporary is read to what it is a bitcast of."""
    handles = {t.name for t in temporaries}
    sources: dict[str, str] = {}
    for i in module.entry.instructions:
        if i.opcode == "bitcast":
            below = module.instructions[i.operand_ids[0]].name
            if below in handles or below in sources:
                sources[i.name] = below
    return sources
