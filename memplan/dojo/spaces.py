"""What actions and observations are, in the words of Gymnasium and without it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Discrete:
    """The numbers from 0 to `n`, which is not one of them."""

    n: int

    def contains(self, x: object) -> bool:
        return isinstance(x, int | np.integer) and 0 <= int(x) < self.n


@dataclass(frozen=True)
class Box:
    """float32 arrays of a shape, each number between `low` and `high`."""

    low: float
    high: float
    shape: tuple[int, ...]

    def contains(self, x: object) -> bool:
        if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.shape != self.shape:
            return False
        found: npt.NDArray[np.float32] = x
        return bool(np.all((found >= self.low) & (found <= self.high)))
