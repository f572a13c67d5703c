"""Programs small enough to be enumerated, and many that make HiGHS talkative."""

import itertools

import numpy as np
import pytest
from scipy.sparse import csr_array

from hlo_passes.integer_program import minimize


def _knapsack(seed: int, variables: int, rows: int):
    random = np.random.default_rng(seed)
    picked = random.random((rows, variables)) < 0.3
    weights = picked * random.integers(1, 100, (rows, variables)) * random.random((rows, variables))
    return -random.random(variables), weights, weights.sum(axis=1) * random.uniform(0.2, 0.6)


def _solve(cost, weights, limits, whole, nodes=100_000):
    return minimize(
        cost,
        whole,
        np.zeros(len(cost)),
        np.ones(len(cost)),
        csr_array(weights),
        np.full(len(limits), -np.inf),
        limits,
        nodes=nodes,
    )


@pytest.mark.parametrize("seed", range(8))
def test_finds_the_best_of_all_points(seed):
    cost, weights, limits = _knapsack(seed, 10, 5)
    points = np.array(list(itertools.product((0.0, 1.0), repeat=10)))
    best = min(cost @ x for x in points if np.all(weights @ x <= limits))
    found = _solve(cost, weights, limits, np.ones(10, np.bool_))
    assert found.best
    assert found.x is not None
    assert cost @ found.x == pytest.approx(best)
    assert found.bound == pytest.approx(best)


def test_continuous_variables_stay_so():
    cost, weights, limits = _knapsack(3, 10, 5)
    whole = _solve(cost, weights, limits, np.ones(10, np.bool_))
    relaxed = _solve(cost, weights, limits, np.zeros(10, np.bool_))
    assert whole.x is not None
    assert relaxed.x is not None
    assert cost @ relaxed.x < cost @ whole.x - 1e-6
    assert np.any(np.abs(relaxed.x - np.round(relaxed.x)) > 1e-6)


def test_no_point():
    found = _solve(np.ones(2), [[-1.0, -1.0]], np.array([-3.0]), np.ones(2, np.bool_))
    assert found.x is None
    assert not found.best


def test_a_search_cut_short_still_bounds():
    cost, weights, limits = _knapsack(1, 60, 20)
    whole = np.ones(60, np.bool_)
    cut = _solve(cost, weights, limits, whole, nodes=1)
    rest = _solve(cost, weights, limits, whole, nodes=100)
    assert not cut.best
    assert cut.x is not None
    assert rest.x is not None
    assert cut.bound <= rest.bound <= cost @ rest.x <= cost @ cut.x


def test_nothing_is_written(capfd):
    # Of scipy 1.18's milp each of these draws a line.
    for seed in range(6):
        cost, weights, limits = _knapsack(seed, 60, 20)
        whole = np.random.default_rng(seed).random(60) < 0.7
        _solve(1e6 * cost, 1e6 * weights, 1e6 * limits, whole, nodes=20)
    assert capfd.readouterr() == ("", "")
