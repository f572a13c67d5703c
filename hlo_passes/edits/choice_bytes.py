"""Bytes on the device at every tick, under what is chosen of `edits.choices`.

    load       ████████████████████████████████████████     every gap kept, no weights
    away       ░░░░░░░░████████                             less its bytes in [start, end)
    streamed                      ▒▒▒        ▒▒▒            a weight, while it is read

These are bytes at best: a transfer that starts or ends inside a gap takes the rest of it too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.choices import Choices

Bytes = npt.NDArray[np.int64]


class Profile:
    """Sums of (half-open range of ticks, bytes); bytes may be fractions, and negative."""

    def __init__(self, ticks: int) -> None:
        self._steps = np.zeros(ticks + 1)

    def add(self, start: int, end: int, size: float) -> None:
        self._steps[start] += size
        self._steps[end] -= size

    def sums(self) -> npt.NDArray[np.float64]:
        """Returns float64[ticks]."""
        return np.cumsum(self._steps)[:-1]

    def onto(self, load: Bytes) -> Bytes:
        """Returns int64[ticks], for whole bytes: `load` and what was added."""
        return load + np.rint(self.sums()).astype(np.int64)


def least_bytes(choices: Choices) -> Bytes:
    """Returns int64[ticks], bytes that are on the device whatever is chosen."""
    profile = Profile(choices.ticks)
    for gap in choices.gaps:
        profile.add(gap.start, gap.end, -gap.size)
    for weight in choices.weights:
        for live in weight.reads:
            profile.add(live.start, live.end, weight.size)
    return profile.onto(choices.load)


def most_bytes(choices: Choices) -> Bytes:
    """Returns int64[ticks], bytes on the device when every gap is kept and every weight is
    there from its first to its last read."""
    profile = Profile(choices.ticks)
    for weight in choices.weights:
        if weight.reads:
            profile.add(weight.reads[0].start, weight.reads[-1].end, weight.size)
    return profile.onto(choices.load)
