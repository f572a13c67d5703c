"""The sizes that are worth a compilation each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.buckets.errors import BucketsError


@dataclass(frozen=True)
class Chosen:
    """Buckets for sizes that were seen.

    Attributes:
      sizes: of the buckets, ascending.
      cost: of all that was seen, each at its bucket's cost.
      unpadded: of the same at its own.
    """

    sizes: tuple[int, ...]
    cost: float
    unpadded: float

    @property
    def padding(self) -> float:
        """What part of the cost is for padding."""
        return 1 - self.unpadded / self.cost


def choose_buckets(
    seen: Iterable[int],
    *,
    most: int,
    each: float = 0.0,
    multiple: int = 1,
    cost: Callable[[int], float] = float,
) -> Chosen:
    """The buckets with the least cost: of every size seen that of its bucket, and of every bucket
    that of its compilation. No other choice of sizes is better.

    Dynamic programming over the sizes seen, as for optimal quantization (Bruce, 1965): of n
    different ones it takes O(most · n²) steps.

    Args:
      seen: sizes, as often as each was seen.
      most: so many buckets at the most.
      each: what one more bucket costs, in units of `cost`, as its compilation does.
      multiple: of what number sizes have to be.
      cost: of one call at a size, in any unit, such as seconds; it must not fall.

    Raises:
      BucketsError: when nothing was seen, or numbers are not positive.

    >>> choose_buckets([100] * 9 + [120] * 3 + [900], most=2).sizes
    (120, 900)
    """
    counts = Counter(seen)
    if not counts or min(counts) < 1:
        raise BucketsError(
            f"sizes that were seen: expected positive ints, found {sorted(counts)[:5]}"
        )
    if most < 1 or multiple < 1 or each < 0:
        raise BucketsError(
            f"most={most}, multiple={multiple}, each={each}: expected positive ones, and no less "
            "than 0"
        )
    calls = Counter[int]()
    for size, times in counts.items():
        calls[-(-size // multiple) * multiple] += times
    sizes = sorted(calls)
    before = np.concatenate([[0], np.cumsum([calls[size] for size in sizes])])
    costs = [cost(size) for size in sizes]
    # Of the first k sizes: the least cost with so many buckets, and where the last one begins.
    least = np.full(len(sizes) + 1, np.inf)
    least[0] = 0.0
    begins: list[npt.NDArray[np.int64]] = []
    best, used = math.inf, 0
    for n in range(1, min(most, len(sizes)) + 1):
        found, begin = np.full_like(least, np.inf), np.zeros(len(least), np.int64)
        for k in range(n, len(sizes) + 1):
            total = least[n - 1 : k] + costs[k - 1] * (before[k] - before[n - 1 : k])
            at = int(np.argmin(total))
            found[k], begin[k] = total[at], n - 1 + at
        least = found
        begins.append(begin)
        if least[-1] + n * each < best:
            best, used = float(least[-1]) + n * each, n
    chosen: list[int] = []
    end = len(sizes)
    for begin in reversed(begins[:used]):
        chosen.append(sizes[end - 1])
        end = int(begin[end])
    unpadded = sum(cost(size) * times for size, times in counts.items())
    return Chosen(tuple(reversed(chosen)), best - used * each, unpadded)
