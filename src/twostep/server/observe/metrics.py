"""What `/metrics` tells: names are vLLM's with another prefix where the meaning is the same.

Steps, gaps between tokens and the engine's totals are up to date with its last message; what belongs to whole answers
is counted when they end. An answer that failed or was left gives what it had, never a zero in its place.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from twostep.engine.backend import Snapshot, Worker
from twostep.engine.outputs import ChoiceOutput
from twostep.engine.timing.meter import KINDS, STEP_S, STEP_TOKENS, Counted, Histogram
from twostep.server.observe.exposition import Family, Labels
from twostep.server.observe.finished import LEFT, Reply

REQUEST_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5,
    2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Bounds of the times of whole answers."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

ANSWERED = ("stop", "length")
"""How answers end that came to their end."""
FINISH_REASONS = (*ANSWERED, "abort", "error")

_TIMES = {
    "time_to_first_token": "From a request's arrival to its first token leaving the engine; streamed or not.",
    "request_queue_time": "From a request's arrival to the first step that computed a token of it.",
    "request_prefill_time": "From the first step that computed a token of a request to its first token.",
    "request_decode_time": "From the first token of an answer to its last.",
    "request_inference_time": "From the first step that computed a token of a request to its last token.",
    "e2e_request_latency": "From a request's arrival to the last token of an answer.",
    "request_time_per_output_token": "Mean gap between the tokens of an answer; those of one token have none.",
    "request_preempted_time": "Time that an answer spent preempted; only those that were.",
}
_SIZES = {
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens of an answer that came to its end.",
}


class HttpReplies:
    """Counts of replies over HTTP, whatever the model."""

    def __init__(self) -> None:
        self._replies: Counter[tuple[str, int]] = Counter()

    def count(self, path: str, status: int) -> None:
        """A request over HTTP got this status."""
        self._replies[path, status] += 1

    def families(self) -> Iterator[Family]:
        by_status = [({"path": path, "status": str(status)}, n) for (path, status), n in self._replies.items()]
        yield _counter("http_requests_total", "Requests over HTTP, by path and status.", *by_status)
        yield _counter("requests_rejected_total", "Requests for tokens that were refused.", *self._rejected())

    def _rejected(self) -> Iterator[tuple[Labels, int]]:
        """By status: 429 the queue was full, 503 the server was not ready, 413 the body too long, ..."""
        refused: Counter[int] = Counter()
        for (path, status), count in self._replies.items():
            if path in TOKEN_PATHS and (status == 503 or 400 <= status < 500):
                refused[status] += count
        yield from (({"status": str(status)}, count) for status, count in sorted(refused.items()))


class Metrics:
    """For one event loop. `heard` is one of what `Ledger` tells of replies."""

    def __init__(self) -> None:
        self._times = {name: Histogram(REQUEST_S) for name in _TIMES}
        self._sizes = {name: Histogram(TOKENS) for name in _SIZES}
        self._finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._prompt_tokens = self._cached_tokens = self._left = 0

    # --- what is counted ------------------------------------------------------------------------------------------

    def heard(self, reply: Reply) -> None:
        """A reply ended, and all its outputs are here."""
        self._left += reply.status == LEFT
        for output in reply.outputs:
            self._prompt_tokens += len(output.prompt_token_ids)
            self._cached_tokens += output.cached_tokens
            self._sizes["request_prompt_tokens"].add(len(output.prompt_token_ids))
            for choice in output.choices:
                self._count(reply, choice)

    def _count(self, reply: Reply, choice: ChoiceOutput) -> None:
        self._finished[choice.finish_reason] += 1
        times = dict(_begun_times(reply, choice))
        if choice.finish_reason in ANSWERED:
            times |= _ended_times(reply, choice)
            self._sizes["request_generation_tokens"].add(len(choice.token_ids))
        for name, seconds in times.items():
            if seconds is not None:
                self._times[name].add(seconds)

    # --- what is told ---------------------------------------------------------------------------------------------

    def of_replies(self) -> Iterator[Family]:
        for name, about in _TIMES.items():
            yield _histogram(f"{name}_seconds", about, self._times[name])
        for name, about in _SIZES.items():
            yield _histogram(name, about, self._sizes[name])
        by_reason = [({"finished_reason": reason}, count) for reason, count in self._finished.items()]
        yield _counter("request_success_total", "Answers that ended, by how.", *by_reason)
        yield _counter("requests_aborted_total", "Requests whose client left.", ({}, self._left))
        yield _counter("prompt_tokens_total", "Tokens of prompts of requests that ended.", ({}, self._prompt_tokens))
        about = "Prompt tokens of requests that ended, whose KV was found in the prefix cache."
        yield _counter("prompt_tokens_cached_total", about, ({}, self._cached_tokens))


TOKEN_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


def _begun_times(reply: Reply, choice: ChoiceOutput) -> dict[str, float | None]:
    """Also of answers that did not come to their end, as far as they came."""
    line = choice.timeline
    before_s = (line.arrival_ns - reply.received_ns) / 1e9
    return {
        "time_to_first_token": None if line.ttft_s is None else before_s + line.ttft_s,
        "request_queue_time": None if line.queue_s is None else before_s + line.queue_s,
        "request_prefill_time": line.prefill_s,
        "request_preempted_time": line.preempted_s if line.preemptions else None,
    }


def _ended_times(reply: Reply, choice: ChoiceOutput) -> dict[str, float | None]:
    line = choice.timeline
    first_ns, last_ns = line.token_ns[0], line.token_ns[-1]
    return {
        "request_decode_time": (last_ns - first_ns) / 1e9,
        "request_inference_time": None if line.e2e_s is None or line.queue_s is None else line.e2e_s - line.queue_s,
        "e2e_request_latency": (last_ns - reply.received_ns) / 1e9,
        "request_time_per_output_token": line.tpot_s,
    }


def of_workers(workers: Sequence[Worker]) -> Iterator[Family]:
    """Of a backend, summed over its workers. Before their first message their metrics are missing, not zero."""
    yield _gauge("engine_up", "1 while the engine's process lives and has its model loaded.", int(_all_up(workers)))
    restarts = sum(worker.restarts for worker in workers)
    yield _counter("engine_restarts_total", "Engines started because one had died.", ({}, restarts))
    snapshots = [_now(worker.snapshot, up=worker.up) for worker in workers if worker.snapshot is not None]
    if snapshots:
        yield from _of_engine(reduce(_sum, snapshots))


def _all_up(workers: Sequence[Worker]) -> bool:
    return bool(workers) and all(worker.up for worker in workers)


def _now(snapshot: Snapshot, *, up: bool) -> Snapshot:
    """A worker that is down runs nothing."""
    return snapshot if up else replace(snapshot, running=0, waiting=0, kv_blocks_free=snapshot.kv_blocks)


def _sum(one: Any, other: Any) -> Any:
    """Of two values of the same form, field by field: snapshots, their histograms and totals."""
    match one:
        case int() | float():
            return one + other
        case Counted():
            return Counted(tuple(map(operator.add, one.counts, other.counts)), one.total + other.total)
        case dict():
            both = one.keys() & other.keys()
            return {**one, **other, **{key: _sum(one[key], other[key]) for key in both}}
    names = one.__struct_fields__ if isinstance(one, Struct) else one.__dataclass_fields__
    return type(one)(*(_sum(getattr(one, name), getattr(other, name)) for name in names))


def dropped_lines(count: int) -> Family:
    about = "Lines of the log that were dropped because nothing read them in time."
    return _counter("log_lines_dropped_total", about, ({}, count))


def _of_engine(now: Snapshot) -> Iterator[Family]:
    used = now.kv_blocks - now.kv_blocks_free
    yield _gauge("num_requests_running", "Sequences that have a seat.", now.running)
    yield _gauge("num_requests_waiting", "Sequences that wait for a seat or for KV blocks.", now.waiting)
    yield _gauge("kv_blocks", "KV blocks that there are.", now.kv_blocks)
    yield _gauge("kv_blocks_used", "KV blocks that sequences hold.", used)
    yield _gauge("kv_cache_usage_perc", "Share of KV blocks that sequences hold, 0 to 1.", used / now.kv_blocks)
    for name, about, count in (
        ("prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache.", now.prefix_queried_tokens),
        ("prefix_cache_hits", "Prompt tokens that were found there.", now.prefix_hit_tokens),
        ("num_preemptions", "Sequences that had to give up seat and blocks.", now.preemptions),
        ("preempted_tokens", "Computed tokens that were given up so.", now.preempted_tokens),
        ("generation_tokens", "Tokens that were generated.", now.measured.generated_tokens),
        ("computed_tokens", "Tokens that steps computed, of prompts and of answers.", now.measured.computed_tokens),
        ("steps", "Steps begun.", now.steps),
    ):
        yield _counter(f"{name}_total", about, ({}, count))
    about = "Gap between two successive tokens of an answer. The first token has none."
    yield Family("twostep:inter_token_latency_seconds", "histogram", about, [({}, now.measured.itl_s)], STEP_S)
    about = "Kernels' time of a step, by kind: only decodes, only prompts, both."
    yield _by_kind("step_time_seconds", about, now.measured.step_s, STEP_S)
    about = "Of the kernels' time, what they were kept from the cores, as by other programs; estimated."
    yield _counter("kernel_starved_seconds_total", about, ({}, now.measured.starved_ns / 1e9))
    yield _by_kind("iteration_tokens_total", "Tokens of a step, by kind.", now.measured.step_tokens, STEP_TOKENS)


def _by_kind(name: str, about: str, counted: dict[str, Counted], bounds: tuple[float, ...]) -> Family:
    return Family(f"twostep:{name}", "histogram", about, [({"kind": kind}, counted[kind]) for kind in KINDS], bounds)


def _histogram(name: str, about: str, histogram: Histogram) -> Family:
    return Family(f"twostep:{name}", "histogram", about, [({}, histogram.counted())], histogram.bounds)


def _counter(name: str, about: str, *samples: tuple[Labels, float]) -> Family:
    return Family(f"twostep:{name}", "counter", about, samples)


def _gauge(name: str, about: str, value: float) -> Family:
    return Family(f"twostep:{name}", "gauge", about, [({}, value)])
