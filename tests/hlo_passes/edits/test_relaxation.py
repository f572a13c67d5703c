"""No selection and no schedule beats the bound; on simple families one reaches it.

Tight families, worked out by hand: everything that is short is evicted and the link is the
bottleneck; compute hides every transfer; what is short is recomputed; weights stream through
all of the memory, or through one slot.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from scipy.optimize import linprog

from hlo_passes.edits.choices import Choices, Gap, Weight
from hlo_passes.edits.gap_groups import merge
from hlo_passes.edits.linear_program import build
from hlo_passes.edits.relaxation import lower_bound_s, relax, sample_ticks
from hlo_passes.plan import LiveRange
from tests.hlo_passes.selections import optimum_s, tiny_choices

# Every schedule is tried, which Hypothesis finds slow.
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def choices_of(costs, load, gaps=(), weights=(), rate=10.0, **changes):
    made = Choices(
        np.array(costs, dtype=float),
        np.array(load, dtype=np.int64),
        tuple(gaps),
        tuple(weights),
        rate,
        rate,
        0.0,
        False,
    )
    return replace(made, **changes)


def gap(start, end, size=20, value=0, written=None, is_evictable=True, recompute_s=None):
    written = start if written is None else written
    return Gap(value, size, written, start, end, is_evictable, recompute_s)


def weight(*reads, size=20, may_stay=True):
    return Weight(size, tuple(LiveRange(t, t + 1) for t in reads), may_stay)


def test_without_choices_it_is_the_compute():
    assert lower_bound_s(choices_of([1, 2], [5, 5]), 5) == pytest.approx(3)


def test_a_step_of_no_ticks_takes_as_long_as_other_transfers():
    assert lower_bound_s(choices_of([], [], in_busy_s=3.0), 0) == 3


def test_other_transfers_occupy_the_link():
    busy = choices_of([1], [0], [], [weight(0, may_stay=False)], in_busy_s=4.0)
    assert lower_bound_s(busy, 20) == pytest.approx(4 + 2)


def test_what_cannot_fit_has_no_bound():
    assert math.isinf(lower_bound_s(choices_of([1, 2], [5, 6]), 5))
    away = choices_of([1, 1, 1], [20, 30, 20], [gap(1, 2)])
    assert math.isinf(lower_bound_s(away, 19))
    assert lower_bound_s(away, 20) < math.inf


def test_compute_hides_what_leaves_and_comes_back():
    # Both values are away at tick 2: 4 s out during tick 1, 4 s in during tick 3.
    gaps = [gap(1, 4, written=1), gap(1, 4, value=1, written=1)]
    choices = choices_of([1, 4, 1, 4, 1], [40, 40, 80, 40, 40], gaps)
    assert lower_bound_s(choices, 40) == pytest.approx(11)


@pytest.mark.parametrize("shared_queue", [False, True])
def test_a_round_trip_that_nothing_hides(shared_queue):
    choices = choices_of(
        [1, 1, 1], [20, 40, 20], [gap(1, 2)], latency_s=0.5, shared_queue=shared_queue
    )
    assert lower_bound_s(choices, 20) == pytest.approx(3 + 2 * 2.5)
    assert optimum_s(choices, 20) == pytest.approx(3 + 2 * 2.5)


def test_it_is_away_for_the_shortest_tick_at_least():
    # Only tick 1 has no room; the long tick behind it hides the way back.
    choices = choices_of([1, 1, 9, 1], [20, 40, 20, 20], [gap(1, 3)])
    assert lower_bound_s(choices, 20) == pytest.approx(12 + 2)
    assert optimum_s(choices, 20) == pytest.approx(12 + 2)


def test_bytes_out_wait_until_they_are_written():
    # 20 bytes leave behind tick 3 and nothing hides them; before it the link was idle.
    gaps = [gap(4, 6, written=4)]
    choices = choices_of([9, 9, 9, 9, 0, 3, 1], [20, 20, 20, 20, 20, 40, 20], gaps)
    assert lower_bound_s(choices, 20) == pytest.approx(40 + 2 + 2)


def test_link_bound():
    # Eight values are made, one a tick, and read again in the opposite order. With room for
    # three, five have left before tick 7, which begins when the first has been made and five
    # have crossed; from tick 9 on they come back, and one tick more follows.
    gaps = [gap(t + 1, 15 - t, value=t) for t in range(7)]
    load = [20 * min(t + 1, 16 - t) for t in range(16)]
    choices = choices_of([0.5] * 16, load, gaps)
    assert lower_bound_s(choices, 160) == pytest.approx(8)
    assert lower_bound_s(choices, 60) == pytest.approx(0.5 + 5 * 2 + 2 * 0.5 + 5 * 2 + 0.5)


def test_one_queue_for_both_directions_takes_the_sum():
    # Before tick 2 a value leaves and a weight comes, 2 s each; behind it the value comes back.
    choices = choices_of(
        [0, 0, 1, 0], [20, 20, 40, 20], [gap(2, 3, written=1)], [weight(2, may_stay=False)]
    )
    assert lower_bound_s(choices, 40) == pytest.approx(2 + 1 + 2)
    shared = replace(choices, shared_queue=True)
    assert lower_bound_s(shared, 40) == pytest.approx(4 + 1 + 2)
    assert optimum_s(shared, 40) == pytest.approx(4 + 1 + 2)


def test_recomputing_takes_compute():
    choices = choices_of([1, 1, 1], [20, 40, 20], [gap(1, 2, recompute_s=1.5)])
    assert lower_bound_s(choices, 20) == pytest.approx(3 + 1.5)
    # Half of it would be enough if it could be halved.
    assert lower_bound_s(choices, 30) == pytest.approx(3 + 1.5 / 2)


def test_weights_that_fit_stay():
    weights = [weight(t) for t in range(4)]
    choices = choices_of([1] * 4, [5] * 4, [], weights)
    assert lower_bound_s(choices, 85) == pytest.approx(4)
    streamed = replace(choices, weights=tuple(replace(w, may_stay=False) for w in weights))
    assert lower_bound_s(streamed, 85) == pytest.approx(8 + 1)


def test_the_link_cannot_run_ahead_of_one_slot():
    weights = [weight(t, may_stay=False) for t in range(3)]
    choices = choices_of([5] * 3, [0] * 3, [], weights)
    assert lower_bound_s(choices, 20) == pytest.approx(3 * (2 + 5))
    assert lower_bound_s(choices, 40) == pytest.approx(2 + 3 * 5)
    assert optimum_s(choices, 20) == pytest.approx(3 * (2 + 5))


def test_a_weight_is_dropped_between_reads_only_where_memory_is_short():
    choices = choices_of([1, 1, 1], [0, 20, 0], [], [weight(0, 2, may_stay=False)])
    assert lower_bound_s(choices, 40) == pytest.approx(2 + 3)
    assert lower_bound_s(choices, 20) == pytest.approx(2 + 2 + 2 + 1)


def test_gaps_of_a_value_share_one_eviction():
    gaps = [gap(1, 2), gap(3, 4, written=1)]
    choices = choices_of([0] * 5, [20, 40, 20, 40, 20], gaps)
    assert lower_bound_s(choices, 20) == pytest.approx(3 * 2)
    assert optimum_s(choices, 20) == pytest.approx(3 * 2)


@settings(max_examples=60, suppress_health_check=SLOW)
@given(tiny_choices())
def test_no_selection_and_no_schedule_is_faster(drawn):
    choices, capacity = drawn
    optimum = optimum_s(choices, capacity)
    bound = lower_bound_s(choices, capacity)
    assert bound <= optimum or bound == pytest.approx(optimum)
    assert bound >= choices.costs.sum() or bound == pytest.approx(choices.costs.sum())


@settings(max_examples=40, suppress_health_check=SLOW)
@given(tiny_choices(ticks=4))
def test_ticks_left_out_and_gaps_merged_or_given_away_only_lower_it(drawn):
    choices, capacity = drawn
    bound = lower_bound_s(choices, capacity)
    assume(bound < math.inf)
    everything = range(len(choices.gaps))
    for samples in ((2,), (1, 3)):
        groups = merge(choices, samples)
        for program in (
            build(choices, capacity, samples, everything),
            build(choices, capacity, samples, everything[1:]),
            build(groups.choices, capacity, samples, range(len(groups.members)), groups.merged),
        ):
            assert least_units(program) * program.second <= bound + 1e-6


def least_units(program):
    solved = linprog(
        program.objective(),
        program.at_most.toarray(),
        program.limits,
        program.equal.toarray(),
        program.targets,
        list(zip(program.low, program.high, strict=True)),
    )
    assert solved.status == 0
    assert solved.fun is not None
    return solved.fun


def test_gaps_that_samples_cannot_tell_apart_are_merged():
    # 1.02 and 1.1 are less than 10% apart, and 2 is another price.
    gaps = [
        gap(3, 8, value=0, size=10, recompute_s=1.1),
        gap(4, 7, value=1, size=10, recompute_s=1.02),
        gap(3, 8, value=2, size=10, recompute_s=2.0),
        gap(3, 8, value=3, size=10),
        gap(3, 5, value=4, size=10),
        gap(6, 8, value=4, size=10),
    ]
    groups = merge(choices_of([1] * 10, [0] * 10, gaps), (2, 5, 9))
    assert groups.members == ((0, 1), (2,), (3,), (4,), (5,))
    assert groups.merged == {0}
    assert groups.choices.gaps[0].size == 20
    assert groups.choices.gaps[0].recompute_s == pytest.approx(2.04)
    assert groups.choices.gaps[1].recompute_s == 2.0


def test_of_many_ticks_those_with_most_bytes_are_looked_at():
    load = np.zeros(1000, dtype=np.int64)
    load[[100, 777]] = 50
    ticks = sample_ticks(choices_of([1] * 1000, load), 10)
    assert len(ticks) <= 150
    assert {100, 777} <= set(ticks)


def test_memory_that_is_short_between_samples_is_found():
    # 300 peaks of one tick each: more than are looked at first.
    ticks = 1200
    load = np.full(ticks, 20)
    gaps = [gap(t, t + 1, value=t, written=t - 1) for t in range(1, ticks - 1, 4)]
    load[[g.start for g in gaps]] = 40
    choices = choices_of([0.1] * ticks, load, gaps)
    first = build(choices, 20, sample_ticks(choices, 20), range(len(gaps)))
    assert lower_bound_s(choices, 20) > 1.2 * least_units(first) * first.second


def test_thousands_of_gaps_are_merged_and_bounded():
    # As `test_link_bound`, each value in 300 parts.
    ticks, parts = 32, 300
    gaps = [
        gap(t + 1, 31 - t, size=1, value=t * parts + part)
        for t in range(15)
        for part in range(parts)
    ]
    load = [parts * min(t + 1, 32 - t) for t in range(ticks)]
    choices = choices_of([0.5] * ticks, load, gaps, rate=150.0)
    one = [gap(t + 1, 31 - t, size=parts, value=t) for t in range(15)]
    whole = replace(choices, gaps=tuple(one))
    assert lower_bound_s(choices, 3 * parts) == pytest.approx(lower_bound_s(whole, 3 * parts))
    relaxation = relax(choices, 3 * parts)
    assert relaxation is not None
    # Thirteen of sixteen values are away when the most are alive.
    assert relaxation.evicted.sum() >= (13 - 1e-6) * parts
