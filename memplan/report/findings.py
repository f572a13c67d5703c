"""What a person who looks into a program's memory wants to know, beside a `RunView`.

    held        what is live at the peak, by source line, by scope, by opcode
    heap        XLA's packing of it, and ours
    idle        temporaries that nobody works on for long
    resting     arguments that nobody works on at the peak
    relayouts   what only moves bytes, and for whom
    layouts     which arguments, given in another layout, would save that
    donations   arguments given away, and what came of it
    kernels     who moves most bytes
    hbm         what fusions save of these bytes, and what none can
    pairs       which kernels hand each other arrays through memory, and why

Facts, in bytes, seconds and ticks; `memplan.report.inspecting` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hlo_passes.analysis.donation import Fate
from hlo_passes.analysis.launches import Launches
from hlo_passes.fusions.pairs import PairReason
from hlo_passes.fusions.traffic import FusionTraffic
from hlo_passes.layouts.relayouts import Reorder
from hlo_passes.plan import LiveRange
from memplan.report.view import Step

GroupedBy = Literal["source", "scope", "opcode"]


@dataclass(frozen=True, slots=True)
class Group:
    """Buffers that are live at the peak and have something in common.

    Attributes:
      name: a source line, a scope or an opcode; ``""`` of those that have none.
      size: bytes.
      count: of buffers.
    """

    name: str
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class HeapView:
    """The bytes that temporaries share in device memory.

    Attributes:
      allocated: bytes that XLA took for them, tables of pointers included; None where it does not
        say.
      predicted: bytes that memplan's model of XLA takes.
      live: bytes that are live at the peak: no packing takes less.
      padding: of the live ones, how many are there for the tiles' sake only.
      assigned: the sum of all buffers that lie in it at some time; None where XLA does not say.
      peak: the instruction at the peak.
    """

    allocated: int | None
    predicted: int
    live: int
    padding: int
    assigned: int | None
    peak: Step | None

    @property
    def size(self) -> int:
        return self.predicted if self.allocated is None else self.allocated

    @property
    def fragmentation(self) -> int:
        """Bytes that packing takes more than what is live at most."""
        return self.size - self.live


@dataclass(frozen=True, slots=True)
class IdleView:
    """A temporary that nobody works on for a while.

    Attributes:
      step: the instruction that makes it.
      size: bytes.
      ticks: half-open.
      seconds: of compute in between, predicted; None without a machine.
      after, before: who works on it last and next.
      at_peak: whether the peak is in between.
    """

    step: Step
    size: int
    ticks: LiveRange
    seconds: float | None
    after: Step
    before: Step
    at_peak: bool


@dataclass(frozen=True, slots=True)
class RestingView:
    """Arguments on the device that nobody works on at the peak.

    Attributes:
      name: the path that they have in common, `memplan.paths.dotted`.
      size: bytes of all.
      count: how many.
      seconds: of compute around the peak for which none of them is worked on, predicted; None
        without a machine.
      link_s: for which the link is busy in a step if they are on the host: with bringing them,
        and with what takes their places; None without a machine that has such a link.
    """

    name: str
    size: int
    count: int
    seconds: float | None
    link_s: float | None


@dataclass(frozen=True, slots=True)
class RelayoutView:
    """An instruction that only moves bytes.

    Attributes:
      step: it.
      kind: how.
      shape: what is moved.
      moved_bytes: in a step, read and written.
      seconds: of a step, predicted; None without a machine.
      why: who wants which order; ``""`` where the order stays.
      can_be_told: whether it stands between two products that XLA can be told how to take their
        operands.
    """

    step: Step
    kind: Reorder
    shape: str
    moved_bytes: int
    seconds: float | None
    why: str
    can_be_told: bool = False


@dataclass(frozen=True, slots=True)
class LayoutView:
    """An argument that would better be given in another layout.

    Attributes:
      name: the user's, or HLO's.
      shape: with the type.
      size: bytes.
      before, after: layouts, minor to major, as HLO writes them.
    """

    name: str
    shape: str
    size: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class DonationView:
    """An argument that is given away, or could be.

    Attributes:
      name: the user's, or HLO's.
      size: bytes.
      fate, why: see `analysis.donation`.
    """

    name: str
    size: int
    fate: Fate
    why: str


@dataclass(frozen=True, slots=True)
class KernelView:
    """An instruction outside fusions that moves bytes in the device's memory.

    Attributes:
      step: it.
      opcode: with a fusion's kind.
      executions: in a step.
      moved_bytes: in a step, read and written.
      seconds: of a step, predicted; None without a machine.
    """

    step: Step
    opcode: str
    executions: int
    moved_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class PairView:
    """Two kernels, the one of which reads in the device's memory what the other wrote there.

    Attributes:
      producer, consumer: them.
      shape: what goes from one to the other.
      saved_bytes: that one kernel for both would not move, in a step.
      seconds: that these take, predicted; None without a machine. What is hidden behind a
        product's own time is saved as bytes, not as time.
      reason, why: see `hlo_passes.fusions.pairs`.
      conversion: the name of the one that only brings bytes into another order, or ``""``.
    """

    producer: Step
    consumer: Step
    shape: str
    saved_bytes: int
    seconds: float | None
    reason: PairReason
    why: str
    conversion: str


@dataclass(frozen=True, slots=True)
class PagesView:
    """A pool of pages that operations declare to read.

    Attributes:
      pool: the user's name for it, or the instruction that makes it.
      shape: of it, whose first dimension counts pages.
      page_bytes, page_tokens: of a page.
      sequences: whose pages are read at once.
      pages: of a sequence, at most.
      window: tokens behind which pages are never read again; None where all are.
      reads: how often in a step.
      step: the first who reads.
    """

    pool: str
    shape: str
    page_bytes: int
    page_tokens: int
    sequences: int
    pages: int
    window: int | None
    reads: int
    step: Step


@dataclass(frozen=True)
class Findings:
    """What there is to say of one program; each list with the most first.

    Attributes:
      held: groups of what is live in device memory at the peak, each way to group it.
      heap: None where the program has no temporaries in device memory.
      layouts: arguments that cost conversions.
      saved_by_layouts: bytes that a step reads and writes for these.
      hbm: bytes to and from device memory, without fusions, as it is, and at the least.
      launches: of a step on a GPU, where the dump says what its executable does.
      pages: pools that are read page by page, in the order of who reads first.
    """

    held: Mapping[GroupedBy, tuple[Group, ...]]
    heap: HeapView | None
    idle: tuple[IdleView, ...]
    resting: tuple[RestingView, ...]
    relayouts: tuple[RelayoutView, ...]
    layouts: tuple[LayoutView, ...]
    saved_by_layouts: int
    donations: tuple[DonationView, ...]
    kernels: tuple[KernelView, ...]
    hbm: FusionTraffic
    pairs: tuple[PairView, ...]
    launches: Launches | None
    pages: tuple[PagesView, ...]
