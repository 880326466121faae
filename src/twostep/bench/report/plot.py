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
    """`anchor`: which of its ends lies at x: start, middle or end."""
    more = f" {attributes}" if attributes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def circle(x: float, y: float, radius: float, attributes: str, tip: str = "") -> str:
    """`tip` is shown while the pointer rests on it."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {attributes}{_end("circle", tip)}'


def rect(x: float, y: float, width: float, height: float, attributes: str, tip: str = "") -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} {attributes}{_end("rect", tip)}'


def polyline(points: Sequence[Point], attributes: str) -> str:
    """Straight from point to point; nothing for no points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" {attributes}/>' if points else ""


def drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """An element to stand in a page of HTML, as wide as there is room. `title` is for who cannot see it."""
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def _end(name: str, tip: str) -> str:
    return f"><title>{escape(tip)}</title></{name}>" if tip else "/>"


# --- axes -------------------------------------------------------------------------------------------------------------

TICKS = 5
"""About so many on an axis."""
WIDE = 50
"""Greatest by smallest value from which an axis is logarithmic."""
DECADES = 4
"""More are not shown: what is smaller lies at the axis' begin."""


@dataclass(frozen=True)
class Axis:
    """From zero. `top`: the greatest value shown; ticks lie at multiples of `step` up to it."""

    title: str
    top: float
    step: float

    def ticks(self) -> list[float]:
        return [i * self.step for i in range(int(self.top / self.step + 1e-9) + 1)]

    def share(self, value: float) -> float:
        """Where it lies: 0 at the axis' begin, 1 at its end."""
        return value / self.top


@dataclass(frozen=True)
class LogAxis:
    """From `low` to `top`, both of 1, 2 and 5 times a power of ten."""

    title: str
    low: float
    top: float

    def ticks(self) -> list[float]:
        """At most twice `TICKS`: else the powers of ten alone."""
        steps = _round_numbers(self.low, self.top)
        return steps if len(steps) <= 2 * TICKS else [step for step in steps if f"{step:e}".startswith("1.0")]

    def share(self, value: float) -> float:
        return log(max(value, self.low) / self.low) / log(self.top / self.low)


def axis(title: str, most: float) -> Axis:
    """From zero to at least `most`, with about five round ticks; to one where there is nothing to show."""
    rough = (most or 1) / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return Axis(title, step * -(-(most or 1) // step), step)


def fitting_axis(title: str, values: Iterable[float]) -> Axis | LogAxis:
    """Logarithmic where the values above zero lie far apart, which the title then says."""
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
"""Width of a letter of a label, about."""
LINE = 14.0
"""Height of a line of labels."""


@dataclass(frozen=True)
class Plane:
    """Sizes are in the units of the drawing, about pixels. The y axis' title stands above it, where it reads easily."""

    x: Axis | LogAxis
    y: Axis | LogAxis
    right: float = 28
    width: float = 560
    height: float = 300
    left: float = 56
    top: float = 34
    bottom: float = 42
    upright: bool = False
    """With lines up from the ticks of x, for figures in which one looks for what happened at the same time."""

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
    """`colour`: number of one of the page's. `tips`: one for each point, or none."""

    label: str
    colour: int
    points: Sequence[Point]
    tips: Sequence[str] = ()


def room_for(labels: Iterable[str]) -> float:
    """The margin that labels at the right of their lines need."""
    return 24 + LETTER * max(map(len, labels), default=0)


def labelled_lines(plane: Plane, series: Sequence[Series]) -> Iterator[str]:
    """Each with its points, and its label where it ends; labels give way to each other."""
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
    """Through the mean of points that lie above each other."""
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
    """Each value holds until the next x."""
    corners = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        corners += [(x, before), (x, y)]
    return corners


def spread(wanted: Sequence[float], gap: float, last: float) -> list[float]:
    """Places near the wanted ones, which ascend, with `gap` between them and none beyond `last`."""
    places = list[float]()
    for place in wanted:
        places.append(max(place, places[-1] + gap) if places else place)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], last if i == len(places) - 1 else places[i + 1] - gap)
    return places


# --- figures ----------------------------------------------------------------------------------------------------------

COLOURS = 6
"""The page has so many, from blue to orange; their order shows that of loads."""


@dataclass(frozen=True)
class Figure:
    """`note`: what one has to know to read it. `legend`: words and the class that has their colour."""

    title: str
    svg: str
    note: str = ""
    legend: Sequence[tuple[str, str]] = ()
    wide: bool = False

    def html(self) -> str:
        drawn = self.svg or '<p class="nothing">Nothing to show: no such value was measured.</p>'
        legend = legend_html(self.legend) if self.legend else ""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        style = ' class="wide"' if self.wide else ""
        return f"<figure{style}><figcaption><h3>{escape(self.title)}</h3>{note}{legend}</figcaption>{drawn}</figure>"


def legend_html(entries: Sequence[tuple[str, str]]) -> str:
    """As the legend of a figure."""
    keys = "".join(f'<span class="{style}"><i></i>{escape(words)}</span>' for words, style in entries)
    return f'<div class="legend">{keys}</div>'


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most so many of them, from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def colour(i: int, of: int) -> int:
    """Number of the colour of the i-th of several."""
    return 1 if of <= 1 else round(i * (COLOURS - 1) / (of - 1))
