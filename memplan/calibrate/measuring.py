"""How long programs take, on a machine that may have other things to do.

All programs run in turns, so that what is slow for a while is so for all of them. What disturbs
adds to what a program takes: of the turns the lower quartile counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

# A turn of a program takes at least this long, or is one run.
_TURN_S = 4e-3
_LEAST_TURNS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """What a run takes.

    Attributes:
      seconds: the lower quartile of the turns.
      spread: what lies between the quartiles, relative to the median.
    """

    seconds: float
    spread: float


@dataclass
class Timed:
    """One program that is measured in turns.

    Attributes:
      run: runs it once, and returns what to wait for; or the seconds that it took, where something
        else went on around it.
      waits: whether a run has to end before the next one: where programs and calls share the
        processors.
    """

    run: Callable[[], Any]
    waits: bool
    runs: int = 0
    seconds: list[float] = field(default_factory=list[float])

    def turn(self) -> None:
        """Runs it for some milliseconds; the first time is not counted."""
        if not self.runs:
            jax.block_until_ready(self.run())
            begin = time.perf_counter()
            jax.block_until_ready(self.run())
            once = max(time.perf_counter() - begin, 1e-7)
            self.runs = max(1, int(_TURN_S / once))
        begin, result, counted = time.perf_counter(), None, 0.0
        for _ in range(self.runs):
            result = self.run()
            if isinstance(result, float):
                counted += result
            elif self.waits:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        self.seconds.append((counted or time.perf_counter() - begin) / self.runs)

    @property
    def timing(self) -> Timing:
        low, median, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return Timing(low, (high - low) / median if median else 0.0)


def in_turns(timed: Sequence[Timed], limit_s: float) -> Iterator[float]:
    """Measures all in turns, some times or until the time is over; yields what part is done."""
    begin = time.monotonic()
    turns = 0
    while turns < _LEAST_TURNS or time.monotonic() - begin < limit_s:
        for n, one in enumerate(timed):
            one.turn()
            done = (turns + (n + 1) / len(timed)) / _LEAST_TURNS
            yield min(1.0, max(done, (time.monotonic() - begin) / limit_s if limit_s else 0.0))
        turns += 1
