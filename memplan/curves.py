"""What does each byte of device memory buy? ``memplan.curve(step, params, batch)``.

    budget ─► plan ─► predicted step      from everything on the device to the least that works,
                                          halving the widest gap, so that a few points say most

Nothing is compiled further than XLA's scheduler, and nothing runs.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlo_passes.budget import budget_text
from hlo_passes.errors import CurveError, MemoryBudgetError
from hlo_passes.plan import Plan
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table, plain_text
from memplan.stages import Lowered

# How often a least budget that does not work is raised.
_LEAST_ROUNDS = 6

_COLUMNS = (
    Column("hbm=", right=True),
    Column("used", right=True),
    Column("moved", right=True),
    Column("step, predicted", right=True),
    Column("beside all on the device", right=True),
    Column("lower bound", right=True),
)


@dataclass(frozen=True)
class Point:
    """A budget and what the planner makes of it.

    Attributes:
      budget_bytes: device bytes asked for; used_bytes: predicted to be taken.
      moved_bytes: between the host and the device, in a step.
      step_time_s: predicted, in seconds.
      lower_bound_s: no plan within that budget is faster on this machine model.
      slowdown: `step_time_s` beside that of everything on the device.
    """

    budget_bytes: int
    used_bytes: int
    moved_bytes: int
    step_time_s: float
    lower_bound_s: float
    slowdown: float


@dataclass(frozen=True)
class Curve:
    """Predicted seconds of a step against bytes of device memory.

    Attributes:
      name: of the function.
      machine: its name.
      capacity_bytes: what the device has.
      points: the largest budget first; the last one is the least that the planner keeps to.
    """

    name: str
    machine: str
    capacity_bytes: int
    points: tuple[Point, ...]

    def __str__(self) -> str:
        return plain_text(self.table)

    @property
    def table(self) -> Table:
        rows = tuple(
            (
                budget_text(p.budget_bytes),
                format_bytes(p.used_bytes),
                format_bytes(p.moved_bytes),
                format_seconds(p.step_time_s),
                f"{p.slowdown:.2f}x",
                format_seconds(p.lower_bound_s),
            )
            for p in self.points
        )
        title = f"{self.name} on {self.machine}, which has {format_bytes(self.capacity_bytes)}"
        return Table(title, _COLUMNS, rows)

    def to_json(self) -> str:
        """Its attributes, as JSON; bytes and seconds."""
        return json.dumps(asdict(self), indent=2)

    def plot(self, path: str | Path) -> None:
        """Draws it into a file, in the format that its name ends with (``.svg``, ``.png``).

        Raises:
          CurveError: when matplotlib is not installed, or has no such format.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise CurveError("a picture needs matplotlib: pip install 'memplan[plot]'") from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        gib = [p.budget_bytes / (1 << 30) for p in self.points]
        ms = [p.step_time_s * 1e3 for p in self.points]
        axes.step(gib, ms, "o-", where="pre", label="plan, predicted")
        axes.plot(gib, [p.lower_bound_s * 1e3 for p in self.points], ":", label="lower bound")
        if min(gib) < self.capacity_bytes / (1 << 30) < 2 * max(gib):
            label = f"{self.machine} has {format_bytes(self.capacity_bytes)}"
            axes.axvline(self.capacity_bytes / (1 << 30), color="gray", label=label)
        axes.set(xlabel="device memory (GiB)", ylabel="step (ms)", title=self.name, ylim=(0, None))
        axes.legend()
        try:
            figure.savefig(path)
        except ValueError as error:
            raise CurveError(f"{path}: {error}") from error


def curve(
    function: Any,
    *args: Any,
    points: int = 8,
    machine: Any = None,
    found: Callable[[Point], None] | None = None,
    **kwargs: Any,
) -> Curve:
    """Predicts how long a step of `function` takes within less and less device memory.

    Args:
      function: what ``jax.jit`` or `memplan.jit` takes, or returns of the latter, with its options.
      args, kwargs: arrays or ``jax.ShapeDtypeStruct``: nothing needs to fit anywhere.
      points: how many budgets to plan for, at least 2.
      machine: as `memplan.jit` takes it, for a function that is not planned yet.
      found: called with each point as soon as it is known: everything on the device and the least
        budget first, then from the widest gap on.

    Raises:
      CurveError: when there are fewer than 2 points, or there is a machine too many.
      MemplanError: as `memplan.jit` does.

    >>> import jax.numpy as jnp
    >>> print(curve(lambda w, x: jnp.tanh(x @ w), jnp.ones((256, 256)), jnp.ones(256), points=2))
    ... # doctest: +ELLIPSIS
    <lambda> on cpu-cxl, which has ...
    """
    if hasattr(function, "place"):
        if machine is not None:
            raise CurveError("machine= goes to memplan.jit, which made this function")
    else:
        function = jit(function, machine=machine)
    lowered = function.lower(*args, **kwargs)
    capacity = lowered.machine.device_memory.capacity_bytes
    say = found or (lambda _: None)
    made = _points(lowered, capacity, points, say)
    return Curve(lowered.fun_name, lowered.machine.name, capacity, made)


def _points(
    lowered: Lowered, capacity: int, count: int, found: Callable[[Point], None]
) -> tuple[Point, ...]:
    if count < 2:
        raise CurveError(f"expected at least 2 points, found {count}")
    resident, closed = lowered.resident(), lowered.closed_bytes
    plain_s = resident.prediction.step_time_s
    points: dict[int, Point] = {}

    def add(budget: int, plan: Plan) -> None:
        points[budget] = _point(budget, plan, closed, plain_s)
        found(points[budget])

    most = resident.prediction.total_bytes + closed
    add(most, resident)
    least = _least(lowered.within, add)
    if least is None or least >= most:
        return _envelope(points)
    for budget in _between(least, most, count - len(points)):
        try:
            add(budget, lowered.within(min(budget, capacity)))
        except MemoryBudgetError:  # Between budgets that work: what packing makes of this one.
            continue
    return _envelope(points)


def _least(within: Callable[[int], Plan], add: Callable[[int, Plan], None]) -> int | None:
    """The least budget that a plan was seen for, which is added; None without one."""
    budget = 1
    for _ in range(_LEAST_ROUNDS):
        try:
            plan = within(budget)
        except MemoryBudgetError as error:
            budget = max(error.least, budget + budget // 64)
        else:
            add(budget, plan)
            return budget
    return None


def _between(least: int, most: int, count: int) -> Iterator[int]:
    """So many budgets between two, each in the middle of the widest gap."""
    gaps = [(least - most, least, most)]
    for _ in range(count):
        _, low, high = heapq.heappop(gaps)
        middle = (low + high) // 2
        yield middle
        heapq.heappush(gaps, (low - middle, low, middle))
        heapq.heappush(gaps, (middle - high, middle, high))


def _point(budget: int, plan: Plan, closed: int, plain_s: float) -> Point:
    prediction = plan.prediction
    return Point(
        budget,
        prediction.total_bytes + closed,
        plan.moved_bytes,
        prediction.step_time_s,
        prediction.lower_bound_s,
        prediction.step_time_s / plain_s if plain_s else 1.0,
    )


def _envelope(points: dict[int, Point]) -> tuple[Point, ...]:
    """The points, the largest budget first; a plan for less memory is one for more, too."""
    found: list[Point] = []
    for budget in sorted(points):
        point = points[budget]
        if found and found[-1].step_time_s < point.step_time_s:
            better = found[-1]
            point = Point(
                budget,
                better.used_bytes,
                better.moved_bytes,
                better.step_time_s,
                point.lower_bound_s,
                better.slowdown,
            )
        found.append(point)
    return tuple(reversed(found))
