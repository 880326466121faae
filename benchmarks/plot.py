"""Small scatter plots as SVG text: points with a spread and a label, axes from zero. Same input, same bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from twostep.bench.report.plot import Axis, axis, circle, line, text

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 20, 50
"""Margins; the right one is for the labels of points near it."""


@dataclass(frozen=True)
class Dot:
    """One point; its bar goes from `low` to `high`."""

    x: float
    y: float
    low: float
    high: float
    label: str


def scatter(title: str, x_title: str, y_title: str, dots: Sequence[Dot], line_y: float | None = None) -> str:
    """A whole SVG document. `line_y`: where a dashed line is drawn across."""
    x, y = axis(x_title, max(dot.x for dot in dots)), axis(y_title, max(dot.high for dot in dots))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(title)}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *(_x_tick(x, value) for value in x.ticks()),
        *(_y_tick(y, value) for value in y.ticks()),
        text(_across(x, x.top / 2), HEIGHT - 12, x.title, "middle"),
        f'<g transform="rotate(-90 16 {_down(y, y.top / 2):.1f})">'
        f"{text(16, _down(y, y.top / 2), y.title, 'middle')}</g>",
    ]
    if line_y is not None:
        down = _down(y, line_y)
        parts.append(line(LEFT, down, WIDTH - RIGHT, down, 'stroke="#888" stroke-dasharray="4"'))
    parts += [_dot(x, y, dot) for dot in dots]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dot(x: Axis, y: Axis, dot: Dot) -> str:
    across, down = _across(x, dot.x), _down(y, dot.y)
    bar = line(across, _down(y, dot.low), across, _down(y, dot.high), 'stroke="#1f5fa8" stroke-width="2"')
    return bar + circle(across, down, 4, 'fill="#1f5fa8"') + text(across + 8, down - 6, dot.label, "start")


def _x_tick(x: Axis, value: float) -> str:
    across = _across(x, value)
    grid = line(across, TOP, across, HEIGHT - BOTTOM, 'stroke="#ddd"')
    return grid + text(across, HEIGHT - BOTTOM + 16, f"{value:g}", "middle")


def _y_tick(y: Axis, value: float) -> str:
    down = _down(y, value)
    return line(LEFT, down, WIDTH - RIGHT, down, 'stroke="#ddd"') + text(LEFT - 6, down + 4, f"{value:g}", "end")


def _across(x: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / x.top


def _down(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / y.top
