"""What a plan is to be best for: ``memplan.jit(objective=...)``.

    strength   0 ────────────────────────────── 1        of the prices (`placing.prices`)
    seconds    fewest ─────────────────────► more
    bytes, or joules      more ─────────► fewest

Plans are made with prices of one strength or another, and of those that keep the bounds the best is
taken; so none is worse in what it is for than the plan that is fastest, which is always made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal, cast, get_args

from hlo_passes.errors import MemoryBudgetError, ObjectiveError
from hlo_passes.hardware.machine import Machine
from hlo_passes.placing.prices import FREE, Prices, energy_prices, traffic_prices
from hlo_passes.plan import Plan
from hlo_passes.units import format_bytes, format_joules, format_seconds

Minimised = Literal["latency", "energy", "traffic"]

# How far prices are lowered for a bound, as a power of 10: then hardly a byte is worth any time.
# And how often what lies between a strength that is too much and one that is too little is halved.
_WEAKEST = -4.0
_HALVINGS = 3

_THROUGHPUT = (
    "no transfer of a call begins before the call before it has ended, so that calls do not "
    "overlap, and the plan with the most steps a second is that for 'latency'"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """What is to be least, and what is not to be more than so much.

    Attributes:
      minimised: ``"latency"``, the predicted seconds of a step; ``"energy"``, its joules, on
        machines whose files say what these are; or ``"traffic"``, the bytes that it moves between
        the device and the host.
      slower: by what part a step may be slower than that of the fastest plan: 0.02 for 2 %.
      latency_s: seconds that a step may take.
      joules: that it may take.
      traffic_bytes: that it may move.

    Raises:
      ObjectiveError: when something else is to be least, or a bound is no positive number.

    >>> print(Objective("traffic", slower=0.02))
    traffic, slower=0.02
    """

    minimised: Minimised = "latency"
    slower: float | None = None
    latency_s: float | None = None
    joules: float | None = None
    traffic_bytes: int | None = None

    def __post_init__(self) -> None:
        if cast(object, self.minimised) == "throughput":
            raise ObjectiveError(self.minimised, f"{_THROUGHPUT}.")
        if self.minimised not in get_args(Minimised):
            known = ", ".join(map(repr, get_args(Minimised)))
            raise ObjectiveError(self.minimised, f"expected {known}, or a memplan.Objective.")
        for name, bound in self._bounds:
            least = 0 if name in ("slower", "traffic_bytes") else math.ulp(0.0)
            if not isinstance(cast(object, bound), int | float) or not least <= bound < math.inf:
                raise ObjectiveError(
                    str(self), f"expected a number of at least 0, found {bound!r}."
                )

    @classmethod
    def of(cls, given: Objective | str) -> Objective:
        """What `jit` is given.

        Raises:
          ObjectiveError: when it is no objective.
        """
        return given if isinstance(given, Objective) else cls(cast(Minimised, given))

    @property
    def _bounds(self) -> list[tuple[str, float]]:
        given = [(f.name, getattr(self, f.name)) for f in fields(self)[1:]]
        return [(name, bound) for name, bound in given if bound is not None]

    def __str__(self) -> str:
        return ", ".join([self.minimised, *(f"{name}={bound!r}" for name, bound in self._bounds)])

    @property
    def is_latency(self) -> bool:
        """Whether only seconds count."""
        return self.minimised == "latency" and self.joules is None and self.traffic_bytes is None

    def prices(self, machine: Machine) -> Prices:
        """At full strength, for a machine.

        Raises:
          NoEnergyError: when joules count, and its file says nothing of them.
        """
        joules = energy_prices(machine) if "energy" in self._counted else FREE
        return traffic_prices(machine) if "traffic" in self._counted else joules

    @property
    def _counted(self) -> set[str]:
        bounded = {"joules": "energy", "traffic_bytes": "traffic"}
        return {self.minimised, *(bounded[n] for n, _ in self._bounds if n in bounded)}

    def measure(self, plan: Plan) -> float:
        """What is to be least of a plan. Of a step the seconds beyond its compute: what XLA has
        said of one program's kernels, it has not said of another's."""
        prediction = plan.prediction
        match self.minimised:
            case "latency":
                return prediction.step_time_s - prediction.compute_s + prediction.recompute_s
            case "energy":
                return prediction.joules or 0.0
            case "traffic":
                return plan.moved_bytes

    def exceeded(self, plan: Plan, fastest: Plan) -> str:
        """The first bound that a plan does not keep, for a person; nothing where it keeps all."""
        step_s, joules = plan.prediction.step_time_s, plan.prediction.joules or 0.0
        allowed_s = math.inf if self.latency_s is None else self.latency_s
        if self.slower is not None:
            allowed_s = min(allowed_s, (1 + self.slower) * fastest.prediction.step_time_s)
        if step_s > allowed_s:
            allowed = format_seconds(allowed_s)
            return f"a step of at most {allowed}, found {format_seconds(step_s)}"
        if self.joules is not None and joules > self.joules:
            allowed = format_joules(self.joules)
            return f"at most {allowed} a step, found {format_joules(joules)}"
        moved = plan.moved_bytes
        if self.traffic_bytes is not None and moved > self.traffic_bytes:
            return f"at most {format_bytes(self.traffic_bytes)} moved, found {format_bytes(moved)}"
        return ""

    def best[T](
        self, machine: Machine, make: Callable[[Prices], T], plan_of: Callable[[T], Plan]
    ) -> T:
        """The best of a few plans, one of them the fastest: of two without bounds, and of as many
        more with some as `_HALVINGS` says.

        Args:
          make: makes a plan with prices, `plan_of` says which.

        Raises:
          MemoryBudgetError: when there is none.
          NoEnergyError: as `prices`.
          ObjectiveError: when none keeps the bounds.
        """
        prices = self.prices(machine)
        found = [make(FREE)]
        fastest = plan_of(found[0])

        def keeps(made: T) -> bool:
            return not self.exceeded(plan_of(made), fastest)

        for strength in self._strengths(found, keeps):
            try:
                found.append(make(prices.times(strength)))
            except MemoryBudgetError:
                break  # Where packing is tight, it may work out with one set of edits only.
        # Of equals that which was found first, which is the faster.
        best = min(filter(keeps, found), key=lambda made: self.measure(plan_of(made)), default=None)
        if best is None:
            nearest = self.exceeded(plan_of(found[-1]), fastest)
            problem = f"expected {nearest}. Allow more, or give a larger hbm=."
            raise ObjectiveError(str(self), problem)
        return best

    def _strengths[T](self, found: list[T], keeps: Callable[[T], bool]) -> Iterator[float]:
        """Those that are worth a plan, as far as is known of the plans for those before.

        Args:
          found: the plans so far, that without prices first.
        """
        fastest_is_kept = keeps(found[0])
        if self.is_latency or (self.minimised == "latency" and fastest_is_kept):
            return
        yield 1.0
        # Between a plan on the one side of a bound and one on the other there may be better ones.
        if len(found) == 1 or keeps(found[-1]) == fastest_is_kept:
            return
        weaker, stronger = _WEAKEST, 0.0
        for count in range(3, 3 + _HALVINGS):
            middle = (weaker + stronger) / 2
            yield 10**middle
            if len(found) < count:
                return
            if keeps(found[-1]) == fastest_is_kept:
                weaker = middle
            else:
                stronger = middle


LATENCY = Objective()
