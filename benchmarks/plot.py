"""Small scatter plots as SVG text: points with a spread and a label, axes from zero. Same input, same bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 20, 50
"""Margins; the right one is for the labels of points near it."""
TICKS = 5


@dataclass(frozen=True)
class Dot:
    """One point; its bar goes from `low` to `high`."""

    x: float
    y: float
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Axis:
    """`top`: the greatest value shown; ticks lie at multiples of `step`."""

    title: str
    top: float
    step: float

    def ticks(self) -> list[float]:
        return [i * self.step for i in range(round(self.top / self.step) + 1)]


def axis(title: str, most: float) -> Axis:
    """From zero to at least `most`, with about five round ticks."""
    rough = most / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return Axis(title, step * -(-most // step), step)


def scatter(title: str, x_title: str, y_title: str, dots: Sequence[Dot], line_y: float | None = None) -> str:
    """A whole SVG document. `line_y`: where a dashed line is drawn across."""
    x, y = axis(x_title, max(dot.x for dot in dots)), axis(y_title, max(dot.high for dot in dots))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(title)}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *(_x_tick(x, value) for value in x.ticks()),
        *(_y_tick(y, value) for value in y.ticks()),
        _text(_across(x, x.top / 2), HEIGHT - 12, x.title, "middle"),
        f'<g transform="rotate(-90 16 {_down(y, y.top / 2):.1f})">'
        f"{_text(16, _down(y, y.top / 2), y.title, 'middle')}</g>",
    ]
    if line_y is not None:
        down = _down(y, line_y)
        parts.append(_line(LEFT, down, WIDTH - RIGHT, down, 'stroke="#888" stroke-dasharray="4"'))
    parts += [_dot(x, y, dot) for dot in dots]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dot(x: Axis, y: Axis, dot: Dot) -> str:
    across, down = _across(x, dot.x), _down(y, dot.y)
    bar = _line(across, _down(y, dot.low), across, _down(y, dot.high), 'stroke="#1f5fa8" stroke-width="2"')
    circle = f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="#1f5fa8"/>'
    return bar + circle + _text(across + 8, down - 6, dot.label, "start")


def _x_tick(x: Axis, value: float) -> str:
    across = _across(x, value)
    grid = _line(across, TOP, across, HEIGHT - BOTTOM, 'stroke="#ddd"')
    return grid + _text(across, HEIGHT - BOTTOM + 16, f"{value:g}", "middle")


def _y_tick(y: Axis, value: float) -> str:
    down = _down(y, value)
    return _line(LEFT, down, WIDTH - RIGHT, down, 'stroke="#ddd"') + _text(LEFT - 6, down + 4, f"{value:g}", "end")


def _across(x: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / x.top


def _down(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / y.top


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
