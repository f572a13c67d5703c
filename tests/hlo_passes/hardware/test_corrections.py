"""What is learned of kernels from measurements that mix them."""

import random

import pytest

from hlo_passes.hardware.corrections import ANY, AT_PEAK, Sample, learned, nearest

FACTORS = {"dot bf16": 1.3, "dot f32": 1.6, "reduce f32": 1.2, "transpose f32": 2.5}


def steps(count, error=0.0, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        modelled = {kind: draw.uniform(0.1, 1.0) for kind in FACTORS}
        seconds = sum(FACTORS[kind] * s for kind, s in modelled.items())
        yield Sample(modelled, seconds * draw.gauss(1.0, error))


def by_kind(samples):
    return {of.kind: of for of in learned([*samples])}


def test_what_each_kind_takes_is_told_from_steps_with_all_of_them():
    found = by_kind(steps(40))
    for kind, factor in FACTORS.items():
        assert found[kind].factor == pytest.approx(factor, rel=0.02)
        assert found[kind].spread < 0.1


def test_doubt_grows_with_errors_and_falls_with_measurements():
    few, many, noisy = (
        by_kind(steps(count, error)) for count, error in ((2, 0.01), (40, 0.01), (40, 0.2))
    )
    for kind in FACTORS:
        assert many[kind].spread < few[kind].spread
        assert many[kind].spread < noisy[kind].spread


def test_a_kind_that_was_not_seen_is_like_its_operation_with_more_doubt():
    found = by_kind([Sample({"dot bf16": 1.0}, 3.0), *(Sample({k: 1.0}, 1.0) for k in "abc")])
    assert nearest(found, "batched dot s8") is found["dot"]
    assert nearest(found, "sort f32") is found[ANY]
    assert found["dot"].factor > 1.5 > found[ANY].factor
    assert found["dot"].spread > found["dot bf16"].spread
    assert nearest(found, "dot f32" + AT_PEAK) is found[ANY]
    assert nearest({}, "dot f32") is None


def test_one_measurement_says_of_all_that_they_take_as_much():
    found = by_kind([Sample({"dot f32": 1.0, "reduce f32": 3.0}, 40.0)])
    assert all(of.factor == pytest.approx(10.0, rel=1e-6) for of in found.values())


def test_no_kind_takes_less_than_nothing():
    samples = [Sample({"dot f32": 1.0, "sort f32": 1.0}, 1.0), Sample({"dot f32": 1.0}, 1.5)]
    found = by_kind(samples)
    assert 0 < found["sort f32"].factor < 0.5 < 1 < found["dot f32"].factor


def test_kernels_that_are_many_count_more():
    one, many = (
        by_kind([Sample({"dot f32": 1.0}, 2.0, kernels), Sample({"dot bf16": 1.0}, 1.0)])
        for kernels in (1.0, 100.0)
    )
    assert many["dot f32"].spread < one["dot f32"].spread
