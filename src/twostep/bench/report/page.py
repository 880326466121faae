"""A result as one page of HTML that needs nothing else: no script, no network, drawings within."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from twostep.bench.load.record import End
from twostep.bench.load.sweep import verdict_words
from twostep.bench.report.cdf import cdf_figures, cdf_legend
from twostep.bench.report.figure import Figure, evenly
from twostep.bench.report.loads import load_figures
from twostep.bench.report.output import write_file
from twostep.bench.report.result import Result, Run
from twostep.bench.report.run_figures import run_figures
from twostep.bench.report.style import STYLE
from twostep.bench.report.table import (
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
"""At most so many runs are shown one by one; figures over loads have all."""
WORDS = (
    "Times count from the moment a request was due, also where it was sent late. Percentiles of TTFT, TPOT and E2E are "
    "of requests, those of ITL of gaps between tokens. Only requests that were served whole count, unless it says so."
)


def write_report(result: Result, path: Path) -> None:
    """Raises `ResultError` where it cannot be written."""
    write_file(path, report(result).encode("utf-8", "replace"))  # a server may say lone surrogates


def report(result: Result) -> str:
    """The page. Same result, same bytes."""
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
    return f"Benchmark of {runs[0].record.server.model}" if runs else "Benchmark without a run"


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
        yield f'<p class="note">{len(shown)} of {len(runs)} runs are shown one by one, and as distributions.</p>'


def _lead(result: Result) -> str:
    client = result.client
    asker = f"twostep {client.twostep} on {client.cpu}, {client.cpus} CPUs, {client.system}, Python {client.python}"
    return f"{result.runs[0].record.server.url}, asked by {asker}" if result.runs else asker


def _run(run: Run) -> Iterator[str]:
    yield _heading(load_words(run).capitalize())
    yield _list(head(run))
    yield _table(latencies(run), "words")
    yield _list(facts(run))
    yield _figures(run_figures(run))


def _notes(result: Result, runs: Sequence[Run]) -> Iterator[str]:
    """What has to be known before the rest."""
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
