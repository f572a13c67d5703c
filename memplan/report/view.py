"""The value that every report shows, and the figures that are read off it.

A `RunView` is one scheduled program (XLA's own, or memplan's); a `Report` sets the runs of
one module beside each other. They hold facts and no presentation: bytes, seconds, logical
ticks. What a page and a table print in common, `figures` words once.

    ticks        0      1      2      3      4
    times        (0,           2,     3)            where the bytes change
    band         8 ────────────► 24 ──► 8 ────►     bytes from times[i] until times[i + 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from hlo_passes.plan import BodyPlan, Decision, LiveRange, LogicalTime, LoopStreams, Split
from hlo_passes.simulator.critical_path import Binding
from hlo_passes.units import format_bytes, format_joules, format_seconds

BandKind = Literal["arguments", "outputs", "constants", "transferred", "temporaries"]

BAND_KINDS: tuple[BandKind, ...] = (
    "arguments",
    "outputs",
    "constants",
    "transferred",
    "temporaries",
)
"""In stacking order, from what never moves to what always does."""


class Step(NamedTuple):
    """An instruction, as a person finds it again.

    Attributes:
      instruction: its HLO name.
      op_name: the framework's name of the operation, ``""`` where XLA made it up.
      source_line: ``file:line``, or ``""``.
    """

    instruction: str
    op_name: str = ""
    source_line: str = ""

    def __str__(self) -> str:
        """``%fusion.3 (jit(step)/dot_general, model.py:12)``."""
        return f"%{self.instruction} ({self.made_by})" if self.made_by else f"%{self.instruction}"

    @property
    def made_by(self) -> str:
        """``jit(step)/dot_general, model.py:12``, or what is known of it."""
        return ", ".join(filter(None, (self.op_name, self.source_line)))


@dataclass(frozen=True, slots=True)
class Band:
    """The bytes of one kind of buffer, aligned with `TierUsage.times`."""

    kind: BandKind
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer that is live at a tier's peak.

    Attributes:
      buffer: the HLO instruction that defines it, with the part's index if any.
      label: the user's name for it, or ``""``.
      kind: what it counts as.
      size: bytes.
      shape: as XLA writes it.
      live_range: half-open, in ticks.
      origin: the defining instruction.
      reader: the first instruction that works on it, or None.
    """

    buffer: str
    label: str
    kind: BandKind
    size: int
    shape: str
    live_range: LiveRange
    origin: Step
    reader: Step | None

    @property
    def name(self) -> str:
        return self.label or f"%{self.buffer}"

    @property
    def about(self) -> str:
        """Where to look in the source: who made it or, of an argument, who reads it first."""
        if not self.label:
            return self.origin.made_by
        return f"read by {self.reader.made_by or self.reader}" if self.reader else ""


@dataclass(frozen=True)
class TierUsage:
    """The bytes that a program holds in one memory, over logical time.

    Attributes:
      tier: ``hbm``, ``host``, ...
      capacity_bytes: what the machine has; None where no machine is known.
      times: the ticks at which a band changes, from 0.
      bands: one for each kind that the tier ever holds, in the order of `BAND_KINDS`.
      end: the tick after the last instruction.
      peak: the instruction that runs at `peak_time`.
      held: the largest buffers that are live at `peak_time`, largest first, of
        `held_count`.
    """

    tier: str
    capacity_bytes: int | None
    times: tuple[LogicalTime, ...]
    bands: tuple[Band, ...]
    end: LogicalTime
    peak: Step
    held: tuple[Held, ...]
    held_count: int

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The sum of the bands, aligned with `times`."""
        return tuple(map(sum, zip(*(band.bytes for band in self.bands), strict=True)))

    @property
    def peak_bytes(self) -> int:
        return max(self.totals)

    @property
    def peak_time(self) -> LogicalTime:
        return self.times[self.totals.index(self.peak_bytes)]


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Device memory, by the names of ``memory_analysis()``.

    Attributes:
      arguments, outputs, aliased, temp: bytes; `aliased` is in both of the first two.
      source: ``"xla"`` if the compiler reported them for its executable, ``"memplan"`` if
        they were worked out from the module.
    """

    arguments: int
    outputs: int
    aliased: int
    temp: int
    source: Literal["xla", "memplan"]

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temp - self.aliased


class TransferSpan(NamedTuple):
    """One execution of a transfer on the clock, in predicted seconds of the step.

    Attributes:
      issued_s: when the compute engine comes to its start.
      begin_s, end_s: when the link begins and ends to carry it.
      hidden_s: how long of that the compute engine is at work.
    """

    issued_s: float
    begin_s: float
    end_s: float
    hidden_s: float


TransferKind = Literal["fetch", "evict", "refetch", "copy", "collective"]
"""``"fetch"`` brings what the host had, ``"evict"`` takes away what the device made, and
``"refetch"`` brings that back; ``"copy"`` stays on the device, between its memory and the chip;
a ``"collective"`` goes to other devices."""


@dataclass(frozen=True, slots=True)
class TransferView:
    """An asynchronous copy between two tiers, or a collective; in a loop one for all iterations.

    Attributes:
      buffer: HLO name of what moves.
      label: the user's name for it, or ``""``.
      kind: where it comes from, and where it goes.
      source, destination: tier names; a collective's destination is the interconnect.
      size: bytes that one execution moves.
      executions: how often it runs in a step; a loop of unknown count is counted once.
      loop: HLO name of the innermost loop that it is in, or ``""``.
      start, done: ticks at which it is issued and waited for.
      computes_between: how many instructions that do work run in between; 0 means that
        nothing can hide it.
      spans: one for each execution, in order; none without a machine.
    """

    buffer: str
    label: str
    kind: TransferKind
    source: str
    destination: str
    size: int
    executions: int
    loop: str
    start: LogicalTime
    done: LogicalTime
    computes_between: int
    spans: tuple[TransferSpan, ...] = ()

    @property
    def name(self) -> str:
        return self.label or self.buffer

    @property
    def on_chip(self) -> bool:
        """Whether it fills or drains on-chip memory, and does not leave the device."""
        return self.kind == "copy"

    @property
    def route(self) -> str:
        return f"{self.source}→{self.destination}"

    @property
    def moved_bytes(self) -> int:
        """Bytes that it moves in a step."""
        return self.size * self.executions

    @property
    def busy_s(self) -> float | None:
        """Predicted seconds of a step that the link carries it; None without a machine."""
        return sum(s.end_s - s.begin_s for s in self.spans) if self.spans else None

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a step that travel while the compute engine works; without a machine, all
        or none."""
        if not self.spans:
            return self.moved_bytes if self.computes_between else 0
        return sum(self.size * _share(s) for s in self.spans)


def _share(span: TransferSpan) -> float:
    """The fraction of an execution that the compute engine hides."""
    seconds = span.end_s - span.begin_s
    return min(1.0, span.hidden_s / seconds) if seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class LoopView:
    """A loop whose body moves bytes between tiers.

    Attributes:
      step: the instruction that runs it.
      trip_count: iterations each time; None if it is not known.
      iterations: of all times that it runs in a step; one of unknown count is counted once.
    """

    step: Step
    trip_count: int | None
    iterations: int


Return = Literal["fetched", "computed again"]
"""How a temporary comes back."""


@dataclass(frozen=True, slots=True)
class SplitView:
    """A temporary that is not on the device all the time that it is needed.

    Attributes:
      buffer: HLO name of the instruction that makes it.
      size: bytes.
      returns: how it comes back.
      held: the plan's ticks in which a slot on the device holds it, in order.
    """

    buffer: str
    size: int
    returns: Return
    held: tuple[LiveRange, ...]


class ComputeSpan(NamedTuple):
    """Seconds during which the instruction at `tick` runs, or waits.

    Attributes:
      stall: the compute engine waits for a transfer; `tick` is the one that waits.
    """

    tick: LogicalTime
    start_s: float
    end_s: float
    stall: bool


@dataclass(frozen=True)
class Clock:
    """What a machine model says of the run's seconds. Predictions, not measurements.

    Attributes:
      machine: the machine's name.
      step_time_s: of one step.
      lower_bound_s: no schedule of the run's own transfers can be faster on this machine
        model; of a plan, no schedule within its budget.
      compute_s: the sum of the instructions' costs, `recompute_s` of it for what is computed
        again.
      stall_s: of the step, how long the compute engine waits for transfers.
      link_s: how long the busiest link is busy; `link` is its route, ``""`` without any.
      interconnect_s: how long asynchronous collectives are under way.
      binding: what holds the step's time.
      joules: of one step; None where the machine's file says nothing of energy.
      spans: of the compute engine, in order, without overlap.
    """

    machine: str
    step_time_s: float
    lower_bound_s: float
    compute_s: float
    recompute_s: float
    stall_s: float
    link_s: float
    link: str
    interconnect_s: float
    binding: Binding
    joules: float | None
    spans: tuple[ComputeSpan, ...]

    @property
    def gap(self) -> float:
        """How much longer than the bound a step is, as a fraction of the bound."""
        return self.step_time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0


@dataclass(frozen=True)
class RunView:
    """One scheduled program.

    Attributes:
      name: what a column is headed with: ``"XLA alone"``, ``"memplan"``.
      module: the module's name.
      steps: the instruction at each tick.
      tiers: memories that the program uses, device memory first; not those on the chip.
      device: its bytes there.
      transfers: those that run, each once, in the order of their first issue.
      loops: those that move bytes, in program order.
      order: ``before → after (reason)``: the orders beyond dataflow that it keeps.
      clock: None when no machine was named.
      is_planned: whether it follows a plan.
      streams: what was decided about loops over stacks before XLA saw them.
      left_alone: why an argument is on the device as a whole, by the user's path.
      compiler_options: the XLA options that the streams need.
      collectives: asynchronous ones, each once.
      recomputed: HLO name of an instruction that runs again to that of the first one.
      is_reordered: whether its plan changes the order of XLA's instructions.
      chunks: what of the user's program is run in chunks.
      split: the temporaries that leave the device and come back.
      decisions: what was decided about temporaries that are idle while memory is short.
      bodies: the plans of the loops' bodies that have one of their own.
    """

    name: str
    module: str
    steps: tuple[Step, ...]
    tiers: tuple[TierUsage, ...]
    device: DeviceBytes
    transfers: tuple[TransferView, ...]
    loops: tuple[LoopView, ...]
    order: tuple[str, ...]
    clock: Clock | None
    is_planned: bool = False
    streams: tuple[LoopStreams, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict[str, str])
    compiler_options: Mapping[str, str] = field(default_factory=dict[str, str])
    collectives: tuple[TransferView, ...] = ()
    recomputed: Mapping[str, str] = field(default_factory=dict[str, str])
    is_reordered: bool = False
    chunks: tuple[Split, ...] = ()
    split: tuple[SplitView, ...] = ()
    decisions: tuple[Decision, ...] = ()
    bodies: tuple[BodyPlan, ...] = ()

    @property
    def off_device(self) -> tuple[TransferView, ...]:
        """The transfers to and from slower memories: not those into on-chip memory."""
        return tuple(t for t in self.transfers if not t.on_chip)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step moves to and from slower memories, those of loops included."""
        return sum(t.moved_bytes for t in self.off_device)

    @property
    def overlapped(self) -> float | None:
        """The fraction of the moved bytes that travel while compute runs; None without any."""
        if not self.moved_bytes:
            return None
        return sum(t.hidden_bytes for t in self.off_device) / self.moved_bytes


@dataclass(frozen=True)
class Report:
    """The runs of one module beside each other: one, or before and after.

    Attributes:
      title: the module's name.
      machine: the machine's name, or ``""``.
      budget_bytes: what the device was asked to keep to, or None.
      version: memplan's.
    """

    title: str
    machine: str
    budget_bytes: int | None
    runs: tuple[RunView, ...]
    version: str

    @property
    def note(self) -> str:
        """What is to be said of it as a whole."""
        if self.budget_bytes is None or any(run.is_planned for run in self.runs):
            return ""
        return "XLA's own program keeps to the budget: no plan was needed"


class Figure(NamedTuple):
    """A row of the table of numbers.

    Attributes:
      label: with "predicted" where a machine model made it.
      values: a text for each run.
      amounts: the number behind each text, None where there is none.
      note: what the label leaves open.
    """

    label: str
    values: tuple[str, ...]
    amounts: tuple[float | None, ...]
    note: str


def figures(report: Report) -> tuple[Figure, ...]:
    """Returns the numbers of a report, in the order of interest.

    Rows that no run has a value for are left out.
    """
    return tuple(f for f in _figures(report) if any(a is not None for a in f.amounts))


def _figures(report: Report) -> Iterator[Figure]:
    memory = report.runs[0].tiers[0].tier.upper() if report.runs[0].tiers else "Device"

    def figure(
        label: str,
        read: Callable[[RunView], float | None],
        write: Callable[[float], str],
        note: str = "",
    ) -> Figure:
        amounts = tuple(map(read, report.runs))
        return Figure(label, tuple("–" if a is None else write(a) for a in amounts), amounts, note)

    def timed(read: Callable[[Clock], float | None]) -> Callable[[RunView], float | None]:
        return lambda run: None if run.clock is None else read(run.clock)

    worked_out = any(run.device.source == "memplan" for run in report.runs)
    source = "worked out from the module" if worked_out else "as XLA reports it"
    yield figure(f"{memory} temp", lambda r: r.device.temp, format_bytes, source)
    yield figure(
        f"{memory} total",
        lambda r: r.device.total,
        format_bytes,
        "arguments + outputs + temp − aliased",
    )
    yield figure(
        f"{memory} lower bound",
        lambda r: r.tiers[0].peak_bytes if r.tiers else None,
        format_bytes,
        "the most that is live at once: no packing of this schedule takes less",
    )
    yield figure("Budget", lambda _: report.budget_bytes, format_bytes)
    yield figure(f"Arguments in {memory}", lambda r: r.device.arguments, format_bytes)
    in_loops = any(t.executions > 1 for run in report.runs for t in run.off_device)
    yield figure(
        "Moved",
        lambda r: r.moved_bytes or None,
        format_bytes,
        "bytes over links in a step" + (", each iteration of a loop counted" * in_loops),
    )
    yield figure(
        "Overlapped",
        lambda r: r.overlapped,
        lambda fraction: f"{fraction:.1%}",
        "of the moved bytes, while compute runs",
    )
    yield figure("Step time, predicted", timed(lambda c: c.step_time_s), format_seconds)
    yield figure(
        "Step time lower bound, predicted",
        timed(lambda c: c.lower_bound_s),
        format_seconds,
        "for the same transfers; with a plan, for any of its program within the budget",
    )
    yield figure(
        "Gap to the lower bound, predicted",
        timed(lambda c: c.gap),
        lambda fraction: f"{fraction:.1%}",
        "how much longer than the bound a step is",
    )
    yield Figure(
        "Bound by, predicted",
        tuple("–" if run.clock is None else binding_in_words(run) for run in report.runs),
        tuple(None if run.clock is None else 1.0 for run in report.runs),
        "parts of the chain of events of which each waits for the one before",
    )
    reordered = any(run.is_reordered for run in report.runs)
    yield Figure(
        "Order of instructions",
        tuple("memplan's" if run.is_reordered else "XLA's" for run in report.runs),
        tuple(float(run.is_reordered) if reordered else None for run in report.runs),
        "",
    )
    yield figure("Compute, predicted", timed(lambda c: c.compute_s), format_seconds)
    yield figure(
        "Computed again, predicted",
        timed(lambda c: c.recompute_s or None),
        format_seconds,
        "of the compute, so that it need not be kept",
    )
    yield figure(
        "Stalls, predicted", timed(lambda c: c.stall_s), format_seconds, "waiting for transfers"
    )
    yield figure(
        "Link busy, predicted",
        timed(lambda c: c.link_s / c.step_time_s if c.link and c.step_time_s else None),
        lambda fraction: f"{fraction:.1%}",
        "of the step; at 100% the link is what holds it",
    )
    yield figure(
        "Energy, predicted",
        timed(lambda c: c.joules),
        format_joules,
        "of a step: static watts, operations, and bytes of memories and links",
    )
    yield figure(
        "Collectives, predicted",
        timed(lambda c: c.interconnect_s or None),
        format_seconds,
        "asynchronous ones, on the interconnect",
    )


def binding_in_words(run: RunView) -> str:
    """``compute 86.6%, memory at act.3 13.4%``: parts of less than a percent are left out."""
    assert run.clock is not None
    held = run.clock.binding
    # XLA's own order may start a fetch late for no reason.
    late = f"{'memory' if run.is_planned else 'late start'} at {held.at or 'the beginning'}"
    parts = ((late if engine == "memory" else engine, s) for engine, s in held.shares.items())
    return ", ".join(f"{name} {share:.1%}" for name, share in parts if share >= 0.01)
