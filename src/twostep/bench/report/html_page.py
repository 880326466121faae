"""A benchmark result as one self-contained HTML page: no script, no network access, inline figures."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from twostep.bench.load.run_record import End
from twostep.bench.load.sweep import verdict_words
from twostep.bench.report.comparison_figures import cdf_figures, cdf_legend, load_figures
from twostep.bench.report.output_files import write_file
from twostep.bench.report.plot import Figure, evenly
from twostep.bench.report.result import Result, Run
from twostep.bench.report.run_figures import run_figures
from twostep.bench.report.text_report import (
    comparison,
    ended_early,
    facts,
    head,
    late_words,
    latencies,
    load_number,
    load_words,
    unit,
)

DETAILED = 6
"""Maximum number of runs shown in detail; figures over load have all runs."""
WORDS = (
    "Times count from when a request was due, even if it was sent late. Percentiles of TTFT, TPOT and E2E are over "
    "requests, those of ITL over gaps between tokens. Only completely served requests count, unless noted otherwise."
)


def write_report(result: Result, path: Path) -> None:
    """Raises `ResultError` if the file cannot be written."""
    write_file(path, report(result).encode("utf-8", "replace"))  # the text of a server may contain lone surrogates


def report(result: Result) -> str:
    """The page. The same result gives the same bytes."""
    title = _title(result.runs)
    return "\n".join([
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head><body><main>',
        f"<h1>{escape(title)}</h1>",
        *_body(result),
        f"<footer><p>{WORDS}</p><p><code>{escape(shlex.join(result.command))}</code></p></footer>",
        "</main></body></html>\n",
    ])  # fmt: skip


def _title(runs: Sequence[Run]) -> str:
    if not runs:
        return "Benchmark without runs"
    return f"{'Simulation' if runs[0].record.simulated else 'Benchmark'} of {runs[0].record.server.model}"


def _body(result: Result) -> Iterator[str]:
    runs = sorted(result.runs, key=lambda run: (run.level is None, run.level or 0))
    yield f'<p class="lead">{escape(_lead(result))}</p>'
    yield from _notes(result, runs)
    if len(runs) > 1:
        yield _heading("All runs")
        yield '<p class="lead">Latencies in ms.</p>'
        yield _table(comparison(runs))
        yield _figures(load_figures(runs))
    shown = evenly(runs, DETAILED)
    if shown:
        yield _heading("Distributions")
        yield cdf_legend(shown)
        yield _figures(cdf_figures(shown))
    for run in shown:
        yield from _run(run)
    if len(shown) < len(runs):
        yield f'<p class="note">{len(shown)} of {len(runs)} runs are shown in detail and as distributions.</p>'


def _lead(result: Result) -> str:
    client = result.client
    client_words = (
        f"twostep {client.twostep} on {client.cpu}, {client.cpus} CPUs, {client.system}, Python {client.python}"
    )
    if not result.runs:
        return client_words
    record = result.runs[0].record
    return f"{record.server.url}, {'simulated' if record.simulated else 'measured'} by {client_words}"


def _run(run: Run) -> Iterator[str]:
    yield _heading(load_words(run).capitalize())
    yield _list(head(run))
    yield _table(latencies(run), "words")
    yield _list(facts(run))
    yield _figures(run_figures(run))


def _notes(result: Result, runs: Sequence[Run]) -> Iterator[str]:
    """Notes and warnings at the top of the page."""
    if result.sweep is not None and runs:
        yield f'<p class="note">Sweep: {escape(verdict_words(result.sweep, unit(runs[0])))}.</p>'
    for run in runs:
        if words := late_words(run):
            yield _warning(f"{load_words(run).capitalize()}: {words}.")
        if run.record.end is not End.WHOLE:
            yield _warning(f"{load_words(run).capitalize()}: {ended_early(run)}.")
    failed = [(found.requests - found.served, run) for run in runs if (found := run.summary).served < found.requests]
    if failed:
        where = "; ".join(
            f"{count:,} of {run.summary.requests:,} at {load_number(run)} {unit(run)}" for count, run in failed
        )
        yield _warning(f"Requests failed: {where}.")


def _warning(words: str) -> str:
    return f'<p class="note warning">{escape(words)}</p>'


def _heading(words: str) -> str:
    return f"<h2>{escape(words)}</h2>"


def _figures(figures: Iterable[Figure]) -> str:
    return f'<div class="figures">{"".join(figure.html() for figure in figures)}</div>'


def _list(rows: Iterable[Sequence[str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(words)}</dd>' for name, words in rows)}</dl>"


def _table(rows: Sequence[Sequence[str]], style: str = "") -> str:
    header, *body = (_row(row, "td" if i else "th") for i, row in enumerate(rows))
    table = f"<thead>{header}</thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="{style}">{table}</table></div>'


def _row(cells: Iterable[str], element: str) -> str:
    return f"<tr>{''.join(f'<{element}>{escape(cell)}</{element}>' for cell in cells)}</tr>"


STYLE = """
:root {
  --paper: #ffffff; --ink: #1b2330; --muted: #667085; --grid: #e8ebf0; --axis: #98a2b3; --card: #f7f8fa;
  --edge: #e4e7ec; --warn: #fff6e5; --warn-edge: #f0b429; --bad: #d92d20; --wait: #e9a23b; --unsent: #98a2b3;
  --c0: #0e8fb3; --c1: #2563eb; --c2: #6d3be0; --c3: #b026c9; --c4: #dd2a5f; --c5: #e05a10;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181f; --ink: #e6e9ef; --muted: #98a2b3; --grid: #262c36; --axis: #5b6472; --card: #1b2029;
    --edge: #2b323d; --warn: #33270e; --warn-edge: #b7851c; --bad: #ff7a6e; --wait: #d9962f; --unsent: #5b6472;
    --c0: #3fbfe0; --c1: #6b9bff; --c2: #a483ff; --c3: #df78f2; --c4: #ff7599; --c5: #ff9355;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif;
}
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; font-weight: 650; letter-spacing: -0.01em; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; font-weight: 650; margin: 44px 0 12px; padding-top: 20px; border-top: 1px solid var(--edge); }
h3 { font-size: 15px; font-weight: 600; margin: 0; }
.lead { color: var(--muted); margin: 0 0 20px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0 0 20px; font-size: 14px; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.note { background: var(--card); border-left: 3px solid var(--c1); border-radius: 4px; padding: 10px 14px;
  margin: 12px 0; }
.warning { background: var(--warn); border-left-color: var(--warn-edge); }
.scroll { overflow-x: auto; margin: 0 0 20px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 500; border-bottom: 1px solid var(--axis); }
th, td { padding: 5px 14px 5px 0; text-align: right; white-space: nowrap; }
td { border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child, .words th:last-child, .words td:last-child { text-align: left; }
.words th:last-child, .words td:last-child { padding-left: 10px; color: var(--muted); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 28px 32px; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
figcaption p { color: var(--muted); font-size: 13px; margin: 1px 0 0; }
.nothing { color: var(--muted); background: var(--card); border-radius: 4px; padding: 28px 14px; text-align: center; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; margin-top: 4px; }
h2 + .legend { margin: -4px 0 18px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; background: var(--c); }
svg { width: 100%; height: auto; display: block; margin-top: 6px; font-family: inherit; }
svg text { font-size: 12px; fill: var(--ink); }
svg .tick { fill: var(--muted); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .name { fill: var(--muted); font-size: 12px; }
svg .label { fill: var(--c); font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px;
  stroke-linejoin: round; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--axis); }
.limit { stroke: var(--muted); stroke-dasharray: 5 4; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.thin { stroke-width: 1.2; }
.area { fill: var(--c); fill-opacity: 0.16; stroke: none; }
.dot { fill: var(--c); stroke: var(--paper); stroke-width: 1.5; }
.bar { fill: var(--c); }
.cross { stroke: var(--bad); stroke-width: 1.8; }
.failed { --c: var(--bad); }
.wait { --c: var(--wait); }
.unsent { --c: var(--unsent); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
footer { color: var(--muted); font-size: 13px; margin-top: 48px; border-top: 1px solid var(--edge); padding-top: 16px; }
code { font-family: ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace; font-size: 0.92em;
  overflow-wrap: anywhere; }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } }
"""
