"""The plan: a frozen value that says where every buffer lives and when it moves.

Time is logical. Let c0, c1, ... be the entry computation's schedule without the host
transfers that memplan manages; *tick* t is the moment just before ``ct`` runs.

    tick        0        1        2        3        4
    compute         c0       c1       c2       c3
    transfer w2          start ─────► done                  start=1, done=2
    slot of w2           [───── live_range ─────)           LiveRange(1, 3)

At a tick, evictions come first, and stores, which take to the host what the program returns
there: their starts are issued, then their dones wait. Then the other starts are issued, in the
order of ``Plan.transfers``, and their dones wait. So what starts at a tick may overwrite what an
eviction that is done there has left behind, and may fetch it again.
A transfer occupies its slot from its start until after the last instruction that reads
it, so ``live_range.end`` is the tick after that instruction. All ranges are half-open.

What stands in loops, and what the entry fetches or stores by the slice, is scheduled
computation by computation, each with ticks of its own (`LoopSchedule`). `LoopStreams` says
which arrays of the user's program these are slices of. A body that brings whole weights, or
whose temporaries are evicted or computed again, has a plan of its own, as if it were the entry
(`BodyPlan`).

`Edits` say what else is done to the entry before transfers are placed in it: the order of
its compute, what is computed twice, and which temporaries leave the device for a while. The
ticks are those of the edited entry.

Buffers are named by the HLO instruction that defines them (for an argument: its
parameter instruction), and ``labels`` gives the user's name for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from hlo_passes.errors import PlanFormatError
from hlo_passes.units import format_bytes, format_joules, format_seconds

FORMAT_VERSION = 8

LogicalTime = int


class LiveRange(NamedTuple):
    """Half-open interval of ticks."""

    start: LogicalTime
    end: LogicalTime

    def overlaps(self, other: LiveRange) -> bool:
        return self.start < other.end and other.start < self.end


ON_CHIP = "on_chip"
"""The allocation of what XLA is known to hold on the chip: none of the device's bytes."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An arena in a tier, of `size` bytes, in which slots have offsets."""

    name: str
    tier: str
    size: int


@dataclass(frozen=True, slots=True)
class Slot:
    """`size` bytes at `offset` of an allocation, held by `buffer` during `live_range`."""

    buffer: str
    allocation: str
    offset: int
    size: int
    live_range: LiveRange


@dataclass(frozen=True, slots=True)
class Transfer:
    """One asynchronous copy of a buffer between tiers.

    Attributes:
      id: its place in the plan's issue order.
      buffer: the HLO name of the value that moves: a parameter, or the instruction of the
        entry whose result is evicted and fetched again, or returned in host memory.
      source, destination: tier names.
      size: bytes moved.
      start: tick at which it is issued.
      done: tick at which its reader waits for it; ``start <= done``. Of an eviction the tick
        from which its bytes on the device may be overwritten.
      end: tick after the last instruction that reads this copy; of an eviction the tick at
        which the last fetch of it is done, of what is returned the end of the program.
      kind: ``"prefetch"`` brings data to the device, ``"evict"`` takes it away.
    """

    id: int
    buffer: str
    source: str
    destination: str
    size: int
    start: LogicalTime
    done: LogicalTime
    end: LogicalTime
    kind: Literal["prefetch", "evict"] = "prefetch"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens in the planned program: ``compute`` t, or the ``start`` or
    ``done`` of transfer i."""

    kind: Literal["compute", "start", "done"]
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    @classmethod
    def parse(cls, text: str, where: str = "event") -> Event:
        kind, _, index = text.partition(":")
        if kind not in ("compute", "start", "done") or not index.isdecimal():
            raise PlanFormatError(where, text, "'compute:N', 'start:N' or 'done:N'")
        return cls(kind, int(index))


@dataclass(frozen=True, slots=True)
class Fence:
    """`before` must have finished when `after` begins.

    ``reason="data"``: `after` reads what `before` brought. ``reason="reuse"``: `after`
    overwrites bytes that `before` still read.
    """

    before: Event
    after: Event
    reason: Literal["data", "reuse"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an argument lives when the step is called.

    Attributes:
      parameter: its parameter number in the entry computation.
      buffer: the HLO name of its parameter instruction.
      tier: the tier's name; ``size`` its bytes there.
      in_place: the program reads it there, by the slice (CPU); otherwise transfers bring it.
    """

    parameter: int
    buffer: str
    tier: str
    size: int
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the machine model says of the plan. Predictions, not measurements.

    Attributes:
      arguments_bytes, outputs_bytes, alias_bytes, temp_bytes: device bytes, named as in
        ``memory_analysis()``; `temp_bytes` is the size of the packed arena.
      lower_bound_bytes: the largest sum of live temporaries at any tick; no packing of
        this schedule can use less.
      step_time_s: predicted time of one step; `stall_s` of it the compute engine waits
        for a transfer.
      compute_s: the sum of the instructions' costs, `recompute_s` of it for what is
        computed again (below 0 where that takes less than to write and read it); `link_s` the
        time the links are busy.
      lower_bound_s: no plan within this budget can be faster on this machine model.
      joules: of one step; `recompute_j` of it for what is computed again (below 0 where that takes
        less). None, and 0, where the machine's file says nothing of energy.
      p99_s: what 99 of 100 steps take at most where kernels and transfers vary; None where it is
        not said by how much.
    """

    arguments_bytes: int
    outputs_bytes: int
    alias_bytes: int
    temp_bytes: int
    lower_bound_bytes: int
    step_time_s: float
    compute_s: float
    link_s: float
    stall_s: float
    lower_bound_s: float
    recompute_s: float = 0.0
    joules: float | None = None
    recompute_j: float = 0.0
    p99_s: float | None = None

    @property
    def gap(self) -> float:
        """How much longer than the bound a step is, as a fraction of the bound."""
        return self.step_time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long a step takes as with everything on the device."""
        plain_s = self.compute_s - self.recompute_s
        return self.step_time_s / plain_s if plain_s else 1.0

    @property
    def total_bytes(self) -> int:
        return self.arguments_bytes + self.outputs_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True, slots=True)
class LoopTransfer:
    """One asynchronous transfer between host and device memory in a `LoopSchedule`.

    Attributes:
      id: its place in the computation's issue order.
      start_name, done_name: HLO names of the pair.
      source, destination: tier names.
      size: bytes that one execution moves.
      start: tick at which it is issued.
      done: tick at which it is waited for; ``start <= done``.
      end: tick after the last instruction that reads what was fetched, the computation's
        end if it is handed on; of a store `done`.
      start_after, done_after: HLO names of the last instruction before that takes time and
        that XLA leaves where it is; ``""`` for none. They hold in the executable, whose
        schedule has other ticks.
      kind: ``"prefetch"`` brings data to the device, ``"evict"`` takes it away.
    """

    id: int
    start_name: str
    done_name: str
    source: str
    destination: str
    size: int
    start: LogicalTime
    done: LogicalTime
    end: LogicalTime
    start_after: str
    done_after: str
    kind: Literal["prefetch", "evict"]


@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """The transfers of one computation: the body of a loop, what is called, or the entry.

    Tick t is the moment before the t-th of the computation's instructions, these transfers'
    starts and dones not counted. At a tick each start is issued behind the dones that it
    needs, in the order of `transfers`; the other dones follow.

    Attributes:
      computation: its HLO name.
      loop: HLO name of the instruction that runs it; ``""`` for the entry.
      trip_count: how often `loop` runs it, if that is known.
      depth: how many loops and calls it lies in; 0 for the entry.
      executions: how often it runs in a step; a loop of unknown count is counted once.
      ticks: how many it has.
      transfers: in issue order.
      dropped_copies: HLO names of copies of what was fetched that this order needs no more.
      is_resequenced: whether the plan orders the computation; if not, XLA's order stays, and
        the ticks are where it has the transfers.
    """

    computation: str
    loop: str
    trip_count: int | None
    depth: int
    executions: int
    ticks: int
    transfers: tuple[LoopTransfer, ...]
    dropped_copies: tuple[str, ...]
    is_resequenced: bool

    @property
    def moved_bytes(self) -> int:
        """Bytes that its transfers move in a step."""
        return self.executions * sum(t.size for t in self.transfers)


@dataclass(frozen=True, slots=True)
class LoopStack:
    """An array with a leading axis of layers that a loop takes apart, or puts together.

    Attributes:
      name: the user's path of an argument; of what loops make, what it is.
      shape: of the whole array on all devices, as XLA writes it.
      slice_bytes: what one layer reads or writes of it on one device.
      checkpoint_name, line: of what loops make, the user's name for it, and ``file:line`` of what
        makes it; ``""`` where there is none.
    """

    name: str
    shape: str
    slice_bytes: int
    checkpoint_name: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class LoopStreams:
    """What was decided about the stacks of one loop before XLA saw the program.

    Attributes:
      source_line: ``file:line`` of the loop in the user's program.
      length: its layers; `runs`: how often it runs in a step, as far as is known.
      slots: how many layers of what it reads from the host are on the device at once; 0 when
        all of its stacks are there.
      share: the stacks that a layer reads first, up to this share of the bytes that it
        fetches, have so many; the others have one.
      fetched, stored: on the host; a stack may be both.
      on_device: could be streamed too, and are not.
    """

    source_line: str
    length: int
    runs: int
    slots: int
    share: float
    fetched: tuple[LoopStack, ...]
    stored: tuple[LoopStack, ...]
    on_device: tuple[LoopStack, ...]

    @property
    def fetched_bytes(self) -> int:
        """What one layer fetches."""
        return sum(stack.slice_bytes for stack in self.fetched)

    @property
    def stored_bytes(self) -> int:
        """What one layer stores."""
        return sum(stack.slice_bytes for stack in self.stored)


@dataclass(frozen=True, slots=True)
class Recompute:
    """An instruction of the entry that runs once more, so that its result need not be kept.

    Attributes:
      clone: HLO name of the second one.
      original: HLO name of the first one.
      before: HLO name of the instruction of the module that it stands in front of.
      readers: HLO names of what reads the clone instead of the original: instructions of the
        module, or other clones.
    """

    clone: str
    original: str
    before: str
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refetch:
    """An evicted temporary comes back in front of `before`, for `readers` (as in `Recompute`)."""

    before: str
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A temporary that leaves the device between two of its readers.

        after: last reader ──► evict ┄┄┄┄ host ┄┄┄┄► fetch ──► before: next reader

    Attributes:
      buffer: HLO name of the instruction of the entry whose result it is: an array.
      after: HLO name of the last instruction that reads it on the device, `buffer` itself
        when none does; an element of a tuple then stands right behind what makes that.
      refetches: in the order of the schedule; the copy in the host's memory serves them all.
    """

    buffer: str
    after: str
    refetches: tuple[Refetch, ...]


@dataclass(frozen=True, slots=True)
class Edits:
    """What is done to the entry before transfers are placed in it, in this order.

    Attributes:
      order: HLO names of the entry's instructions in a new order, parameters left out; empty
        when the order is XLA's.
      recomputes: clones in front of one instruction stand in this order, behind refetches.
      evictions: of temporaries.
    """

    order: tuple[str, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    evictions: tuple[Eviction, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.order or self.recomputes or self.evictions)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about a temporary that is idle while memory is short, and at what price.

    Attributes:
      buffer: HLO name of the instruction whose result it is.
      size: bytes.
      action: what is done with it.
      after, before: HLO names of the last instruction that reads it before it is idle, and of
        the first one behind.
      idle_s: predicted seconds of compute in between.
      transfer_s: seconds for which taking it away and back occupies links; None where it
        cannot be moved.
      recompute_s: seconds of compute to make it again; None where that is not possible.
      obstacle: why it cannot be moved or recomputed, where it cannot; else ``""``.
    """

    buffer: str
    size: int
    action: Literal["keep", "evict", "recompute"]
    after: str
    before: str
    idle_s: float
    transfer_s: float | None
    recompute_s: float | None
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Preparation:
    """Which program of the user's a plan is for, and what was done to that before XLA saw it.

    Attributes:
      function: its name.
      fingerprint: `Module.fingerprint` of the program as jax lowers it.
      signature: the flat arguments, as ``"params.w: float32[8,512]"``.
      devices: how many it runs on.
      budget_bytes: what was asked for; the plan's own leaves out what XLA was seen to add.
      versions: of what made the plan, by package.
      offered: flat numbers of the arguments that were free to leave the device.
      hosted: those of them that live on the host.
      hosted_results: results of scans that do: the path to the scan's equation, and their number.
      depth, share: of rings, as in `LoopStreams`.
      lagging: paths to the scans whose rings of one slot store while the next layer comes.
      hosted_inside: flat numbers of those that loops bring whole, in each iteration.
      nested: whether also loops inside loops do.
      recomputed: what scans compute again of what others leave for them.
      aim: bytes that are to be live, for which parts of it are run in chunks; None where none is.
      split: glob patterns of the lines of which some may be.
      argument_layouts, result_layouts: flat numbers of those that are not as jax has them, and
        their dimensions, minor to major; None is left to XLA.
      donors: flat numbers of results that are laid out, and of the arguments whose place they take.
      objective: what it is best for, as `memplan.Objective` writes it.
      jitter: by how much kernels and transfers were taken to vary; None for not at all.
      forms: how products take their operands, by their number in the program: which dimensions
        of the left and of the right one are the innermost, and whether the result is in rows.
    """

    function: str
    fingerprint: str
    signature: tuple[str, ...]
    devices: int
    budget_bytes: int
    versions: Mapping[str, str]
    offered: tuple[int, ...]
    hosted: tuple[int, ...]
    hosted_results: tuple[tuple[tuple[int, ...], int], ...]
    depth: int
    share: float
    lagging: tuple[tuple[int, ...], ...] = ()
    hosted_inside: tuple[int, ...] = ()
    nested: bool = False
    recomputed: Literal["nothing", "elementwise", "everything"] = "nothing"
    aim: int | None = None
    split: tuple[str, ...] = ()
    argument_layouts: tuple[tuple[int, tuple[int, ...] | None], ...] = ()
    result_layouts: tuple[tuple[int, tuple[int, ...] | None], ...] = ()
    donors: tuple[tuple[int, int], ...] = ()
    forms: tuple[tuple[int, str | None, str | None, bool], ...] = ()
    objective: str = "latency"
    jitter: float | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """A part of the user's program that is run in chunks, in a loop.

    Attributes:
      parts: how many.
      array: the largest that is never there as a whole, as ``"float32[8192,128256]"``.
      size: bytes that it would take as a whole.
      chunk: bytes that its chunks take, at most.
      dimension: of it, that is cut.
      operations: in the loop.
      line: of the user's program, where that is known of what makes the array, or of something
        else in the loop; else ``""``.
    """

    parts: int
    array: str
    size: int
    chunk: int
    dimension: int
    operations: int
    line: str

    def __str__(self) -> str:
        at = f" ({self.line})" if self.line else ""
        return (
            f"{self.parts} chunks along dimension {self.dimension} of {self.array}{at}, "
            f"{self.operations} operations"
        )


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """The plan of a loop's body: what every iteration brings, evicts and computes again.

    Attributes:
      computation: the body's HLO name.
      loop: HLO name of the ``while`` that runs it.
      executions: how often it runs in a step; a loop of unknown count is counted once.
      arguments: parameter numbers of the weights in `plan`, and in the module.
      plan: of the body as a program of its own (`bodies.Body`): a step of it is an iteration, its
        budget and its bytes are without what else the module holds meanwhile.
    """

    computation: str
    loop: str
    executions: int
    arguments: tuple[tuple[int, int], ...]
    plan: Plan

    @property
    def moved_bytes(self) -> int:
        """Bytes that it moves in a step of the module."""
        return self.executions * self.plan.moved_bytes


@dataclass(frozen=True, repr=False)
class Plan:
    """Where every buffer lives and when it moves, for one module on one machine.

    Attributes:
      module_fingerprint: `Module.fingerprint` of the module it was made for.
      machine: the machine's name.
      budget_bytes: the device bytes it was asked to keep to.
      placements: the tier of every argument.
      allocations, slots: the buffer assignment.
      transfers: in issue order.
      fences: the orders that must hold for the plan to be right.
      device_tier: name of the tier that the program computes in.
      loops: the transfers in loop bodies, and those of the entry that move no whole argument.
      bodies: the plans of loops' bodies that have one of their own, callees first.
      splits: what is run in chunks, and
      streams: what was decided about loops over stacks, before XLA saw the program.
      left_alone: why an argument that a loop reads cannot be streamed, and one that is donated
        or not offered cannot be moved, by the user's path.
      compiler_options: the XLA options that it was made with and needs.
      edits: what is done to the entry before transfers are placed in it.
      decisions: what was decided about temporaries that are idle while memory is short,
        largest first.
      labels: HLO buffer name to the user's name.
      preparation: what it takes to follow it from the user's function on; None for a plan that was
        made of a module.
    """

    module_fingerprint: str
    machine: str
    budget_bytes: int
    placements: tuple[Placement, ...]
    allocations: tuple[Allocation, ...]
    slots: tuple[Slot, ...]
    transfers: tuple[Transfer, ...]
    fences: tuple[Fence, ...]
    prediction: Prediction
    device_tier: str = "hbm"
    loops: tuple[LoopSchedule, ...] = ()
    bodies: tuple[BodyPlan, ...] = ()
    splits: tuple[Split, ...] = ()
    streams: tuple[LoopStreams, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict[str, str])
    compiler_options: Mapping[str, str] = field(default_factory=dict[str, str])
    edits: Edits = Edits()
    decisions: tuple[Decision, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    preparation: Preparation | None = None

    def __repr__(self) -> str:
        used = f"{format_bytes(self.prediction.total_bytes)} of {format_bytes(self.budget_bytes)}"
        return f"<Plan for {self.machine}: {used}; {self.predicted}>"

    @property
    def predicted(self) -> str:
        """What it moves, and what a step is predicted to take, for a person."""
        step = format_seconds(self.prediction.step_time_s)
        if self.prediction.p99_s is not None:
            step += f" (99 of 100: {format_seconds(self.prediction.p99_s)})"
        best_for = "" if self.preparation is None else self.preparation.objective
        if self.prediction.joules is not None and ("energy" in best_for or "joules" in best_for):
            step += f" and {format_joules(self.prediction.joules)}"
        return (
            f"{format_bytes(self.moved_bytes)} moved in a step of {step} (predicted), "
            f"{self.prediction.slowdown:.2f}x that with everything on the device"
        )

    @property
    def host_parameters(self) -> tuple[int, ...]:
        """Parameter numbers of the arguments that live off the device."""
        return tuple(p.parameter for p in self.placements if p.tier != self.device_tier)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step moves between tiers."""
        loops = sum(loop.moved_bytes for loop in self.loops)
        bodies = sum(body.moved_bytes for body in self.bodies)
        return loops + bodies + sum(t.size for t in self.transfers)

    @property
    def fingerprint(self) -> str:
        """A digest of all that is written into the module. For how many bytes that was planned,
        where they lie, and what is predicted of it, is left out: two plans may differ in these."""
        written = [
            self.module_fingerprint,
            self.machine,
            [self.compiler_options, self.transfers, self.fences, self.loops, self.edits],
            [(body.computation, body.plan.fingerprint) for body in self.bodies],
        ]
        return hashlib.sha256(json.dumps(_encode(written), sort_keys=True).encode()).hexdigest()[
            :16
        ]

    def to_json(self, indent: int | None = None) -> str:
        """Writes the plan as versioned JSON that `from_json` reads back equal."""
        document: dict[str, Any] = {"format": "memplan.plan", "version": FORMAT_VERSION}
        for f in dataclasses.fields(self):
            document[f.name] = _encode(getattr(self, f.name))
        return json.dumps(document, indent=indent, sort_keys=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads what `to_json` wrote.

        Raises:
          PlanFormatError: when it is no plan, of another version, or a field is missing
            or of the wrong kind.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanFormatError("plan", text[:40], f"JSON ({error})") from error
        if not isinstance(document, dict) or document.get("format") != "memplan.plan":
            raise PlanFormatError("format", _found(document, "format"), "'memplan.plan'")
        if document.get("version") != FORMAT_VERSION:
            raise PlanFormatError("version", document.get("version"), str(FORMAT_VERSION))
        return _decode(cls, document, "plan")

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self.to_json(indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Reads what `save` wrote.

        Raises:
          OSError: when there is no such file.
          PlanFormatError: as `from_json`.
        """
        return cls.from_json(Path(path).read_bytes())


def _encode(value: Any) -> Any:
    if isinstance(value, Event):
        return str(value)
    if isinstance(value, LiveRange):
        return [value.start, value.end]
    if isinstance(value, tuple | list):
        return [_encode(v) for v in cast("tuple[Any, ...] | list[Any]", value)]
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """What `_encode` made of something of that type."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return None if value is None else _decode(arguments[0], value, where)
    if origin is Event and isinstance(value, str):
        return Event.parse(value, where)
    if origin is LiveRange and isinstance(value, list):
        return LiveRange(*_decode(tuple[int, int], value, where))
    if origin is tuple and isinstance(value, list):
        found = cast("list[Any]", value)
        kinds = arguments[:1] * len(found) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(found):
            pairs = enumerate(zip(kinds, found, strict=True))
            return tuple(_decode(k, v, f"{where}[{n}]") for n, (k, v) in pairs)
    if origin is Mapping and isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {k: _decode(arguments[1], v, f"{where}[{k!r}]") for k, v in found.items()}
    if dataclasses.is_dataclass(origin) and isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        kinds = _kinds(origin)
        if missing := sorted(kinds.keys() - found.keys()):
            raise PlanFormatError(f"{where}.{missing[0]}", "nothing", "a value")
        return origin(**{n: _decode(k, found[n], f"{where}.{n}") for n, k in kinds.items()})
    if origin is float and type(value) in (int, float):
        return value
    if origin in (int, str, bool) and type(value) is origin:
        return value
    if origin is Literal and value in arguments:
        return value
    raise PlanFormatError(where, value, str(kind) if arguments else kind.__name__)


@cache
def _kinds(record: Any) -> dict[str, Any]:
    """The types of a record's fields."""
    return get_type_hints(record)


def _found(document: Any, key: str) -> object:
    return document.get(key) if isinstance(document, dict) else document
