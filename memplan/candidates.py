"""Programs with a plan, or what one promises: which is faster, and whether a finer one may be."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, override

from hlo_passes.placing.prices import FREE, Prices
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
    def charged_s(self) -> float:
        """What is charged beside the seconds of a step (`placing.prices`)."""

    @property
    @abstractmethod
    def has_edits(self) -> bool:
        """Whether anything is moved or computed again, so that less of it may be faster."""

    @property
    def cost_s(self) -> float:
        """Seconds of a step, and what is charged beside them."""
        return self.step_time_s + self.charged_s

    @property
    def waits_s(self) -> float:
        """What a step costs beyond its compute. What rings compute is the same; what XLA has
        said of the kernels of one, it has not said of those of another."""
        return self.cost_s - self.compute_s

    def is_faster_than(self, other: Step) -> bool:
        """Whether its step waits less, as far as counts; or costs less, where more is charged."""
        return self.waits_s < other.waits_s - (1 - _WORTH_IT) * other.cost_s

    @property
    def is_slow(self) -> bool:
        """Whether a step takes so much longer than its compute that another way may be faster."""
        return self.cost_s > _SLOW * self.compute_s

    @property
    def is_good(self) -> bool:
        """Whether a step takes hardly longer than its compute."""
        return self.cost_s <= _GOOD * self.compute_s

    @property
    def is_hidden(self) -> bool:
        """Whether a step takes no longer than its compute, as far as counts."""
        return self.cost_s * _WORTH_IT <= self.compute_s


@dataclass(frozen=True)
class Promise(Step):
    """What a plan for a program probably comes to, before it is made: how its arena is packed is
    not known yet.

    Attributes:
      promised_s: of a step, and what is charged beside that.
      computing_s: of its compute.
    """

    promised_s: float
    computing_s: float

    @property
    @override
    def charged_s(self) -> float:
        return 0.0  # It is among what is promised.

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

    def with_again(self, seconds: float, charged_s: float = 0.0) -> Promise:
        """The same where so much of the compute is not in the program as it is written, and that is
        charged so."""
        promised_s = self.promised_s + charged_s
        return replace(self, promised_s=promised_s, computing_s=self.computing_s - seconds)


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
      again_j: joules of that.
      prices: what it is charged for beside seconds.
    """

    placing: Placing
    program: Program
    plan: Plan
    hosting: Hosting
    hosted_bytes: int
    counts_chip: bool
    again_s: float = 0.0
    again_j: float = 0.0
    prices: Prices = FREE

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

    @property
    @override
    def charged_s(self) -> float:
        known, moved = self.plan.prediction, self.plan.moved_bytes
        # Where seconds vary, one step of 100 counts.
        varied_s = 0.0 if known.p99_s is None else known.p99_s - known.step_time_s
        return varied_s + self.prices.byte_s * moved + self.prices.joule_s * known.recompute_j

    def priced(self, prices: Prices) -> Candidate:
        """The same, compared with others by such prices from now on."""
        return replace(self, prices=prices)

    def with_again(self, seconds: float, joules: float) -> Candidate:
        """The same, its prediction too, where so much more of its compute, in seconds and in
        joules, is not in the program as it is written."""
        known = self.plan.prediction
        prediction = replace(
            known, recompute_s=known.recompute_s + seconds, recompute_j=known.recompute_j + joules
        )
        plan, again_s = replace(self.plan, prediction=prediction), self.again_s + seconds
        return replace(self, plan=plan, again_s=again_s, again_j=self.again_j + joules)

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
      again_j: joules of `again_s`.
    """

    again_s: float = 0.0
    more_bytes: int = 0
    again_j: float = 0.0


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
