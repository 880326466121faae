"""Overhead of the front end on the first token of an idle server, and latency of `/health` during a prefill."""

import json
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from benchmarks import http_load
from benchmarks.http_client import Reply
from benchmarks.http_load import Ask, asks
from benchmarks.jobs import Job, prompt
from benchmarks.measurement import EngineError, say
from twostep.metrics.summary import Summary, summarise

WORDS = ("river", "stone", "morning", "letter", "garden", "window", "music", "winter", "people", "because", "under")
PAUSE_S = 0.05
PROBE_PAUSE_S = 0.01


@dataclass(frozen=True)
class Effort:
    singles: int
    words: int
    prefill: int
    runs: int


FULL = Effort(singles=60, words=80, prefill=4000, runs=3)
QUICK = Effort(singles=4, words=8, prefill=600, runs=1)


@dataclass(frozen=True)
class Idle:
    """Streamed chat requests of `words` words, one at a time."""

    words: int
    first_byte: Summary
    """From connecting to the first byte of the reply's body."""
    added: Summary
    """`first_byte` without connecting and without the engine time from the start of the first step to the first
    token."""
    connecting: Summary
    before_step: Summary
    """Part of `added`: from the arrival of the request to the first step. The rest is the way in and out."""


@dataclass(frozen=True)
class Health:
    """Latency of `/health`, requested 10 ms after each answer, on a new connection each time."""

    prefill: int
    """Tokens of the prompt computed meanwhile."""
    latency: Summary
    client_cores: float
    """CPU use of the client, in CPUs."""


def measure_idle(clients: Executor, port: int, effort: Effort) -> Idle:
    warm, asked = _chats(3, effort.words, "warm"), _chats(effort.singles, effort.words, "idle")
    clients.submit(http_load.closed_loop, port, warm).result()
    load = clients.submit(http_load.closed_loop, port, asked, pause_s=PAUSE_S).result()
    found = idle(effort.words, load.replies)
    say(f"front end adds {found.added.p50:.2f} ms to the first token")
    return found


def idle(words: int, replies: Sequence[Reply]) -> Idle:
    timings = [reply.timings() for reply in replies]
    connecting_s = [(reply.connected_s or reply.asked_s) - reply.asked_s for reply in replies]
    first_s = [reply.first_s - reply.asked_s for reply in replies]
    added_s = [
        first - connecting - times["prompt_ms"] / 1000
        for first, connecting, times in zip(first_s, connecting_s, timings, strict=True)
    ]
    before_s = [(times["ttft_ms"] - times["prompt_ms"]) / 1000 for times in timings]
    return Idle(words, summary_ms(first_s), summary_ms(added_s), summary_ms(connecting_s), summary_ms(before_s))


def measure_health(clients: Executor, port: int, effort: Effort) -> Health:
    """Raises `EngineError` if any answer is not 200."""
    loads = []
    for run in range(effort.runs):
        [ask] = asks([Job(prompt(effort.prefill, "health", run), 1)])
        loads.append(clients.submit(http_load.health_during, port, ask, PROBE_PAUSE_S).result())
        say(f"{len(loads[-1].replies) - 1} probes of /health in a prefill of {loads[-1].wall_s:.1f} s")
    latencies_s = [latency for load in loads for latency in _probes_s(load.replies)]
    shares = [load.cpu_s / load.wall_s for load in loads]
    return Health(effort.prefill, summary_ms(latencies_s), max(shares))


def _probes_s(replies: Sequence[Reply]) -> list[float]:
    """Latencies of all replies but the first, which belongs to the prefill."""
    for reply in replies:
        reply.body()
    return [reply.last_s - reply.asked_s for reply in replies[1:]]


def summary_ms(seconds: Iterable[float]) -> Summary:
    """Summary in milliseconds. Raises `EngineError` without values."""
    found = summarise(1000 * value for value in seconds)
    if found is None:
        raise EngineError("nothing was measured")
    return found


def _chats(count: int, words: int, kind: str) -> list[Ask]:
    return [Ask("/v1/chat/completions", json.dumps(_chat(words, f"{kind} {i}")).encode()) for i in range(count)]


def _chat(words: int, key: str) -> dict[str, object]:
    text = " ".join(random.Random(key).choices(WORDS, k=words))
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "ignore_eos": True, "stream": True}
