"""What is measured of every server that is compared, and what one run gives."""

from dataclasses import dataclass
from typing import Literal

from benchmarks import jobs
from benchmarks.jobs import Job
from benchmarks.peers_contenders import Started
from benchmarks.process_memory import memory
from benchmarks.prompts import prompt
from benchmarks.serving_engines import ServingEngine
from benchmarks.traces import Served, gaps

Better = Literal["more", "less"]


@dataclass(frozen=True)
class Effort:
    prefill: int
    """Tokens of the long prompt, the newcomer's too."""
    decode: int
    """Tokens of the one stream, after a prompt of 128."""
    requests: int
    outstanding: int
    stream_tokens: int
    """Of each of the four streams: they have to outlast the newcomer's wait."""
    after: int
    """So many tokens have they when the newcomer comes."""
    runs: int


FULL = Effort(prefill=2048, decode=128, requests=32, outstanding=16, stream_tokens=256, after=48, runs=3)
QUICK = Effort(prefill=64, decode=8, requests=3, outstanding=2, stream_tokens=32, after=2, runs=1)


@dataclass(frozen=True)
class Row:
    """`text` may name the effort's numbers."""

    text: str
    better: Better


ROWS = {
    "prefill": Row("prefill of {prefill} tokens, tokens/s", "more"),
    "decode": Row("decode, 1 stream, tokens/s", "more"),
    "streams": Row("{requests} mixed requests, {outstanding} at a time, output tokens/s", "more"),
    "itl_p99_ms": Row("a prompt of {prefill} tokens arrives: p99 ITL of 4 streams meanwhile, ms", "less"),
    "itl_max_ms": Row("the same, longest ITL, ms", "less"),
    "ttft_ms": Row("the same, TTFT of the newcomer, ms", "less"),
    "start_s": Row("start of the process to its first answer, s", "less"),
    "memory_mb": Row("memory after all this, MB", "less"),
    "installed_mb": Row("installed, MB", "less"),
}
"""In the table's order. Installed size is no measurement of a run."""


def measure(started: Started, effort: Effort, run: int) -> dict[str, float]:
    """One run of an engine that was started for it: each row but the installed size. Raises `EngineError`."""
    engine = started.engine
    _warm_up(engine, effort)
    [long] = engine.closed([Job(prompt(effort.prefill, "long", run), 1)], 1).traces
    alone = engine.closed([Job(prompt(128, "alone", run), effort.decode)], 1)
    mixed = engine.closed(jobs.serving(run, effort.requests), effort.outstanding)
    stall = jobs.stall(run, newcomer=effort.prefill, tokens=effort.stream_tokens, after=effort.after)
    felt = gaps([engine.interrupt(stall)])
    return {
        "prefill": effort.prefill / (long.token_s[0] - long.asked_s),
        "decode": decode_rate(alone),
        "streams": mixed.output_tokens_per_s,
        "itl_p99_ms": felt.p99_ms.median,
        "itl_max_ms": felt.longest_ms.median,
        "ttft_ms": felt.ttft_ms.median,
        "start_s": started.start_s,
        "memory_mb": memory(started.pid).pss / 1e6,
    }


def _warm_up(engine: ServingEngine, effort: Effort) -> None:
    """As many short answers at a time as will be asked for, and a longer prompt: nothing is the first time later."""
    engine.closed([Job(job.prompt, 4) for job in jobs.serving(-1, effort.outstanding)], effort.outstanding)
    engine.closed([Job(prompt(effort.prefill // 2, "warm"), 4)], 1)


def decode_rate(alone: Served) -> float:
    """Tokens after the first, over the time since the first."""
    [trace] = alone.traces
    return (trace.tokens - 1) / (trace.token_s[-1] - trace.token_s[0])
