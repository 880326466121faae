"""Figures that compare runs: latency, throughput and goodput over load, and latency distributions."""

from collections.abc import Iterator, Sequence

from twostep.bench.load.goodput_limits import asked, limit_words
from twostep.bench.report.plot import (
    LETTER,
    LINE,
    Axis,
    Figure,
    LogAxis,
    Plane,
    Point,
    Series,
    axis,
    colour,
    dots,
    evenly,
    fitting_axis,
    labelled_lines,
    legend_html,
    line,
    line_of,
    polyline,
    room_for,
    staircase,
    text,
)
from twostep.bench.report.result import Run
from twostep.bench.report.text_report import load_number, load_words, ms, number, waits
from twostep.metrics.load import LoadSummary, RequestTimes
from twostep.metrics.summary import Summary
from twostep.workload.schedule import Closed

PERCENTILES = (("p50", 1), ("p90", 3), ("p99", 5))
"""Percentiles that are drawn, with their colours."""
TITLES = {
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
    "tpot": "Time per output token",
    "e2e": "End to end",
}
HIGH = "p90"
"""The percentile in the throughput-latency figures."""


def load_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Figures over load, for runs in ascending order of load; none if all runs have the same load."""
    levels = [run for run in runs if run.level is not None]
    if len({run.level for run in levels}) < 2:
        return
    yield latency_figure(levels, "ttft")
    yield latency_figure(levels, "itl")
    yield rates_figure(levels)
    yield tokens_figure(levels)
    yield frontier_figure(levels, "ttft")
    yield frontier_figure(levels, "tpot")


def latency_figure(runs: Sequence[Run], name: str) -> Figure:
    """Percentiles of a latency over load, with its limit if there is one."""
    series = [Series(percentile, colour, *_points(runs, name, percentile)) for percentile, colour in PERCENTILES]
    title = f"{TITLES[name]} ({name.upper()}) against load"
    if not any(one.points for one in series):
        return Figure(title, "")
    limit = dict(asked(runs[0].limits)).get(name)
    values = [y for one in series for _, y in one.points] + ([1000 * limit] if limit else [])
    x = _load_axis(runs)
    plane = Plane(x, fitting_axis(f"{name.upper()}, ms", values), room_for(["p99"]))
    marks = [] if limit is None else _limit(plane, 1000 * limit)
    return Figure(title, plane.draw(title, [*marks, *labelled_lines(plane, series)]))


def rates_figure(runs: Sequence[Run]) -> Figure:
    """Served requests per second and goodput over load."""
    words = limit_words(runs[0].limits)
    loads = _loads(runs)
    series = [Series("served", 1, [(load, run.summary.request_rate) for load, run in loads])]
    if words:
        series.append(Series("goodput", 5, [(load, run.summary.goodput) for load, run in loads]))
    x = _load_axis(runs)
    y = axis("requests/s", max(y for one in series for _, y in one.points))
    plane = Plane(x, y, room_for(["goodput"]))
    marks = [] if isinstance(runs[0].record.mode, Closed) else _all_served_line(plane)
    title = "Requests served" + (", and goodput" if words else "")
    note = f"Goodput: requests per second with {words}." if words else ""
    return Figure(title, plane.draw(title, [*marks, *labelled_lines(plane, series)]), note)


def tokens_figure(runs: Sequence[Run]) -> Figure:
    loads = _loads(runs)
    series = [
        Series("in", 3, [(load, run.summary.input_rate) for load, run in loads]),
        Series("out", 1, [(load, run.summary.output_rate) for load, run in loads]),
    ]
    x = _load_axis(runs)
    y = fitting_axis("tokens/s", [y for one in series for _, y in one.points])
    plane = Plane(x, y, room_for(["out"]))
    title = "Tokens per second, in and out"
    return Figure(title, plane.draw(title, labelled_lines(plane, series)), "Of requests that were served.")


def frontier_figure(runs: Sequence[Run], name: str) -> Figure:
    """Latency against throughput; lower right is better."""
    served = [run for run in runs if getattr(run.summary, name) is not None]
    title = f"Throughput against {HIGH} {name.upper()}"
    if not served:
        return Figure(title, "")
    points = [(run.summary.output_rate, 1000 * _value(run.summary, name, HIGH)) for run in served]
    tips = [
        f"{load_number(run)} {load_title(run)}: {x:.1f} tokens/s, {y:.1f} ms"
        for run, (x, y) in zip(served, points, strict=True)
    ]
    x_axis = axis("output tokens/s, all requests", max(x for x, _ in points))
    plane = Plane(x_axis, fitting_axis(f"{HIGH} {name.upper()}, ms", [y for _, y in points]), room_for(["1234"]))
    series = Series("", 1, points, tips)
    labels = _free_labels(plane, [(*point, load_number(run)) for run, point in zip(served, points, strict=True)])
    note = f"Each point is a run, labelled with its {load_title(runs[0])}. Lower right is better."
    return Figure(title, plane.draw(title, [line_of(plane, series), *dots(plane, series), *labels]), note)


def load_title(run: Run) -> str:
    return "clients" if isinstance(run.record.mode, Closed) else "requests per second"


def _loads(runs: Sequence[Run]) -> list[tuple[float, Run]]:
    """Runs with their position on the load axis, in order: the requested rate, or the offered rate if it was lower in
    any run because requests waited for answers."""
    due = _uses_offered_rate(runs)
    return sorted((((run.offered if due else run.level) or 0, run) for run in runs), key=lambda pair: pair[0])


def _uses_offered_rate(runs: Sequence[Run]) -> bool:
    return any(waits(run) for run in runs) and all(run.offered is not None for run in runs)


def _load_axis(runs: Sequence[Run]) -> Axis | LogAxis:
    """Logarithmic for loads that span a wide range, as in a sweep."""
    title = (
        "offered requests per second (lower than requested, as some wait for answers)"
        if _uses_offered_rate(runs)
        else load_title(runs[0])
    )
    return fitting_axis(title, [load for load, _ in _loads(runs)])


def _points(runs: Sequence[Run], name: str, percentile: str) -> tuple[list[tuple[float, float]], list[str]]:
    """Points with a tip for each."""
    served = [(load, run) for load, run in _loads(runs) if getattr(run.summary, name) is not None]
    points = [(load, 1000 * _value(run.summary, name, percentile)) for load, run in served]
    return points, [f"{number(x)}: {name.upper()} {percentile} {ms(y / 1000)} ms" for x, y in points]


def _value(found: LoadSummary, name: str, percentile: str) -> float:
    summary: Summary = getattr(found, name)
    value: float = getattr(summary, percentile)
    return value


def _limit(plane: Plane, value: float) -> list[str]:
    down = plane.down(value)
    return [
        line(plane.left, down, plane.width - plane.right, down, 'class="limit"'),
        text(plane.left + 6, down - 5, f"limit {value:g} ms", "start", 'class="tick"'),
    ]


def _all_served_line(plane: Plane) -> list[str]:
    """The line on which all offered requests are served."""
    top = min(plane.x.top, plane.y.top)
    values = (top * 1000 ** (i / 60 - 1) for i in range(61))  # a curve if only the load axis is logarithmic
    return [
        polyline([(plane.across(value), plane.down(value)) for value in values], 'class="limit" fill="none"'),
        text(plane.across(top * 0.6) - 8, plane.down(top * 0.6), "all requests served", "end", 'class="tick"'),
    ]


def _free_labels(plane: Plane, labels: Sequence[tuple[float, float, str]]) -> Iterator[str]:
    """Labels that overlap no earlier one, starting with the highest load."""
    taken = list[tuple[float, float, float]]()
    for x, y, words in reversed(labels):
        across, down, width = plane.across(x) + 8, plane.down(y) - 7, LETTER * len(words)
        if all(
            across > end + 4 or across + width < start - 4 or abs(down - place) >= LINE for start, end, place in taken
        ):
            taken.append((across, across + width, down))
            yield text(across, down, words, "start", 'class="label c1"')


# --- distributions ---------------------------------------------------------------------------------------------------

POINTS = 400
"""Maximum points drawn per distribution."""
WHAT = {
    "ttft": ("Time to first token (TTFT)", "Per request, from when it was due."),
    "itl": ("Inter-token latency (ITL)", "Per gap between successive tokens; long answers have many."),
    "tpot": (
        "Time per output token (TPOT)",
        "Per request with at least two tokens: mean over the tokens after the first.",
    ),
    "e2e": ("End to end (E2E)", "Per request, from when it was due to its last token."),
}


class Shares(Axis):
    """Per cent, with ticks at the percentiles in the tables."""

    def ticks(self) -> list[float]:
        return [0, 25, 50, 75, 90, 100]


def cdf_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """One figure per latency, with a line for each run that served a request."""
    for name, (title, note) in WHAT.items():
        distributions = [_cumulative(sorted(_values(run, name))) for run in runs]
        yield Figure(title, _drawing(title, distributions), note)


def cdf_legend(runs: Sequence[Run]) -> str:
    """The common legend of these figures; empty for one run."""
    entries = [(load_words(run), f"c{colour(i, len(runs))}") for i, run in enumerate(runs)]
    return legend_html(entries) if len(runs) > 1 else ""


def _drawing(title: str, distributions: Sequence[Sequence[Point]]) -> str:
    values = [x for points in distributions for x, _ in points]
    if not values:
        return ""
    plane = Plane(fitting_axis("ms", values), Shares("% of values up to", 100, 25))
    lines = (
        polyline(
            [(plane.across(x), plane.down(y)) for x, y in staircase(points)],
            f'class="line c{colour(i, len(distributions))}"',
        )
        for i, points in enumerate(distributions)
    )
    return plane.draw(title, lines)


def _cumulative(ordered: Sequence[float]) -> list[Point]:
    """Milliseconds, and per cent of values up to that."""
    ranks = evenly(range(len(ordered)), POINTS)
    rises = [(1000 * ordered[rank], 100 * (rank + 1) / len(ordered)) for rank in ranks]
    return [(rises[0][0], 0.0), *rises] if rises else []


def _values(run: Run, name: str) -> Iterator[float]:
    """Values of served requests, as in the summary."""
    times = (outcome.times() for outcome in run.record.outcomes if outcome.failure is None)
    for request in times:
        yield from _of_request(request, name)


def _of_request(request: RequestTimes, name: str) -> Sequence[float]:
    if name == "itl":
        return request.itl_s
    value: float | None = getattr(request, f"{name}_s")
    return () if value is None else (value,)
