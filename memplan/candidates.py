"""Programs with a plan, or what one promises: which is faster, and whether a finer one may be."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, override

from hlo_passes.plan import Plan
from memplan.executable import Program
from memplan.placing import Placing
from memplan.streams.hosting import Hosting

# Where a step takes longer than its compute by this factor, another way may be faster.
_SLOW = 1.5

# Where it takes no longer than that, nothing else is looked for first.
_GOOD = 1.05

# A plan replaces another one when it is faster by more than this factor.
_WORTH_IT = 0.99

# As many programs with smaller chunks may be no faster, while they still move anything; and as many
# may need no less than the program without chunks.
PATIENCE = 3


class Step(ABC):
    """A step that takes so many seconds, and computes for so many of them."""

    @property
    @abstractmethod
    def step_time_s(self) -> float: ...

    @property
    @abstractmethod
    def compute_s(self) -> float:
        """Seconds of compute, without what is computed again."""

    @property
    @abstractmethod
    def has_edits(self) -> bool:
        """Whether anything is moved or computed again, so that less of it may be faster."""

    @property
    def waits_s(self) -> float:
        """Seconds of a step beyond its compute. What rings compute is the same; what XLA has
        said of the kernels of one, it has not said of those of another."""
        return self.step_time_s - self.compute_s

    def is_faster_than(self, other: Step) -> bool:
        """Whether its step waits less, as far as counts."""
        return self.waits_s < other.waits_s - (1 - _WORTH_IT) * other.step_time_s

    @property
    def is_slow(self) -> bool:
        """Whether a step takes so much longer than its compute that another way may be faster."""
        return self.step_time_s > _SLOW * self.compute_s

    @property
    def is_good(self) -> bool:
        """Whether a step takes hardly longer than its compute."""
        return self.step_time_s <= _GOOD * self.compute_s

    @property
    def is_hidden(self) -> bool:
        """Whether a step takes no longer than its compute, as far as counts."""
        return self.step_time_s * _WORTH_IT <= self.compute_s


@dataclass(frozen=True)
class Promise(Step):
    """What a plan for a program probably comes to, before it is made: how its arena is packed is
    not known yet.

    Attributes:
      promised_s: of a step.
      computing_s: of its compute.
    """

    promised_s: float
    computing_s: float

    @property
    @override
    def step_time_s(self) -> float:
        return self.promised_s

    @property
    @override
    def compute_s(self) -> float:
        return self.computing_s

    @property
    @override
    def has_edits(self) -> bool:
        return True

    def with_again(self, seconds: float) -> Promise:
        """The same where so much of the compute is not in the program as it is written."""
        return replace(self, computing_s=self.computing_s - seconds)


@dataclass(frozen=True)
class Refused:
    """That no plan of a program with the first of its rings keeps to the budget.

    Attributes:
      least: bytes that one needs.
    """

    least: float


@dataclass(frozen=True)
class Candidate(Step):
    """A placed program and the plan for the module that XLA scheduled for it.

    Attributes:
      placing: of which it is one.
      hosting: what lives on the host.
      hosted_bytes: theirs, where XLA sees one memory and counts them with the device's; else 0.
      counts_chip: whether it counts what XLA was seen to hold on the chip.
      again_s: seconds of its compute that are not in the program as it is written; fewer than none
        where to compute again takes less than to write and read.
    """

    placing: Placing
    program: Program
    plan: Plan
    hosting: Hosting
    hosted_bytes: int
    counts_chip: bool
    again_s: float = 0.0

    @property
    def predicted_bytes(self) -> int:
        return self.plan.prediction.total_bytes

    @property
    @override
    def step_time_s(self) -> float:
        return self.plan.prediction.step_time_s

    @property
    @override
    def compute_s(self) -> float:
        return self.plan.prediction.compute_s - self.plan.prediction.recompute_s

    def with_again(self, seconds: float) -> Candidate:
        """The same, its prediction too, with another `again_s`."""
        known = self.plan.prediction
        prediction = replace(known, recompute_s=known.recompute_s + seconds - self.again_s)
        return replace(self, plan=replace(self.plan, prediction=prediction), again_s=seconds)

    @property
    @override
    def has_edits(self) -> bool:
        return bool(self.plan.moved_bytes or self.plan.edits)


class Against(NamedTuple):
    """What a program comes to against the same as it is written, before anything moves.

    Attributes:
      again_s: seconds of its compute that the other does not have.
      more_bytes: bytes besides its arguments that the other does not need; fewer than none where it
        needs less.
    """

    again_s: float = 0.0
    more_bytes: int = 0


@dataclass
class FinerChunks:
    """Whether chunks that are smaller still are worth a look, after each of a series of programs
    with ever smaller ones.

    Attributes:
      best: the fastest of them; `slower`: how many came after it.
      least: the fewest bytes that were needed; `of_least`: the aim that this was with.
      without: the fewest bytes that were needed without chunks, where that was refused; `vain`: how
        many programs with chunks needed no less.
    """

    best: Step | None = None
    slower: int = 0
    least: float = math.inf
    of_least: int = 0
    without: float = math.inf
    vain: int = 0

    def begin_again(self) -> None:
        """After none of those so far could be packed."""
        self.best, self.slower = None, 0

    def is_over(self, aim: int, step: Step | None, needs: float) -> bool:
        """After a program with another aim, and what came of it.

        Args:
          needs: the fewest bytes that were needed where there was no plan.
        """
        if needs < self.least:
            self.least, self.of_least = needs, aim
        elif step is None and aim < self.of_least / 2:
            return True  # They do not need less, as XLA has them.
        if step is None:
            self.vain += needs >= self.without
            return self.vain >= PATIENCE
        if self.best is None or step.is_faster_than(self.best):
            self.best, self.slower = step, 0
            return False
        self.slower += 1
        return not self.best.has_edits or self.slower >= PATIENCE
