"""Which memory an evicted temporary waits in, when one off the device cannot hold them all.

    tick       0    1    2    3    4    5    6
    a           [─ away ─────────────────)        idle for long: cxl, or nvme
    b                [─ away ──)                  comes back soon: the fastest tier
    c                          [─ away ──)        takes b's place there

A tier can be used that has a link from device memory and one back; on-chip memory is XLA's
alone. Copies that are away at the same time share a tier's capacity; where in the tier each
lies is not decided here.

The objective is, first, the seconds that the device waits: over all copies, by how much the
way out and back takes longer than the copy's idle time. Second, the seconds that links are
busy, which sends a copy to the fastest tier that is left. Links are priced one copy at a
time; what they queue for each other is the timeline's to say.

A copy with little idle time for its bytes gains most from a fast tier, so a greedy pass
gives out tiers in that order. From there a branch and bound looks for better: it is exact
for a few copies, and cut short for many, when the best found so far stands.

XLA itself moves temporaries to its host memory only. Plans that name other tiers are for the
simulator, and for machines whose tiers custom calls drive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.errors import TierCapacityError
from hlo_passes.hardware.machine import Machine, Tier
from hlo_passes.ir import ON_CHIP_MEMORY_SPACE
from hlo_passes.plan import LiveRange

_NODES = 20_000
"""How many steps the branch and bound takes at most; some 0.1 s."""


@dataclass(frozen=True, slots=True)
class AwayCopy:
    """An evicted temporary, while it is off the device.

    Attributes:
      name: HLO name of what is evicted.
      size: bytes.
      away: half-open ticks during which the copy has to be kept.
      idle_s: seconds of compute between the reader before and the reader behind.
    """

    name: str
    size: int
    away: LiveRange
    idle_s: float


class _Price(NamedTuple):
    """Compared in this order. Whole nanoseconds: their sums are exact, so ties are ties.

    Attributes:
      exposed: what idle time does not cover.
      link: for how long links are busy.
    """

    exposed: int
    link: int


_NOTHING = _Price(0, 0)


def choose_tiers(
    machine: Machine, copies: Sequence[AwayCopy], held: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """Returns the tier of each copy, by name, in the order of `copies`.

    Args:
      held: bytes of a tier that other things take for the whole step, by the tier's name.

    Raises:
      TierCapacityError: when no assignment is found in which every tier holds what it gets.
        With one tier there is none; with several, none among those that were looked at.

    O(copies² × tiers) for the greedy pass, then at most `_NODES` times O(copies).
    """
    if not copies:
        return ()
    if not off_device_tiers(machine):
        stored = {"temporaries": max(copy.size for copy in copies)}
        raise TierCapacityError(machine.name, "host", stored, 0)
    return _Search(machine, copies, held or {}).best()


def off_device_tiers(machine: Machine) -> tuple[Tier, ...]:
    """The tiers that device memory has links to and from, on-chip memory apart."""
    near = machine.device_memory.name
    linked = {(link.source, link.destination) for link in machine.links}
    return tuple(
        tier
        for tier in machine.tiers[1:]
        if tier.memory_space != ON_CHIP_MEMORY_SPACE
        and {(near, tier.name), (tier.name, near)} <= linked
    )


class _Search:
    """A greedy assignment, and a branch and bound that starts from it."""

    def __init__(
        self, machine: Machine, copies: Sequence[AwayCopy], held: Mapping[str, int]
    ) -> None:
        self._machine = machine
        self._copies = copies
        self._tiers = off_device_tiers(machine)
        self._held = [held.get(tier.name, 0) for tier in self._tiers]
        # Only the ticks at which a copy leaves matter: elsewhere the load does not rise.
        ticks = sorted({copy.away.start for copy in copies})
        self._spans = [
            slice(*np.searchsorted(ticks, (copy.away.start, copy.away.end)).tolist())
            for copy in copies
        ]
        self._load = np.array([[h] * len(ticks) for h in self._held], dtype=np.int64).reshape(
            len(self._tiers), len(ticks)
        )
        self._prices = [[self._price(copy, tier) for tier in self._tiers] for copy in copies]
        # Those with the least idle time for their bytes first.
        self._order = sorted(
            range(len(copies)), key=lambda k: (copies[k].idle_s / max(1, copies[k].size), k)
        )

    def _price(self, copy: AwayCopy, tier: Tier) -> _Price:
        near = self._machine.device_memory.name
        seconds = self._machine.transfer_seconds(copy.size, near, tier.name)
        seconds += self._machine.transfer_seconds(copy.size, tier.name, near)
        return _Price(round(max(0.0, seconds - copy.idle_s) * 1e9), round(seconds * 1e9))

    def best(self) -> tuple[str, ...]:
        chosen = self._greedy(self._by_price) or self._greedy(self._largest_last)
        if len(self._tiers) > 1:
            chosen = self._branch_and_bound(chosen)
        if chosen is None:
            raise self._shortage()
        return tuple(self._tiers[t].name for t in chosen)

    def _greedy(self, order: Callable[[int], Sequence[int]]) -> list[int] | None:
        """Each copy to the first tier, in `order` of its own, that still has room for it."""
        chosen = [-1] * len(self._copies)
        load = self._load.copy()
        for k in self._order:
            tier = next((t for t in order(k) if self._fits(load, k, t)), None)
            if tier is None:
                return None
            load[tier, self._spans[k]] += self._copies[k].size
            chosen[k] = tier
        return chosen

    def _branch_and_bound(self, incumbent: list[int] | None) -> list[int] | None:
        """Returns the best assignment among those looked at, `incumbent` included.

        The copy at depth d of the order tries its tiers one after the other, cheapest first;
        a branch ends where even the cheapest tiers for the rest cost as much as the best.
        """
        best = None if incumbent is None else self._total(incumbent)
        rest, load = self._least_rest(), self._load.copy()
        path: list[int] = []
        paid = [_NOTHING]
        untried = [iter(self._by_price(self._order[0]))]
        for _ in range(_NODES):
            if not untried:
                break
            k = self._order[len(path)]
            tier = next(untried[-1], None)
            if tier is None:
                untried.pop()
                if path:
                    paid.pop()
                    k = self._order[len(path) - 1]
                    load[path.pop(), self._spans[k]] -= self._copies[k].size
                continue
            price = _plus(paid[-1], self._prices[k][tier])
            if best is not None and _plus(price, rest[len(path) + 1]) >= best:
                continue
            if not self._fits(load, k, tier):
                continue
            if len(path) + 1 == len(self._order):
                best, incumbent = price, [-1] * len(self._copies)
                for place, t in zip(self._order, (*path, tier), strict=True):
                    incumbent[place] = t
                continue
            load[tier, self._spans[k]] += self._copies[k].size
            path.append(tier)
            paid.append(price)
            untried.append(iter(self._by_price(self._order[len(path)])))
        return incumbent

    def _least_rest(self) -> list[_Price]:
        """What the copies from each depth on cost at least: each in its cheapest tier."""
        rest = [_NOTHING]
        for k in reversed(self._order):
            rest.append(_plus(rest[-1], min(self._prices[k])))
        return rest[::-1]

    def _by_price(self, k: int) -> list[int]:
        return sorted(range(len(self._tiers)), key=lambda t: (self._prices[k][t], t))

    def _fits(self, load: npt.NDArray[np.int64], k: int, t: int) -> bool:
        top = load[t, self._spans[k]].max(initial=0)
        return int(top) + self._copies[k].size <= self._tiers[t].capacity_bytes

    def _total(self, chosen: Sequence[int]) -> _Price:
        return reduce(_plus, (self._prices[k][t] for k, t in enumerate(chosen)), _NOTHING)

    def _largest_last(self, k: int) -> list[int]:
        return [*(t for t in self._by_price(k) if t != self._largest), self._largest]

    @property
    def _largest(self) -> int:
        return max(range(len(self._tiers)), key=lambda t: self._tiers[t].capacity_bytes)

    def _shortage(self) -> TierCapacityError:
        """What would stand in the largest tier if all that fits nowhere else went there."""
        load, largest = self._load.copy(), self._largest
        for k in self._order:
            others = self._largest_last(k)[:-1]
            tier = next((t for t in others if self._fits(load, k, t)), largest)
            load[tier, self._spans[k]] += self._copies[k].size
        held = self._held[largest]
        stored = {"arguments": held, "temporaries": int(load[largest].max()) - held}
        tier = self._tiers[largest]
        return TierCapacityError(self._machine.name, tier.name, stored, tier.capacity_bytes)


def _plus(a: _Price, b: _Price) -> _Price:
    return _Price(a.exposed + b.exposed, a.link + b.link)
