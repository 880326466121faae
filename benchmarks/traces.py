"""Arrival times of the tokens of each request, and derived figures: throughput, gaps, time to first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.measurement import EngineError, Spread, spread
from twostep.metrics.summary import percentile


@dataclass(frozen=True)
class Trace:
    """One request, in seconds of any clock. `tokens` may exceed the number of times, as servers may send several at
    once."""

    asked_s: float
    tokens: int
    token_s: Sequence[float]

    @property
    def gaps_ms(self) -> list[float]:
        return [1000 * (after - before) for before, after in pairwise(self.token_s)]

    def gaps_until_ms(self, end_s: float) -> list[float]:
        """Gaps that ended before then."""
        return [1000 * (after - before) for before, after in pairwise(self.token_s) if after < end_s]


@dataclass(frozen=True)
class Served:
    """Requests served together; the newcomer, if any, is last."""

    traces: Sequence[Trace]

    @property
    def wall_s(self) -> float:
        """From the first request to the last token."""
        return max(trace.token_s[-1] for trace in self.traces) - min(trace.asked_s for trace in self.traces)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(trace.tokens for trace in self.traces) / self.wall_s


@dataclass(frozen=True)
class Gaps:
    """Latency of streams while a further prompt is computed, and of that prompt; over several runs."""

    before_ms: Spread
    """Median gap between tokens of the streams before the newcomer arrives."""
    longest_ms: Spread
    """Over gaps that overlap the wait of the newcomer for its first token."""
    p99_ms: Spread
    ttft_ms: Spread
    """TTFT of the newcomer."""


def during_ms(stream: Trace, newcomers: Sequence[Trace]) -> list[float]:
    """Gaps of a stream that overlap the wait of a newcomer for its first token."""
    waits = [(trace.asked_s, trace.token_s[0]) for trace in newcomers]
    pairs = list(pairwise(stream.token_s))
    return [1000 * (b - a) for a, b in pairs if any(b >= asked and a <= answered for asked, answered in waits)]


def gaps(runs: Sequence[Served]) -> Gaps:
    """Raises `EngineError` if a stream ended before the first token of the newcomer, as it covers only part of the
    wait."""
    before, during = zip(*map(_stream_gaps_ms, runs), strict=True)
    newcomers = [run.traces[-1] for run in runs]
    return Gaps(
        before_ms=spread([median(values) for values in before]),
        longest_ms=spread([max(values) for values in during]),
        p99_ms=spread([percentile(values, 99) for values in during]),
        ttft_ms=spread([1000 * (trace.token_s[0] - trace.asked_s) for trace in newcomers]),
    )


def _stream_gaps_ms(run: Served) -> tuple[list[float], list[float]]:
    """Gaps that ended before the newcomer arrived, and gaps that overlap its wait."""
    *streams, newcomer = run.traces
    arrived, answered = newcomer.asked_s, newcomer.token_s[0]
    if any(stream.token_s[-1] < answered for stream in streams):
        raise EngineError("a stream ended before the first token of the newcomer; it needs more tokens")
    pairs = [pair for stream in streams for pair in pairwise(stream.token_s)]
    before = [1000 * (b - a) for a, b in pairs if b < arrived]
    during = [1000 * (b - a) for a, b in pairs if b >= arrived and a <= answered]
    return before, during
