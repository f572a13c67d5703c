"""Points of several methods in a plane where less is better both ways, drawn as SVG.

y │  ○
  │  └──○           a method's front: the points that none of its own beats,
  │     │   ○       joined by the steps that bound what they reach
  │     └─────●
  └──────────────── x
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

# Of one panel, in SVG's units: the plane, and what surrounds it.
_WIDTH, _HEIGHT = 460, 360
_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 34, 16, 46
_PANEL_COLUMNS = 2
_LEGEND_ROW = 18
_TICKS = 6

# Okabe & Ito (2008), "Color universal design": told apart by colour-blind readers too.
_COLORS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")


class Point(NamedTuple):
    """`label` says which of its method it is; a number beside the point stands for it."""

    x: float
    y: float
    label: str = ""


class Panel(NamedTuple):
    """One plane. `series` are the points by method; a method has the same colour everywhere."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[Point]]


def front(points: Iterable[Point]) -> list[Point]:
    """Those that no other point equals or beats both ways, by falling y. O(n log n).

    >>> front([Point(1, 9), Point(2, 9), Point(3, 5), Point(4, 7)])
    [Point(x=1, y=9, label=''), Point(x=3, y=5, label='')]
    """
    found: list[Point] = []
    for point in sorted(points):
        if not found or point.y < found[-1].y:
            found.append(point)
    return found


def scatter(panels: Sequence[Panel]) -> str:
    """Returns an SVG document: the panels, two beside each other, and what the numbers mean.

    Panels without points are left out.
    """
    drawn = [panel for panel in panels if any(panel.series.values())]
    names = list(dict.fromkeys(name for panel in drawn for name in panel.series))
    keys = {name: _Key(_COLORS[k % len(_COLORS)], name, drawn) for k, name in enumerate(names)}
    panel_width, panel_height = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM
    width = panel_width * _PANEL_COLUMNS
    legend = panel_height * math.ceil(len(drawn) / _PANEL_COLUMNS) + _LEGEND_ROW // 2
    height = legend + _LEGEND_ROW * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for k, panel in enumerate(drawn):
        row, column = divmod(k, _PANEL_COLUMNS)
        x, y = column * panel_width + _LEFT, row * panel_height + _TOP
        parts.append(f'<g transform="translate({x},{y})">')
        parts += _Plane(panel, keys).draw()
        parts.append("</g>")
    for row, key in enumerate(keys.values()):
        y = legend + row * _LEGEND_ROW
        parts.append(f'<circle cx="{_LEFT}" cy="{y - 4}" r="4" fill="{key.color}"/>')
        parts.append(f'<text x="{_LEFT + 9}" y="{y}">{escape(key.text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


class _Key:
    """How a method's points are told apart: by one colour, and a number for each label."""

    def __init__(self, color: str, name: str, panels: Iterable[Panel]) -> None:
        self.color = color
        labels = dict.fromkeys(p.label for panel in panels for p in panel.series.get(name, ()))
        self.numbers = {label: n for n, label in enumerate(labels, 1)}
        numbered = ",  ".join(f"{n} {label}" for label, n in self.numbers.items())
        self.text = f"{name}:  {numbered}"


class _Plane:
    """Draws a panel; its origin is the upper left corner of the plane."""

    def __init__(self, panel: Panel, keys: Mapping[str, _Key]) -> None:
        self._panel = panel
        self._keys = keys
        points = [point for series in panel.series.values() for point in series]
        self._x_ticks = _ticks([point.x for point in points])
        self._y_ticks = _ticks([point.y for point in points])

    def draw(self) -> Iterator[str]:
        yield from self._axes()
        taken: list[tuple[float, float]] = []
        for name, points in self._panel.series.items():
            key = self._keys[name]
            yield f'<path d="{self._staircase(front(points))}" fill="none" stroke="{key.color}"/>'
            for point in points:
                x, y = self._x(point.x), self._y(point.y)
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{key.color}">'
                yield f"<title>{escape(f'{name}: {point.label}')}</title></circle>"
                yield self._number(point, key, taken)

    def _axes(self) -> Iterator[str]:
        panel = self._panel
        yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>'
        yield f'<text x="{_WIDTH / 2}" y="-12" text-anchor="middle" font-size="13">'
        yield f"{escape(panel.title)}</text>"
        for tick in self._x_ticks:
            x = f"{self._x(tick):.1f}"
            yield f'<path d="M{x} 0V{_HEIGHT}" stroke="#eee"/>'
            yield f'<text x="{x}" y="{_HEIGHT + 15}" text-anchor="middle">{tick:g}</text>'
        for tick in self._y_ticks:
            y = self._y(tick)
            yield f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#eee"/>'
            yield f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        yield f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 33}" text-anchor="middle">'
        yield f"{escape(panel.x_label)}</text>"
        yield f'<text transform="translate(-40,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        yield f"{escape(panel.y_label)}</text>"

    def _staircase(self, points: Sequence[Point]) -> str:
        """Right from each point to where the next one is better, then down to it."""
        if not points:
            return ""
        steps = [f"M{self._x(points[0].x):.1f} {self._y(points[0].y):.1f}"]
        steps += [f"H{self._x(point.x):.1f}V{self._y(point.y):.1f}" for point in points[1:]]
        return "".join(steps)

    def _number(self, point: Point, key: _Key, taken: list[tuple[float, float]]) -> str:
        """Beside the point, moved down until it is free of those in `taken`."""
        size = 9
        x, y = self._x(point.x) + 6, self._y(point.y) + 3
        while any(abs(x - u) < size and abs(y - v) < size for u, v in taken):
            y += size
        taken.append((x, y))
        where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}"'
        return f'<text {where} fill="{key.color}">{key.numbers[point.label]}</text>'

    def _x(self, value: float) -> float:
        begin, *_, end = self._x_ticks
        return (value - begin) / (end - begin) * _WIDTH

    def _y(self, value: float) -> float:
        begin, *_, end = self._y_ticks
        return (end - value) / (end - begin) * _HEIGHT


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers at equal distances, from below the least of the positive values to above
    the greatest."""
    least, greatest = min(values), max(values)
    rough = max(greatest - least, greatest / 4) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    first, last = math.ceil(least / step) - 1, math.floor(greatest / step) + 1
    return [k * step for k in range(first, last + 1)]
