"""The metrics of `/metrics`. Names are vLLM's with another prefix where the meaning is the same.

Metrics of steps, of gaps between tokens and of the engine are those of its last message; metrics of answers are updated
when they end. An answer that failed or was cancelled counts as far as it was computed, never as zero.

The text format is our own code, as our histograms are counts from the engine's process; client libraries want each
value.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from twostep.engine.outputs import ChoiceOutput
from twostep.engine.process.messages import Snapshot
from twostep.engine.timing.histogram import Counted, Histogram
from twostep.engine.timing.meter import KINDS, STEP_S, STEP_TOKENS
from twostep.server.observe.finished_requests import LEFT, Reply

# --- text format ------------------------------------------------------------------------------------------------------

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Family(NamedTuple):
    """One metric. `samples`: for each set of labels a value, or the counts of a histogram with these `bounds`."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    about: str
    samples: Sequence[tuple[Labels, float | Counted]]
    bounds: Sequence[float] = ()


def exposition(families: Iterable[Family], labels: Labels) -> str:
    """The text of all families; `labels` are added to every sample."""
    return "".join(f"{line}\n" for family in families for line in _lines(family, labels))


def _lines(family: Family, common: Labels) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.about)}"
    yield f"# TYPE {family.name} {family.kind}"
    for own, value in family.samples:
        labels = {**common, **own}
        if isinstance(value, Counted):
            yield from _histogram_lines(family, labels, value)
        else:
            yield f"{family.name}{_braces(labels)} {value}"


def _histogram_lines(family: Family, labels: Labels, counted: Counted) -> Iterator[str]:
    bounds = (*map(str, family.bounds), "+Inf")
    for bound, count in zip(bounds, accumulate(counted.counts), strict=True):
        yield f"{family.name}_bucket{_braces({**labels, 'le': bound})} {count}"
    yield f"{family.name}_sum{_braces(labels)} {counted.total}"
    yield f"{family.name}_count{_braces(labels)} {sum(counted.counts)}"


def _braces(labels: Labels) -> str:
    inner = ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _quoted(value: str) -> str:
    return _escaped(value).replace('"', '\\"')


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# --- metrics ----------------------------------------------------------------------------------------------------------

REQUEST_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5,
    2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Bounds of the histograms of answers' times."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

ANSWERED = ("stop", "length")
"""Finish reasons of complete answers."""
FINISH_REASONS = (*ANSWERED, "abort", "error")

_TIMES = {
    "time_to_first_token": "From a request's arrival until its first token leaves the engine; streamed or not.",
    "request_queue_time": "From a request's arrival until the first step that computes a token of it.",
    "request_prefill_time": "From the first step that computes a token of a request until its first token.",
    "request_decode_time": "From the first token of an answer until its last.",
    "request_inference_time": "From the first step that computes a token of a request until its last token.",
    "e2e_request_latency": "From a request's arrival until the last token of an answer.",
    "request_time_per_output_token": "Mean gap between the tokens of an answer with at least two.",
    "request_preempted_time": "Time that an answer spent preempted; only answers that were preempted.",
}
_SIZES = {
    "request_prompt_tokens": "Tokens in a request's prompt.",
    "request_generation_tokens": "Tokens in a complete answer.",
}


class ServerStatus(NamedTuple):
    """Values of the server itself."""

    up: bool
    """The engine accepts requests."""
    restarts: int = 0
    dropped_lines: int = 0
    """Dropped lines of the log."""


class Metrics:
    """For one event loop. `add_reply` is called by `FinishedRequests`."""

    def __init__(self) -> None:
        self._times = {name: Histogram(REQUEST_S) for name in _TIMES}
        self._sizes = {name: Histogram(TOKENS) for name in _SIZES}
        self._finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._replies: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = self._cached_tokens = self._left = 0

    # --- counting -------------------------------------------------------------------------------------------------

    def count_reply(self, path: str, status: int) -> None:
        """Counts an HTTP reply."""
        self._replies[path, status] += 1

    def add_reply(self, reply: Reply) -> None:
        """Counts a reply that has ended and has all its outputs."""
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

    # --- text -----------------------------------------------------------------------------------------------------

    def text(self, model: str, snapshot: Snapshot | None, status: ServerStatus) -> str:
        """Prometheus' text. Before the engine's first message its metrics are missing, not zero. A dead engine has no
        running or waiting sequences."""
        if snapshot is not None and not status.up:
            snapshot = replace(snapshot, running=0, waiting=0, kv_blocks_free=snapshot.kv_blocks)
        families = [*self._of_replies(), *_of_server(status), *(_of_engine(snapshot) if snapshot else ())]
        return exposition(families, {"model_name": model})

    def _of_replies(self) -> Iterator[Family]:
        for name, about in _TIMES.items():
            yield _histogram(f"{name}_seconds", about, self._times[name])
        for name, about in _SIZES.items():
            yield _histogram(name, about, self._sizes[name])
        by_reason = [({"finished_reason": reason}, count) for reason, count in self._finished.items()]
        yield _counter("request_success_total", "Answers that ended, by finish reason.", *by_reason)
        by_status = [({"path": path, "status": str(status)}, n) for (path, status), n in self._replies.items()]
        yield _counter("http_requests_total", "HTTP requests, by path and status.", *by_status)
        yield _counter("requests_rejected_total", "Requests for tokens that were refused.", *self._rejected())
        yield _counter("requests_aborted_total", "Requests whose client left.", ({}, self._left))
        yield _counter("prompt_tokens_total", "Prompt tokens of requests that ended.", ({}, self._prompt_tokens))
        about = "Prompt tokens of requests that ended whose KV was found in the prefix cache."
        yield _counter("prompt_tokens_cached_total", about, ({}, self._cached_tokens))

    def _rejected(self) -> Iterator[tuple[Labels, int]]:
        """By status: 429 queue full, 503 not ready, 413 body too long, ..."""
        refused: Counter[int] = Counter()
        for (path, status), count in self._replies.items():
            if path in TOKEN_PATHS and (status == 503 or 400 <= status < 500):
                refused[status] += count
        yield from (({"status": str(status)}, count) for status, count in sorted(refused.items()))


TOKEN_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


def _begun_times(reply: Reply, choice: ChoiceOutput) -> dict[str, float | None]:
    """Times that an incomplete answer has too, as far as it was computed."""
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


def _of_server(status: ServerStatus) -> Iterator[Family]:
    yield _gauge("engine_up", "1 while the engine's process runs and has loaded the model.", int(status.up))
    yield _counter("engine_restarts_total", "Restarts of an engine that died.", ({}, status.restarts))
    about = "Log lines dropped because nothing read them in time."
    yield _counter("log_lines_dropped_total", about, ({}, status.dropped_lines))


def _of_engine(now: Snapshot) -> Iterator[Family]:
    used = now.kv_blocks - now.kv_blocks_free
    yield _gauge("num_requests_running", "Running sequences: those with a slot.", now.running)
    yield _gauge("num_requests_waiting", "Sequences waiting for a slot or for KV blocks.", now.waiting)
    yield _gauge("kv_blocks", "KV blocks in all.", now.kv_blocks)
    yield _gauge("kv_blocks_used", "KV blocks allocated to sequences.", used)
    yield _gauge("kv_cache_usage_perc", "Share of KV blocks allocated to sequences, 0 to 1.", used / now.kv_blocks)
    for name, about, count in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prefix_queried_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.prefix_hit_tokens),
        ("num_preemptions", "Preemptions of running sequences.", now.preemptions),
        ("preempted_tokens", "Computed tokens lost by preemptions.", now.preempted_tokens),
        ("generation_tokens", "Generated tokens.", now.measured.generated_tokens),
        ("computed_tokens", "Tokens computed by steps, of prompts and of answers.", now.measured.computed_tokens),
        ("steps", "Steps begun.", now.steps),
    ):
        yield _counter(f"{name}_total", about, ({}, count))
    about = "Gap between two successive tokens of an answer; the first token has none."
    yield Family("twostep:inter_token_latency_seconds", "histogram", about, [({}, now.measured.itl_s)], STEP_S)
    about = "Time of the kernels per step, by kind: only decodes, only prefill chunks, both."
    yield _by_kind("step_time_seconds", about, now.measured.step_s, STEP_S)
    about = "Estimated part of the kernels' time in which their threads had no core, for example by other programs."
    yield _counter("kernel_starved_seconds_total", about, ({}, now.measured.starved_ns / 1e9))
    yield _by_kind("iteration_tokens_total", "Tokens per step, by kind.", now.measured.step_tokens, STEP_TOKENS)


def _by_kind(name: str, about: str, counted: dict[str, Counted], bounds: tuple[float, ...]) -> Family:
    return Family(f"twostep:{name}", "histogram", about, [({"kind": kind}, counted[kind]) for kind in KINDS], bounds)


def _histogram(name: str, about: str, histogram: Histogram) -> Family:
    return Family(f"twostep:{name}", "histogram", about, [({}, histogram.counted())], histogram.bounds)


def _counter(name: str, about: str, *samples: tuple[Labels, float]) -> Family:
    return Family(f"twostep:{name}", "counter", about, samples)


def _gauge(name: str, about: str, value: float) -> Family:
    return Family(f"twostep:{name}", "gauge", about, [({}, value)])
