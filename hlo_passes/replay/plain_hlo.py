"""Plain meanings as HLO text: what `portable` has XLA's own parser read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hlo_passes.ir import Shape


def _physical_order(shape: Shape) -> list[int]:
    """The dimensions from major to minor."""
    return list(reversed(shape.layout.minor_to_major)) or list(range(len(shape.dimensions)))


def bitcast(source: Shape, result: Shape) -> str:
    """A bitcast as HLO on values: it keeps the bytes and changes how they are read.

    The elements of an array in the order of its bytes are a row-major 1-D array:

        source ─ transposed to its physical dimension order
               ─ each tile: padded, split into tiles, tile counts before tile sizes
               ─ flat: the bytes of both ─ flat
                 the same steps of the result's layout, backwards ─ result

    (The "Tiled layout" page of XLA's documentation; `hlo_passes.ir.tiled_element_count`.)
    """
    value = _Chain(source.dtype, source.dimensions)
    same_tiling = _tiling(source) == _tiling(result)
    value.transpose(_physical_order(source))
    for tile in () if same_tiling else source.layout.tiles:
        step = _Tiled.of(value.sizes, tile)
        value.reshape(step.sizes)
        value.pad(step.padded)
        value.reshape(step.split)
        value.transpose(step.order)
    value.reshape([math.prod(value.sizes)])
    value.bitcast_convert(result.dtype)

    sizes = [result.dimensions[d] for d in _physical_order(result)]
    steps: list[_Tiled] = []
    for tile in () if same_tiling else result.layout.tiles:
        steps.append(_Tiled.of(sizes, tile))
        sizes = [steps[-1].split[d] for d in steps[-1].order]
    # Tiles that pad the end of one and not of the other: those bytes carry nothing.
    value.pad([max(value.sizes[0], math.prod(sizes))])
    value.slice([math.prod(sizes)])
    value.reshape(sizes)
    for step in reversed(steps):
        value.reshape([step.split[d] for d in step.order])
        value.transpose(_inverse(step.order))
        value.reshape(step.padded)
        value.slice(step.sizes)
    value.reshape([result.dimensions[d] for d in _physical_order(result)])
    value.transpose(_inverse(_physical_order(result)))
    return plain_text(value.lines)


def _tiling(shape: Shape) -> tuple[object, ...]:
    """What decides where tiles put the elements: equal values, equal places."""
    sizes = [shape.dimensions[d] for d in _physical_order(shape)]
    untouched = max(len(sizes) - max(map(len, shape.layout.tiles), default=0), 0)
    return (shape.layout.tiles, sizes[untouched:], math.prod(sizes[:untouched]))


@dataclass(frozen=True)
class _Tiled:
    """One tile applied to the minor dimensions of an array.

    Attributes:
      sizes: the array's, with leading ones where the tile has more dimensions.
      padded: rounded up to whole tiles.
      split: each tiled size as (number of tiles, size of the tile).
      order: the dimensions of `split` as they lie in memory.
    """

    sizes: list[int]
    padded: list[int]
    split: list[int]
    order: list[int]

    @classmethod
    def of(cls, sizes: Sequence[int], tile: Sequence[int]) -> _Tiled:
        sizes = [1] * (len(tile) - len(sizes)) + list(sizes)
        outer = len(sizes) - len(tile)
        counts = [-(-n // t) for n, t in zip(sizes[outer:], tile, strict=True)]
        pairs = list(zip(counts, tile, strict=True))
        split = sizes[:outer] + [n for pair in pairs for n in pair]
        of_counts = range(outer, len(split), 2)
        return cls(
            sizes,
            sizes[:outer] + [count * t for count, t in pairs],
            split,
            [*range(outer), *of_counts, *(d + 1 for d in of_counts)],
        )


class _Chain:
    """HLO text in which each line takes the one before; steps that change nothing are none."""

    def __init__(self, dtype: str, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.lines = [f"v0 = {text(dtype, sizes)} parameter(0)"]
        self._dtype = dtype

    def transpose(self, order: Sequence[int]) -> None:
        if list(order) != sorted(order):
            sizes = [self.sizes[d] for d in order]
            self._then("transpose", sizes, f", dimensions={braces(order)}")

    def reshape(self, sizes: Sequence[int]) -> None:
        if list(sizes) != self.sizes:
            self._then("reshape", sizes)

    def bitcast_convert(self, dtype: str) -> None:
        if dtype != self._dtype:
            self._dtype = dtype
            self._then("bitcast-convert", self.sizes)

    def pad(self, sizes: Sequence[int]) -> None:
        if list(sizes) != self.sizes:
            zero = f"zero{len(self.lines)}"
            self.lines.append(f"{zero} = {self._dtype}[] constant(0)")
            high = "x".join(f"0_{n - m}" for n, m in zip(sizes, self.sizes, strict=True))
            self._then("pad", sizes, f", padding={high}", zero, operand=-2)

    def slice(self, sizes: Sequence[int]) -> None:
        if list(sizes) != self.sizes:
            bounds = ", ".join(f"[0:{n}]" for n in sizes)
            self._then("slice", sizes, f", slice={{{bounds}}}")

    def _then(
        self, opcode: str, sizes: Sequence[int], attributes: str = "", *more: str, operand: int = -1
    ) -> None:
        operands = [self.lines[operand].split(" ")[0], *more]
        self.sizes = list(sizes)
        line = f"v{len(self.lines)} = {text(self._dtype, sizes)} {opcode}({', '.join(operands)})"
        self.lines.append(line + attributes)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def undefined(name: str, shape: Shape) -> list[str]:
    """Memory without defined content, as lines of HLO text.

    It is full of NaN: what depends on it shows. (Integers have no such number.)
    """
    content = "nan" if shape.dtype.startswith(("f", "bf")) else "1"
    return [
        f"{name}.content = {shape.dtype}[] constant({content})",
        f"{name} = {text(shape.dtype, shape.dimensions)} broadcast({name}.content), "
        "dimensions={}",
    ]


def plain_text(lines: Iterable[str]) -> str:
    return "\n  ".join(["HloModule plain\n\nENTRY plain {", *lines]) + "\n}\n"


def text(dtype: str, sizes: Iterable[int]) -> str:
    return f"{dtype}[{','.join(map(str, sizes))}]"


def braces(numbers: Iterable[int | str]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"
