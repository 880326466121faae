"""The plane of a figure: two axes with grid and ticks, and series of points drawn into it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from twostep.bench.report.svg import Point, circle, drawing, line, polyline, text
from twostep.bench.report.svg_axis import Axis, LogAxis, tick_words

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
