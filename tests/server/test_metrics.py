"""Metrics count what happened and nothing else (CASES 14, 34, 35); the ledger and the log of requests."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.bills import output, reply
from support.engines import engine, failing, mixed_requests, prompt, run, submit
from support.http_server import NAME, Host, Served

from twostep.engine.backend import Snapshot, Worker
from twostep.engine.engine import Engine
from twostep.engine.outputs import ChunkTime, DecodeTime, PreemptionTime, RequestOutput, Timeline
from twostep.engine.params import SamplingParams
from twostep.engine.process.engine_host import EngineHost
from twostep.engine.step import executor as executor_module
from twostep.engine.timing.meter import Histogram
from twostep.openai_api.errors import ApiError
from twostep.server.observe.breakdown import bill
from twostep.server.observe.exposition import Family, exposition
from twostep.server.observe.finished import LEFT, Ledger, Reply
from twostep.server.observe.log_lines import LogLines
from twostep.server.observe.metrics import HttpReplies, Metrics, dropped_lines, of_workers
from twostep.server.observe.refusals_log import RefusalsLog
from twostep.server.observe.requests_log import LONG, RequestsLog, log_entry

S = 1_000_000_000
SAMPLING = SamplingParams(max_tokens=2, temperature=0)
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "twostep.json"

SAME_AS_VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
}  # fmt: skip
"""What dashboards for vLLM ask for, without its prefix."""


class Scrape:
    """Values by name and labels, as Prometheus reads them; the model's name is checked and left out."""

    def __init__(self, text: str, model: str) -> None:
        self.kinds: dict[str, str] = {}
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            self.kinds[family.name] = family.type
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == model
                key = sample.name, frozenset(labels.items())
                assert key not in self.values, f"{key} twice"
                self.values[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[f"twostep:{name}", frozenset(labels.items())]

    def names(self) -> set[str]:
        return {name for name, _ in self.values}


def scrape(
    metrics: Metrics, snapshot: Snapshot | None = None, model: str = "small", replies: HttpReplies | None = None
) -> Scrape:
    server = [*(replies or HttpReplies()).families(), dropped_lines(0)]
    families = [*metrics.of_replies(), *of_workers([Worker("a", True, snapshot=snapshot)]), *server]
    return Scrape(exposition([(model, families)]), model)


def line(first_s: float, *token_s: float, arrival_s: float = 1.0, prefill_s: float = 0.5) -> Timeline:
    """Arrives at 1 s; the first token comes at `first_s`, the others at `token_s`."""
    at_ns = tuple(int(s * S) for s in (first_s, *token_s))
    prefill_ns, decode_ns = int(prefill_s * S), at_ns[-1] - at_ns[0]
    chunk = ChunkTime(at_ns[0] - prefill_ns, at_ns[0], 4, 1, kernel_ns=prefill_ns, alone_ns=prefill_ns)
    decode = DecodeTime(at_ns[0], at_ns[-1], len(token_s), 0, decode_ns, len(token_s), decode_ns, 0)
    decodes = (decode,) if decode_ns else ()
    return Timeline(int(arrival_s * S), chunk.start_ns, (chunk,), at_ns, (), at_ns[-1], (), decodes)


def heard(*replies: Reply) -> Scrape:
    metrics = Metrics()
    for one in replies:
        metrics.heard(one)
    return scrape(metrics)


def at(received_s: float, *outputs: RequestOutput, **changes: Any) -> Reply:
    return reply(*outputs, received_ns=int(received_s * S), submitted_ns=int(received_s * S), **changes)


# --- whole answers, by hand ---------------------------------------------------------------------------------------


def test_times_of_one_answer() -> None:
    """Received at 0.9 s, heard by the engine at 1 s, first step 1.5 s, tokens at 2, 2.1 and 2.4 s."""
    told = heard(at(0.9, output(line(2.0, 2.1, 2.4))))
    for name, seconds in {
        "time_to_first_token": 1.1,
        "request_queue_time": 0.6,
        "request_prefill_time": 0.5,
        "request_decode_time": 0.4,
        "request_inference_time": 0.9,
        "e2e_request_latency": 1.5,
        "request_time_per_output_token": 0.2,
    }.items():
        assert told(f"{name}_seconds_count") == 1, name
        assert told(f"{name}_seconds_sum") == pytest.approx(seconds), name
    assert told("request_preempted_time_seconds_count") == 0
    assert told("request_success_total", finished_reason="length") == 1
    assert (told("prompt_tokens_total"), told("request_generation_tokens_sum")) == (4, 3)


def test_one_token_has_no_tpot_and_decodes_for_no_time() -> None:
    told = heard(at(1, output(line(2.0))))
    assert told("request_time_per_output_token_seconds_count") == 0
    assert told("request_decode_time_seconds_sum") == 0
    assert told("time_to_first_token_seconds_count") == told("e2e_request_latency_seconds_count") == 1


def test_a_reply_that_is_not_streamed_has_a_ttft() -> None:
    for stream in (True, False):
        told = heard(replace(at(1, output(line(2.0, 2.5))), stream=stream))
        assert told("time_to_first_token_seconds_sum") == pytest.approx(1)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_failed_before_its_first_token_is_no_zero(reason: Any) -> None:
    nothing = Timeline(1 * S, finish_ns=2 * S)
    told = heard(at(1, output(nothing, reason=reason), status=500))
    assert told("request_success_total", finished_reason=reason) == 1
    for (name, _), value in told.values.items():
        if name.endswith("_seconds_count"):
            assert value == 0, name
    assert told("request_generation_tokens_count") == 0


def test_what_failed_later_counts_as_far_as_it_came() -> None:
    told = heard(at(1, output(line(2.0, 2.5), reason="error"), status=500))
    assert told("time_to_first_token_seconds_count") == told("request_queue_time_seconds_count") == 1
    assert told("e2e_request_latency_seconds_count") == told("request_decode_time_seconds_count") == 0


def test_a_reply_without_outputs_is_no_zero() -> None:
    told = heard(reply(status=500), reply(status=LEFT, id="cmpl-2"))
    assert told("requests_aborted_total") == 1
    assert told("request_prompt_tokens_count") == told("time_to_first_token_seconds_count") == 0


def test_choices_and_prompts_count_each() -> None:
    told = heard(at(1, output(line(2.0, 2.1), line(2.0, 2.2), cached=16), output(line(3.0), id="b")))
    assert told("time_to_first_token_seconds_count") == told("e2e_request_latency_seconds_count") == 3
    assert told("request_time_per_output_token_seconds_count") == 2
    assert (told("prompt_tokens_total"), told("prompt_tokens_cached_total")) == (8, 16)


def test_preempted_time_is_of_those_that_were() -> None:
    preempted = replace(line(2.0, 2.1), preemptions=(PreemptionTime(int(2.05 * S), 3),), finish_ns=int(2.1 * S))
    told = heard(at(1, output(preempted)), at(1, output(line(2.0)), id="b"))
    assert told("request_preempted_time_seconds_count") == 1
    assert told("request_preempted_time_seconds_sum") == pytest.approx(0.05)


@pytest.mark.parametrize(("took_s", "bucket"), [(0.0009, "0.001"), (0.001, "0.001"), (0.0011, "0.002"), (700, "+Inf")])
def test_buckets_resolve_a_millisecond(took_s: float, bucket: str) -> None:
    told = heard(at(1, output(line(1 + took_s, prefill_s=0))))
    bounds = sorted((float(dict(labels)["le"]), value) for (name, labels), value in told.values.items()
                    if name == "twostep:time_to_first_token_seconds_bucket")  # fmt: skip
    assert next(bound for bound, count in bounds if count) == float(bucket)


# --- steps and gaps, from real runs -------------------------------------------------------------------------------


def served(settings: dict[str, Any], wrap: Any = None) -> tuple[dict[str, RequestOutput], Snapshot, Engine]:
    with engine(wrap, **settings) as made:
        for asked in mixed_requests(40, seed=4):
            submit(made, asked)
        outputs = run(made)
        return outputs, EngineHost(made, None).snapshot(), made  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"chunking": "tokens=40"}, {"kv_blocks": 36}, {"overlap": False}])
def test_gaps_and_steps_of_a_run_add_up(settings: dict[str, Any]) -> None:
    """CASES 34: the first token is no gap; every other is one. What is counted live is what timelines say later."""
    outputs, snapshot, _ = served(settings)
    told = scrape(Metrics(), snapshot)
    lines = [choice.timeline for output in outputs.values() for choice in output.choices]
    gaps_ns = [later - before for line in lines for before, later in pairwise(line.token_ns)]
    assert told("inter_token_latency_seconds_count") == len(gaps_ns)
    assert told("inter_token_latency_seconds_sum") == pytest.approx(sum(gaps_ns) / 1e9)
    assert told("generation_tokens_total") == sum(len(line.token_ns) for line in lines)
    kinds = ("decode", "prefill", "mixed")
    assert sum(told("step_time_seconds_count", kind=kind) for kind in kinds) == snapshot.steps
    assert sum(told("iteration_tokens_total_sum", kind=kind) for kind in kinds) == told("computed_tokens_total")
    assert told("num_preemptions_total") == sum(len(line.preemptions) for line in lines)
    assert told("preempted_tokens_total") == sum(line.tokens_lost for line in lines)
    assert (told("num_requests_running"), told("kv_blocks_used"), told("kv_cache_usage_perc")) == (0, 0, 0)


def test_the_prefix_cache_counts_tokens() -> None:
    """CASES 14: raw counters, in tokens, which replies agree with."""
    with engine() as made:
        shared = list(range(10, 110))
        for _ in range(3):
            made.submit(shared, SAMPLING)
            run(made)
        told = scrape(Metrics(), EngineHost(made, None).snapshot())  # type: ignore[arg-type]
    assert told("prefix_cache_queries_total") == 300
    assert told("prefix_cache_hits_total") == 2 * 96


def test_the_hit_rate_does_not_decay() -> None:
    """CASES 15: a prefix that all share stays, however much else passes through a small cache."""
    shared, rates = prompt(96, seed=1), []
    with engine(kv_blocks=30, max_num_seqs=2) as made:
        for i in range(240):
            made.submit(shared + prompt(20, seed=100 + i), SAMPLING)
            if i % 40 == 39:
                run(made)
                told = scrape(Metrics(), EngineHost(made, None).snapshot())  # type: ignore[arg-type]
                rates.append((told("prefix_cache_hits_total"), told("prefix_cache_queries_total")))
    windows = [(hits - h) / (queries - q) for (h, q), (hits, queries) in pairwise(rates)]
    assert windows == [pytest.approx(96 / 116)] * 5


def test_time_without_a_core_is_part_of_the_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had got no CPU time at all; then all of it."""
    monkeypatch.setattr(executor_module, "process_time_ns", lambda: 0)
    outputs, snapshot, _ = served({"max_num_seqs": 1})
    told = scrape(Metrics(), snapshot)
    lines = [choice.timeline for output in outputs.values() for choice in output.choices]
    starved_ns = sum(item.starved_ns for line in lines for item in (*line.chunks, *line.decodes))
    assert told("kernel_starved_seconds_total") == pytest.approx(starved_ns / 1e9)
    kinds = ("decode", "prefill", "mixed")
    assert 0 < starved_ns / 1e9 < sum(told("step_time_seconds_sum", kind=kind) for kind in kinds)
    monkeypatch.setattr(executor_module, "process_time_ns", perf_counter_ns)
    _, snapshot, _ = served({})
    assert scrape(Metrics(), snapshot)("kernel_starved_seconds_total") == 0


def test_a_failed_step_is_no_step_time() -> None:
    _, snapshot, _ = served({}, failing({3: MemoryError()}))
    told = scrape(Metrics(), snapshot)
    kinds = ("decode", "prefill", "mixed")
    assert sum(told("step_time_seconds_count", kind=kind) for kind in kinds) == snapshot.steps - 1


# --- the text -----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 20)), st.lists(st.floats(0.001, 10), min_size=1, unique=True))
def test_histograms_count_as_prometheus_defines_it(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for value in values:
        histogram.add(value, times=2)
    text = exposition([("m", [Family("h", "histogram", "", [({}, histogram.counted())], histogram.bounds)])])
    [family] = text_string_to_metric_families(text)
    for sample in family.samples:
        if sample.name == "h_bucket":
            assert sample.value == 2 * sum(value <= float(sample.labels["le"]) for value in values)
    totals = {sample.name: sample.value for sample in family.samples}
    assert totals["h_count"] == 2 * len(values)
    assert totals["h_sum"] == pytest.approx(2 * sum(values))


@given(st.text())
def test_any_label_survives(name: str) -> None:
    families = [Family("a", "gauge", "with \\ and\nmore", [({"label": name}, 1)])]
    [family] = text_string_to_metric_families(exposition([("m", families)]))
    assert family.documentation == "with \\ and\nmore"
    assert family.samples[0].labels == {"model_name": "m", "label": name}


def test_names_are_those_of_vllm_where_they_mean_the_same() -> None:
    told = scrape(Metrics(), quiet())
    known = {name.removeprefix("twostep:") for name in told.names()}
    roots = {re.sub("_(bucket|count|sum)$", "", name) for name in known}
    assert roots >= SAME_AS_VLLM


def test_before_the_engine_has_spoken_its_metrics_are_missing() -> None:
    told = Scrape(exposition([("small", of_workers([Worker("a", False)]))]), "small")
    assert told("engine_up") == 0
    assert "twostep:num_requests_running" not in told.names()


def quiet() -> Snapshot:
    with engine() as made:
        return EngineHost(made, None).snapshot()  # type: ignore[arg-type]


def test_every_metric_of_the_dashboard_exists() -> None:
    metrics = Metrics()
    replies = HttpReplies()
    replies.count("/v1/completions", 429)
    metrics.heard(at(1, output(line(2.0, 2.1))))
    told = scrape(metrics, quiet(), replies=replies)
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for query in queries for name in re.findall(r"twostep:\w+", query)}
    assert len(queries) > 20
    assert used <= told.names()
    groups = [group for query in queries for group in re.findall(r"by \(([^)]*)\)", query)]
    labels = {label for group in groups for label in group.split(", ")} - {"le"}
    assert labels <= {name for _, known in told.values for name, _ in known} | {"model_name"}


def test_the_page_about_metrics_names_all_and_no_others() -> None:
    told = scrape(Metrics(), quiet())
    page = (DASHBOARD.parent.parent / "observability.md").read_text()
    families = {name if kind != "counter" else f"{name}_total" for name, kind in told.kinds.items()}
    assert set(re.findall(r"twostep:\w+", page)) == families


def test_the_dashboard_has_a_place_for_every_panel() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


# --- over HTTP ----------------------------------------------------------------------------------------------------


def metrics_of(front: Served) -> Scrape:
    answer = httpx.get(f"{front.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(answer.text, NAME)


def ask(front: Served, **body: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": "Once upon", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **body}
    return httpx.post(f"{front.url}/v1/completions", json=body, timeout=60)


def test_streamed_and_whole_replies_are_counted_alike(server_host: Host) -> None:
    with server_host.front(log="off") as front:
        server_host.snapshot()
        before = metrics_of(front)
        assert ask(front).status_code == ask(front, stream=True).status_code == 200
        told = metrics_of(front)
    assert told("time_to_first_token_seconds_count") == told("e2e_request_latency_seconds_count") == 2
    assert told("http_requests_total", path="/v1/completions", status="200") == 2
    assert told("generation_tokens_total") - before("generation_tokens_total") == 12
    assert told("inter_token_latency_seconds_count") - before("inter_token_latency_seconds_count") == 10


def test_refusals_are_rejected_not_failed(server_host: Host) -> None:
    with server_host.front(log="off") as front:
        assert ask(front, max_tokens=-1).status_code == 400
        assert ask(front, model="other").status_code == 404
        httpx.get(f"{front.url}/no/such/path")
        told = metrics_of(front)
    assert told("requests_rejected_total", status="400") == told("requests_rejected_total", status="404") == 1
    assert told("http_requests_total", path="other", status="404") == 1
    assert sum(told("request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")) == 0


def test_a_defect_is_counted_as_500(server_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with server_host.front(log="off") as front:
        with monkeypatch.context() as patch:
            patch.setattr(front.state.ledger, "get", lambda id_: 1 / 0)
            assert httpx.get(f"{front.url}/v1/requests/any").status_code == 500
        assert metrics_of(front)("http_requests_total", path="other", status="500") == 1


def test_a_client_that_left_is_counted_and_billed(server_host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    with server_host.front(log="json") as front:
        body = {"model": NAME, "prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{front.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
        told = wait_for(lambda: metrics_of(front), lambda told: told("requests_aborted_total") == 1)
        assert told("request_success_total", finished_reason="abort") == 1
        assert told("time_to_first_token_seconds_count") == 1
        assert told("e2e_request_latency_seconds_count") == 0
        [entry] = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
        assert (entry["status"], entry["finish_reasons"]) == (LEFT, ["abort"])
        bill = httpx.get(f"{front.url}/v1/requests/{entry['id']}").json()
        [choice] = bill["choices"]
        assert sum(line["ns"] for line in choice["lines"]) == choice["total"]["ns"]


def wait_for(look: Callable[[], Scrape], there: Callable[[Scrape], bool]) -> Scrape:
    for _ in range(200):
        if there(told := look()):
            return told
    raise AssertionError("it never came")


# --- the ledger ---------------------------------------------------------------------------------------------------


def test_the_ledger_keeps_so_many_and_so_long() -> None:
    now = 0
    ledger = Ledger(keep=3, keep_s=10, now_ns=lambda: now)
    for i in range(5):
        ledger.finished(reply(id=str(i), sent_ns=i * S))
    assert [ledger.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    now = int(13.5 * S)
    assert [ledger.get(str(i)) is not None for i in range(5)] == [False, False, False, False, True]
    assert len(ledger) == 1


def test_a_reply_is_told_of_once_when_all_its_outputs_are_here() -> None:
    told: list[Reply] = []
    ledger = Ledger(tell=[told.append], now_ns=lambda: 0)
    ledger.finished(reply(output(line(2.0), id="a-0"), id="a", status=LEFT, awaited=("a-1", "a-2")))
    ledger.late(output(line(2.0), id="a-1"))
    ledger.late(output(line(2.0), id="unknown"))
    assert told == []
    ledger.late(output(line(2.0), id="a-2"))
    assert [[one.id for one in entry.outputs] for entry in told] == [["a-0", "a-1", "a-2"]]
    assert ledger.get("a") == told[0]


def test_an_output_may_come_before_the_end_of_its_reply() -> None:
    told: list[Reply] = []
    ledger = Ledger(tell=[told.append], now_ns=lambda: 0)
    for i in range(300):
        ledger.late(output(line(2.0), id=f"b-{i}"))
    ledger.late(output(line(2.0), id="a-1"))
    ledger.finished(reply(id="a", status=LEFT, awaited=("a-0", "a-1")))
    assert (told, len(ledger._early)) == ([], 99)
    ledger.late(output(line(2.0), id="a-0"))
    assert [[one.id for one in entry.outputs] for entry in told] == [["a-1", "a-0"]]


def test_what_is_still_awaited_when_it_is_forgotten_is_told_of_as_it_is() -> None:
    told: list[Reply] = []
    ledger = Ledger(keep=1, tell=[told.append], now_ns=lambda: 0)
    ledger.finished(reply(id="a", awaited=("a-0",)))
    ledger.finished(reply(id="b"))
    assert [entry.id for entry in told] == ["b", "a"]
    ledger.late(output(line(2.0), id="a-0"))
    assert len(told) == 2
    assert ledger._owner == {}


# --- the log ------------------------------------------------------------------------------------------------------


def test_one_line_of_json_a_request_without_its_text() -> None:
    stream = StringIO()
    RequestsLog(LogLines(stream, as_json=True)).write(at(0.9, output(line(2.0, 2.1, 2.4), cached=2)))
    [text] = stream.getvalue().splitlines()
    entry = json.loads(text)
    assert (entry["ttft_ms"], entry["e2e_ms"], entry["completion_tokens"], entry["cached_tokens"]) == (1100, 1500, 3, 2)
    assert sum(entry["parts_ms"].values()) == pytest.approx(entry["total_ms"], abs=0.01)
    assert entry["limit"] == "queue"
    assert "text" not in text.replace("context", "")


def test_a_request_of_very_many_steps_is_logged_beside_the_event_loop() -> None:
    """Its line is there when the log is closed."""
    stream, threads = StringIO(), []

    class Lines(LogLines):
        def write(self, entry: dict[str, Any], words: str) -> None:
            threads.append(threading.current_thread())
            super().write(entry, words)

    log = RequestsLog(Lines(stream, as_json=True))
    times = [2 * S + number for number in range(LONG + 1)]
    chunks = tuple(ChunkTime(ns, ns + 1, 16, step, position=16 * step) for step, ns in enumerate(times))
    long = Timeline(1 * S, 2 * S, chunks, (times[-1] + 1,), finish_ns=times[-1] + 2)
    log.write(at(0.9, output(long)))
    log.write(at(0.9, output(line(2.0, 2.1, 2.4))))
    log.close()
    assert len(stream.getvalue().splitlines()) == 2
    assert [thread is threading.current_thread() for thread in threads].count(True) == 1


def test_the_line_is_of_the_choice_that_ended_last() -> None:
    """As the breakdown's verdict is; the others' are not made for it."""
    outputs = [output(line(2.0, 2.1, end), id=f"a-{number}") for number, end in enumerate((2.4, 2.9, 2.5))]
    several = at(0.9, *outputs)
    whole, entry = bill(several), log_entry(several)
    last = whole["choices"][1]
    assert (whole["verdict"]["prompt"], whole["verdict"]["limit"]) == (1, entry["limit"])
    assert entry["e2e_ms"] == round(last["e2e"]["ns"] / 1e6, 3)
    assert entry["parts_ms"] == {part: round(ns / 1e6, 3) for part, ns in last["total"]["parts_ns"].items()}


def test_the_line_for_people() -> None:
    stream = StringIO()
    log = RequestsLog(LogLines(stream, as_json=False))
    log.write(at(0.9, output(line(2.0, 2.1, 2.4))))
    log.write(reply(status=500))
    first, second = stream.getvalue().splitlines()
    assert first.endswith("cmpl-1: 4 (0 cached) + 3 tokens, TTFT 1100 ms, 1500 ms in all, held by queue")
    assert " 500 /v1/completions cmpl-1: 0 (0 cached) + 0 tokens, TTFT -" in second


def test_a_line_tells_when_it_ended_and_when_it_came() -> None:
    entry = log_entry(at(0.9, output(line(2.0, 2.1, 2.4))))
    assert entry["arrived"] == "2023-11-14T22:13:20.250+00:00"
    assert entry["time"] == "2023-11-14T22:13:21.750+00:00"


def test_nothing_of_a_reply_that_was_cut_is_later_than_the_whole() -> None:
    """The client left at 2.05 s, the engine heard of it after two more tokens."""
    entry = log_entry(at(1, output(line(2.0, 2.1, 2.4), reason="abort"), status=LEFT, sent_ns=int(2.05 * S)))
    assert (entry["cut_ms"], entry["e2e_ms"], entry["total_ms"]) == (1050, 1400, 1400)
    assert sum(entry["parts_ms"].values()) == pytest.approx(entry["total_ms"], abs=0.01)


def test_nothing_that_never_came_is_logged_as_zero() -> None:
    entry = log_entry(at(1, output(Timeline(1 * S, finish_ns=2 * S), reason="abort"), status=LEFT))
    assert (entry["ttft_ms"], entry["e2e_ms"]) == (None, None)
    assert entry["total_ms"] > 0


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    class Broken(StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    RequestsLog(LogLines(Broken(), as_json=True)).write(reply())


# --- the log of refusals ------------------------------------------------------------------------------------------


class Flood:
    """A log of refusals whose seconds end when the test says so."""

    def __init__(self, *, as_json: bool) -> None:
        self._stream, self.ends = StringIO(), list[Callable[[], None]]()
        lines = LogLines(self._stream, as_json=as_json)
        self.log = RefusalsLog(lines, lambda _, end: self.ends.append(end), lambda: 1_700_000_000.5)

    def refuse(self, times: int) -> None:
        for _ in range(times):
            self.log.write("/v1/completions", 429, ApiError("never told", status=429, code="queue_full", param="n"))

    def written(self) -> list[str]:
        return self._stream.getvalue().splitlines()


def test_a_refusal_is_one_line() -> None:
    people, programs = Flood(as_json=False), Flood(as_json=True)
    people.refuse(1)
    programs.refuse(1)
    moment = "2023-11-14T22:13:20.500+00:00"
    assert people.written() == [f"{moment} 429 /v1/completions: refused, code queue_full, param n"]
    assert [json.loads(line) for line in programs.written()] == [
        {"event": "refusal", "time": moment, "endpoint": "/v1/completions", "status": 429, "code": "queue_full",
         "param": "n"}
    ]  # fmt: skip


def test_a_flood_of_refusals_is_no_flood_of_lines() -> None:
    flood = Flood(as_json=False)
    flood.refuse(1000)
    assert (len(flood.written()), len(flood.ends)) == (20, 1)
    flood.ends.pop()()
    assert flood.written()[-1].endswith(" 980 more refusals within 1 s")
    flood.refuse(20)
    flood.ends.pop()()
    flood.log.end()
    assert len(flood.written()) == 41
    told = Flood(as_json=True)
    told.refuse(21)
    told.log.end()
    last = json.loads(told.written()[-1])
    assert (last["event"], last["count"]) == ("refusals_left_out", 1)


def test_refusals_are_logged_without_a_word_of_the_request(
    server_host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    with server_host.front(log="json", max_body_bytes=500) as front:
        ask(front, temperature="SECRET")
        ask(front, model="SECRET")
        ask(front, prompt="SECRET" * 100)
        httpx.get(f"{front.url}/elsewhere?SECRET")
        httpx.get(f"{front.url}/v1/requests/none")
        httpx.get(f"{front.url}/v1/completions")
    with server_host.front(log="json", loaded=False) as front:
        ask(front)
        httpx.get(f"{front.url}/ready")
    text = capfd.readouterr().err
    told = [(entry["endpoint"], entry["status"], entry["code"], entry["param"]) for entry in entries(text)]
    assert told == [
        ("/v1/completions", 400, None, "temperature"),
        ("/v1/completions", 404, "model_not_found", "model"),
        ("/v1/completions", 413, "body_too_long", None),
        ("other", 404, None, None),
        ("other", 404, "request_not_found", "id"),
        ("/v1/completions", 405, None, None),
        ("/v1/completions", 503, "loading", None),
    ]
    assert "SECRET" not in text
    assert [entry["path"] for entry in entries(text) if "path" in entry] == ["/elsewhere", "/v1/requests/none"]


def entries(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_what_the_ledger_has_is_logged_once(server_host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    """Cut by its own limit, before anything was sent."""
    with server_host.front(log="json") as front:
        assert ask(front, max_tokens=4000, timeout_s=0.2).status_code == 504
        wait_for(lambda: metrics_of(front), lambda told: told("request_success_total", finished_reason="abort") == 1)
    [entry] = entries(capfd.readouterr().err)
    assert (entry["event"], entry["status"]) == ("reply", 504)
    assert entry["cut_ms"] <= entry["total_ms"] >= (entry["e2e_ms"] or 0)
