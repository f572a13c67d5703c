"""What ``buckets=`` and ``dims=`` say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlo_passes.budget import whole_number
from memplan.buckets.errors import BucketsError
from memplan.paths import matching

type Sizes = Mapping[str, int]

_NO_NAME = "_"


@dataclass(frozen=True)
class Buckets:
    """The sizes that are compiled, and which dimensions of the arguments have them.

    Attributes:
      sizes: of each axis, ascending.
      dims: of patterns of argument paths, the axes that their dimensions are; None for no axis.
    """

    sizes: Mapping[str, tuple[int, ...]]
    dims: Mapping[str, tuple[str | None, ...]]

    @classmethod
    def of(cls, sizes: object, dims: object) -> Buckets:
        """What `memplan.jit` was given.

        Raises:
          BucketsError: when they are something else.
        """
        if not isinstance(sizes, Mapping) or not sizes:
            raise BucketsError(
                f"buckets={sizes!r}: expected names of sizes and the sizes that are compiled: "
                "{'tokens': [128, 512, 2048]}"
            )
        if not isinstance(dims, Mapping) or not dims:
            raise BucketsError(
                f"dims={dims!r}: expected patterns of arguments and the names of their dimensions: "
                "{'ids': 'batch tokens', 'cache.*': 'batch _ _ _'}"
            )
        found = {str(axis): _ascending(axis, numbers) for axis, numbers in sizes.items()}
        named: dict[str, tuple[str | None, ...]] = {}
        for pattern, names in dims.items():
            if not isinstance(pattern, str) or not isinstance(names, str):
                raise BucketsError(f"dims={dims!r}: expected strings")
            axes = names.replace(",", " ").split()
            if unknown := {*axes} - {*found, _NO_NAME}:
                raise BucketsError(
                    f"dims[{pattern!r}]={names!r}: buckets= has no {', '.join(sorted(unknown))}; "
                    f"it has {', '.join(found)}, and a dimension of no bucket is {_NO_NAME}"
                )
            named[pattern] = tuple(None if axis == _NO_NAME else axis for axis in axes)
        if unused := {*found} - {axis for axes in named.values() for axis in axes}:
            raise BucketsError(f"dims={dims!r}: no dimension is {', '.join(sorted(unused))}")
        return cls(found, named)

    def places(
        self, paths: Sequence[str], ranks: Sequence[int]
    ) -> tuple[tuple[str | None, ...], ...]:
        """Of each argument the axes of its dimensions.

        Args:
          paths, ranks: of the flat arguments.

        Raises:
          BucketsError: when a pattern matches none, or one of another rank.
        """
        found: list[tuple[str | None, ...]] = [(None,) * rank for rank in ranks]
        for pattern, axes in self.dims.items():
            matched = {*matching(pattern, paths)}
            if not matched:
                raise BucketsError(
                    f"dims[{pattern!r}]: no argument matches. The arguments are "
                    f"{', '.join(paths[:5])}{' and others' if len(paths) > 5 else ''}"
                )
            for n, path in enumerate(paths):
                if path not in matched:
                    continue
                if len(axes) != ranks[n]:
                    raise BucketsError(
                        f"dims[{pattern!r}] names {len(axes)} dimensions, {path} has {ranks[n]}"
                    )
                found[n] = axes
        return tuple(found)

    def sizes_of(
        self,
        shapes: Sequence[tuple[int, ...]],
        places: Sequence[tuple[str | None, ...]],
        paths: Callable[[], Sequence[str]],
    ) -> dict[str, int]:
        """The sizes that a function is called with.

        Args:
          shapes, places: of the flat arguments; `paths` says what they are called.

        Raises:
          BucketsError: when arguments do not agree, or one is 0 or larger than every bucket.
        """
        found: dict[str, tuple[int, int]] = {}
        for n, axes in enumerate(places):
            for axis, size in zip(axes, shapes[n], strict=True):
                if axis is None:
                    continue
                before, first = found.setdefault(axis, (size, n))
                if before != size:
                    raise BucketsError(
                        f"{axis} is {before} by {paths()[first]} and {size} by {paths()[n]}"
                    )
                if not 1 <= size <= self.sizes[axis][-1]:
                    raise BucketsError(
                        f"{axis} is {size} by {paths()[n]}; its buckets are for 1 to "
                        f"{self.sizes[axis][-1]} (buckets=)"
                    )
        return {axis: size for axis, (size, _) in found.items()}

    def bucket(self, sizes: Sizes) -> dict[str, int]:
        """The next larger of each."""
        return {
            axis: next(n for n in self.sizes[axis] if n >= size) for axis, size in sizes.items()
        }

    def ranges(self, bucket: Sizes) -> dict[str, tuple[int, int]]:
        """The sizes that come into a bucket: the least, and the bucket's own."""
        found: dict[str, tuple[int, int]] = {}
        for axis, size in bucket.items():
            at = self.sizes[axis].index(size)
            found[axis] = (self.sizes[axis][at - 1] + 1 if at else 1, size)
        return found

    def all(self) -> Iterator[dict[str, int]]:
        """Every bucket, the largest first."""
        products = itertools.product(*(self.sizes[axis] for axis in self.sizes))
        for sizes in sorted(products, key=lambda s: (-math.prod(s), s)):
            yield dict(zip(self.sizes, sizes, strict=True))


def _ascending(axis: object, numbers: object) -> tuple[int, ...]:
    given = (numbers,) if isinstance(numbers, int) else numbers
    found = [whole_number(n) for n in given] if isinstance(given, Sequence) else []
    if not found or isinstance(given, str) or any(n is None or n < 1 for n in found):
        raise BucketsError(f"buckets[{axis!r}]={numbers!r}: expected positive ints")
    return tuple(sorted({n for n in found if n is not None}))
