"""Figures of one run over time: requests, running requests, tokens, and steps of our own engine."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from twostep.bench.client.outcome import Outcome
from twostep.bench.load.run_record import LATE_S
from twostep.bench.report.plot import (
    Axis,
    Figure,
    Plane,
    Point,
    axis,
    evenly,
    fitting_axis,
    line,
    polyline,
    rect,
    staircase,
)
from twostep.bench.report.result import EngineStep, Run
from twostep.bench.report.text_report import ms, plural

S = 1e9
"""Nanoseconds."""
ROWS = 200
"""Maximum requests drawn individually."""
COLUMNS = 480
"""About the pixel columns of a drawing; only the maximum of each column is drawn."""
WIDE = 1140.0
"""Width of a full-width drawing."""


class Rows(Axis):
    """An axis without ticks."""

    def ticks(self) -> list[float]:
        return []


def run_figures(run: Run) -> Iterator[Figure]:
    yield requests_figure(run)
    yield outstanding_figure(run)
    yield tokens_figure(run)
    if run.steps:
        yield steps_figure(run)


def requests_figure(run: Run) -> Figure:
    """A bar per request: waiting for its first token, then receiving tokens."""
    outcomes = sorted(run.record.outcomes, key=lambda outcome: outcome.due_ns)
    shown = evenly(outcomes, ROWS)
    row = max(3.0, min(14.0, 480 / len(shown)))
    plane = Plane(_time(run), Rows("requests, in order of their due time", 1, 1), width=WIDE,
                  height=row * len(shown) + 76, upright=True)  # fmt: skip
    bars = [bar for i, outcome in enumerate(shown) for bar in _bars(plane, outcome, plane.top + i * row, row)]
    note = "" if shown == outcomes else f"{len(shown)} of {len(outcomes):,} requests, evenly sampled. "
    legend = [("waiting for its first token", "wait"), ("receiving tokens", "c1"), ("failed or cut", "failed")]
    if any(outcome.sent_ns - outcome.due_ns > LATE_S * S for outcome in shown):
        legend.insert(0, ("due but not sent: the client is late", "unsent"))
    title = "Timeline of requests"
    return Figure(title, plane.draw(title, bars), note + "Hover over a bar for its figures.", legend, wide=True)


def outstanding_figure(run: Run) -> Figure:
    """Running requests, and those that wait for their first token."""
    outcomes = run.record.outcomes
    every = _running((outcome.sent_ns, outcome.ended_ns) for outcome in outcomes)
    waiting = _running((outcome.sent_ns, _first_ns(outcome)) for outcome in outcomes)
    plane = Plane(_time(run), axis("requests", max(y for _, y in every)), width=WIDE, upright=True)
    title = "Running requests"
    note = "Sent and not ended; below, those without a token yet. Growth until the end indicates overload."
    legend = [("all", "c1"), ("waiting for their first token", "wait")]
    drawn = [_area(plane, every, "c1"), _area(plane, waiting, "wait")]
    return Figure(title, plane.draw(title, drawn), note, legend, wide=True)


def tokens_figure(run: Run) -> Figure:
    """Output tokens per second in short intervals."""
    title = "Output tokens per second"
    times = Counter[int]()
    width_s = axis("", _seconds(run) / 16).step
    for outcome in run.record.outcomes:
        times.update(int(token_ns / (width_s * S)) for token_ns in outcome.token_ns)
    if not times:
        return Figure(title, "", wide=True)
    spans = range(max(times) + 2)
    points = [(min(i * width_s, _seconds(run)), times[i] / width_s) for i in spans]
    plane = Plane(_time(run), axis("tokens/s", max(y for _, y in points)), width=WIDE, upright=True)
    note = f"Of all requests, in intervals of {width_s:g} s; includes tokens of requests that failed later."
    return Figure(title, plane.draw(title, [_area(plane, points, "c1")]), note, wide=True)


def steps_figure(run: Run) -> Figure:
    """A stroke per engine step; its height is the duration."""
    shown = _longest(run.steps)
    plane = Plane(_time(run), fitting_axis("ms", [_step_ms(step) for step in shown]), width=WIDE, upright=True)
    strokes = (_stroke(plane, step) for step in shown)
    title = "Duration of engine steps"
    note = (
        ""
        if len(shown) == len(run.steps)
        else f"{plural(len(run.steps), 'step')}; of steps close together, only the longest is drawn."
    )
    legend = [("decode", "c1"), ("prefill", "wait"), ("both", "c3")]
    return Figure(title, plane.draw(title, strokes), note, legend, wide=True)


# --- requests -----------------------------------------------------------------------------------------------------


def _bars(plane: Plane, outcome: Outcome, top: float, row: float) -> Iterator[str]:
    """Due, sent, first token, last token or end."""
    due, sent, first, end = (
        plane.across(at_ns / S) for at_ns in (outcome.due_ns, outcome.sent_ns, _first_ns(outcome), _last_ns(outcome))
    )
    tip, height = _tip(outcome), row * 0.76
    if outcome.sent_ns - outcome.due_ns > LATE_S * S:
        yield rect(due, top + height / 3, sent - due, height / 3, 'class="bar unsent"', tip)
    yield rect(sent, top, max(first - sent, 0.5), height, 'class="bar wait"', tip)
    if outcome.token_ns:
        yield rect(first, top, max(end - first, 0.5), height, 'class="bar c1"', tip)
    if outcome.failure is not None:
        across, reach = plane.across(outcome.ended_ns / S), max(2.6, min(4.0, row * 0.6))
        middle = top + height / 2
        yield line(across - reach, middle - reach, across + reach, middle + reach, 'class="cross"')
        yield line(across - reach, middle + reach, across + reach, middle - reach, 'class="cross"')


def _tip(outcome: Outcome) -> str:
    times = outcome.times()
    words = [f"request {outcome.number}", f"due at {outcome.due_ns / S:.2f} s"]
    words.append(f"TTFT {ms(times.ttft_s)} ms, {plural(len(outcome.token_ns), 'token')}, E2E {ms(times.e2e_s)} ms")
    if outcome.failure is not None:
        words.append(f"{outcome.failure.kind}: {outcome.failure.detail}")
    return "; ".join(words)


def _first_ns(outcome: Outcome) -> int:
    """Time of the first token, or of the end if there was none."""
    return outcome.token_ns[0] if outcome.token_ns else outcome.ended_ns


def _last_ns(outcome: Outcome) -> int:
    return outcome.token_ns[-1] if outcome.token_ns else outcome.ended_ns


# --- over time ----------------------------------------------------------------------------------------------------


def _seconds(run: Run) -> float:
    """Duration of the run."""
    return max(outcome.ended_ns for outcome in run.record.outcomes) / S


def _time(run: Run) -> Axis:
    """A time axis that ends with the run."""
    fitting = axis("seconds since the run began", _seconds(run) / 2)
    return Axis(fitting.title, _seconds(run) or 1, fitting.step)


def _running(spans: Iterable[tuple[int, int]]) -> list[Point]:
    """Number of overlapping spans over time, thinned to the maximum per column."""
    changes = Counter[int]()
    for start_ns, end_ns in spans:
        changes[start_ns] += 1
        changes[end_ns] -= 1
    moments = sorted(changes)
    points = list(zip((at_ns / S for at_ns in moments), accumulate(changes[at] for at in moments), strict=True))
    return _thinned(points)


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= COLUMNS:
        return list(points)
    width, highest = points[-1][0] / COLUMNS, dict[int, Point]()
    for point in points:
        column = int(point[0] / width)
        highest[column] = max(highest.get(column, point), point, key=lambda found: found[1])
    return [*list(highest.values())[:-1], points[-1]]


def _area(plane: Plane, points: Sequence[Point], style: str) -> str:
    corners = [(plane.across(x), plane.down(y)) for x, y in staircase(points)]
    floor = plane.down(0)
    around = [(corners[0][0], floor), *corners, (corners[-1][0], floor)]
    return polyline(around, f'class="area {style}"') + polyline(around, f'class="line thin {style}"')


def _longest(steps: Sequence[EngineStep]) -> list[EngineStep]:
    """The longest step of each column of the drawing."""
    end_ns = max(step.end_ns for step in steps)
    found = dict[int, EngineStep]()
    for step in steps:
        column = step.start_ns * 2 * COLUMNS // max(end_ns, 1)
        found[column] = max(found.get(column, step), step, key=_step_ms)
    return list(found.values())


def _stroke(plane: Plane, step: EngineStep) -> str:
    top, floor = plane.down(_step_ms(step)), plane.height - plane.bottom
    style = f'class="bar {_kind(step)}"'
    return rect(plane.across(step.start_ns / S), top, 1.4, max(floor - top, 1), style, _step_tip(step))


def _step_ms(step: EngineStep) -> float:
    return (step.end_ns - step.start_ns) / 1e6


def _kind(step: EngineStep) -> str:
    if step.prefill_tokens and step.decode_tokens:
        return "c3"
    return "wait" if step.prefill_tokens else "c1"


def _step_tip(step: EngineStep) -> str:
    return f"{_step_ms(step):.1f} ms: {step.prefill_tokens} prefill tokens, {step.decode_tokens} decode tokens"
