"""The metrics of `/metrics`. Names are vLLM's with another prefix where the meaning is the same.

Metrics of steps, of gaps between tokens and of the engine are those of its last message; metrics of answers are updated
when they end. An answer that failed or was cancelled counts as far as it was computed, never as zero.

The text format is our own code, as our histograms are counts from the engine's process; client libraries want each
value.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from twostep.engine.backend import Snapshot, Worker
from twostep.engine.outputs import ChoiceOutput
from twostep.engine.timing.meter import KINDS, STEP_S, STEP_TOKENS, Counted, Histogram
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


def exposition(models: Iterable[tuple[str, Iterable[Family]]]) -> str:
    """The text of each model's families, by name. Samples get the model's name as a label; families of several models
    are merged."""
    merged: dict[str, Family] = {}
    for model, families in models:
        for family in families:
            samples = [({"model_name": model, **labels}, value) for labels, value in family.samples]
            known = merged.get(family.name)
            merged[family.name] = family._replace(samples=[*known.samples, *samples] if known else samples)
    return "".join(f"{line}\n" for family in merged.values() for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.about)}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.samples:
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

TOKEN_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths whose refusals count as rejected requests."""

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


class HttpReplies:
    """Counts HTTP replies of all models."""

    def __init__(self) -> None:
        self._replies: Counter[tuple[str, int]] = Counter()

    def count(self, path: str, status: int) -> None:
        """Counts a reply."""
        self._replies[path, status] += 1

    def families(self) -> Iterator[Family]:
        by_status = [({"path": path, "status": str(status)}, n) for (path, status), n in self._replies.items()]
        yield _counter("http_requests_total", "HTTP requests, by path and status.", *by_status)
        yield _counter("requests_rejected_total", "Requests for tokens that were refused.", *self._rejected())

    def _rejected(self) -> Iterator[tuple[Labels, int]]:
        """By status: 429 queue full, 503 not ready, 413 body too long, ..."""
        refused: Counter[int] = Counter()
        for (path, status), count in self._replies.items():
            if path in TOKEN_PATHS and (status == 503 or 400 <= status < 500):
                refused[status] += count
        yield from (({"status": str(status)}, count) for status, count in sorted(refused.items()))


class Metrics:
    """Metrics of one model's replies. For one event loop. `add_reply` is called by `FinishedRequests`."""

    def __init__(self) -> None:
        self._times = {name: Histogram(REQUEST_S) for name in _TIMES}
        self._sizes = {name: Histogram(TOKENS) for name in _SIZES}
        self._finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._prompt_tokens = self._cached_tokens = self._left = 0

    # --- counting -------------------------------------------------------------------------------------------------

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

    def of_replies(self) -> Iterator[Family]:
        for name, about in _TIMES.items():
            yield _histogram(f"{name}_seconds", about, self._times[name])
        for name, about in _SIZES.items():
            yield _histogram(name, about, self._sizes[name])
        by_reason = [({"finished_reason": reason}, count) for reason, count in self._finished.items()]
        yield _counter("request_success_total", "Answers that ended, by finish reason.", *by_reason)
        yield _counter("requests_aborted_total", "Requests whose client left.", ({}, self._left))
        yield _counter("prompt_tokens_total", "Prompt tokens of requests that ended.", ({}, self._prompt_tokens))
        about = "Prompt tokens of requests that ended whose KV was found in the prefix cache."
        yield _counter("prompt_tokens_cached_total", about, ({}, self._cached_tokens))


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


def of_workers(workers: Sequence[Worker]) -> Iterator[Family]:
    """Metrics of a backend, summed over its workers. Before their first message they are missing, not zero."""
    yield _gauge("engine_up", "1 while the engine's process runs and has loaded the model.", int(_all_up(workers)))
    restarts = sum(worker.restarts for worker in workers)
    yield _counter("engine_restarts_total", "Restarts of an engine that died.", ({}, restarts))
    resumed = sum(worker.resumed for worker in workers)
    yield _counter("requests_resumed_total", "Requests that another engine continued.", ({}, resumed))
    snapshots = [_now(worker.snapshot, up=worker.up) for worker in workers if worker.snapshot is not None]
    if snapshots:
        yield from _of_engine(reduce(_sum, snapshots))
        yield from _of_budgets(snapshots)


def _all_up(workers: Sequence[Worker]) -> bool:
    return bool(workers) and all(worker.up for worker in workers)


def _now(snapshot: Snapshot, *, up: bool) -> Snapshot:
    """The snapshot; a worker that is down has no running or waiting sequences."""
    return snapshot if up else replace(snapshot, running=0, waiting=0, kv_blocks_free=snapshot.kv_blocks)


def _sum(one: Any, other: Any) -> Any:
    """Adds two values of the same type field by field: snapshots, their histograms and totals."""
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
    about = "Log lines dropped because nothing read them in time."
    return _counter("log_lines_dropped_total", about, ({}, count))


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


def _of_budgets(workers: Sequence[Snapshot]) -> Iterator[Family]:
    """Of budgets by time; of several workers the largest budget, and the sum of the steps."""
    kept = [now.measured.promised for now in workers]
    about = "Longest time between two tokens that steps with decodes are planned for; 0 without such a budget."
    yield _gauge("itl_budget_seconds", about, max(one.budget_ns for one in kept) / 1e9)
    about = "Least possible budget for the batch of the last step that was known to exceed it; 0 if none did."
    yield _gauge("itl_budget_least_seconds", about, max(one.least_ns for one in kept) / 1e9)
    about = "Steps with decodes under a budget by time."
    yield _counter("itl_budget_steps_total", about, ({}, sum(one.steps for one in kept)))
    about = (
        "Such steps that took longer than the budget: impossible for the decodes alone, impossible with a prompt (both "
        "known before), starved of cores, or late for another reason."
    )
    late = sum(one.late - one.late_starved for one in kept)
    reasons = {
        "decodes": sum(one.over_decodes for one in kept),
        "prompt": sum(one.over_prompts for one in kept),
        "starved": sum(one.late_starved for one in kept),
        "late": late,
    }
    samples = [({"reason": reason}, count) for reason, count in reasons.items()]
    yield _counter("itl_budget_exceeded_steps_total", about, *samples)


def _by_kind(name: str, about: str, counted: dict[str, Counted], bounds: tuple[float, ...]) -> Family:
    return Family(f"twostep:{name}", "histogram", about, [({"kind": kind}, counted[kind]) for kind in KINDS], bounds)


def _histogram(name: str, about: str, histogram: Histogram) -> Family:
    return Family(f"twostep:{name}", "histogram", about, [({}, histogram.counted())], histogram.bounds)


def _counter(name: str, about: str, *samples: tuple[Labels, float]) -> Family:
    return Family(f"twostep:{name}", "counter", about, samples)


def _gauge(name: str, about: str, value: float) -> Family:
    return Family(f"twostep:{name}", "gauge", about, [({}, value)])
