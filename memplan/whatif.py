"""What if XLA had fused or split this? A step before and after, by the same simulator.

    module ─► fuse, split ─► edited ─► simulator: seconds   memory analysis: bytes   traffic: HBM

Nothing is compiled: that XLA would make these kernels, and as fast as their bytes allow, nobody
says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hlo_passes.fusions.editing import fuse, refusal
from hlo_passes.fusions.pairs import FusionPair, fusion_pairs
from hlo_passes.fusions.splitting import split
from hlo_passes.fusions.traffic import fusion_traffic
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.simulated import simulated
from memplan.report.tables import Column, Table

# How many pairs are tried, those that would save most bytes first: each is a step simulated.
_TRIED = 48


@dataclass(frozen=True)
class Measured:
    """A step of a module, predicted.

    Attributes:
      step_s: seconds, with shared memories and launches, as `memplan simulate` has it.
      peak_bytes: device bytes as XLA's ``memory_analysis()`` adds them up.
      hbm_bytes: that kernels read and write in device memory.
    """

    step_s: float
    peak_bytes: int
    hbm_bytes: int


@dataclass(frozen=True)
class Edited:
    """What became of a module by an edit, and those before it.

    Attributes:
      edit: ``"fuse PRODUCER,CONSUMER"`` or ``"split KERNEL:PARTS"``.
      result: of the module with it.
    """

    edit: str
    result: Measured


@dataclass(frozen=True)
class WhatIf:
    """A module before, and after.

    Attributes:
      module, machine: names.
      before: as it is.
      edits: one after the other.
      best: edits of a search, each by itself, the fastest step first; `tried` of them were
        simulated.
      refused: how many pairs of kernels that hand each other an array cannot be one, by why.
    """

    module: str
    machine: str
    before: Measured
    edits: tuple[Edited, ...]
    best: tuple[Edited, ...] = ()
    tried: int = 0
    refused: Mapping[str, int] | None = None


def measured(module: Module, machine: Machine) -> Measured:
    """Predicts a step.

    Raises:
      UnscheduledModuleError, MalformedModuleError: when the module has no schedule.
    """
    return Measured(
        simulated(module, machine, machine.name).step_s,
        memory_usage(module, machine.platform, machine=machine).total_bytes,
        fusion_traffic(module).compiled.total,
    )


@dataclass(frozen=True)
class Fuse:
    """Two kernels of the entry as one, which is called ``PRODUCER.CONSUMER`` then."""

    producer: str
    consumer: str

    def __str__(self) -> str:
        return f"fuse {self.producer},{self.consumer}"

    def edited(self, module: Module) -> Module:
        return fuse(module, self.producer, self.consumer)


@dataclass(frozen=True)
class Split:
    """A kernel of the entry in parts along its first dimension."""

    kernel: str
    parts: int

    def __str__(self) -> str:
        return f"split {self.kernel}:{self.parts}"

    def edited(self, module: Module) -> Module:
        return split(module, self.kernel, self.parts)


def what_if(module: Module, machine: Machine, wanted: Sequence[Fuse | Split]) -> WhatIf:
    """Edits the entry, in this order.

    Raises:
      FusionError: when two kernels cannot be one.
      SplittingError: when one cannot be run in parts.
    """
    before, edits = measured(module, machine), list[Edited]()
    name = module.name
    for edit in wanted:
        module = edit.edited(module)
        edits.append(Edited(str(edit), measured(module, machine)))
    return WhatIf(name, machine.name, before, tuple(edits))


def best_edits(module: Module, machine: Machine, count: int) -> WhatIf:
    """Looks for the fusions with the fastest step, each by itself.

    Args:
      count: how many are told.
    """
    here = [p for p in fusion_pairs(module) if p.producer.computation_id == module.entry.id]
    pairs: dict[tuple[str, str], FusionPair] = {}
    for pair in here:
        pairs.setdefault((pair.producer.name, pair.consumer.name), pair)
    refused, legal = Counter[str](), list[tuple[str, str]]()
    for names in pairs:
        if why := refusal(module, *names):
            refused[why] += 1
        else:
            legal.append(names)
    tried = [Fuse(*pair) for pair in legal[:_TRIED]]
    found = [Edited(str(edit), measured(edit.edited(module), machine)) for edit in tried]
    found.sort(key=lambda e: (e.result.step_s, e.result.peak_bytes))
    return WhatIf(
        module.name,
        machine.name,
        measured(module, machine),
        (),
        tuple(found[:count]),
        len(found),
        dict(refused.most_common()),
    )


def summarize_what_if(found: WhatIf, version: str) -> dict[str, Any]:
    """Returns it as JSON-ready data, with the names of the dataclasses.

    Args:
      version: memplan's.
    """
    head = {"format": "memplan.whatif", "version": 1, "memplan": version}
    return {**head, "predicted": True, **asdict(found)}


def what_if_tables(found: WhatIf) -> Iterator[Table]:
    """Yields the step before and after, or the best edits, and what cannot be done."""
    headings = ("step", "", "peak memory", "", "HBM traffic", "")
    columns = (Column(""), *(Column(heading, right=True) for heading in headings))
    searched = found.refused is not None
    shown = found.best if searched else found.edits
    note = "a prediction: whether XLA would make these kernels, and how fast, nobody says"
    if searched:
        note += f"; {found.tried} fusions were tried, each by itself"
    yield Table(
        f"{found.module} on {found.machine}, predicted",
        columns,
        (
            _row("as it is", found.before, found.before),
            *(_row(e.edit, e.result, found.before) for e in shown),
        ),
        note,
    )
    if found.refused:
        rows = tuple((why, str(count)) for why, count in found.refused.items())
        yield Table(
            "pairs that cannot be one kernel", (Column("why"), Column("", right=True)), rows
        )


def _row(name: str, now: Measured, before: Measured) -> tuple[str, ...]:
    return (
        name,
        format_seconds(now.step_s),
        _change(now.step_s, before.step_s),
        format_bytes(now.peak_bytes),
        _change(now.peak_bytes, before.peak_bytes),
        format_bytes(now.hbm_bytes),
        _change(now.hbm_bytes, before.hbm_bytes),
    )


def _change(now: float, before: float) -> str:
    return "" if now == before or not before else f"{100 * (now / before - 1):+.2f} %"
