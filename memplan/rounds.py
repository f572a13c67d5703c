"""Plans for one budget, one after another, each by what XLA reported of those before.

    the fastest ─► one more that counts the chip ─► with what is known now ─► with more left free

On TPU there are two kinds: of what XLA holds on the chip, a plan leaves out what every executable
seen held there; or it counts all of that, and is made for so much more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hlo_passes.errors import MemoryBudgetError
from memplan.aiming import aim_for
from memplan.candidates import Candidate
from memplan.planner import Planner

# By what part of a budget XLA may stay below what is predicted, because it packs better.
NEAR = 1 / 64

# A step that takes longer than with everything on the device by more than this factor waits.
WAITS = 1.05

# Where XLA's report is aimed at by what it was of other plans, so much of the room is left free.
_LEFT = 1 / 40

# How often what XLA was seen to take for no known reason is left free in one round after another.
_CAUTIONS = (2, 4, 8)

# On TPU, how often a plan has to fit where what XLA holds on the chip is drawn: before any was
# compiled, and one after another then; and the shares of the room for which plans are made until
# one does.
_AT_FIRST = 0.4
_CHANCES = (0.4, 0.75, 0.95)
_SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82)


@dataclass(frozen=True)
class Seen:
    """A plan that was compiled.

    Attributes:
      reported: bytes, by XLA.
      unexplained: bytes of them by which XLA may exceed another plan as well.
    """

    candidate: Candidate
    reported: int
    unexplained: int

    def __str__(self) -> str:
        return f"planned {self.candidate.predicted_bytes} bytes, XLA reports {self.reported}"


class Rounds:
    """Plans to compile for a budget until XLA reports no more.

    Args:
      planner: of the program.
      room: the budget, in bytes.
      options: XLA's, with which all are compiled.
      own: returns the bytes that XLA reports of the program as it has it, which may take a
        compilation; None where that does not fit.

    Attributes:
      seen: what was compiled. Whoever compiles a plan adds it before the next is asked for; or
        nothing, where XLA scheduled another module: then the plan is made anew.
    """

    def __init__(
        self,
        planner: Planner,
        room: int,
        options: Mapping[str, Any] | None,
        own: Callable[[], int | None],
    ) -> None:
        self._planner = planner
        self._room = room
        self._options = options
        self._own = own
        self.seen: list[Seen] = []
        self._shares = iter(_SHARES)
        self._surer: list[Candidate] = []  # Behind the fastest of those made first.
        self._drawn: dict[str, tuple[Candidate, tuple[int, ...]]] = {}

    def __iter__(self) -> Iterator[Candidate]:
        """Yields plans, none that was compiled.

        Raises:
          MemoryBudgetError: when there is none, or none any more.
        """

        def fastest() -> Candidate:
            found, *self._surer = self.first()
            return found

        yield from self._until_seen(fastest)
        if self._planner.knows_chip:
            for chance in _CHANCES:
                yield from self._until_seen(lambda least=chance: self._likely(least))
        for caution in _CAUTIONS:
            yield from self._until_seen(lambda n=caution: self._with_known(n))

    def _until_seen(self, make: Callable[[], Candidate | None]) -> Iterator[Candidate]:
        compiled = {seen.candidate.plan.fingerprint for seen in self.seen}
        before = len(self.seen)
        while len(self.seen) == before:
            candidate = make()
            if candidate is None or candidate.plan.fingerprint in compiled:
                return
            yield candidate
            if len(self.seen) == before:
                self._forget()

    def _forget(self) -> None:
        """Drops what was planned and not compiled, which was for another module."""
        compiled = {seen.candidate.plan.fingerprint for seen in self.seen}
        self._drawn = {name: known for name, known in self._drawn.items() if name in compiled}
        self._surer.clear()
        self._shares = iter(_SHARES)

    def first(self) -> list[Candidate]:
        """The plan to compile as far as is known before any is, and behind one that counts what is
        on the chip one that does not, if there is one.

        What XLA:TPU holds on the chip depends on the plan. Where one that leaves out what it was
        seen to hold there waits, or hardly ever fits where that is drawn, or there is none, others
        are made that count all of it, less what XLA stayed below that: small programs need less
        than a tenth of the HBM that is predicted so, or none. The fastest comes first, or one that
        is hardly slower and fits oftener.

        Raises:
          MemoryBudgetError: when there is none.
        """
        found: list[Candidate] = []
        errors: list[MemoryBudgetError] = []
        for beyond, counts_chip in self._kinds():
            try:
                aim = self._room + beyond
                candidate = self._planner.plan(
                    aim, self._options, counts_chip=counts_chip, near=found[0] if found else None
                )
            except MemoryBudgetError as error:
                errors.append(error.asked_for(self._room, error.least - beyond))
                continue
            found.append(candidate)
            if not self._planner.knows_chip:
                return found
            if candidate.is_hidden and self._fits(candidate, _AT_FIRST):
                break
        if not found:
            raise min(errors, key=lambda e: e.least)
        best, *others = found
        for other in others:
            best = other if other.is_faster_than(best) else best
        near = (c for c in found if c.cost_s <= WAITS * best.cost_s)
        fitting = (c for c in near if self._fits(c, _AT_FIRST))
        best = min(fitting, key=lambda c: c.waits_s, default=best)
        return [best, *(c for c in found if not c.counts_chip and best.counts_chip)]

    def _kinds(self) -> Iterator[tuple[int, bool]]:
        """Bytes to plan for beyond the room, and whether what is on the chip is counted."""
        yield 0, False
        credit = self._credit()
        if credit:
            yield credit, True
        if self._planner.knows_chip:
            yield 0, True

    def _credit(self) -> int:
        """Bytes by which XLA stays below what is predicted of the program as it has it, all counted
        that it holds on the chip; 0 where that is next to nothing, or not known."""
        own = self._own()
        if own is None:
            return 0
        unmoved = self._planner.unmoved(self._options, counts_chip=True)
        if unmoved is None:
            return 0
        credit = unmoved.predicted_bytes - own
        return credit if credit > self._room * NEAR else 0

    def _fits(self, candidate: Candidate, chance: float) -> bool:
        """Whether XLA reports no more of a plan than there is room for with that `chance`."""
        return self._excess(candidate, chance) <= 0

    def _excess(self, candidate: Candidate, chance: float) -> int:
        """The bytes by which a plan exceeds the room unless it is luckier than that `chance`, as
        far as drawn packings say, and what XLA reported of others beyond all that was drawn of
        them."""
        fingerprint = candidate.plan.fingerprint
        if fingerprint not in self._drawn:
            drawn = self._planner.drawn_bytes(candidate, self._options)
            self._drawn[fingerprint] = candidate, drawn
        beyond = 0
        for seen in self.seen:
            if (known := self._drawn.get(seen.candidate.plan.fingerprint)) is not None:
                beyond = max(beyond, seen.reported - max(known[1]))
        _, drawn = self._drawn[fingerprint]
        enough = max(math.ceil(chance * len(drawn)), 1)
        return sorted(drawn)[enough - 1] + beyond - self._room

    def _planned(self, aim: int, *, counts_chip: bool = False) -> Candidate:
        """A plan for so many bytes, of a program like that of the last one that was compiled."""
        near = self.seen[-1].candidate if self.seen else None
        return self._planner.plan(aim, self._options, counts_chip=counts_chip, near=near)

    def _likely(self, chance: float) -> Candidate | None:
        """The fastest plan not compiled yet that fits with that `chance`, or one made for less that
        counts what is on the chip; None where none was found."""
        compiled = {seen.candidate.plan.fingerprint for seen in self.seen}
        known = [c for name, (c, _) in self._drawn.items() if name not in compiled]
        if likely := [c for c in known if self._fits(c, chance)]:
            return min(likely, key=lambda c: c.waits_s)
        most = self._room
        for aim in (int(self._room * share) for share in self._shares):
            if aim > most:
                continue
            try:
                candidate = self._planned(aim, counts_chip=True)
            except MemoryBudgetError:
                return None
            excess = self._excess(candidate, chance)
            if candidate.plan.fingerprint not in compiled and excess <= 0:
                return candidate
            most = aim - excess  # Of less by so much, about so much less is drawn.
        return None

    def _counting(self) -> Candidate | None:
        """A plan that counts what is on the chip, of which XLA reports about as much as there is
        room for, as far as what it reported of others says; None where there is none."""
        with suppress(MemoryBudgetError):
            aim = aimed_at(self._room, self.seen, counts_chip=True)
            return self._planned(aim, counts_chip=True)
        return None

    def _with_known(self, caution: int) -> Candidate:
        """A plan made with all that is known by now, what remains unexplained left free; where
        there is none, a surer one, or one that counts what is on the chip."""
        try:
            return self._below(max(seen.unexplained for seen in self.seen), caution)
        except MemoryBudgetError:
            other = self._surer.pop() if self._surer else None
            if other is None and self._planner.knows_chip:
                other = self._counting()
            if other is None:
                raise
            return other

    def _below(self, overhead: int, caution: int) -> Candidate:
        """Plans for bytes that XLA was seen to exceed by `overhead`.

        Another plan breaks up XLA's arena in another way: where there is room for it,
        `caution` times of what was seen is left free, so that one more compilation is enough, else
        half of that, and so on; and where there is none for what was seen, as much as the planner
        can.

        Args:
          caution: a power of 2.
        """
        errors: list[MemoryBudgetError] = []
        times = (caution >> n for n in range(caution.bit_length()))
        for left_free in dict.fromkeys(n * overhead for n in times):
            try:
                return self._planned(self._room - left_free)
            except MemoryBudgetError as error:
                errors.append(error)
        least = min(error.least for error in errors)
        if self._room - overhead < least < self._room:
            with suppress(MemoryBudgetError):
                return self._planned(least)
        # Which arguments stay depends on the budget, and on them what is needed beside.
        error = min(errors, key=lambda e: e.least)
        raise error.asked_for(self._room, error.least + overhead)


def aimed_at(room: int, seen: Iterable[Seen], *, counts_chip: bool) -> int:
    """Returns the bytes to plan for, so that XLA reports somewhat less than `room`, as far as plans
    that count what is on the chip, or leave it out, say."""
    alike = (s for s in seen if s.candidate.counts_chip == counts_chip)
    reported = {s.candidate.predicted_bytes: s.reported for s in alike}
    aim = int(room * (1 - _LEFT))
    return aim_for(aim, reported) if reported else aim
