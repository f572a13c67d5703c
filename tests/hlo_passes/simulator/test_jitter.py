"""Random factors: their mean, their spread, and that a seed fixes them."""

import itertools
import statistics

import pytest

from hlo_passes.simulator.jitter import STEADY, Jitter


def first(factors, n=40_000):
    return list(itertools.islice(factors, n))


@pytest.mark.parametrize("variation", [0.05, 0.2, 1.0])
def test_factors_have_mean_one_and_the_variation_asked_for(variation):
    for factors in (Jitter(variation).compute_factors(), Jitter(0, variation).transfer_factors()):
        drawn = first(factors)
        assert min(drawn) > 0
        assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.03 * variation + 0.001)
        assert statistics.stdev(drawn) == pytest.approx(variation, rel=0.1)


def test_without_variation_all_factors_are_one():
    assert (
        set(first(STEADY.compute_factors(), 9)) == set(first(STEADY.transfer_factors(), 9)) == {1}
    )
    assert set(first(Jitter(compute=0.5).transfer_factors(), 9)) == {1}


def test_a_seed_fixes_the_factors_and_the_two_kinds_differ():
    drawn = first(Jitter(0.2, 0.2, seed=3).compute_factors(), 9)
    assert drawn == first(Jitter(0.2, 0.9, seed=3).compute_factors(), 9)
    assert drawn != first(Jitter(0.2, 0.2, seed=4).compute_factors(), 9)
    assert drawn != first(Jitter(0.2, 0.2, seed=3).transfer_factors(), 9)


@pytest.mark.parametrize("wrong", [{"compute": -0.1}, {"transfer": float("inf")}, {"seed": -1}])
def test_what_is_no_variation_is_refused(wrong):
    with pytest.raises(ValueError, match="of 0 or more"):
        Jitter(**wrong)
