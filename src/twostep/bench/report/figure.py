"""A figure of the report: a drawing with what it shows, or the reason why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

T = TypeVar("T")

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
