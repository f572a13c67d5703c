"""What a step is made of, for the clock: what computes, what moves, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_passes.hardware.machine import Link

TransferId = int | str

Direction = tuple[str, str]
"""Names of the source and the destination tier."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel asks for beside time; or what several do that are one event.

    Attributes:
      device_bytes: that are read from device memory, and written to it.
      memory_s: of its seconds, those of kernels that device memory holds back, not arithmetic.
      launches: kernels that are launched one by one.
      graphs: that are launched, of kernels.
      captured: kernels in them.
      kernels: how many equal ones vary as much, taken together: (Σ s)² / Σ s², with s the seconds
        of each (Kish, "Survey Sampling", 1965, section 8.2).
    """

    device_bytes: float = 0.0
    memory_s: float = 0.0
    launches: float = 0.0
    graphs: float = 0.0
    captured: float = 0.0
    kernels: float = 1.0


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Compute:
    """The compute engine is busy for `seconds`, if nothing else is in the way of `work`."""

    name: str
    seconds: float
    work: Work = NO_WORK


@dataclass(frozen=True, slots=True)
class Start:
    """`size` bytes are queued on the link from tier `source` to tier `destination`."""

    transfer: TransferId
    size: int
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective is queued on the interconnect: `size` bytes leave this device for others,
    and it is busy for `seconds`."""

    transfer: TransferId
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """The compute engine waits for the end of `transfer`."""

    transfer: TransferId


TimelineEvent = Compute | Start | Exchange | Done


def queue_of(link: Link) -> Direction:
    """Names the queue that a link's transfers stand in: its own, or, where it is not full
    duplex, the one it has in common with the opposite direction."""
    if link.full_duplex:
        return link.source, link.destination
    return min(link.source, link.destination), max(link.source, link.destination)
