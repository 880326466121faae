"""Elements of SVG as text. Attributes are ours and go in as they are; words may be anybody's and are escaped.

Same input, same bytes.
"""

from collections.abc import Iterable, Sequence
from html import escape

Point = tuple[float, float]


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
