"""The roofline of one or several devices as a stand-alone SVG file, with kinds of work on it as dots."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import atan2, ceil, degrees, floor, log10

from twostep.bench.report.plot import (
    LETTER,
    LINE,
    LogAxis,
    Plane,
    circle,
    line,
    polyline,
    rect,
    spread,
    text,
    tick_words,
)

WIDTH, HEIGHT = 760.0, 470.0
NEAR = 26.0
"""Dots of one colour closer than this share one label."""
LEAST_INTENSITY, MOST_INTENSITY = 0.1, 1e4
COLOURS = ("#1d63d8", "#d9480f", "#0b7f74", "#8a3ffc", "#b02a4c", "#7a5b00")


@dataclass(frozen=True)
class Roof:
    """A device: operations and bytes per second, at its peaks and as real kernels reach them."""

    name: str
    peak: float
    bandwidth: float
    real_peak: float
    real_bandwidth: float

    @property
    def ridge(self) -> float:
        """Operations per byte where both roofs meet."""
        return self.peak / self.bandwidth


@dataclass(frozen=True)
class Dot:
    """Work of `intensity` operations per byte that runs at `rate` operations per second. `share`: of its step's time,
    0 to 1. `colour`: an index into the legend."""

    label: str
    intensity: float
    rate: float
    share: float
    colour: int
    tip: str = ""


def roofline_svg(title: str, roofs: Sequence[Roof], dots: Sequence[Dot], legend: Sequence[str]) -> str:
    """Axes are logarithmic; the same arguments give the same text.

    On one roof, dots are kinds of work and `legend` has one text for each colour. With several roofs, dot i belongs to
    the roof of its colour and its label is the phase.
    """
    several = len(roofs) > 1
    plane = _plane(roofs, dots)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" font-size="12" '
        f'font-family="system-ui, sans-serif"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        rect(0, 0, WIDTH, HEIGHT, 'fill="white"'),
        text(plane.left, 20, title, "start", 'class="title"'),
        *_grid(plane),
    ]
    parts += _several_roofs(plane, roofs) if several else _one_roof(plane, roofs[0])
    parts += [_drop(plane, roofs[dot.colour if several else 0], dot) for dot in dots]
    parts += [_dot(plane, dot) for dot in sorted(dots, key=lambda one: -one.share)]
    parts += _columns(plane, dots) if several else _labels(plane, dots)
    parts += [*_legend(plane, () if several else legend), "</svg>"]
    return "\n".join(parts) + "\n"


# --- plane ------------------------------------------------------------------------------------------------------------


def _plane(roofs: Sequence[Roof], dots: Sequence[Dot]) -> Plane:
    intensities = [dot.intensity for dot in dots] + [roof.ridge for roof in roofs]
    low = 10.0 ** floor(log10(max(LEAST_INTENSITY, min(intensities) / 2)))
    top = 10.0 ** ceil(log10(min(MOST_INTENSITY, max(intensities) * 4)))
    rates = [dot.rate for dot in dots] + [roof.peak for roof in roofs]
    x = LogAxis("arithmetic intensity, operations per byte", low, top)
    y = LogAxis("performance, 10¹² operations/s", 10.0 ** floor(log10(min(rates) / 1e12)), _round_up(max(rates) / 1e12))
    right = 40 + LETTER * max(len(roof.name) for roof in roofs) if len(roofs) > 1 else 24
    return Plane(x, y, right=right, width=WIDTH, height=HEIGHT, left=64, top=58, bottom=48)


def _round_up(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (2, 5, 10, 20) if step * power >= value * 1.3)


def _grid(plane: Plane) -> Iterator[str]:
    end, bottom = plane.width - plane.right, plane.height - plane.bottom
    for value in plane.x.ticks():
        across = plane.across(value)
        yield line(across, plane.top, across, bottom, 'class="grid"')
        yield text(across, bottom + 17, tick_words(value), "middle", 'class="tick"')
    for value in plane.y.ticks():
        down = plane.down(value)
        yield line(plane.left, down, end, down, 'class="grid"')
        yield text(plane.left - 8, down + 4, tick_words(value), "end", 'class="tick"')
    yield text(end, plane.height - 8, plane.x.title, "end", 'class="tick"')
    yield text(8, plane.top - 12, plane.y.title, "start", 'class="tick"')


# --- roofs ------------------------------------------------------------------------------------------------------------


def _several_roofs(plane: Plane, roofs: Sequence[Roof]) -> Iterator[str]:
    """Each in a colour of its own, named in the right margin with its peak."""
    end = plane.width - plane.right
    for colour, roof in enumerate(roofs):
        style = f'class="roof" style="stroke: {_shade(colour)}"'
        yield polyline(_points(plane, roof.peak, roof.bandwidth), style)
    order = sorted(range(len(roofs)), key=lambda i: -roofs[i].peak)
    wanted = [plane.down(roofs[i].peak / 1e12) + 4 for i in order]
    for place, i in zip(spread(wanted, LINE, plane.height - plane.bottom), order, strict=True):
        yield text(end + 8, place, f"{roofs[i].name} {_peak(roofs[i])}", "start", f'class="label" fill="{_shade(i)}"')


def _peak(roof: Roof) -> str:
    return f"{tick_words(float(f'{roof.peak / 1e12:.3g}'))}"


def _one_roof(plane: Plane, roof: Roof) -> Iterator[str]:
    yield polyline(_points(plane, roof.peak, roof.bandwidth), 'class="roof"')
    end, bottom = plane.width - plane.right, plane.height - plane.bottom
    yield text(end - 4, plane.down(roof.peak / 1e12) - 6, f"{_peak(roof)} · 10¹² op/s", "end", 'class="name"')
    yield polyline(_points(plane, roof.real_peak, roof.real_bandwidth), 'class="real"')
    ridge = plane.across(roof.ridge)
    yield line(ridge, plane.down(roof.peak / 1e12), ridge, bottom, 'class="ridge"')
    yield text(ridge + 5, bottom - 8, f"ridge point {roof.ridge:.0f} op/B", "start", 'class="name"')
    yield _slope_label(plane, roof)


def _slope_label(plane: Plane, roof: Roof) -> str:
    """The bandwidth, along the sloping part of the roof."""
    (x1, y1), (x2, y2), *_ = _points(plane, roof.peak, roof.bandwidth)
    share = 0.42
    x, y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
    angle = degrees(atan2(y2 - y1, x2 - x1))
    words = text(x, y - 7, f"{roof.bandwidth / 1e9:,.0f} GB/s", "middle", 'class="name"')
    return f'<g transform="rotate({angle:.1f} {x:.1f} {y:.1f})">{words}</g>'


def _points(plane: Plane, peak: float, bandwidth: float) -> list[tuple[float, float]]:
    """Where the roof begins, bends and ends; it begins where the axes do."""
    assert isinstance(plane.x, LogAxis)
    assert isinstance(plane.y, LogAxis)
    start = max(plane.x.low, plane.y.low * 1e12 / bandwidth)
    corners = [(start, start * bandwidth), (peak / bandwidth, peak), (plane.x.top, peak)]
    return [(plane.across(x), plane.down(y / 1e12)) for x, y in corners]


# --- dots -------------------------------------------------------------------------------------------------------------


def _dot(plane: Plane, dot: Dot) -> str:
    radius = 3.5 + 7.5 * dot.share**0.5
    style = f'fill="{_shade(dot.colour)}" class="dot"'
    return circle(plane.across(dot.intensity), plane.down(dot.rate / 1e12), radius, style, dot.tip or dot.label)


def _drop(plane: Plane, roof: Roof, dot: Dot) -> str:
    """From the roof down to the dot: what real kernels leave."""
    above = min(roof.peak, dot.intensity * roof.bandwidth)
    across = plane.across(dot.intensity)
    style = f'stroke="{_shade(dot.colour)}" class="drop"'
    return line(across, plane.down(above / 1e12), across, plane.down(dot.rate / 1e12), style)


def _shade(colour: int) -> str:
    return COLOURS[colour % len(COLOURS)]


def _columns(plane: Plane, dots: Sequence[Dot]) -> Iterator[str]:
    """The name of each phase above its topmost dot."""
    for name in dict.fromkeys(dot.label for dot in dots):
        top = max((dot for dot in dots if dot.label == name), key=lambda dot: dot.rate)
        across, down = plane.across(top.intensity), plane.down(top.rate / 1e12)
        yield text(across - 10, down - 8, name, "end", 'class="label" fill="#1b2330"')


def _labels(plane: Plane, dots: Sequence[Dot]) -> Iterator[str]:
    """One for each cluster, right of its dots, or below them where the drawing ends; apart from each other."""
    clusters = sorted(_clusters(plane, dots), key=lambda members: _middle(plane, members)[1])
    wanted = [_middle(plane, members)[1] + 5 for members in clusters]
    places = spread(wanted, LINE, plane.height - plane.bottom - 4)
    for place, members in zip(places, clusters, strict=True):
        across = max(plane.across(dot.intensity) + 5 + 7.5 * dot.share**0.5 for dot in members)
        words = ", ".join(dict.fromkeys(dot.label for dot in members))
        beyond = across + 6.6 * len(words) > plane.width - plane.right
        style = f'class="label" fill="{_shade(members[0].colour)}"'
        yield text(across, place + 18 if beyond else place, words, "end" if beyond else "start", style)


def _clusters(plane: Plane, dots: Iterable[Dot]) -> list[list[Dot]]:
    found = list[list[Dot]]()
    for dot in dots:
        near = [members for members in found if members[0].colour == dot.colour and _close(plane, members[0], dot)]
        near[0].append(dot) if near else found.append([dot])
    return found


def _close(plane: Plane, one: Dot, other: Dot) -> bool:
    across = plane.across(one.intensity) - plane.across(other.intensity)
    down = plane.down(one.rate / 1e12) - plane.down(other.rate / 1e12)
    return across**2 + down**2 < NEAR**2


def _middle(plane: Plane, members: Sequence[Dot]) -> tuple[float, float]:
    places = [(plane.across(dot.intensity), plane.down(dot.rate / 1e12)) for dot in members]
    return sum(x for x, _ in places) / len(places), sum(y for _, y in places) / len(places)


def _legend(plane: Plane, legend: Sequence[str]) -> Iterator[str]:
    across = plane.left + 190
    for colour, words in enumerate(legend):
        yield circle(across, plane.top - 16, 5, f'fill="{_shade(colour)}"')
        yield text(across + 10, plane.top - 12, words, "start", 'class="name"')
        across += 28 + 6.6 * len(words)


STYLE = """
.title { font-size: 14px; font-weight: 650; fill: #1b2330 }
.grid { stroke: #e8ebf0 }
.tick { fill: #667085; font-size: 11.5px }
.name { fill: #3b4454; font-size: 11.5px }
.roof { fill: none; stroke: #1b2330; stroke-width: 2 }
.real { fill: none; stroke: #98a2b3; stroke-width: 1.2; stroke-dasharray: 5 4 }
.ridge { stroke: #98a2b3; stroke-dasharray: 2 3 }
.drop { stroke-width: 1; stroke-opacity: 0.45 }
.dot { fill-opacity: 0.85; stroke: white; stroke-width: 1.2 }
.label { font-size: 12px; font-weight: 600; paint-order: stroke; stroke: white; stroke-width: 3px }
"""
