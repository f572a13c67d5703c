"""Gaps that a sampled timeline cannot tell apart, merged into one of which any part can go.

    samples      p0      p1      p2      p3
    gap a          ├──────────────┤                 a and b are away at p1 and p2, can leave
    gap b            ├─────────────┤                behind p0 and are due by p3: one gap of
    gap c          ├──────┤                         their bytes; c is another

For the program of `edits.linear_program` each choice about a and b is a choice of so many bytes of
the merged gap at the same price, so that merging only lowers the bound, by little:

what is recomputed costs what the cheapest of the group costs a byte, and only gaps within 10% of
the same price are merged.

A value of several gaps stays as it is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hlo_passes.edits.choices import Choices, Gap

_PRICES = 1.1
"""The ratio of the highest to the lowest price a byte in a group."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Choices about merged gaps.

    Attributes:
      choices: with one gap for each group.
      members: of each group the indices of its gaps.
    """

    choices: Choices
    members: tuple[tuple[int, ...], ...]

    @cached_property
    def merged(self) -> frozenset[int]:
        """Indices of the groups of more than one gap."""
        return frozenset(i for i, members in enumerate(self.members) if len(members) > 1)


def merge(choices: Choices, samples: Sequence[int]) -> Groups:
    """Merges what the `samples`, ticks in order, cannot tell apart. O(n log n) in gaps."""
    gaps_of = Counter(gap.value for gap in choices.gaps)
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, gap in enumerate(choices.gaps):
        if gaps_of[gap.value] > 1:
            groups["alone", i].append(i)
            continue
        ticks = np.searchsorted(samples, [gap.written, gap.start, gap.end])
        groups[*ticks.tolist(), gap.is_evictable, _price(gap)].append(i)
    members = tuple(map(tuple, groups.values()))
    gaps = tuple(_group([choices.gaps[i] for i in group]) for group in members)
    return Groups(replace(choices, gaps=gaps), members)


def single(choices: Choices) -> Groups:
    """Merges nothing."""
    return Groups(choices, tuple((i,) for i in range(len(choices.gaps))))


def _price(gap: Gap) -> int | None:
    """The price a byte of making it again, in steps of 10%; None where it cannot be."""
    if gap.recompute_s is None:
        return None
    price = gap.recompute_s / max(1, gap.size)
    # What costs nothing is taken together with what costs next to nothing.
    return math.floor(math.log(max(price, 1e-40), _PRICES))


def _group(gaps: Sequence[Gap]) -> Gap:
    size = sum(gap.size for gap in gaps)
    prices = [gap.recompute_s / max(1, gap.size) for gap in gaps if gap.recompute_s is not None]
    recompute_s = min(prices) * size if len(gaps) > 1 and prices else gaps[0].recompute_s
    return replace(gaps[0], size=size, recompute_s=recompute_s)
