"""What a person is shown of a result: the table in the terminal, the page of HTML and its drawings."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bench_runs import MS, S, outcome, queue, result, run

from twostep.bench.client.outcome import Counting, Failure, FailureKind, Outcome
from twostep.bench.load.goodput_limits import parse_limits
from twostep.bench.load.run_record import End
from twostep.bench.load.sweep import Ending, Search, Verdict
from twostep.bench.report import run_figures as report_run
from twostep.bench.report.comparison_figures import POINTS, latency_figure, rates_figure, tokens_figure
from twostep.bench.report.html_page import report, write_report
from twostep.bench.report.plot import (
    Axis,
    LogAxis,
    Plane,
    Series,
    axis,
    evenly,
    fitting_axis,
    labelled_lines,
    spread,
    staircase,
)
from twostep.bench.report.result import EngineStep, Result, Run
from twostep.bench.report.text_report import aligned, ms, number, percent, result_lines, run_lines
from twostep.errors import ResultError
from twostep.metrics.load import Limits
from twostep.metrics.summary import Summary
from twostep.workload.schedule import Closed

LIMITS = parse_limits(["ttft:200", "itl:60"])
BROKEN = Failure(FailureKind.DROPPED, "after 1 token")
HOSTILE = "</title><script>alert(1)</script>\x1b[2J\x00\ud800 & \"quoted\" 'too'"


def by_hand() -> Run:
    """Due at 0, 1, 2 and 3 s; the first three have TTFTs of 100, 200 and 300 ms and gaps of 50 and 10 ms. The third has
    one token, the fourth failed."""
    return run(
        [
            outcome(0, 0, 100 * MS, 150 * MS, 160 * MS, input_tokens=96, cached_tokens=64, asked_output_tokens=3),
            outcome(1, S, S + 200 * MS, S + 250 * MS, S + 260 * MS, counted=Counting.SPREAD),
            outcome(2, 2 * S, 2 * S + 300 * MS),
            outcome(3, 3 * S, 3 * S + 100 * MS, ended_ns=4 * S, failure=BROKEN),
        ],
        limits=LIMITS,
    )


# --- the table ----------------------------------------------------------------------------------------------------


def test_a_run_in_the_terminal() -> None:
    assert list(run_lines(by_hand())) == [
        "server    http://127.0.0.1:8000/v1 completions, model small (of twostep)",
        "workload  chat: 4 requests, 400 tokens in (64 in shared prefixes), 8 out",
        "load      open loop, 4 requests/s requested, 1 offered, started 2026-11-29 12:00:00 UTC",
        "result    3 of 4 requests served in 4 s",
        "",
        "ms     mean    p50    p90    p99    max  of",
        "TTFT  200.0  200.0  280.0  298.0  300.0  3 requests",
        "ITL    30.0   30.0   50.0   50.0   50.0  4 gaps between tokens",
        "TPOT   30.0   30.0   30.0   30.0   30.0  2 requests",
        "E2E   240.0  260.0  292.0  299.2  300.0  3 requests",
        "",
        "served      0.75 requests/s",
        "tokens in   74 /s, counted by the server for 1 of 3, 64 of them from its prefix cache",
        "tokens out  1.75 /s; 7 received, spread over chunks by text length in 1 of 3 replies",
        "goodput     0.5 requests/s, 50.0% of requests, with TTFT <= 200 ms, ITL <= 60 ms",
        "failed      1 connection dropped, for example: after 1 token",
        "sent late   p50 0.0, p99 0.0, max 0.0 ms",
    ]


def test_how_tokens_were_counted_is_told_case_by_case() -> None:
    ways = [Counting.STATED, Counting.ASSUMED, Counting.ASSUMED, Counting.SPREAD]
    lines = {way: _tokens_out(outcome(0, 0, S, counted=way)) for way in Counting}
    assert lines[Counting.STATED].endswith("1 received, counted by the server for each chunk")
    assert lines[Counting.SPREAD].endswith("1 received, spread over chunks by text length in 1 of 1 replies")
    assumed = "counted as one per chunk, as the server gave no total,"
    assert lines[Counting.ASSUMED].endswith(f"1 received, {assumed} in 1 of 1 replies")
    mixed = _tokens_out(*(outcome(i, i * S, (i + 1) * S, counted=way) for i, way in enumerate(ways)))
    assert mixed.endswith(f"spread over chunks by text length in 1 of 4 replies, {assumed} in 2 of 4 replies")


def _tokens_out(*outcomes: Outcome) -> str:
    [line] = [line for line in run_lines(run(outcomes)) if line.startswith("tokens out")]
    return line


def test_what_was_not_measured_is_a_dash_and_never_zero() -> None:
    failed = run([outcome(i, i * S, failure=BROKEN) for i in range(3)])
    lines = list(run_lines(failed))
    assert "TTFT     -    -    -    -    -  0 requests" in lines
    assert "served      - requests/s" in lines
    assert "tokens out  - /s; no complete answer" in lines
    compared = [line for line in result_lines(result(failed, failed)) if line.split()[:1] == ["4"]]
    assert [line.split() for line in compared] == [["4", "1", "0", "3", *["-"] * 8]] * 2


def test_failures_are_told_by_kind_with_what_the_first_said() -> None:
    kinds = [FailureKind.DROPPED, FailureKind.STATUS, FailureKind.STATUS, FailureKind.EMPTY]
    failed = [outcome(i, 0, failure=Failure(kind, f"n{i}" * (i < 3))) for i, kind in enumerate(kinds)]
    lines = [line[12:] for line in run_lines(run(failed)) if line.startswith("failed")]
    assert lines == ["2 HTTP status, for example: n1", "1 connection dropped, for example: n0", "1 no token"]


def test_a_client_that_was_late_is_warned_of() -> None:
    late = run([outcome(0, 0, S)], late=Summary(0.03, 0.03, 0.03, 0.03, 0.03, 1))
    assert any(
        line.startswith("WARNING") and "the client was late: p99 above 10 ms" in line for line in run_lines(late)
    )
    assert not any("WARNING" in line for line in run_lines(by_hand()))


@pytest.mark.parametrize(
    ("counts", "warned"),
    [
        ([(95, None), (105, 90)], []),
        ([(None, 700)], []),
        ([(106, None)], ["prompt lengths differ from the workload: the server counts 106 tokens instead of 100"]),
        ([(50, 0), (100, 0)], ["prompt lengths differ from the workload: the server counts 150 tokens instead of 200"]),
        (
            [(100, 101), (100, 100)],
            ["inconsistent server: it reports more cached than prompt tokens in 1 of 2 replies"],
        ),
    ],
)
def test_counts_that_cannot_be_or_are_not_those_asked_for_are_warned_of(
    counts: list[tuple[int | None, int | None]], warned: list[str]
) -> None:
    outcomes = [outcome(0, 0, S, input_tokens=found, cached_tokens=cached) for found, cached in counts]
    lines = list(run_lines(run([*outcomes, outcome(1, 0, input_tokens=5, cached_tokens=9, failure=BROKEN)])))
    assert [line.removeprefix("WARNING").strip() for line in lines if line.startswith("WARNING")] == warned


def test_lengths_of_prompts_that_are_given_as_text_are_not_the_clients() -> None:
    found = run([outcome(0, 0, S, input_tokens=300)])
    given = replace(found, workload=replace(found.workload, texts=1))
    assert any("prompt lengths differ" in line for line in run_lines(found))
    assert not any("prompt lengths differ" in line for line in run_lines(given))


def test_runs_stand_side_by_side() -> None:
    runs = [run(queue(rate), rate=rate, limits=LIMITS) for rate in (2.0, 8.0, 16.0)]
    lines = list(result_lines(result(*runs, sweep=Verdict(Search(1, 1, 16), (), Ending.FOUND, 8, 16))))
    header = next(i for i, line in enumerate(lines) if "asked/s" in line)
    assert [line.split()[0] for line in lines[header + 1 : header + 4]] == ["2", "8", "16"]
    assert len({len(line) for line in lines[header : header + 4]}) == 1
    assert lines[header - 1] == "All runs; latencies in ms"
    assert lines[-1] == "sweep: 8 requests/s is the highest load that meets the limits; 16 misses them"


def test_closed_loops_are_told_by_clients() -> None:
    lines = list(result_lines(result(*(run(queue(4), mode=Closed(n)) for n in (1, 16)))))
    assert any("closed loop, 16 clients" in line for line in lines)
    assert any(line.split()[:1] == ["clients"] for line in lines)


def test_a_run_that_ended_early_says_so() -> None:
    """Of six requests one was cut, and one not sent: neither failed."""
    whole = by_hand()
    cut = outcome(4, 3 * S, failure=Failure(FailureKind.CANCELLED, ""))
    record = replace(whole.record, end=End.INTERRUPTED, warmup=2, outcomes=(*whole.record.outcomes, cut))
    early = replace(whole, record=record, rate=None, workload=replace(whole.workload, requests=6))
    lines = list(run_lines(early))
    ended = "ended early (interrupted): 1 cut while running, 1 not sent"
    assert f"result    3 of 4 requests served in 4 s; {ended}" in lines
    assert [line for line in lines if line.startswith("failed")] == [
        "failed      1 connection dropped, for example: after 1 token"
    ]
    assert any("50.0% of requests" in line for line in lines)
    assert "1 cut while running, 1 not sent." in report(result(early))
    assert any("arrivals as in the workload" in line and "after 2 requests to warm up" in line for line in lines)


def test_a_queue_that_grew_is_told() -> None:
    assert any(line.startswith("queue") for line in run_lines(run(queue(64), rate=64)))
    assert not any(line.startswith("queue") for line in run_lines(run(queue(4), rate=4)))


def test_nothing_that_a_server_says_moves_the_cursor() -> None:
    hostile = run([outcome(0, 0, failure=Failure(FailureKind.STATUS, HOSTILE))], model=HOSTILE)
    for line in result_lines(result(hostile)):
        assert line.isprintable()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (ms(None), "-"), (ms(0.0123), "12.3"), (ms(0.99999), "1,000.0"), (ms(12.3456), "12,346"),
        (number(0.12345), "0.123"), (number(1234.5), "1,234"), (number(0), "0"),
        (percent(9999, 10_000), "99.9%"), (percent(10, 10), "100%"), (percent(0, 10), "0.0%"),
    ],
)  # fmt: skip
def test_numbers_for_people(said: str, words: str) -> None:
    assert said == words


def test_columns_are_aligned() -> None:
    assert list(aligned([["a", "b"], ["long", "123"]])) == ["a       b", "long  123"]


# --- axes and places ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9, allow_subnormal=False), max_size=9))
def test_axes_hold_their_values(values: list[float]) -> None:
    found = fitting_axis("ms", values)
    ticks = found.ticks()
    assert 2 <= len(ticks) <= 12
    assert all(before < after for before, after in pairwise(ticks))
    for value in [*values, *ticks]:
        assert -1e-9 <= found.share(value) <= 1 + 1e-9


def kept_to(rate: float) -> Run:
    """A run whose requests came as they were asked, which is at about this rate."""
    outcomes = queue(rate)
    return run(outcomes, rate=run(outcomes).offered)


def test_loads_of_a_sweep_lie_on_a_logarithmic_axis() -> None:
    near, far = ([kept_to(rate) for rate in rates] for rates in ((1.0, 8.0), (1.0, 8.0, 64.0)))
    assert "requests per second, log scale" not in report(result(*near))
    assert report(result(*far)).count("requests per second, log scale") == 4


def test_loads_whose_requests_wait_for_answers_are_drawn_at_what_was_due() -> None:
    """Asked at 2 and 64 a second, of which 2 and 8 came about: the plot ends where the load did."""
    slow, fast = run(queue(2), rate=2), run(queue(8), rate=64)
    page = report(result(slow, fast))
    assert page.count("offered requests per second (lower than requested, as some wait for answers)") == 4
    assert slow.offered is not None
    assert fast.offered is not None
    for figure in (latency_figure([fast, slow], "ttft"), rates_figure([slow, fast]), tokens_figure([slow, fast])):
        assert ">64<" not in figure.svg
    tips = re.findall(r"<title>([\d.]+): TTFT p50", latency_figure([fast, slow], "ttft").svg)
    assert tips == [number(slow.offered), number(fast.offered)]


def test_loads_that_came_as_asked_are_drawn_at_what_was_asked() -> None:
    page = report(result(kept_to(2), kept_to(8)))
    assert "offered requests per second" not in page
    assert "requests per second" in page


def test_values_far_apart_get_a_logarithmic_axis_that_says_so() -> None:
    assert fitting_axis("ms", [3, 40]) == axis("ms", 40)
    assert fitting_axis("ms", [3, 400]) == LogAxis("ms, log scale", 2, 500)
    far = fitting_axis("ms", [0, 0.001, 400])
    assert far == LogAxis("ms, log scale", 0.02, 500)
    assert far.share(0) == 0
    assert LogAxis("", 1, 10_000).ticks() == [1, 10, 100, 1000, 10_000]


@settings(deadline=None)
@given(st.lists(st.floats(0, 300), max_size=9))
def test_labels_do_not_cover_each_other(wanted: list[float]) -> None:
    places = spread(sorted(wanted), 14, 300)
    assert all(after - before >= 14 - 1e-6 for before, after in pairwise(places))
    assert all(place <= 300 for place in places)


def test_stairs_hold_each_value_until_the_next() -> None:
    assert staircase([(0, 1), (2, 3)]) == [(0, 1), (2, 1), (2, 3)]
    assert staircase([]) == []


def test_a_few_of_many_are_from_the_first_to_the_last() -> None:
    assert evenly(range(5), 5) == [0, 1, 2, 3, 4]
    assert evenly(range(101), 3) == [0, 50, 100]


def test_lines_are_drawn_where_the_values_are() -> None:
    plane = Plane(Axis("rate", 10, 5), Axis("ms", 100, 50), right=60)
    drawn = plane.draw("a < b", labelled_lines(plane, [Series("p50", 1, [(0, 0), (10, 100)]), Series("none", 2, [])]))
    root = ElementTree.fromstring(drawn)
    circles = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in root.iter("circle")]
    assert circles == [(plane.left, plane.height - plane.bottom), (plane.width - plane.right, plane.top)]
    assert {"rate", "ms", "p50", "100"} <= {one.text for one in root.iter("text")}
    assert root.attrib["aria-label"] == "a < b"


# --- the page -----------------------------------------------------------------------------------------------------


def drawings(page: str) -> Iterator[tuple[str, ElementTree.Element]]:
    """Title and drawing of each figure that has one."""
    for drawing in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(drawing)
        yield root.attrib["aria-label"], root


class Outline(HTMLParser):
    """Checks that elements are closed in order."""

    VOID = frozenset({"meta", "line", "circle", "rect", "polyline"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.sources: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.sources += [name for name, _ in attrs if name in ("src", "href", "onload", "onerror")]
        if tag not in self.VOID or (tag in ("circle", "rect")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def several() -> Result:
    runs = [run(queue(rate, fail=0.1), rate=rate, limits=LIMITS) for rate in (16.0, 2.0, 4.0, 8.0)]
    return result(*runs, sweep=Verdict(Search(1, 1, 16), (), Ending.FOUND, 8, 16))


def test_the_page_needs_nothing_else_and_is_well_formed(tmp_path: Path) -> None:
    write_report(several(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    outline = Outline(page)
    assert "script" not in outline.seen
    assert outline.sources == []
    assert "@import" not in page
    assert "url(" not in page
    assert page == report(several())


def test_the_page_has_the_figures_people_look_for() -> None:
    page = report(several())
    titles = [title for title, _ in drawings(page)]
    assert titles[:6] == [
        "Time to first token (TTFT) against load", "Inter-token latency (ITL) against load",
        "Requests served, and goodput", "Tokens per second, in and out",
        "Throughput against p90 TTFT", "Throughput against p90 TPOT",
    ]  # fmt: skip
    assert titles[6:10] == [
        "Time to first token (TTFT)", "Inter-token latency (ITL)", "Time per output token (TPOT)", "End to end (E2E)"
    ]  # fmt: skip
    assert titles[10:13] == ["Timeline of requests", "Running requests", "Output tokens per second"]
    assert len(titles) == 10 + 4 * 3
    assert re.findall("<h2>Open loop, (.*?) requests/s</h2>", page) == ["2", "4", "8", "16"]
    assert "limit 200 ms" in page
    assert "Sweep: 8 requests/s is the highest load that meets the limits" in page
    assert "http://127.0.0.1:8000/v1, measured by twostep 0.1.0 on A &lt;fast&gt; CPU &amp; more" in page


def test_latency_is_drawn_from_the_lowest_load_to_the_highest() -> None:
    root = dict(drawings(report(several())))["Time to first token (TTFT) against load"]
    lines = [one for one in root.iter("polyline") if one.attrib["class"].startswith("line")]
    assert len(lines) == 3
    for one in lines:
        across = [float(point.split(",")[0]) for point in one.attrib["points"].split()]
        assert len(across) == 4
        assert across == sorted(across)


def test_labels_of_the_frontier_do_not_cover_each_other() -> None:
    close = [run(queue(5 + i / 50, seed=7), rate=5 + i / 50) for i in range(12)]
    root = dict(drawings(report(result(*close))))["Throughput against p90 TPOT"]
    labels = [one for one in root.iter("text") if "label" in one.attrib.get("class", "")]
    places = sorted((float(one.attrib["x"]), float(one.attrib["y"]), len(one.text or "")) for one in labels)
    assert 1 < len(places) < len(close)
    assert labels[0].text == "5.22"
    for (x, y, letters), (right_x, right_y, _) in combinations(places, 2):
        assert x + 7.6 * letters < right_x or abs(y - right_y) >= 13.9


def test_a_distribution_rises_from_nothing_to_all() -> None:
    root = dict(drawings(report(result(by_hand()))))["Time to first token (TTFT)"]
    [drawn] = [one for one in root.iter("polyline") if one.attrib["class"].startswith("line")]
    points = [tuple(map(float, point.split(","))) for point in drawn.attrib["points"].split()]
    assert all(before[0] <= after[0] and before[1] >= after[1] for before, after in pairwise(points))
    plane = Plane(axis("", 300), Axis("", 100, 25))
    assert points[0] == pytest.approx((plane.across(100), plane.down(0)), abs=0.06)
    assert points[-1] == pytest.approx((plane.across(300), plane.down(100)), abs=0.06)


def test_every_request_has_its_bars_and_failures_a_cross() -> None:
    root = dict(drawings(report(result(by_hand()))))["Timeline of requests"]
    bars = [one for one in root.iter("rect") if one.attrib["class"].startswith("bar")]
    assert [one.attrib["class"].split()[1] for one in bars] == ["wait", "c1"] * 4
    assert sum(one.attrib.get("class") == "cross" for one in root.iter("line")) == 2
    [*_, tip] = [one.text for one in bars[-1]]
    assert tip == "request 3; due at 3.00 s; TTFT 100.0 ms, 1 token, E2E 100.0 ms; connection dropped: after 1 token"
    widths = [float(one.attrib["width"]) for one in bars]
    assert widths[4] / widths[0] == pytest.approx(3, abs=0.02)


def test_a_request_that_was_sent_late_shows_it() -> None:
    late = run([outcome(0, 0, S, sent_ns=S // 2)], late=Summary(0.5, 0.5, 0.5, 0.5, 0.5, 1))
    page = report(result(late))
    assert "due but not sent: the client is late" in page
    assert "bar unsent" in page
    assert "Open loop, 4 requests/s: the client was late" in page


@pytest.mark.parametrize(
    "runs",
    [
        (),
        (run([outcome(0, 0, failure=BROKEN)]),),
        (run([outcome(0, 0, failure=BROKEN)], rate=1.0), run([outcome(0, 0, failure=BROKEN)], rate=2.0)),
        (run([outcome(0, 0, S)]),),
        (run([outcome(0, 0, S)]), run([outcome(0, 0, failure=BROKEN)], rate=None)),
        (run([outcome(0, 0, 0)]),),
        (run([outcome(0, 0, failure=BROKEN, ended_ns=0)]),),
        (run([outcome(0, 0, S)], limits=LIMITS), run([outcome(0, 0, S)], rate=8.0, limits=LIMITS)),
    ],
    ids=["no run", "one failed", "all failed", "one token", "no rate", "no time", "no time and failed", "two points"],
)
def test_little_or_nothing_makes_a_page_too(runs: tuple[Run, ...]) -> None:
    page = report(result(*runs))
    Outline(page)
    assert "nan" not in page.lower().replace("finance", "")
    assert "Infinity" not in page
    list(result_lines(result(*runs)))


def test_names_that_would_break_the_page_do_not(tmp_path: Path) -> None:
    failed = outcome(0, 0, failure=Failure(FailureKind.STATUS, HOSTILE), request_id=HOSTILE)
    hostile = result(run([failed, outcome(1, 0, S)], model=HOSTILE))
    hostile = replace(hostile, command=(HOSTILE,))
    write_report(hostile, tmp_path / "report.html")
    outline = Outline((tmp_path / "report.html").read_text())
    assert "script" not in outline.seen
    assert outline.seen.count("title") == 1 + 3


def test_ten_thousand_requests_make_a_page_of_bearable_size() -> None:
    page = report(result(run(queue(50, requests=10_000, fail=0.01))))
    assert "200 of 10,000 requests, evenly sampled." in page
    assert len(page) < 400_000
    root = dict(drawings(page))["Inter-token latency (ITL)"]
    [drawn] = [one for one in root.iter("polyline") if one.attrib["class"].startswith("line")]
    assert len(drawn.attrib["points"].split()) == 2 * POINTS + 1


def test_of_many_runs_a_few_are_shown_one_by_one() -> None:
    page = report(result(*(run(queue(rate), rate=float(rate)) for rate in range(1, 11))))
    assert page.count('aria-label="Timeline of requests"') == 6
    assert "6 of 10 runs are shown in detail" in page


def test_steps_of_our_engine_are_drawn_by_kind() -> None:
    steps = (EngineStep(0, 5 * MS, 0, 3), EngineStep(5 * MS, 105 * MS, 256, 0), EngineStep(105 * MS, 225 * MS, 256, 3))
    served = [outcome(0, 0, S // 4)]
    root = dict(drawings(report(result(run(served, steps=steps)))))["Duration of engine steps"]
    bars = [one for one in root.iter("rect") if one.attrib["class"].startswith("bar")]
    assert [one.attrib["class"] for one in bars] == ["bar c1", "bar wait", "bar c3"]
    many = tuple(EngineStep(i * MS, i * MS + 1000 * (i + 1), 0, 1) for i in range(10_000))
    figure = report_run.steps_figure(run(served, steps=many))
    assert figure.svg.count("<rect") <= 2 * report_run.COLUMNS + 1
    assert figure.note.startswith("10,000 steps; of steps close together, only the longest")


def test_requests_under_way_are_counted() -> None:
    spans = [outcome(0, 0, 3 * S), outcome(1, S, 2 * S), outcome(2, S, 4 * S)]
    root = ElementTree.fromstring(report_run.outstanding_figure(run(spans)).svg)
    drawn = next(one for one in root.iter("polyline") if one.attrib["class"] == "line thin c1")
    downs = [float(point.split(",")[1]) for point in drawn.attrib["points"].split()]
    plane = Plane(axis("", 4), axis("", 3))
    assert sorted(set(downs)) == [pytest.approx(plane.down(n), abs=0.06) for n in (3, 2, 1, 0)]


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot be written: Is a directory"):
        write_report(result(), tmp_path)


def test_limits_of_another_run_are_shown_where_set() -> None:
    assert "goodput" not in report(result(run(queue(4), limits=Limits())))
