from dataclasses import replace

import numpy as np
import pytest

from hlo_passes.analysis.kernel_work import KernelWork
from hlo_passes.hardware.rates import KernelRate, Rates, amounts
from hlo_passes.reading.reader import read_module
from memplan.calibrate.fitting import Sample, fit, works_of

CACHE = 1 << 20
TRUE = {
    "dot f32": KernelRate("dot f32", 2e-6, flop_s=2e-11, cached_byte_s=1e-10, byte_s=3e-10),
    "elementwise f32": KernelRate(
        "elementwise f32", 2e-6, cached_byte_s=1e-10, byte_s=3e-10, slow_s=1e-9, plain_s=1e-10
    ),
}
CALL_S, ARRAY_S, HANDOFF_S, FRESH_BYTE_S = 5e-5, 1e-6, 1e-5, 5e-10


def seconds(rates, works):
    total = 0.0
    for work, times in works:
        there_is = amounts(work.flops, work.bytes, work.slow, work.plain, CACHE)
        rate = rates[work.kind].coefficients
        total += times * sum(a * s for a, s in zip(there_is, rate, strict=True))
    return total


def drawn_works(rng):
    size = int(10 ** rng.uniform(3, 8))
    kind = rng.choice([*TRUE])
    if kind == "dot f32":
        return KernelWork(kind, int(size * 10 ** rng.uniform(0, 3)), size, 0, 0)
    return KernelWork(kind, 0, size, int(rng.integers(0, 2)) * size // 4, size // 4)


def samples(rng, count, noise=0.0):
    for _ in range(count):
        works = [(drawn_works(rng), int(rng.integers(1, 20))) for _ in range(3)]
        handed = int(rng.integers(0, 100))
        fresh = int(rng.integers(0, 2)) * int(rng.integers(1 << 20))
        taken = CALL_S + 3 * ARRAY_S + handed * HANDOFF_S + fresh * FRESH_BYTE_S
        taken = (taken + seconds(TRUE, works)) * float(np.exp(noise * rng.standard_normal()))
        yield Sample(works, taken, 3, handed, fresh)


def test_rates_are_found_again():
    rng = np.random.default_rng(0)
    found = fit([*samples(rng, 200)], CACHE)
    assert np.median(np.abs(found.errors)) < 0.01
    rates = Rates(found.rates)
    new = [sample.works for sample in samples(rng, 50)]
    for works in new:
        assert seconds(rates, works) == pytest.approx(seconds(TRUE, works), rel=0.05)
    assert found.call_s + 3 * found.array_s == pytest.approx(CALL_S + 3 * ARRAY_S, rel=0.2)
    assert found.handoff_s == pytest.approx(HANDOFF_S, rel=0.05)
    assert found.fresh_byte_s == pytest.approx(FRESH_BYTE_S, rel=0.05)


def test_what_some_programs_were_disturbed_by_does_not_count():
    rng = np.random.default_rng(1)
    measured = [*samples(rng, 200, noise=0.02)]
    disturbed = [
        replace(s, seconds=s.seconds * 5) if n % 10 == 0 else s for n, s in enumerate(measured)
    ]
    rates = Rates(fit(disturbed, CACHE).rates)
    errors = [seconds(rates, s.works) / seconds(TRUE, s.works) - 1 for s in measured]
    assert np.median(np.abs(errors)) < 0.05


def test_two_programs_are_no_rate_of_their_own():
    """What a call took longer once is not what each byte of a rare kernel takes."""
    rng = np.random.default_rng(2)
    rare = KernelWork("reduce bf16", 0, 64, 0, 32)
    measured = [*samples(rng, 200, noise=0.05), Sample([(rare, 1)], 3 * CALL_S, 1, 0, 0)]
    rates = Rates(fit(measured, CACHE).rates)
    large = KernelWork("reduce bf16", 0, 1 << 24, 0, 1 << 23)
    assert seconds(rates, [(large, 1)]) < 10 * seconds(
        TRUE, [(KernelWork("elementwise f32", 0, 1 << 24, 0, 1 << 23), 1)]
    )


def test_kinds_that_were_not_measured_are_like_others():
    rates = Rates(TRUE.values())
    assert rates["dot bf16"] is rates["dot f32"]
    assert rates["sort s32"] is rates["elementwise f32"]
    with pytest.raises(KeyError):
        Rates([TRUE["dot f32"]])["sort s32"]


LOOP = """
HloModule m, is_scheduled=true

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = f32[8]{0} get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %m = s32[] add(%n, %one)
  %y = f32[8]{0} tanh(%x)
  ROOT %t = (s32[], f32[8]{0}) tuple(%m, %y)
}

%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant(7)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}

ENTRY %e {
  %p = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %p)
  %w = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body
  %r = f32[8]{0} get-tuple-element(%w), index=1
  ROOT %s = f32[8]{0} negate(%r)
}
"""


def test_what_is_in_a_loop_runs_as_often_as_it_does():
    works = {(work.slow, work.plain): times for work, times in works_of(read_module(LOOP))}
    assert works[8, 0] == 7
    assert works[0, 8] == 1


def test_what_nothing_explains_is_no_rate_of_a_kernel_that_takes_little():
    rng = np.random.default_rng(3)
    rare = KernelWork("reduce bf16", 0, 2048, 0, 1024)
    measured = [*samples(rng, 200, noise=0.02)]
    longer = [
        replace(s, works=[*s.works, (rare, 1)], seconds=1.3 * s.seconds)
        for s in measured
        if s.seconds > 1e-3
    ][:4]
    assert len(longer) == 4
    rates = Rates(fit([*measured, *longer], CACHE).rates)
    assert seconds(rates, [(rare, 1)]) < 1e-2 * min(s.seconds for s in longer)
