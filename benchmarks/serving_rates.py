"""Output tokens per second over HTTP, and through `LLM` in this process for the same requests."""

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks import http_load
from benchmarks.http_load import asks
from benchmarks.jobs import Job, serving
from benchmarks.measurement import EngineError, Spread, say, spread
from benchmarks.server_process import Pair, Server
from twostep.engine.params import SamplingParams
from twostep.llm import LLM

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 16, "max_num_batched_tokens": 1024, "chunking": "tokens=512", "kv_memory": "512MiB",
}  # fmt: skip
FLAGS = (
    "--max-num-seqs", "16", "--max-num-batched-tokens", "1024", "--chunking", "tokens=512", "--kv-memory", "512MiB",
)  # fmt: skip
"""The same settings for `LLM` and for the server."""


@dataclass(frozen=True)
class Effort:
    requests: int
    outstanding: int
    runs: int


FULL = Effort(requests=48, outstanding=16, runs=3)
QUICK = Effort(requests=3, outstanding=2, runs=1)


class Http(NamedTuple):
    """One run over HTTP. Shares are of the time of all CPUs."""

    tokens_per_s: float
    client: float
    front: float
    engine: float
    resident: Pair


@dataclass(frozen=True)
class Rates:
    """`requests` requests by `outstanding` clients in a closed loop. Output tokens per second."""

    requests: int
    outstanding: int
    llm: Spread
    http: Spread
    ratio: Spread
    """HTTP / `LLM`, of consecutive runs."""
    cpu_client: Spread
    """Share of the time of all CPUs used by the clients over HTTP; likewise for the next two fields."""
    cpu_front: Spread
    cpu_engine: Spread
    resident_mb: tuple[float, float]
    """Front end and engine after the last run."""


def measure(clients: Executor, path: Path, effort: Effort) -> Rates:
    """Both take turns in alternating order; each run uses a new, warmed-up engine."""
    llm, http = list[float](), list[Http]()

    def in_process(jobs: Sequence[Job]) -> None:
        llm.append(through_llm(path, jobs, effort))

    def in_another(jobs: Sequence[Job]) -> None:
        http.append(over_http(clients, path, jobs, effort))

    turns = [in_another, in_process]
    for run in range(effort.runs):
        for turn in turns:
            turn(serving(run, effort.requests))
        turns.reverse()
        say(f"{effort.requests} requests: HTTP {http[-1].tokens_per_s:.0f}, LLM {llm[-1]:.0f} output tokens/s")
    return rates(effort, llm, http)


def rates(effort: Effort, llm: Sequence[float], http: Sequence[Http]) -> Rates:
    return Rates(
        requests=effort.requests,
        outstanding=effort.outstanding,
        llm=spread(llm),
        http=spread([run.tokens_per_s for run in http]),
        ratio=spread([run.tokens_per_s / other for run, other in zip(http, llm, strict=True)]),
        cpu_client=spread([run.client for run in http]),
        cpu_front=spread([run.front for run in http]),
        cpu_engine=spread([run.engine for run in http]),
        resident_mb=(http[-1].resident.front / 1e6, http[-1].resident.engine / 1e6),
    )


def through_llm(path: Path, jobs: Sequence[Job], effort: Effort) -> float:
    """Output tokens per second."""
    with LLM(path, **SETTINGS) as llm:
        _serve(llm, _warm_up(effort), effort.outstanding)
        started = perf_counter()
        tokens = _serve(llm, jobs, effort.outstanding)
        return tokens / (perf_counter() - started)


def _serve(llm: LLM, jobs: Sequence[Job], outstanding: int) -> int:
    """Serves jobs in a closed loop. Returns the number of output tokens."""
    left = [(job.prompt, SamplingParams(temperature=0.0, max_tokens=job.tokens, ignore_eos=True)) for job in jobs]
    left.reverse()
    tokens = 0
    for _ in range(min(outstanding, len(left))):
        llm.submit(*left.pop())
    for output in llm.run():
        tokens += output.output_tokens
        if left:
            llm.submit(*left.pop())
    return tokens


def over_http(clients: Executor, path: Path, jobs: Sequence[Job], effort: Effort) -> Http:
    """Measures a new server. Raises `EngineError` unless all answers have their full length."""
    with Server(path, FLAGS) as server:
        clients.submit(http_load.closed_loop, server.port, asks(_warm_up(effort)), effort.outstanding).result()
        before = server.cpu_s()
        load = clients.submit(http_load.closed_loop, server.port, asks(jobs), effort.outstanding).result()
        after, resident = server.cpu_s(), server.resident_bytes()
    tokens = sum(reply.timings()["predicted_n"] for reply in load.replies)
    if tokens != (expected := sum(job.tokens for job in jobs)):
        raise EngineError(f"twostep serve: generated {tokens} tokens instead of {expected}")
    wall_s = max(reply.last_s for reply in load.replies) - min(reply.asked_s for reply in load.replies)
    cpus_s = load.wall_s * len(os.sched_getaffinity(0))
    front, engine = after.front - before.front, after.engine - before.engine
    return Http(tokens / wall_s, load.cpu_s / cpus_s, front / cpus_s, engine / cpus_s, resident)


def _warm_up(effort: Effort) -> list[Job]:
    """As many concurrent short answers, as a warm-up."""
    return [Job(job.prompt, 4) for job in serving(-1, effort.outstanding)]
