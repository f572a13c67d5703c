"""Which elements of an array that is larger than it has to be are those of the smaller one.

    x [batch, tokens, 8]  ─ reshape ─►  [batch · tokens, 8]

    batch 2 of 3, tokens 3 of 4       of 12 rows    ■ ■ ■ □ ■ ■ ■ □ □ □ □ □

Along a dimension these are the first ones: of each *factor* of it, where it was made of several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from memplan.buckets.sizes import ONE, Size


@dataclass(frozen=True)
class Dim:
    """A dimension of an array.

    Attributes:
      factors: sizes, the major one first, whose product is that of the dimension.
      uniform: all elements along it are the same, so that any of them are those.
    """

    factors: tuple[Size, ...]
    uniform: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether all elements are those."""
        return all(factor.number is not None for factor in self.factors)

    @property
    def varied(self) -> Dim:
        """The same, but that elements along it may differ."""
        return Dim(self.factors)

    @property
    def single(self) -> Size | None:
        """The size of one whose first elements are those; None of others."""
        return self.factors[0] if len(self.factors) == 1 else None

    def __str__(self) -> str:
        return " × ".join(f"({factor})" for factor in self.factors)


def dim(*factors: Size, uniform: bool = False) -> Dim:
    """A dimension in one form: what has a fixed size behind a factor is part of that one."""
    found: list[Size] = []
    for factor in factors:
        if factor == ONE:
            continue
        if found and factor.number is not None and (together := found[-1] * factor) is not None:
            found[-1] = together
        else:
            found.append(factor)
    return Dim(tuple(found) or (ONE,), uniform)


def same(a: Dim, b: Dim) -> Dim | None:
    """Two dimensions of which elements are paired; None where those are not the same."""
    if a.uniform:
        return b
    return a if b.uniform or a.factors == b.factors else None


def reshaped(dims: Sequence[Dim], sizes: Sequence[Size]) -> tuple[Dim, ...] | None:
    """The dimensions of an array of such sizes whose elements are in the same order; None where
    its elements are no product of first ones."""
    if all(d.uniform or d.factors == (ONE,) for d in dims):
        return tuple(dim(size, uniform=True) for size in sizes)
    if any(size.number == 0 for size in sizes):
        return tuple(map(dim, sizes))  # Of no elements all are there.
    rest = [factor for d in dims for factor in d.factors]
    found: list[Dim] = []
    for size in sizes:
        factors: list[Size] = []
        left: Size | None = size
        while left is not None and left != ONE:
            if not rest:
                return None
            head = rest.pop(0)
            taken = _common(head, left)
            if taken is None:
                return None
            factors.append(taken)
            after, left = head.over(taken), left.over(taken)
            if after is None:
                return None
            if after != ONE:
                rest.insert(0, after)
        if left is None:
            return None
        found.append(dim(*factors))
    return tuple(found) if all(factor == ONE for factor in rest) else None


def _common(head: Size, left: Size) -> Size | None:
    """What a dimension takes of the next factor: all of it, or what is major in that; None where
    the elements of what it would take are not the first ones."""
    if left.over(head) is not None:
        return head
    after = head.over(left)
    if after is not None:
        # The first of 4 · n are n times all 4; those of n · m are not n times the first of m.
        return left if after.number is not None else None
    if head.number is not None and left.number is not None:
        common = math.gcd(head.number, left.number)
        return Size.of(common) if common > 1 else None
    return None


def mask(
    dims: Sequence[Dim],
    which: Sequence[int],
    shape: Sequence[int],
    bucket: Mapping[str, int],
    sizes: Mapping[str, Any],
) -> Any:
    """Which elements along some dimensions are those of an array at the sizes.

    Args:
      shape: of the array at the bucket's sizes.

    Returns:
      bool, of that shape.
    """
    found = None
    for d in which:
        index = lax.broadcasted_iota(jnp.int32, tuple(shape), d)
        for factor in reversed(dims[d].factors):
            whole = factor.at(bucket)
            here = index % whole if len(dims[d].factors) > 1 else index
            index = index // whole
            if factor.number is None:
                inside = here < factor.at(sizes)
                found = inside if found is None else found & inside
    return jnp.ones(tuple(shape), bool) if found is None else found
