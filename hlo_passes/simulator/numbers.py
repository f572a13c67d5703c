"""Seconds of one step as a float, or of many draws of it at once as an array.

What a step does next is the same in each draw; when, is not. So the clock runs over the events
once, and each of its times is a float, or float64[draws]: an operation on a thousand draws takes
about as long as twenty on floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

type Seconds = float | npt.NDArray[np.float64]
"""One step's, or float64[draws]."""

type Flag = bool | npt.NDArray[np.bool_]
"""One step's, or bool[draws]."""


class Numbers(Protocol):
    """What the clock does with its times, beside arithmetic and comparisons."""

    def zero(self) -> Seconds: ...

    def larger(self, a: Seconds, b: Seconds) -> Seconds: ...

    def smaller(self, a: Seconds, b: Seconds) -> Seconds: ...

    def where(self, condition: Flag, a: Seconds, b: Seconds) -> Seconds: ...

    def any(self, condition: Flag) -> bool: ...

    def all(self, condition: Flag) -> bool: ...

    def level(self, capacity: float, demands: Sequence[Seconds]) -> Seconds:
        """Returns what each of several gets of a capacity at most, where they share it evenly and
        who asks for less leaves the rest to the others (max-min fairness: Bertsekas and Gallager,
        "Data Networks", 1992, section 6.5.2). Where it is enough for all, no less than the most
        that one asks for. O(n log n) in demands."""
        ...

    def varied(self, kernels: float) -> Seconds:
        """Returns by what the seconds of so many equal kernels, or of a transfer, are multiplied
        next; 1 in the mean."""
        ...


class OneStep:
    """A step in which everything takes what it is said to take; see `Numbers`."""

    def zero(self) -> Seconds:
        return 0.0

    def larger(self, a: Seconds, b: Seconds) -> Seconds:
        return a if a > b else b

    def smaller(self, a: Seconds, b: Seconds) -> Seconds:
        return a if a < b else b

    def where(self, condition: Flag, a: Seconds, b: Seconds) -> Seconds:
        return a if condition else b

    def any(self, condition: Flag) -> bool:
        return bool(condition)

    def all(self, condition: Flag) -> bool:
        return bool(condition)

    def level(self, capacity: float, demands: Sequence[Seconds]) -> Seconds:
        level, remaining = 0.0, len(demands)
        # Shares rise as long as demands are below them, and fall from there on.
        for demand in sorted(cast("Sequence[float]", demands)):
            level = max(level, capacity / remaining)
            capacity, remaining = capacity - demand, remaining - 1
        return level

    def varied(self, kernels: float) -> Seconds:
        return 1.0


class Draws:
    """Many steps, in which seconds are multiplied by lognormal numbers; see `Numbers`.

    Args:
      steps: how many.
      variation: standard deviation over mean of those of one kernel, not negative.
      seed: the same one gives the same numbers.
    """

    def __init__(self, steps: int, variation: float, seed: int) -> None:
        self._steps = steps
        self._variation = variation
        self._generator = np.random.default_rng(seed)

    def zero(self) -> Seconds:
        return np.zeros(self._steps)

    def larger(self, a: Seconds, b: Seconds) -> Seconds:
        return np.maximum(a, b)

    def smaller(self, a: Seconds, b: Seconds) -> Seconds:
        return np.minimum(a, b)

    def where(self, condition: Flag, a: Seconds, b: Seconds) -> Seconds:
        return np.where(condition, a, b)

    def any(self, condition: Flag) -> bool:
        return bool(np.any(condition))

    def all(self, condition: Flag) -> bool:
        return bool(np.all(condition))

    def level(self, capacity: float, demands: Sequence[Seconds]) -> Seconds:
        count = len(demands)
        asked = np.sort(np.broadcast_arrays(self.zero(), *demands)[1:], axis=0)
        before = np.cumsum(asked, axis=0) - asked
        shares = (capacity - before) / np.arange(count, 0, -1)[:, np.newaxis]
        return np.max(shares, axis=0)

    def varied(self, kernels: float) -> Seconds:
        # Of a lognormal number: its logarithm's variance is log(1 + variation²).
        variance = math.log1p(self._variation**2 / kernels)
        drawn = self._generator.standard_normal(self._steps)
        return np.exp(math.sqrt(variance) * drawn - variance / 2)
