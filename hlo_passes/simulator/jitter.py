"""Seconds that are not as predicted: random factors for the simulator.

predicted   │ c0 │ c1 │ c2 │          host→hbm  ├──w──►├──v──►
one run     │ c0│  c1  │ c2│          host→hbm  ├───w────►├─v─►
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np


@dataclass(frozen=True, slots=True)
class Jitter:
    """How far seconds may be from the predicted ones.

    Each compute, each collective, and the bytes of each transfer (not its latency) take their
    predicted seconds times a factor of their own: lognormal, of mean 1. Such factors are
    never negative and now and then large, as delays are.

    Attributes:
      compute: coefficient of variation (standard deviation over mean) of the factors of
        computes; 0 for none.
      transfer: the same for transfers and collectives.
      seed: equal seeds give equal factors. The k-th compute has the same factor in every
        schedule, and so has the k-th transfer: two schedules of one program are compared in
        the same weather.

    Raises:
      ValueError: when a coefficient or the seed is negative.
    """

    compute: float = 0.0
    transfer: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.compute < math.inf and 0 <= self.transfer < math.inf):
            raise ValueError(f"{self}: expected coefficients of variation of 0 or more")
        if self.seed < 0:
            raise ValueError(f"{self}: expected a seed of 0 or more")

    def compute_factors(self) -> Iterator[float]:
        """Yields a factor for each compute, for ever."""
        return _lognormal(self.compute, (self.seed, 0))

    def transfer_factors(self) -> Iterator[float]:
        """Yields a factor for each transfer or collective, for ever."""
        return _lognormal(self.transfer, (self.seed, 1))


STEADY = Jitter()
"""All seconds as predicted."""


def _lognormal(variation: float, seed: tuple[int, int]) -> Iterator[float]:
    """Of exp(N(μ, σ²)) the mean is exp(μ + σ²/2), and the squared coefficient of variation
    exp(σ²) − 1."""
    if not variation:
        yield from repeat(1.0)
        return
    variance = math.log1p(variation**2)
    random = np.random.default_rng(seed)
    while True:
        yield from random.lognormal(-variance / 2, math.sqrt(variance), 1024).tolist()
