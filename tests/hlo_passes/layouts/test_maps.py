"""An order after a view is the one in which the same bytes lie."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.layouts.maps import Order, OrderMap, aligned, refined, reshaped, transposed

ATOMS = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5)


def in_memory(array: np.ndarray, order: Order) -> np.ndarray:
    """The elements, as they lie when the dimensions do so, minor to major."""
    left_out = [d for d in range(array.ndim) if d not in order]
    return array.transpose(*left_out, *reversed(order)).ravel()


def orders(dimensions: tuple[int, ...]) -> list[Order]:
    return list(permutations(d for d, extent in enumerate(dimensions) if extent != 1))


@st.composite
def grouped(draw: st.DrawFn, atoms: list[int]) -> tuple[int, ...]:
    """The atoms, merged into dimensions."""
    dimensions, at = [], 0
    while at < len(atoms):
        n = draw(st.integers(1, len(atoms) - at))
        dimensions.append(math.prod(atoms[at : at + n]))
        at += n
    return tuple(dimensions)


def check(link: OrderMap, before: np.ndarray, after: np.ndarray) -> None:
    """Every order of the one that has one of the other has the same bytes; and it has one if
    there is any."""
    for order in orders(before.shape):
        lies = in_memory(before, order)
        fits = [o for o in orders(after.shape) if np.array_equal(in_memory(after, o), lies)]
        found = link.forward(order)
        assert (found in fits) if fits else (found is None)
        if found is not None:
            assert link.backward(found) == order


@given(st.data(), ATOMS)
def test_a_reshape(data: st.DataObject, atoms: list[int]):
    before, after = data.draw(grouped(atoms)), data.draw(grouped(atoms))
    array = np.arange(math.prod(atoms)).reshape(before)
    link = reshaped(before, after)
    if link is None:  # 6 x 4 as 8 x 3: only a whole dimension may stay apart.
        assert any(
            a % b and b % a for a in np.cumprod(before[::-1]) for b in np.cumprod(after[::-1])
        )
        return
    check(link, array, array.reshape(after))


@given(st.data(), st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4))
def test_a_transpose(data: st.DataObject, dimensions: list[int]):
    permutation = data.draw(st.permutations(range(len(dimensions))))
    array = np.arange(math.prod(dimensions)).reshape(dimensions)
    check(transposed(dimensions, permutation), array, array.transpose(permutation))


@given(st.data(), ATOMS)
def test_a_bitcast_between_layouts(data: st.DataObject, atoms: list[int]):
    """The bytes of an array in one order, seen in other dimensions in another order."""
    before, after = data.draw(grouped(atoms)), data.draw(grouped(atoms))
    order_before = data.draw(st.sampled_from(orders(before)))
    order_after = data.draw(st.sampled_from(orders(after)))
    link = refined(before, order_before, after, order_after)
    if link is None:
        return
    assert link.forward(order_before) == order_after
    array = np.arange(math.prod(atoms)).reshape(before)
    seen = np.empty(math.prod(after), int)
    positions = in_memory(np.arange(math.prod(after)).reshape(after), order_after)
    seen[positions] = in_memory(array, order_before)
    check(link, array, seen.reshape(after))


def test_of_a_slice_the_rest_is_outermost():
    link = aligned((4, 8, 16), (1, 8, 16))
    assert link.forward((2, 0, 1)) == (2, 1)
    assert link.backward((1, 2)) == (1, 2, 0)


def test_nothing_has_no_other_order():
    assert reshaped((1, 0, 4), (0,)) is None
    assert reshaped((0,), (3, 0)) is None


@pytest.mark.parametrize(
    ("before", "after", "keeps"),
    [
        ((64, 16, 128), (1024, 128), True),  # Rows of tiles of 8 follow each other.
        ((64, 12, 128), (768, 128), False),  # The twelve are padded to sixteen.
        ((64, 16, 128), (64, 2048), False),  # Two columns of tiles are not one.
        ((64, 16, 128), (64, 16, 1, 128), True),
    ],
)
def test_tiles_stay_what_they_are(before: tuple[int, ...], after: tuple[int, ...], keeps: bool):
    link = reshaped(before, after)
    assert link is not None
    assert link.keeps_tiles(tuple(range(len(before)))[::-1], 8) == keeps
