"""What the machine takes in watts while it runs this or that, where the system says it.

    idle ─► static watts ─┬─ a stream ─► joules of a byte ─┬─ products ─► joules of an operation
                          └─ copies ──────────────────────┴─► joules of a byte on the link

A processor counts its joules in files of Linux's powercap (RAPL), which often only root may read;
an NVIDIA GPU's driver says its watts (nvidia-smi). What is measured is the package or the board: of
a processor with its memory, where that is a domain of its own.
"""

from __future__ import annotations

import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, override

import jax

from hlo_passes.hardware.machine import Machine
from memplan.calibrate.measuring import Timed

POWERCAP = Path("/sys/class/powercap")

# What is measured runs for so long: nvidia-smi's watts are those of the last second.
_SECONDS = 2.0

_TIMEOUT_S = 10.0


class Meter(ABC):
    """Says how many watts a device takes.

    Attributes:
      name: of what says it.
    """

    name: str

    @abstractmethod
    def watts(self, run: Callable[[], object], seconds: float) -> float:
        """Returns those taken while something runs again and again for so many seconds."""


@dataclass(frozen=True)
class Powercap(Meter):
    """The counters of all packages, and of their memory.

    Attributes:
      domains: folders with `energy_uj` in them.
    """

    domains: tuple[Path, ...]
    name = "powercap"

    @classmethod
    def here(cls, folder: Path = POWERCAP) -> Powercap | None:
        """Those that can be read; None where that is none."""
        found: list[Path] = []
        for domain in sorted(folder.glob("intel-rapl:*")):
            try:
                kind = (domain / "name").read_text(encoding="ascii").strip()
                _microjoules(domain)
            except (OSError, ValueError):
                continue
            if kind.startswith("package") or kind == "dram":
                found.append(domain)
        return cls(tuple(found)) if found else None

    @override
    def watts(self, run: Callable[[], object], seconds: float) -> float:
        before, begin = [*map(_microjoules, self.domains)], time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            run()
        counted = 0
        for domain, first in zip(self.domains, before, strict=True):
            last = _microjoules(domain)
            if last < first:  # It begins again at 0 now and then.
                last += int((domain / "max_energy_range_uj").read_text(encoding="ascii"))
            counted += last - first
        return counted * 1e-6 / (now - begin)


def _microjoules(domain: Path) -> int:
    return int((domain / "energy_uj").read_text(encoding="ascii"))


@dataclass(frozen=True)
class NvidiaSmi(Meter):
    """The driver's figure of the first GPU."""

    name = "nvidia-smi"

    @classmethod
    def here(cls) -> NvidiaSmi | None:
        meter = cls()
        try:
            meter.now()
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return meter

    def now(self) -> float:
        query = ("nvidia-smi", "--id=0", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return float(done.stdout)

    @override
    def watts(self, run: Callable[[], object], seconds: float) -> float:
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            run()
        return self.now()


def meter_of(platform: str) -> Meter | None:
    """Returns what says the watts of a device of this machine; None where nothing does."""
    return NvidiaSmi.here() if platform == "gpu" else Powercap.here() if platform == "cpu" else None


class Load(NamedTuple):
    """A program that is measured, and what it does in a second.

    Attributes:
      bytes_per_s: of device memory, read and written.
      dtype, flops_per_s: of its products; ``""`` and 0 where it has none.
    """

    timed: Timed
    bytes_per_s: float
    dtype: str = ""
    flops_per_s: float = 0.0


def with_energy(
    machine: Machine,
    meter: Meter,
    stream: Load,
    products: Iterable[Load],
    copies: Mapping[tuple[str, str], Load],
    seconds: float = _SECONDS,
) -> Machine:
    """Returns the machine with what was measured of its energy, in watts and joules.

    Args:
      stream: moves next to nothing but bytes of device memory.
      products: one for each type.
      copies: by the ends of the link, with the bytes that it carries a second.
      seconds: for each.
    """

    def beside(load: Load, *known_w: float) -> float:
        taken = meter.watts(lambda: jax.block_until_ready(load.timed.run()), seconds)
        return max(0.0, taken - static_w - sum(known_w))

    static_w = meter.watts(lambda: time.sleep(seconds / 10), seconds)
    memory, host = machine.device_memory.name, machine.host_link.source
    byte_j = beside(stream) / stream.bytes_per_s
    flop_j = {
        load.dtype: beside(load, load.bytes_per_s * byte_j) / load.flops_per_s for load in products
    }
    wires = {ends: beside(load) / load.bytes_per_s for ends, load in copies.items()}
    # Of a copy the device's memory is known; what is left is of the wires and the host's memory,
    # and counts as the wires'.
    links = tuple(
        link
        if (ends := (link.source, link.destination)) not in wires
        else replace(link, j_per_byte=max(0.0, wires[ends] - byte_j))
        for link in machine.links
    )
    of_memory = {memory: byte_j, host: 0.0}
    tiers = tuple(replace(t, j_per_byte=of_memory.get(t.name, t.j_per_byte)) for t in machine.tiers)
    return replace(
        machine, static_w=static_w, flop_j=tuple(flop_j.items()), tiers=tiers, links=links
    )
