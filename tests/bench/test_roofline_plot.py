"""The drawing of a roofline: roofs bend at the ridge point, dots lie where they should, labels keep apart."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from twostep.bench.report.roofline_plot import Dot, Roof, roofline_svg

ROOF = Roof("a10", 125e12, 600e9, 100e12, 480e9)
DOTS = [
    Dot("feed-forward", 300, 100e12, 0.6, 0),
    Dot("projections", 290, 99e12, 0.3, 0),
    Dot("attention", 60, 9e12, 0.1, 0),
    Dot("feed-forward", 1, 0.48e12, 0.7, 1),
    Dot("attention", 1, 0.3e12, 0.3, 1),
]


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith(f"}}{tag}")]


def points(svg: str, kind: str) -> list[tuple[float, float]]:
    [line] = [element for element in elements(svg, "polyline") if element.get("class") == kind]
    return [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]  # type: ignore[misc]


def drawn(roofs: list[Roof] | None = None, dots: list[Dot] | None = None) -> str:
    return roofline_svg("Title <&>", [ROOF] if roofs is None else roofs, DOTS if dots is None else dots, ("one", "two"))


def test_the_roof_bends_at_the_ridge_point() -> None:
    svg = drawn()
    (_, start), (bend, top), (_, flat) = points(svg, "roof")
    assert top == flat < start
    [ridge] = [line for line in elements(svg, "line") if line.get("class") == "ridge"]
    assert float(ridge.get("x1") or 0) == pytest.approx(bend, abs=0.1)


def test_dots_lie_below_the_roof_and_on_the_line_of_real_kernels() -> None:
    svg = drawn(dots=[Dot("x", 1, 0.48e12, 1, 0)])
    (x1, y1), (x2, y2), _ = points(svg, "real")
    dot = elements(svg, "circle")[0]
    x, y = float(dot.get("cx") or 0), float(dot.get("cy") or 0)
    assert y == pytest.approx(y1 + (x - x1) / (x2 - x1) * (y2 - y1), abs=0.3)


def test_close_dots_share_a_label_and_labels_keep_apart() -> None:
    labels = [text for text in elements(drawn(), "text") if text.get("class") == "label"]
    assert "feed-forward, projections" in [label.text for label in labels]
    heights = sorted(float(label.get("y") or 0) for label in labels)
    assert all(b - a >= 13.9 for a, b in pairwise(heights))


def test_several_roofs_have_colours_and_names_that_keep_apart() -> None:
    roofs = [Roof(f"device-{i}", peak, 1e12, peak, 1e12) for i, peak in enumerate([1e14, 1.01e14, 9.9e13, 2e13])]
    svg = drawn(roofs, [Dot("prefill", 50, 1e13, 0.1, i) for i in range(4)])
    strokes = {line.get("style") for line in elements(svg, "polyline")}
    assert len(strokes) == 4
    names = [text for text in elements(svg, "text") if re.match(r"device-\d \d", text.text or "")]
    heights = sorted(float(name.get("y") or 0) for name in names)
    assert len(heights) == 4
    assert all(b - a >= 13.9 for a, b in pairwise(heights))


def test_text_is_escaped_and_the_same_arguments_give_the_same_file() -> None:
    assert "Title &lt;&amp;&gt;" in drawn()
    assert drawn() == drawn()
