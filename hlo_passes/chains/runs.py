"""What is known of the bytes of a space, run by run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Run[Value]:
    value: Value


class Runs[Value]:
    """A value for each of `size` bytes, equal ones in a row kept as one. O(log runs) a look."""

    def __init__(self, size: int, value: Value) -> None:
        # Run k is of the bytes from bound k to bound k + 1.
        self._bounds, self._runs = [0, size], [Run(value)]

    def between(self, start: int, end: int) -> Sequence[Run[Value]]:
        """The runs of bytes, half-open, whose values may be replaced."""
        first, last = self._split(start), self._split(end)
        return self._runs[first:last]

    def set(self, start: int, end: int, value: Value) -> None:
        """Gives all of the bytes one value."""
        first, last = self._split(start), self._split(end)
        self._bounds[first:last] = [start]
        self._runs[first:last] = [Run(value)]

    def _split(self, at: int) -> int:
        """The run that begins here, or would."""
        k = bisect_left(self._bounds, at)
        if self._bounds[k] != at:
            self._bounds.insert(k, at)
            self._runs.insert(k, Run(self._runs[k - 1].value))
        return k
