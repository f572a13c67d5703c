"""Selections that fit at every tick, and searches that find what is best on small cases."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from hlo_passes.edits.choice_bytes import device_bytes
from hlo_passes.edits.choices import Choices, Gap, Recipe, Selection, Weight
from hlo_passes.edits.improve import improve, round_up
from hlo_passes.edits.relaxation import Relaxation, relax
from hlo_passes.plan import LiveRange
from tests.hlo_passes.selections import optimum_s, schedule_s, selections, tiny_choices

NOTHING = Selection(frozenset(), (), frozenset())

# Every schedule is tried, which Hypothesis finds slow.
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def choices_of(costs, load, gaps=(), weights=(), rate=10.0):
    return Choices(
        np.array(costs, dtype=float),
        np.array(load, dtype=np.int64),
        tuple(gaps),
        tuple(weights),
        rate,
        rate,
        0.0,
        False,
    )


def pyramid(layers: int, recompute_s: float | None = None) -> Choices:
    """A value of 20 bytes is made at each of the first ticks and read in the opposite order."""
    last = 2 * layers - 1
    recipes = () if recompute_s is None else (Recipe(recompute_s, 0, ()),)
    gaps = [Gap(t, 20, t + 1, t + 1, last - t, True, recipes) for t in range(layers - 1)]
    load = [20 * min(t + 1, last + 1 - t) for t in range(last + 1)]
    return choices_of([1.0] * (last + 1), load, gaps)


def fits(choices, capacity, selection):
    return (device_bytes(choices, selection) <= capacity).all()


def test_bytes_under_a_selection():
    again = Recipe(1.0, 0, (), holds=((LiveRange(1, 3), 3),))
    gaps = [Gap(0, 20, 1, 1, 3, True, ()), Gap(1, 10, 1, 2, 4, True, (again,))]
    weights = [Weight(7, (LiveRange(1, 2), LiveRange(4, 5)), True)]
    choices = choices_of([1] * 5, [50] * 5, gaps, weights)
    assert device_bytes(choices, NOTHING).tolist() == [50, 57, 50, 50, 57]
    assert device_bytes(choices, replace(NOTHING, staying=frozenset({0}))).tolist() == [57] * 5
    chosen = replace(NOTHING, evicted=frozenset({0}), recomputed=((1, 0),))
    assert device_bytes(choices, chosen).tolist() == [50, 40, 23, 40, 57]


def test_what_the_fractions_choose_whole_is_chosen():
    choices = pyramid(4)
    relaxation = relax(choices, 40)
    assert relaxation is not None
    assert round_up(choices, 40, relaxation) == replace(NOTHING, evicted=frozenset({0, 1}))


def test_what_is_needless_is_kept_again():
    # The fractions leave 20 of 30 bytes at tick 1 to one of two gaps, or share them.
    gaps = [Gap(0, 30, 1, 1, 2, True, ()), Gap(1, 30, 1, 1, 2, True, ())]
    choices = choices_of([1, 1, 1], [60, 80, 60], gaps)
    relaxation = relax(choices, 60)
    assert relaxation is not None
    rounded = round_up(choices, 60, relaxation, likely=0.9)
    assert rounded is not None
    assert len(rounded.evicted) == 1


def test_weights_stay_where_the_fractions_say_so():
    weights = [Weight(20, (LiveRange(t, t + 1),), True) for t in range(4)]
    choices = choices_of([1] * 4, [5] * 4, [], weights)
    relaxation = relax(choices, 85)
    assert relaxation is not None
    assert round_up(choices, 85, relaxation) == replace(NOTHING, staying=frozenset(range(4)))


@pytest.mark.parametrize(("evicted", "recomputed"), [(1.0, 0.9), (0.9, 1.0)])
def test_what_a_recipe_needs_is_kept(evicted, recomputed):
    # Both gaps are chosen by fractions, but the second's recipe reads what the first takes away.
    gaps = [
        Gap(0, 20, 1, 1, 2, True, ()),
        Gap(1, 20, 1, 1, 2, False, (Recipe(1.0, 0, (), needs=(0,)),)),
    ]
    choices = choices_of([1, 1, 1], [40, 60, 40], gaps)
    shares = Relaxation(3.0, (0, 1, 2), np.array([evicted, 0]), ((), (recomputed,)), np.zeros(0))
    rounded = round_up(choices, 40, shares)
    if evicted > recomputed:
        assert rounded == replace(NOTHING, evicted=frozenset({0}))
    else:
        assert rounded == replace(NOTHING, recomputed=((1, 0),))
    assert round_up(choices, 20, shares) is None


@settings(max_examples=100, suppress_health_check=SLOW)
@given(tiny_choices())
def test_what_is_rounded_up_can_be_chosen_and_fits(drawn):
    choices, capacity = drawn
    relaxation = relax(choices, capacity)
    assume(relaxation)
    assert relaxation is not None
    for likely in (0.1, 0.5, 0.9):
        rounded = round_up(choices, capacity, relaxation, likely)
        if rounded is not None:
            assert rounded in set(selections(choices))
            assert fits(choices, capacity, rounded)


@settings(max_examples=15, suppress_health_check=SLOW)
@given(tiny_choices())
def test_only_what_fits_is_tried_and_nothing_worse_is_returned(drawn):
    choices, capacity = drawn
    tried = []

    def evaluate(selection):
        assert tried == [] or fits(choices, capacity, selection)
        assert selection not in tried
        tried.append(selection)
        return schedule_s(choices, capacity, selection)

    found = improve(choices, capacity, NOTHING, 60.0, evaluate)
    assert tried[0] == NOTHING
    assert found in set(selections(choices))
    best = min(schedule_s(choices, capacity, selection) for selection in tried)
    assert schedule_s(choices, capacity, found) == best
    # The programs see all that is to be seen: where a schedule exists, they find one.
    assert math.isfinite(best) or math.isinf(optimum_s(choices, capacity))


@pytest.mark.parametrize(("recompute_s", "recomputed"), [(None, 0), (9.0, 0), (0.25, 1)])
def test_the_cheaper_way_is_taken(recompute_s, recomputed):
    # One of two values has to go: 2 s each way on the link, at most 3 s of compute in between.
    choices = pyramid(3, recompute_s)
    found = improve(choices, 40, NOTHING, 60.0, lambda s: schedule_s(choices, 40, s))
    assert (len(found.evicted), len(found.recomputed)) == (1 - recomputed, recomputed)
    assert schedule_s(choices, 40, found) == pytest.approx(optimum_s(choices, 40))


def test_no_more_leaves_than_has_to():
    # 40 values at the peak, 15 of which have room.
    choices, capacity = pyramid(40), 300
    relaxation = relax(choices, capacity)
    assert relaxation is not None
    rounded = round_up(choices, capacity, relaxation)
    assert rounded is not None
    found = improve(choices, capacity, rounded, 60.0, lambda s: 1000.0 + len(s.evicted))
    assert len(found.evicted) == 25


def test_what_evaluate_likes_decides():
    # By the programs' own measure evicting costs less than recomputing; `evaluate` differs.
    choices = pyramid(3, 5.0)

    def evaluate(selection):
        return 100.0 - len(selection.recomputed) if fits(choices, 40, selection) else math.inf

    found = improve(choices, 40, NOTHING, 60.0, evaluate)
    assert len(found.recomputed) == 1


def test_without_time_or_room_it_returns_where_it_began():
    def evaluate(selection):
        return float(len(selection.evicted))

    assert improve(pyramid(4), 40, NOTHING, 0.0, evaluate) == NOTHING
    assert improve(pyramid(4), 19, NOTHING, 60.0, evaluate) == NOTHING


def test_the_same_work_gives_the_same_selection():
    choices = pyramid(8, 1.0)

    def evaluate(selection):
        if not fits(choices, 100, selection):
            return math.inf
        return 1000.0 + sum(selection.evicted) + 2 * len(selection.recomputed)

    first, second = (improve(choices, 100, NOTHING, 600.0, evaluate) for _ in range(2))
    assert first == second
    assert len(first.evicted) + len(first.recomputed) == 3
