"""Cumulative distributions of the latencies of a few runs."""

from collections.abc import Iterator, Sequence

from twostep.bench.report.figure import Figure, colour, evenly, legend_html
from twostep.bench.report.result import Run
from twostep.bench.report.svg import Point, polyline
from twostep.bench.report.svg_axis import Axis, fitting_axis
from twostep.bench.report.svg_plane import Plane, staircase
from twostep.bench.report.table import load_words
from twostep.metrics.load import RequestTimes

POINTS = 400
"""At most so many of a distribution are drawn."""
WHAT = {
    "ttft": ("Time to first token (TTFT)", "Of requests, from when each was due."),
    "itl": ("Gap between tokens (ITL)", "Of all gaps between successive tokens; a long answer has many."),
    "tpot": (
        "Time per output token (TPOT)",
        "Of requests with two tokens and more: mean of the tokens after the first.",
    ),
    "e2e": ("End to end (E2E)", "Of requests, from when each was due to its last token."),
}


class Shares(Axis):
    """Per cent, with the percentile that the tables name."""

    def ticks(self) -> list[float]:
        return [0, 25, 50, 75, 90, 100]


def cdf_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """One for each latency, with a line for each run that served anything."""
    for name, (title, note) in WHAT.items():
        distributions = [_points(sorted(_values(run, name))) for run in runs]
        yield Figure(title, _drawing(title, distributions), note)


def cdf_legend(runs: Sequence[Run]) -> str:
    """For all of these figures; nothing where there is one run."""
    entries = [(load_words(run), f"c{colour(i, len(runs))}") for i, run in enumerate(runs)]
    return legend_html(entries) if len(runs) > 1 else ""


def _drawing(title: str, distributions: Sequence[Sequence[Point]]) -> str:
    values = [x for points in distributions for x, _ in points]
    if not values:
        return ""
    plane = Plane(fitting_axis("ms", values), Shares("% of values at most so long", 100, 25))
    lines = (
        polyline(
            [(plane.across(x), plane.down(y)) for x, y in staircase(points)],
            f'class="line c{colour(i, len(distributions))}"',
        )
        for i, points in enumerate(distributions)
    )
    return plane.draw(title, lines)


def _points(ordered: Sequence[float]) -> list[Point]:
    """Milliseconds, and per cent of values that are at most so long."""
    ranks = evenly(range(len(ordered)), POINTS)
    rises = [(1000 * ordered[rank], 100 * (rank + 1) / len(ordered)) for rank in ranks]
    return [(rises[0][0], 0.0), *rises] if rises else []


def _values(run: Run, name: str) -> Iterator[float]:
    """Of requests that were served, as the summary has them."""
    times = (outcome.times() for outcome in run.record.outcomes if outcome.failure is None)
    for request in times:
        yield from _of_request(request, name)


def _of_request(request: RequestTimes, name: str) -> Sequence[float]:
    if name == "itl":
        return request.itl_s
    value: float | None = getattr(request, f"{name}_s")
    return () if value is None else (value,)
