"""SVG figures for a report: elements, axes, and series of points in a plane."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, pairwise
from math import floor, log, log10
from typing import TypeVar

T = TypeVar("T")
Point = tuple[float, float]


# --- elements: attributes are inserted as they are, text is escaped ---------------------------------------------------


def line(x1: float, y1: float, x2: float, y2: float, attributes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {attributes}/>'


def text(x: float, y: float, words: str, anchor: str = "start", attributes: str = "") -> str:
    """`anchor`: the part of the text at x: start, middle or end."""
    more = f" {attributes}" if attributes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def circle(x: float, y: float, radius: float, attributes: str, tip: str = "") -> str:
    """`tip` is shown on hover."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {attributes}{_end("circle", tip)}'


def rect(x: float, y: float, width: float, height: float, attributes: str, tip: str = "") -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} {attributes}{_end("rect", tip)}'


def polyline(points: Sequence[Point], attributes: str) -> str:
    """Straight lines between the points; empty without points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" {attributes}/>' if points else ""


def drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """An SVG element for an HTML page, as wide as its container. `title` is the accessible name."""
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def _end(name: str, tip: str) -> str:
    return f"><title>{escape(tip)}</title></{name}>" if tip else "/>"


# --- axes -------------------------------------------------------------------------------------------------------------

TICKS = 5
"""Approximate number of ticks on an axis."""
WIDE = 50
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
DECADES = 4
"""Maximum decades of a logarithmic axis; smaller values are drawn at its start."""


@dataclass(frozen=True)
class Axis:
    """A linear axis from 0 to `top`, with ticks at multiples of `step`."""

    title: str
    top: float
    step: float

    def ticks(self) -> list[float]:
        return [i * self.step for i in range(int(self.top / self.step + 1e-9) + 1)]

    def share(self, value: float) -> float:
        """Position of a value: 0 at the start of the axis, 1 at its end."""
        return value / self.top


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis from `low` to `top`, both 1, 2 or 5 times a power of ten."""

    title: str
    low: float
    top: float

    def ticks(self) -> list[float]:
        """Powers of ten with 2 and 5 in between; only powers of ten if that gives more than twice `TICKS`."""
        steps = _round_numbers(self.low, self.top)
        return steps if len(steps) <= 2 * TICKS else [step for step in steps if f"{step:e}".startswith("1.0")]

    def share(self, value: float) -> float:
        return log(max(value, self.low) / self.low) / log(self.top / self.low)


def axis(title: str, most: float) -> Axis:
    """A linear axis from 0 to at least `most`, with about five round ticks; to 1 if `most` is 0."""
    rough = (most or 1) / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return Axis(title, step * -(-(most or 1) // step), step)


def fitting_axis(title: str, values: Iterable[float]) -> Axis | LogAxis:
    """An axis for these values; logarithmic, and labelled so, if the positive values span a wide range."""
    above = [value for value in values if value > 0]
    if not above or max(above) < WIDE * min(above):
        return axis(title, max(above, default=0))
    low, top = max(min(above), max(above) / 10**DECADES), max(above)
    steps = _round_numbers(low / 5, 5 * top)
    below, beyond = [step for step in steps if step <= low * 1.001], [step for step in steps if step >= top * 0.999]
    return LogAxis(f"{title}, log scale", below[-1], beyond[0])


def tick_words(value: float) -> str:
    return f"{value:,.10g}"


def _round_numbers(low: float, top: float) -> list[float]:
    found = list[float]()
    for power in count(floor(log10(low))):
        found += [n * 10.0**power for n in (1, 2, 5)]
        if found[-1] >= top:
            return [step for step in found if low * 0.999 <= step <= top * 1.001]
    raise AssertionError("count has no end")


# --- plane and series -------------------------------------------------------------------------------------------------

LETTER = 7.6
"""Approximate width of a letter in a label."""
LINE = 14.0
"""Height of a line of labels."""


@dataclass(frozen=True)
class Plane:
    """Two axes with grid and ticks. Sizes are in drawing units, about pixels. The title of the y axis is above it."""

    x: Axis | LogAxis
    y: Axis | LogAxis
    right: float = 28
    width: float = 560
    height: float = 300
    left: float = 56
    top: float = 34
    bottom: float = 42
    upright: bool = False
    """Draw vertical grid lines, for figures over time."""

    def across(self, value: float) -> float:
        return self.left + (self.width - self.left - self.right) * self.x.share(value)

    def down(self, value: float) -> float:
        return self.height - self.bottom - (self.height - self.top - self.bottom) * self.y.share(value)

    def draw(self, title: str, parts: Iterable[str]) -> str:
        return drawing(self.width, self.height, title, [*self._grid(), *parts])

    def _grid(self) -> Iterator[str]:
        end, floor = self.width - self.right, self.height - self.bottom
        for value in self.y.ticks():
            down = self.down(value)
            yield line(self.left, down, end, down, 'class="grid"')
            yield text(self.left - 8, down + 4, tick_words(value), "end", 'class="tick"')
        for value in self.x.ticks():
            across = self.across(value)
            if self.upright:
                yield line(across, self.top - 6, across, floor, 'class="grid"')
            yield line(across, floor, across, floor + 4, 'class="axis"')
            yield text(across, floor + 18, tick_words(value), "middle", 'class="tick"')
        yield line(self.left, floor, end, floor, 'class="axis"')
        yield text(0, 14, self.y.title, "start", 'class="name"')
        yield text(end, self.height - 6, self.x.title, "end", 'class="name"')


@dataclass(frozen=True)
class Series:
    """Points to draw. `colour`: index into the page's colours. `tips`: one per point, or none."""

    label: str
    colour: int
    points: Sequence[Point]
    tips: Sequence[str] = ()


def room_for(labels: Iterable[str]) -> float:
    """Right margin needed for labels at the end of lines."""
    return 24 + LETTER * max(map(len, labels), default=0)


def labelled_lines(plane: Plane, series: Sequence[Series]) -> Iterator[str]:
    """Lines with their points and a label at the end; labels are moved apart."""
    drawn = [one for one in series if one.points]
    yield from (line_of(plane, one) for one in drawn)
    for one in drawn:
        yield from dots(plane, one)
    ends = sorted((plane.down(one.points[-1][1]), i) for i, one in enumerate(drawn))
    places = spread([down for down, _ in ends], LINE, plane.height - plane.bottom)
    for place, (_, i) in zip(places, ends, strict=True):
        across = plane.across(drawn[i].points[-1][0])
        yield text(across + 9, place + 4, drawn[i].label, "start", f'class="label c{drawn[i].colour}"')


def line_of(plane: Plane, series: Series) -> str:
    """A line through the mean y of points with equal x."""
    columns = dict[float, list[float]]()
    for x, y in series.points:
        columns.setdefault(x, []).append(y)
    means = [(plane.across(x), plane.down(sum(ys) / len(ys))) for x, ys in columns.items()]
    return polyline(means, f'class="line c{series.colour}"')


def dots(plane: Plane, series: Series) -> Iterator[str]:
    tips = series.tips or [""] * len(series.points)
    for (x, y), tip in zip(series.points, tips, strict=True):
        yield circle(plane.across(x), plane.down(y), 3.5, f'class="dot c{series.colour}"', tip)


def staircase(points: Sequence[Point]) -> list[Point]:
    """The corners of a step function: each value holds until the next x."""
    corners = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        corners += [(x, before), (x, y)]
    return corners


def spread(wanted: Sequence[float], gap: float, last: float) -> list[float]:
    """Positions near the `wanted` ones (ascending), at least `gap` apart and none beyond `last`."""
    places = list[float]()
    for place in wanted:
        places.append(max(place, places[-1] + gap) if places else place)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], last if i == len(places) - 1 else places[i + 1] - gap)
    return places


# --- figures ----------------------------------------------------------------------------------------------------------

COLOURS = 6
"""Number of colours in the page, from blue to orange, in order of load."""


@dataclass(frozen=True)
class Figure:
    """A figure of the report. `note`: explains how to read it. `legend`: labels, and the class of their colour."""

    title: str
    svg: str
    note: str = ""
    legend: Sequence[tuple[str, str]] = ()
    wide: bool = False

    def html(self) -> str:
        drawn = self.svg or '<p class="nothing">No data: no such value was measured.</p>'
        legend = legend_html(self.legend) if self.legend else ""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        style = ' class="wide"' if self.wide else ""
        return f"<figure{style}><figcaption><h3>{escape(self.title)}</h3>{note}{legend}</figcaption>{drawn}</figure>"


def legend_html(entries: Sequence[tuple[str, str]]) -> str:
    """HTML of a legend."""
    keys = "".join(f'<span class="{style}"><i></i>{escape(words)}</span>' for words, style in entries)
    return f'<div class="legend">{keys}</div>'


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly chosen from first to last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def colour(i: int, of: int) -> int:
    """Index of the colour of item `i` of `of` items."""
    return 1 if of <= 1 else round(i * (COLOURS - 1) / (of - 1))
