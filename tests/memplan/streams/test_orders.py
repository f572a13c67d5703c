"""Orders of stacks, and of what is seen of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from memplan.streams.orders import (
    Order,
    lies_in_rows,
    order_of_view,
    seen_as_it_was,
    seen_in_rows,
    slice_as_it_was,
    slice_in_rows,
)

ORDERS = [order for rank in (1, 2, 3, 4) for order in itertools.permutations(range(rank))]


def in_memory(array: np.ndarray, order: Order) -> list[int]:
    """The elements as they follow each other."""
    return array.transpose(order[::-1]).ravel().tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_seen_is_the_same_memory(order: Order):
    stack = np.arange(math.prod(range(2, len(order) + 2))).reshape(range(2, len(order) + 2))
    rows = np.asarray(seen_in_rows(stack, order))
    assert rows.ravel().tolist() == in_memory(stack, order)
    np.testing.assert_array_equal(seen_as_it_was(rows, order), stack)
    assert lies_in_rows(order) == (in_memory(stack, order) == stack.ravel().tolist())
    if order[-1] == 0:
        np.testing.assert_array_equal(slice_as_it_was(rows[1], order), stack[1])
        np.testing.assert_array_equal(slice_in_rows(stack[1], order), rows[1])


@pytest.mark.parametrize("order", [o for o in ORDERS if len(o) > 1])
def test_a_view_lies_as_the_stack_does(order: Order):
    """With its leading axis split, and joined again: the same elements, one after another."""
    sizes = (6, 3, 5, 2)[: len(order)]
    stack = np.arange(math.prod(sizes)).reshape(sizes)
    split = stack.reshape(2, 3, *sizes[1:])
    found = order_of_view(order, split.ndim)
    if order[-1] != 0:
        assert found is None
        return
    assert found is not None
    assert in_memory(split, found) == in_memory(stack, order)
    assert order_of_view(found, stack.ndim) == order
    assert order_of_view(order, stack.ndim) == order
    other_way = (*found[:-2], 0, 1)
    assert order_of_view(other_way, stack.ndim) is None
