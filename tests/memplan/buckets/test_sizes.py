"""Sizes found from a few probes, and what dimensions become of a reshape."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from memplan.buckets.choosing import choose_buckets
from memplan.buckets.dims import Dim, dim, mask, reshaped
from memplan.buckets.errors import BucketsError
from memplan.buckets.sizes import Probes, Size, product_of

TWO = Probes({"b": (5, 9), "t": (8, 17)})
B, T = Size({frozenset("b"): 1}), Size({frozenset("t"): 1})


@given(st.lists(st.integers(-9, 9), min_size=4, max_size=4))
def test_a_sum_of_products_is_found(terms: list[int]):
    one, b, t, both = terms
    found = TWO.size([one + b * p["b"] + t * p["t"] + both * p["b"] * p["t"] for p in TWO.points])
    assert found is not None
    for sizes in itertools.product(range(1, 20), repeat=2):
        at = dict(zip("bt", sizes, strict=True))
        assert found.at(at) == one + b * at["b"] + t * at["t"] + both * at["b"] * at["t"]


@given(*[st.lists(st.integers(-5, 5), min_size=2, max_size=2)] * 2)
def test_a_product_is_divided(one: list[int], other: list[int]):
    """Of sizes of other axes; and what is none is not."""
    left = Size(
        {axes: n for axes, n in zip([frozenset("b"), frozenset[str]()], one, strict=True) if n}
    )
    right = Size(
        {axes: n for axes, n in zip([frozenset("t"), frozenset[str]()], other, strict=True) if n}
    )
    product = left * right
    assert product is not None
    if right.terms:
        assert product.over(right) == left
        more = product.minus(Size({frozenset("bt"): 7, frozenset(): 1}))
        quotient = more.over(right)
        assert quotient is None or quotient * right == more


def test_other_functions_are_not_sums_of_products():
    assert TWO.size([p["t"] ** 2 for p in TWO.points]) is None
    assert TWO.size([p["t"] // 2 for p in TWO.points]) is None
    assert TWO.size([max(p["b"], 7) for p in TWO.points]) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda b, t: 1 / (b * t),
        lambda b, t: 2.5 * t,
        lambda b, t: t**-0.5,
        lambda b, t: (3 * b + 1) ** 0.5,
        lambda b, t: np.log(b * t),
        lambda b, t: -np.log(t + 2.0),
        lambda b, t: 1 / (t - 1),
    ],
)
def test_numbers_that_depend_on_sizes(function):
    found = TWO.number([float(function(**p)) for p in TWO.points])
    assert found is not None
    for b, t in [(5, 9), (2, 13), (9, 17), (7, 3)]:
        assert float(found({"b": b, "t": t})) == pytest.approx(function(b, t), rel=1e-5)


def test_numbers_that_are_neither():
    assert TWO.number([p["t"] ** 2.0 for p in TWO.points]) is None
    assert TWO.number([np.sin(p["t"]) for p in TWO.points]) is None


def test_small_sizes_are_not_probed():
    """jax traces them otherwise."""
    points = Probes({"t": (1, 4)}).points
    assert [p["t"] for p in points] == [4, 5, 6, 7]
    assert Probes({"t": (3, 3)}).open == ()


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """The same factors grouped in two ways: 0 is b, 1 is t, others are numbers."""
    factors = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4]), min_size=1, max_size=5))
    found = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {len(factors)})
        found.append([factors[a:b] for a, b in itertools.pairwise([0, *cuts])])
    return found[0], found[1]


@pytest.mark.slow
@given(_reshapes())
def test_what_is_there_after_a_reshape(groups: tuple[list[list[int]], list[list[int]]]):
    """The mask of the reshaped array is the reshaped mask."""
    bucket, sizes = {"b": 3, "t": 5}, {"b": 2, "t": 3}
    size = {0: B, 1: T, 2: Size.of(2), 3: Size.of(3), 4: Size.of(4)}
    before = [dim(*(size[n] for n in group)) for group in groups[0]]
    if any(max(group.count(0), group.count(1)) > 1 for group in groups[1]):
        return
    after = reshaped(before, [product_of([size[n] for n in group]) for group in groups[1]])
    if after is None:
        return  # It may be refused, but not wrong.

    def of(dims: list[Dim]) -> np.ndarray:
        shape = [int(np.prod([f.at(bucket) for f in d.factors])) for d in dims]
        return np.asarray(mask(dims, range(len(dims)), shape, bucket, sizes))

    there = of([*after])
    np.testing.assert_array_equal(of(before).reshape(there.shape), there)


def test_reshapes_that_are_refused():
    rows = [dim(T), dim(Size.of(4))]
    assert reshaped([dim(T)], [Size.of(1), T]) == (dim(), dim(T))
    four = Size.of(4)
    assert reshaped(rows, [product_of([T, four])]) is not None
    assert reshaped([dim(product_of([four, T]))], [four, T]) is None
    assert reshaped([dim(product_of([B, T]))], [B, T]) is None
    assert reshaped([dim(B), dim(T)], [product_of([B, T])]) == (Dim((B, T)),)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_buckets_is_better(seed: int):
    draw = random.Random(seed)
    seen = [draw.randint(1, 30) for _ in range(25)]
    most, each, slope = draw.randint(1, 4), draw.choice([0.0, 3.0, 60.0]), draw.choice([0, 40])
    found = choose_buckets(seen, most=most, each=each, cost=lambda n: slope + n)
    distinct = sorted({*seen})
    least = min(
        sum(Fraction(slope + next(b for b in sizes if b >= n)) for n in seen) + Fraction(each) * k
        for k in range(1, most + 1)
        for sizes in itertools.combinations(distinct, k)
        if sizes[-1] == distinct[-1]
    )
    assert found.cost + each * len(found.sizes) == pytest.approx(float(least))
    assert found.unpadded == sum(slope + n for n in seen)


def test_buckets_of_a_multiple():
    found = choose_buckets([3, 5, 14, 100], most=2, multiple=16)
    assert found.sizes == (16, 112)
    assert found.cost == 3 * 16 + 112


@pytest.mark.parametrize(
    "options", [{"most": 0}, {"most": 2, "multiple": 0}, {"most": 1, "each": -1}]
)
def test_a_choice_of_nothing(options: dict[str, Any]):
    with pytest.raises(BucketsError, match="expected positive"):
        choose_buckets([1, 2], **options)
    with pytest.raises(BucketsError, match="that were seen"):
        choose_buckets([], most=1)
