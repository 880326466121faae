"""A benchmark result as text for a terminal: each run in full, then all runs side by side."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set

from twostep.bench.client.outcome import Counting, Outcome
from twostep.bench.load.goodput_limits import asked, limit_words
from twostep.bench.load.run_record import LATE_S, End, RunRecord
from twostep.bench.load.sweep import verdict_words
from twostep.bench.report.result import Result, Run
from twostep.metrics.load import LoadSummary
from twostep.metrics.summary import Summary
from twostep.terminal import printable
from twostep.workload.schedule import Closed

BEHIND = "grew until the last arrival: the server cannot keep up, and a longer run would have higher latencies"
DUE = 0.95
"""If the offered rate is below this share of the requested rate, both are shown."""
NOTHING = "-"
"""Shown for values that were not measured, instead of zero."""
POPULATIONS = {"ttft": "requests", "itl": "gaps between tokens", "tpot": "requests", "e2e": "requests"}
"""The population of the percentiles of each latency."""
COMPARED = (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"), ("tpot", "p50"), ("e2e", "p50"))
"""Latencies in the table that compares runs."""
_UNCOUNTED = {
    Counting.SPREAD: "spread over chunks by text length",
    Counting.ASSUMED: "counted as one per chunk, as the server gave no total,",
}


def result_lines(result: Result) -> Iterator[str]:
    """The lines of the whole report."""
    for run in result.runs:
        yield from run_lines(run)
        yield ""
    if len(result.runs) > 1:
        yield "All runs; latencies in ms"
        yield from aligned(comparison(result.runs), words=frozenset())
    if result.sweep is not None and result.runs:
        yield f"sweep: {verdict_words(result.sweep, unit(result.runs[0]))}"


def run_lines(run: Run) -> Iterator[str]:
    """Server, workload and load of a run, latencies, rates, and warnings."""
    yield from aligned(head(run), words={0, 1})
    yield ""
    yield from aligned(latencies(run), words={0, 6})
    yield ""
    yield from aligned(facts(run), words={0, 1})


def comparison(runs: Sequence[Run]) -> list[list[str]]:
    """A header and one row per run; latencies in ms."""
    title = "clients" if isinstance(runs[0].record.mode, Closed) else "asked/s"
    due = any(waits(run) for run in runs)
    header = [title, *["due/s"] * due, "served", "failed", "served/s", "tokens out/s"]
    header += [f"{name.upper()} {percentile}" for name, percentile in COMPARED]
    limited = any(True for run in runs for _ in asked(run.limits))
    return [header + ["goodput/s", "of requests"] * limited, *(_comparison_row(run, limited, due) for run in runs)]


def _comparison_row(run: Run, limited: bool, due: bool) -> list[str]:
    found = run.summary
    offered = [NOTHING if run.offered is None else number(run.offered)] * due
    row = [load_number(run), *offered, str(found.served), str(found.requests - found.served)]
    row += _rates(run, found.request_rate, found.output_rate)
    row += [ms(_value(found, name, percentile)) for name, percentile in COMPARED]
    return row + [number(found.goodput), percent(found.met, found.requests)] * limited


def _value(found: LoadSummary, name: str, percentile: str) -> float | None:
    summary: Summary | None = getattr(found, name)
    return None if summary is None else getattr(summary, percentile)


# --- one run ------------------------------------------------------------------------------------------------------


def head(run: Run) -> list[list[str]]:
    """Names and values: server, workload, load, result."""
    record, found = run.record, run.summary
    rows = [_server_row(record)]
    rows.append(["workload", f"{record.workload or 'unnamed'}: {_workload_words(run)}"])
    rows.append(["load", f"{load_words(run)}{_started(record)}"])
    rows += [[note.name, note.words] for note in record.simulated.assumed] if record.simulated else []
    served = f"{found.served:,} of {plural(found.requests, 'request')} served in {number(found.duration_s)} s"
    return [*rows, ["result", served + (f"; {words}" if (words := ended_early(run)) else "")]]


def _server_row(record: RunRecord) -> list[str]:
    server = record.server
    if record.simulated:
        return ["simulated", f"{server.model} on {server.url}: nothing was measured"]
    owner = f" (of {server.owner})" if server.owner else ""
    return ["server", f"{server.url} {server.endpoint}, model {server.model}{owner}"]


def _started(record: RunRecord) -> str:
    """A simulation has no date: the same one gives the same report."""
    if record.simulated:
        return ""
    return f", started {record.started_at:%Y-%m-%d %H:%M:%S %Z}{_warmup(record.warmup)}"


def load_words(run: Run) -> str:
    mode = run.record.mode
    if isinstance(mode, Closed):
        return f"closed loop, {plural(mode.clients, 'client')}"
    if run.rate is None:
        return "open loop, arrivals as in the workload"
    return f"open loop, {run.rate:g} requests/s" + (f" requested, {run.offered:.3g} offered" if waits(run) else "")


def waits(run: Run) -> bool:
    """Whether the offered rate is below the requested one, as some requests wait for earlier answers."""
    return run.rate is not None and run.offered is not None and run.offered < DUE * run.rate


def load_number(run: Run) -> str:
    return NOTHING if run.level is None else f"{run.level:.4g}"


def unit(run: Run) -> str:
    return "clients" if isinstance(run.record.mode, Closed) else "requests/s"


def latencies(run: Run) -> list[list[str]]:
    """A table in ms of served requests, with the size of each population."""
    found = run.summary
    rows = [["ms", "mean", "p50", "p90", "p99", "max", "of"]]
    for name, population in POPULATIONS.items():
        summary: Summary | None = getattr(found, name)
        values = [summary.mean, summary.p50, summary.p90, summary.p99, summary.max] if summary else [None] * 5
        rows.append([name.upper(), *map(ms, values), f"{summary.n if summary else 0:,} {population}"])
    return rows


def facts(run: Run) -> list[list[str]]:
    """Names and values: rates, goodput, failures, warnings."""
    found = run.summary
    requests, inputs, outputs = _rates(run, found.request_rate, found.input_rate, found.output_rate)
    rows = [
        ["served", f"{requests} requests/s"],
        ["tokens in", f"{inputs} /s, {_input_words(run.record.outcomes)}"],
        ["tokens out", f"{outputs} /s; {_output_words(run.record)}"],
    ]
    rows += [[note.name, note.words] for note in run.record.simulated.happened] if run.record.simulated else []
    if words := limit_words(run.limits):
        share = f"{percent(found.met, found.requests)} of requests"
        rows.append(["goodput", f"{number(found.goodput)} requests/s, {share}, with {words}"])
    if not run.kept_up:
        rows.append(["queue", BEHIND])
    rows += [["failed", words] for words in failures(run.record.outcomes)]
    return [*rows, *([title, words] for title, words in _client_facts(run))]


def failures(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Each kind of failure with its count, most frequent first, and the message of the first."""
    failed = [outcome.failure for outcome in outcomes if outcome.failure is not None and not outcome.cut]
    examples = {failure.kind: failure.detail for failure in reversed(failed)}
    for kind, count in Counter(failure.kind for failure in failed).most_common():
        yield f"{count} {kind}" + (f", for example: {examples[kind]}" if examples[kind] else "")


def late_words(run: Run) -> str | None:
    """A warning if the client did not keep its schedule."""
    if run.kept_pace:
        return None
    return (
        f"the client was late: p99 above {1000 * LATE_S:g} ms. Latencies count from when requests were due, so they "
        "include its delays; use a lower load, or give the client its own core"
    )


def _client_facts(run: Run) -> Iterator[tuple[str, str]]:
    for title, summary in (("sent late", run.record.lateness), ("timers late", run.record.lag)):
        if summary is not None:
            yield title, f"p50 {ms(summary.p50)}, p99 {ms(summary.p99)}, max {ms(summary.max)} ms"
    if warning := late_words(run):
        yield "WARNING", warning
    for warning in count_warnings(run.record.outcomes, has_texts=run.workload.texts > 0):
        yield "WARNING", warning


def _rates(run: Run, *rates: float) -> list[str]:
    """Formatted rates; `NOTHING` if no request was served."""
    return [number(rate) if run.summary.served else NOTHING for rate in rates]


def _workload_words(run: Run) -> str:
    facts = run.workload
    shared = f" ({facts.shared_tokens:,} in shared prefixes)" if facts.shared_tokens else ""
    asked_for = plural(facts.requests, "request")
    return f"{asked_for}, {facts.input_tokens:,} tokens in{shared}, {facts.output_tokens:,} out"


def _warmup(requests: int) -> str:
    return f", after {plural(requests, 'request')} to warm up" if requests else ""


def ended_early(run: Run) -> str:
    """Why a run ended early, with the requests that were cut or not sent; empty if it did not."""
    if run.record.end is End.WHOLE:
        return ""
    return f"ended early ({run.record.end}): {run.summary.cut:,} cut while running, {run.not_sent:,} not sent"


def _input_words(outcomes: Iterable[Outcome]) -> str:
    """Who counted the input tokens, and how many were cached."""
    served = [outcome for outcome in outcomes if outcome.failure is None]
    counted = sum(outcome.input_tokens is not None for outcome in served)
    whose = (
        "counted by the server" if counted == len(served) else f"counted by the server for {counted} of {len(served)}"
    )
    whose = whose if counted else "counted by the workload"
    cached = [outcome.cached_tokens for outcome in served if outcome.cached_tokens is not None]
    return whose + (f", {sum(cached):,} of them from its prefix cache" if cached else "")


def _output_words(record: RunRecord) -> str:
    """Number of output tokens and how they were counted, which affects ITL and TPOT."""
    served = [outcome for outcome in record.outcomes if outcome.failure is None]
    tokens = sum(len(outcome.token_ns) for outcome in served)
    wanted = sum(outcome.asked_output_tokens for outcome in served)
    if not served:
        return "no complete answer"
    length = f"{tokens:,} received" + (f" of {wanted:,} requested" if tokens != wanted else "")
    if record.simulated:
        return length
    counts = Counter(outcome.counted for outcome in served)
    if counts[Counting.STATED] == len(served):
        return f"{length}, counted by the server for each chunk"
    how = [f"{_UNCOUNTED[one]} in {counts[one]} of {len(served)} replies" for one in _UNCOUNTED if counts[one]]
    return f"{length}, {', '.join(how)}"


# --- numbers and columns ------------------------------------------------------------------------------------------


def ms(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:,.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def number(value: float) -> str:
    """With three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(part: int, whole: int) -> str:
    """Per cent; less than all is never rounded up to 100%."""
    if not whole:
        return NOTHING
    return "100%" if part == whole else f"{min(100 * part / whole, 99.9):.1f}%"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def aligned(rows: Sequence[Sequence[str]], words: Set[int] = frozenset({0})) -> Iterator[str]:
    """Aligns columns, two spaces apart: `words` are left-aligned columns, all others right-aligned."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = (row[i].ljust(width) if i in words else row[i].rjust(width) for i, width in enumerate(widths))
        yield "  ".join(cells).rstrip()


LENGTH_TOLERANCE = 0.05
"""Share of all prompt tokens by which the count of the server may differ."""


def count_warnings(outcomes: Iterable[Outcome], has_texts: bool) -> Iterator[str]:
    """Warns when the server's prompt token counts disagree with the requested lengths or with each other.

    `has_texts`: some prompts are text of the workload, whose length the client does not control.
    """
    served = [outcome for outcome in outcomes if outcome.failure is None]
    counts = [(one.asked_input_tokens, one.input_tokens) for one in served if one.input_tokens is not None]
    asked, found = sum(pair[0] for pair in counts), sum(pair[1] for pair in counts)
    if not has_texts and abs(found - asked) > LENGTH_TOLERANCE * asked:
        yield f"prompt lengths differ from the workload: the server counts {found:,} tokens instead of {asked:,}"
    if odd := sum(one.input_tokens is not None and (one.cached_tokens or 0) > one.input_tokens for one in served):
        yield f"inconsistent server: it reports more cached than prompt tokens in {odd} of {len(served)} replies"
