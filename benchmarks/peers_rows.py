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
    tokens: int
    """Of each prompt and of each answer where one stream decodes, or `streams` together."""
    streams: int
    four: int
    """Tokens of each answer of the four that the newcomer meets: they have to outlast its wait."""
    after: int
    """So many tokens have they when it comes."""
    runs: int


FULL = Effort(prefill=2048, tokens=128, streams=16, four=256, after=48, runs=3)
QUICK = Effort(prefill=64, tokens=8, streams=2, four=32, after=2, runs=1)


@dataclass(frozen=True)
class Row:
    """`text` may name the effort's numbers."""

    text: str
    better: Better


ROWS = {
    "prefill": Row("prefill of {prefill} tokens, tokens/s", "more"),
    "decode": Row("decode, 1 stream, tokens/s", "more"),
    "streams": Row("{streams} streams, prompts included, output tokens/s", "more"),
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
    alone = engine.closed(_streams(effort, 1, "alone", run), 1)
    together = engine.closed(_streams(effort, effort.streams, "together", run), effort.streams)
    stall = jobs.stall(run, newcomer=effort.prefill, tokens=effort.four, after=effort.after)
    felt = gaps([engine.interrupt(stall)])
    return {
        "prefill": effort.prefill / (long.token_s[0] - long.asked_s),
        "decode": decode_rate(alone),
        "streams": together.output_tokens_per_s,
        "itl_p99_ms": felt.p99_ms.median,
        "itl_max_ms": felt.longest_ms.median,
        "ttft_ms": felt.ttft_ms.median,
        "start_s": started.start_s,
        "memory_mb": memory(started.pid).pss / 1e6,
    }


def _warm_up(engine: ServingEngine, effort: Effort) -> None:
    """As many short answers at a time as will be asked for, and a longer prompt: nothing is the first time later."""
    engine.closed([Job(prompt(32, "warm", i), 4) for i in range(effort.streams)], effort.streams)
    engine.closed([Job(prompt(effort.prefill // 4, "warm"), 4)], 1)


def _streams(effort: Effort, count: int, *key: object) -> list[Job]:
    return [Job(prompt(effort.tokens, *key, i), effort.tokens) for i in range(count)]


def decode_rate(alone: Served) -> float:
    """Tokens after the first, over the time since the first."""
    [trace] = alone.traces
    return (trace.tokens - 1) / (trace.token_s[-1] - trace.token_s[0])
