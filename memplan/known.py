"""What executables of a program said of it, which the next plan is made with."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from hlo_passes.analysis.learned import held_on_chip, with_learned, with_measured
from hlo_passes.ir import Module, ShapeIndex
from hlo_passes.memory.usage import memory_usage
from hlo_passes.simulator import cost


@dataclass
class Known:
    """What XLA:TPU said of a program's instructions, and what a profile did; see `learned`.

    Attributes:
      cycles: how long they take.
      on_chip: what each executable seen holds on the chip of an instruction.
      table_bytes: of the latest one's tables; None before the first.
      counts_chip: whether what they hold on the chip is counted all the same.
      seen: how many there were.
      measured: seconds of kernels, by what they are (`kernel_digests`).
      factors: what others take, relative to the machine's model, by kind.
    """

    cycles: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    on_chip: dict[Hashable, frozenset[ShapeIndex]] = field(
        default_factory=dict[Hashable, frozenset[ShapeIndex]]
    )
    table_bytes: int | None = None
    counts_chip: bool = False
    seen: int = 0
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    factors: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def has_chip(self) -> bool:
        """Whether XLA was seen to hold anything on the chip."""
        return any(self.on_chip.values())

    def add(self, final: Module) -> None:
        """Takes note of the module of an executable."""
        self.cycles |= cost.estimates(final)
        self.seen += 1
        # What one of them held there and another did not, may be anywhere in the next.
        for instruction, held in held_on_chip(final).items():
            self.on_chip[instruction] = held & self.on_chip.get(instruction, held)
        self.table_bytes = memory_usage(final, "tpu").table_bytes

    def said_of(self, module: Module) -> Module:
        """The module with what is known of its instructions."""
        on_chip = {} if self.counts_chip else self.on_chip
        return with_learned(self.timed(module), self.cycles, on_chip, self.table_bytes)

    def timed(self, module: Module) -> Module:
        """The module with what was measured of its instructions, and nothing else."""
        return with_measured(module, self.measured, self.factors)

    def explained(self, rewritten: Module) -> int:
        """The bytes that are predicted of a module with what is known now of the chip."""
        usage = memory_usage(with_learned(rewritten, {}, self.on_chip), "tpu")
        return usage.total_bytes - usage.table_bytes + (self.table_bytes or 0)
