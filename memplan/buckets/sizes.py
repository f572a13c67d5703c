"""Sizes of arrays as functions of the sizes that a program is called with.

A program is traced at a few sizes. What is a sum of products of them is found from that:

    batch  tokens     a size there          batch  tokens
      4     512           2,048                      0
      4     257           1,028         ─►  batch · tokens
      3     512           1,536
      3     257             771

and whether it is one, from one more in between.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

type Axes = frozenset[str]

# Smaller ones say nothing of others.
SMALL = 5


@dataclass(frozen=True)
class Size:
    """A sum of products of the sizes of axes, which a program is called with.

    Attributes:
      terms: of products of axes how many there are; none is 0.
    """

    terms: Mapping[Axes, int]

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    @classmethod
    def of(cls, number: int) -> Size:
        """The same at all sizes."""
        return cls({frozenset(): number} if number else {})

    @property
    def number(self) -> int | None:
        """What it is at all sizes; None where that depends on them."""
        return self.terms.get(frozenset(), 0) if self.terms.keys() <= {frozenset[str]()} else None

    def at(self, sizes: Mapping[str, Any]) -> Any:
        """What it is at sizes: an int of ints, an array of arrays."""
        products = (
            functools.reduce(lambda a, b: a * b, (sizes[axis] for axis in sorted(axes)), times)
            for axes, times in self.terms.items()
        )
        return sum(products, start=0)

    def __mul__(self, other: Size) -> Size | None:
        """None where an axis would be multiplied with itself."""
        terms: dict[Axes, int] = {}
        for (a, m), (b, n) in itertools.product(self.terms.items(), other.terms.items()):
            if a & b:
                return None
            terms[a | b] = terms.get(a | b, 0) + m * n
        return Size({axes: n for axes, n in terms.items() if n})

    def over(self, other: Size) -> Size | None:
        """What has to be multiplied with the other one to be this; None where that is no size."""
        if not other.terms:
            return None
        quotient: dict[Axes, int] = {}
        rest, by = self, max(other.terms, key=_order)
        while rest.terms:  # Division of polynomials, the largest products first.
            first = max(rest.terms, key=_order)
            times, left = divmod(rest.terms[first], other.terms[by])
            product = Size({first - by: times}) * other
            if left or not by <= first or product is None:
                return None
            quotient[first - by] = times
            rest = rest.minus(product)
        return Size(quotient)

    def minus(self, other: Size) -> Size:
        terms = dict(self.terms)
        for axes, n in other.terms.items():
            terms[axes] = terms.get(axes, 0) - n
        return Size({axes: n for axes, n in terms.items() if n})

    def __str__(self) -> str:
        named = (
            " · ".join([*([str(n)] if n != 1 or not axes else []), *sorted(axes)])
            for axes, n in sorted(self.terms.items(), key=lambda t: -len(t[0]))
        )
        return " + ".join(named) or "0"


def _order(axes: Axes) -> tuple[int, list[str]]:
    return len(axes), sorted(axes)


ONE = Size.of(1)


def product_of(sizes: Iterable[Size]) -> Size:
    """The product of sizes, of which no two have an axis: those of one dimension."""
    product = ONE
    for size in sizes:
        together = product * size
        assert together is not None
        product = together
    return product


@dataclass(frozen=True)
class Probes:
    """The sizes at which a program is traced: at all corners of some sizes of each axis, 2 for each
    that has several, and at two or three points more.

    Attributes:
      ranges: of each axis the sizes that a bucket is for: from the first to the second, which is
        the bucket's own.
      also: sizes at which it is traced besides.
    """

    ranges: Mapping[str, tuple[int, int]]
    also: tuple[Mapping[str, int], ...] = ()

    @functools.cached_property
    def open(self) -> tuple[str, ...]:
        """The axes that have more than one size."""
        return tuple(axis for axis, (low, high) in self.ranges.items() if low < high)

    @functools.cached_property
    def points(self) -> tuple[Mapping[str, int], ...]:
        """Where it is traced: first at the bucket's own sizes; first of all corners."""
        own = {axis: high for axis, (_, high) in self.ranges.items()}
        found = [{**own, **{axis: self._others[axis][0] for axis in at}} for at in self._corners]
        checks = max((len(others) for others in self._others.values()), default=1)
        for k in range(1, checks):
            more = {axis: others[min(k, len(others) - 1)] for axis, others in self._others.items()}
            found.append({**own, **more})
        return (*found, *self.also)

    @functools.cached_property
    def _others(self) -> dict[str, tuple[int, ...]]:
        """Of each axis with several sizes up to three beside the bucket's own: the lowest, and two
        in between that have no step in common with these, so that what goes up in steps is seen.

        Not the smallest: an axis of one element, as ``tokens - 1`` may be, jax takes for one of any
        size, and traces otherwise. Where that leaves too few, some beyond the bucket.
        """
        found: dict[str, tuple[int, ...]] = {}
        for axis in self.open:
            low, high = self.ranges[axis]
            least = max(low, SMALL)
            if least >= high:
                found[axis] = (high + 1, high + 2, high + 3)
                continue
            near = [least + (high - least) * k // 3 for k in (1, 2)]
            apart = [n for n in range(least + 1, high) if math.gcd(high - least, n - least) == 1]
            between = [min(apart, key=lambda n: abs(n - at)) for at in near] if apart else []
            # Beyond the bucket the function may be another one.
            beyond = [] if between or low >= SMALL else [high + 1]
            found[axis] = tuple(dict.fromkeys([least, *between, *beyond]))
        return found

    @functools.cached_property
    def _corners(self) -> tuple[tuple[str, ...], ...]:
        """The axes that have another size than the bucket's own."""
        numbers = range(len(self.open) + 1)
        return tuple(low for n in numbers for low in itertools.combinations(self.open, n))

    def size(self, found: Sequence[int]) -> Size | None:
        """The size that has been found at these points, the ints that it was there; None where they
        say that it is none."""
        if len({*found}) == 1:
            return Size.of(found[0])
        terms = {axes: round(n) for axes, n in self._terms(found).items()}
        size = Size({axes: n for axes, n in terms.items() if n})
        # Where terms are no ints, this tells.
        return size if [size.at(p) for p in self.points] == [*found] else None

    def has_room(self, size: Size) -> bool:
        """Whether an array of the bucket's sizes is as large as at all others, where it is no less
        than empty; of small sizes at those that were traced. A sum of products is largest, and
        least, at a corner of its axes."""
        ends = ((max(low, min(SMALL, high)), high) for low, high in self.ranges.values())
        corners = (dict(zip(self.ranges, at, strict=True)) for at in itertools.product(*ends))
        most = size.at(self.points[0])
        return all(0 <= size.at(at) <= most for at in (*corners, *self.also))

    def number(
        self, found: Sequence[Any], dtype: Any = np.float32
    ) -> Callable[[Mapping[str, Any]], Any] | None:
        """What has been found at these points, as a function of sizes: a size, or one over it, a
        root of it, or its logarithm; None where it is neither.

        Of 1/512, 1/300 and 1/400 the inverses are a size, which is 1 · tokens; of what that is at a
        call's sizes, the inverse is the number there.

        Args:
          dtype: of floats, which says how exact they are.
        """
        if all(isinstance(n, int) for n in found):
            size = self.size(found)
            return None if size is None else size.at
        exact = max(4 * float(jnp.finfo(dtype).eps), 1e-12)
        for there, back in _SHAPES:
            try:
                seen = [there(float(n)) for n in found]
            except (ValueError, OverflowError, ZeroDivisionError):
                continue
            largest = max(map(abs, seen))
            terms = {
                axes: _rounded(n, exact)
                for axes, n in self._terms(seen).items()
                if abs(n) * self._most(axes) > 4 * exact * largest
            }
            steps = all(n.is_integer() for n in seen) and there is _SHAPES[0][0]
            if steps and not all(n.is_integer() for n in terms.values()):
                continue  # Whole numbers that are no sum of products go up in steps.
            size = Size(terms)  # pyright: ignore[reportArgumentType]  # Of floats, which `at` takes.
            with np.errstate(all="ignore"):
                close = [
                    math.isclose(back(np, np.float64(size.at(p))), n, rel_tol=4 * exact)
                    for p, n in zip(self.points, found, strict=True)
                ]
            if all(close):
                wide = np.float64 if dtype == np.float64 else np.float32
                return functools.partial(_float_at, size, back, wide)
        return None

    def _most(self, axes: Axes) -> int:
        return math.prod(self.ranges[axis][1] for axis in axes)

    def _terms(self, found: Sequence[float]) -> dict[Axes, float]:
        """The sum of products that is so at the corners: what changes as axes go from the bucket's
        sizes to others, one after the other, written out."""
        at = dict(zip(map(frozenset, self._corners), found, strict=False))
        terms: dict[Axes, float] = {}
        for axes in at:
            subsets = (frozenset(s) for n in range(len(axes) + 1) for s in _subsets(axes, n))
            change = sum((-1) ** (len(axes) - len(s)) * at[s] for s in subsets)
            for axis in axes:
                change /= self._others[axis][0] - self.ranges[axis][1]
            # The product of (axis − the bucket's size) over `axes`, multiplied out.
            for n in range(len(axes) + 1):
                for kept in map(frozenset, _subsets(axes, n)):
                    rest = math.prod(-self.ranges[axis][1] for axis in axes - kept)
                    terms[kept] = terms.get(kept, 0) + change * rest
        return terms


def _float_at(
    size: Size, back: Callable[[Any, Any], Any], dtype: Any, sizes: Mapping[str, Any]
) -> Any:
    return back(jnp, size.at({axis: jnp.asarray(n, dtype) for axis, n in sizes.items()}))


def _subsets(axes: Axes, n: int) -> Iterable[tuple[str, ...]]:
    return itertools.combinations(sorted(axes), n)


def _rounded(number: float, exact: float) -> float:
    """The whole number that it is but for rounding."""
    near = round(number)
    return float(near) if near and math.isclose(number, near, rel_tol=16 * exact) else number


# There, and back with the functions of numpy or of jax.
_SHAPES: tuple[tuple[Callable[[float], float], Callable[[Any, Any], Any]], ...] = (
    (lambda v: v, lambda _, s: s),
    (lambda v: 1 / v, lambda _, s: 1 / s),
    (lambda v: v * v, lambda xp, s: xp.sqrt(s)),
    (lambda v: 1 / (v * v), lambda xp, s: 1 / xp.sqrt(s)),
    (math.exp, lambda xp, s: xp.log(s)),
    (lambda v: math.exp(-v), lambda xp, s: -xp.log(s)),
)
