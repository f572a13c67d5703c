"""What of each medium is taken when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Calendar:
    """Bytes a second that are taken of a medium, by nanoseconds: a step function.

    Attributes:
      capacity: bytes a second, at most.
    """

    capacity: int
    # From each moment on, up to the next, so much is taken.
    _moments: list[int] = field(default_factory=lambda: [0], init=False)
    _taken: list[int] = field(default_factory=lambda: [0], init=False)

    def free_from(self, begin: int, duration: int, rate: int) -> int:
        """The first moment, from `begin` on, at which `rate` is free for as long."""
        k = bisect_right(self._moments, begin) - 1
        while k < len(self._moments) and self._moments[k] < begin + duration:
            k += 1
            if self._taken[k - 1] + rate > self.capacity:
                # The last stretch goes on for good, and nothing is taken in it.
                begin = self._moments[k]
        return begin

    def take(self, begin: int, end: int, rate: int) -> None:
        first, last = self._cut(begin), self._cut(end)
        for k in range(first, last):
            self._taken[k] += rate

    def _cut(self, at: int) -> int:
        k = bisect_right(self._moments, at) - 1
        if self._moments[k] == at:
            return k
        self._moments.insert(k + 1, at)
        self._taken.insert(k + 1, self._taken[k])
        return k + 1


def first_free(
    calendars: Sequence[Calendar], begin: int, duration: int, rates: Sequence[int]
) -> int:
    """The first moment from `begin` on at which all are free for as long."""
    while True:
        then = begin
        for calendar, rate in zip(calendars, rates, strict=True):
            then = calendar.free_from(then, duration, rate)
        if then == begin:
            return begin
        begin = then
