"""Points of several methods in a plane where less is better both ways, drawn as SVG.

y │  ○
  │  └──○           a method's front: the points that none of its own beats,
  │     │   ○       joined by the steps that bound what they reach
  │     └─────●
  └──────────────── x
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

# Of one panel, in SVG's units: the plane, and what surrounds it.
_WIDTH, _HEIGHT = 460, 360
_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 34, 16, 46
_PANEL_COLUMNS = 2
_LEGEND_ROW, _LEGEND_COLUMNS = 18, 3
_TICKS = 6

# Okabe & Ito (2008), "Color universal design": told apart by colour-blind readers too.
_COLORS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")


class Point(NamedTuple):
    """`label` stands beside it, ``""`` for none."""

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
    """Returns an SVG document: the panels, two beside each other, one legend below them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colors = {name: _COLORS[k % len(_COLORS)] for k, name in enumerate(names)}
    panel_width, panel_height = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM
    width = panel_width * min(len(panels), _PANEL_COLUMNS)
    legend = panel_height * math.ceil(len(panels) / _PANEL_COLUMNS) + _LEGEND_ROW // 2
    height = legend + _LEGEND_ROW * math.ceil(len(names) / _LEGEND_COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for k, panel in enumerate(panels):
        row, column = divmod(k, _PANEL_COLUMNS)
        x, y = column * panel_width + _LEFT, row * panel_height + _TOP
        parts.append(f'<g transform="translate({x},{y})">')
        parts += _Plane(panel, colors).draw()
        parts.append("</g>")
    for k, name in enumerate(names):
        row, column = divmod(k, _LEGEND_COLUMNS)
        x = _LEFT + column * (width - _LEFT) / _LEGEND_COLUMNS
        y = legend + row * _LEGEND_ROW
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4}" r="4" fill="{colors[name]}"/>')
        parts.append(f'<text x="{x + 9:.1f}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


class _Plane:
    """Draws a panel; its origin is the upper left corner of the plane."""

    def __init__(self, panel: Panel, colors: dict[str, str]) -> None:
        self._panel = panel
        self._colors = colors
        points = [point for series in panel.series.values() for point in series]
        self._x_step, self._x_end = _axis(point.x for point in points)
        self._y_step, self._y_end = _axis(point.y for point in points)

    def draw(self) -> Iterator[str]:
        yield from self._axes()
        taken: list[tuple[float, float, float]] = []
        for name, points in self._panel.series.items():
            color = self._colors[name]
            yield f'<path d="{self._staircase(front(points))}" fill="none" stroke="{color}"/>'
            for point in points:
                x, y = self._x(point.x), self._y(point.y)
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}">'
                yield f"<title>{escape(f'{name} {point.label}'.strip())}</title></circle>"
                if point.label:
                    yield self._label(point, color, taken)

    def _axes(self) -> Iterator[str]:
        panel = self._panel
        yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>'
        yield f'<text x="{_WIDTH / 2}" y="-12" text-anchor="middle" font-size="13">'
        yield f"{escape(panel.title)}</text>"
        for tick in _ticks(self._x_step, self._x_end):
            x = f"{self._x(tick):.1f}"
            yield f'<path d="M{x} 0V{_HEIGHT}" stroke="#eee"/>'
            yield f'<text x="{x}" y="{_HEIGHT + 15}" text-anchor="middle">{tick:g}</text>'
        for tick in _ticks(self._y_step, self._y_end):
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

    def _label(self, point: Point, color: str, taken: list[tuple[float, float, float]]) -> str:
        """Beside the point, moved down until it is free of the labels in `taken`."""
        size = 9
        width = 0.55 * size * len(point.label)
        x, y = self._x(point.x) + 7, self._y(point.y) + 3
        if x + width > _WIDTH:
            x -= width + 14
        while any(abs(y - v) < size and x < u + w and u < x + width for u, v, w in taken):
            y += size
        taken.append((x, y, width))
        where = f'x="{x:.1f}" y="{y:.1f}"'
        return f'<text {where} font-size="{size}" fill="{color}">{escape(point.label)}</text>'

    def _x(self, value: float) -> float:
        return value / self._x_end * _WIDTH

    def _y(self, value: float) -> float:
        return _HEIGHT - value / self._y_end * _HEIGHT


def _axis(values: Iterable[float]) -> tuple[float, float]:
    """The distance of ticks and the end of an axis that begins at 0."""
    greatest = max(values, default=1.0)
    rough = greatest / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return step, step * math.ceil(greatest * 1.05 / step)


def _ticks(step: float, end: float) -> Iterator[float]:
    return (k * step for k in range(round(end / step) + 1))
