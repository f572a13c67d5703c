"""Which of many ways to write a program are planned, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import memplan.api as memplan
from hlo_passes.errors import MemoryBudgetError, VerificationError
from memplan.candidates import Against, Promise, Refused
from memplan.fastest import Fastest
from tests.memplan.chains import HALF, activations, chain, weights
from tests.memplan.test_planner import refusal
from tests.memplan.test_progress import scanned

BUDGET = 1 << 20


@dataclass(frozen=True)
class Planned(Promise):
    """What came of it."""

    placing: Any


@dataclass(eq=False)
class Way:
    """A program that promises so many seconds, None where that is refused, and not a number where
    XLA does not show it; and its plan's step, None where that is refused."""

    promised_s: float | None
    planned_s: float | None
    aim: int | None = None
    needs: int = BUDGET + 1
    more_bytes: int = -1
    planned: list[Way] = field(default_factory=list)
    looked_at: list[Way] = field(default_factory=list)

    @property
    def placing(self) -> Any:
        return SimpleNamespace(aim=self.aim, splits=() if self.aim is None else ("loop",))

    def plan_for(self, *_: Any) -> None: ...

    def named(self, _ring: object) -> str:
        return "it"

    def inside(self, _budget: int) -> Iterator[tuple[frozenset[int], bool]]:
        yield frozenset(), False

    def promise(self, *_: Any) -> Promise | Refused | None:
        self.looked_at.append(self)
        if self.promised_s is None:
            return Refused(self.needs)
        return None if math.isnan(self.promised_s) else Promise(self.promised_s, 1.0)

    def in_turn(self, *args: Any) -> Iterator[Any]:
        *_, found, failed = args
        self.planned.append(self)
        if self.planned_s is None:
            failed.append(refusal(BUDGET, self.needs - BUDGET))
            return
        found.append(candidate := Planned(self.planned_s, 1.0, self.placing))
        yield candidate


def against(way: Way) -> Against:
    return Against(0.0, way.more_bytes)


def planned(ways: Sequence[Way]) -> tuple[float, list[int]]:
    """The step that is found, and which of the ways are planned for it, in turn."""
    order: list[Way] = []
    for way in ways:
        way.planned = order
    found = Fastest(BUDGET, None, against).of(ways)  # pyright: ignore[reportArgumentType]
    return found.step_time_s, [ways.index(way) for way in order]


def test_what_promises_a_good_step_is_planned_at_once_and_ends_the_search():
    assert planned([Way(1.02, 1.03), Way(1.0, 1.0, aim=64)]) == (1.03, [0])


def test_what_promises_a_good_step_but_no_better_one_is_not_planned():
    assert planned([Way(1.04, 1.052), Way(1.045, 1.045, aim=64)]) == (1.052, [0])


def test_nothing_is_computed_again_for_a_step_that_is_fast_enough():
    ways = [Way(1.01, 1.015), Way(1.0, 1.0)]
    assert planned(ways) == (1.015, [0])
    assert planned([Way(1.03, 1.04), ways[1]]) == (1.0, [0, 1])


def test_what_promises_a_slow_step_waits_for_what_promises_a_better_one():
    ways = [Way(4.0, 6.0), Way(2.0, 2.5, aim=64), Way(1.8, 1.9, aim=32)]
    assert planned(ways) == (1.9, [2])


def test_the_next_is_planned_while_it_promises_more_than_there_is():
    ways = [Way(4.0, 4.5), Way(2.0, 2.5, aim=64), Way(1.8, 5.0, aim=32)]
    assert planned(ways) == (2.5, [2, 1])


def test_chunks_without_a_good_promise_do_not_follow_a_good_plan():
    ways = [Way(1.02, 1.5), Way(1.4, 1.45, aim=64), Way(1.6, 1.7, aim=32)]
    assert planned(ways) == (1.45, [0, 1])


def test_where_none_of_those_put_off_can_be_packed_smaller_chunks_are_looked_at():
    chunks = [Way(2.0 + n / 10, None, aim=64 - n) for n in range(4)]
    last = Way(2.5, 2.6, aim=59), Way(2.45, 2.46, aim=58)
    assert planned([*chunks, *last]) == (2.46, [0, 1, 2, 3, 5])


def test_where_chunks_need_no_less_than_the_program_without_them_the_search_ends():
    """Also after some that had promised something could not be packed."""
    seconds = [None, None, None, 2.0, *[None] * 6]
    ways = [Way(s, None, aim=64 - n if n else None) for n, s in enumerate(seconds)]
    order: list[Way] = []
    for way in ways:
        way.planned = order
    with pytest.raises(MemoryBudgetError):
        Fastest(BUDGET, None, against).of(ways)  # pyright: ignore[reportArgumentType]
    assert [ways.index(way) for way in order] == [0, 3, 1, 2, 4, 5]


def test_what_is_refused_is_planned_to_be_told_why():
    with pytest.raises(MemoryBudgetError) as refused:
        planned([Way(None, None), Way(None, None, aim=64, needs=BUDGET + 5)])
    assert refused.value.least == BUDGET + 1
    assert planned([Way(None, None), Way(1.5, 1.6, aim=64)]) == (1.6, [0, 1])


def test_chunks_that_are_refused_are_not_planned_where_there_is_a_plan():
    ways = [Way(2.0, 2.5), Way(None, 1.2, aim=64), Way(None, 1.1, aim=32, needs=BUDGET)]
    assert planned(ways) == (2.5, [0])
    # Its own cannot be packed: that which needs least is planned first.
    assert planned([Way(2.0, None), *ways[1:]]) == (1.1, [0, 2])


def test_chunks_that_need_less_and_less_are_looked_at_until_they_fit():
    refused = [Way(None, None, aim=64 - n, needs=BUDGET + 9 - n) for n in range(4)]
    ways = [Way(None, None, needs=BUDGET + 10), *refused, Way(1.5, 1.6, aim=60)]
    assert planned(ways) == (1.6, [0, 5])


def test_chunks_that_xla_does_not_show_with_the_first_ring_are_planned_with_others():
    assert planned([Way(2.0, 2.5), Way(math.nan, 1.9, aim=64)]) == (1.9, [1])


def test_of_many_that_promise_more_than_they_hold_not_all_are_planned():
    ways = [Way(1.1 + n / 100, 2.0, aim=1 << (20 - n)) for n in range(9)]
    # Each promises less than the one before: after three such the series is over.
    found, order = planned(ways)
    assert (found, order) == (2.0, [0, 1, 2, 3])
    better = [Way(2.0 / 1.1**n, 4.0, aim=1 << (20 - n)) for n in range(6)]
    found, order = planned(better)
    assert (found, order) == (4.0, [5, 4, 3, 2])


def test_chunks_of_which_as_much_is_live_as_without_them_are_left_out():
    vain = [Way(1.1, 1.1, aim=64 - n, more_bytes=n) for n in range(2)]
    found, order = planned([Way(2.0, 2.5), *vain, Way(1.5, 1.6, aim=32)])
    assert (found, order) == (1.6, [3])
    assert not any(way.looked_at for way in vain)
    # Three of them end the series.
    vain.append(Way(1.1, 1.1, aim=60, more_bytes=0))
    assert planned([Way(2.0, 2.5), *vain, Way(1.5, 1.6, aim=32)]) == (2.5, [0])


def test_a_program_that_xla_does_not_show_is_dropped(caplog: pytest.LogCaptureFixture):
    ways = [Way(1.5, 1.6), Way(1.1, 1.2, aim=64)]

    def refused(way: Way) -> Against:
        if way is ways[1]:
            raise VerificationError("loop", "not the same")
        return Against()

    found = Fastest(BUDGET, None, refused).of(ways)  # pyright: ignore[reportArgumentType]
    assert found.step_time_s == 1.6
    assert "it was dropped" in caplog.text


def test_compute_that_is_done_again_counts_against_a_promise():
    ways = [Way(1.5, 1.6), Way(1.4, 1.4, aim=64)]
    order: list[Way] = []
    for way in ways:
        way.planned = order
    again = {id(ways[0]): Against(), id(ways[1]): Against(0.5, -1)}
    search = Fastest(BUDGET, None, lambda way: again[id(way)])
    search.of(ways)  # pyright: ignore[reportArgumentType]
    assert [ways.index(way) for way in order] == [0]
    assert math.isclose(Promise(1.4, 1.0).with_again(0.5).waits_s, 0.9)


@pytest.mark.parametrize("rings", [False, True])
def test_what_no_budget_has_room_for_promises_nothing_but_its_least(rings: bool):
    args = (jnp.stack(weights()) if rings else weights()), activations()
    lowered = memplan.jit(scanned if rings else chain, hbm=HALF).lower(*args)
    way = lowered._budgeted.planner._as_written
    way.plan_for(HALF, None)
    promise = way.promise(HALF, None)
    assert isinstance(promise, Promise)
    assert promise.step_time_s >= promise.compute_s > 0
    way.plan_for(1, None)
    refused = way.promise(1, None)
    assert isinstance(refused, Refused)
    assert 1 < refused.least <= HALF
