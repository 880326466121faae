"""The benchmark of batching: its arithmetic on made-up runs, its handling of other servers, its tables and plots."""

import json
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import batching, batching_tables, http_engine, machine, output_lengths, paging, report, results
from benchmarks import jobs as workloads
from benchmarks.batching_tables import Dot
from benchmarks.http_engine import HttpEngine
from benchmarks.jobs import Job, Stall
from benchmarks.measurement import EngineError, Spread
from benchmarks.openvino import OpenVinoServing
from benchmarks.output_lengths import capped_exponential, lengths_point
from benchmarks.paging import Steady
from benchmarks.prefix_reuse import prefix_point
from benchmarks.serving_engines import Twostep
from benchmarks.traces import Served, Trace, gaps
from twostep.model.loaded import open_model

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"
TIMES = "\N{MULTIPLICATION SIGN}"


# -------------------------------------------------------------------------------------------------------- arithmetic


def test_throughput_is_all_output_tokens_from_the_first_asked_to_the_last_token() -> None:
    served = Served([Trace(1.0, 4, [2.0, 3.0]), Trace(0.5, 2, [1.0, 2.5])])
    assert (served.wall_s, served.output_tokens_per_s) == (2.5, 2.4)


def test_gaps_that_overlap_the_wait_of_the_newcomer_count_as_its_doing() -> None:
    stream = Trace(0.0, 6, [0.25, 0.5, 0.75, 2.75, 3.25, 3.5])
    newcomer = Trace(1.0, 1, [3.0])
    found = gaps([Served([stream, newcomer])])
    assert found.before_ms.median == 250
    assert found.longest_ms.median == 2000
    assert found.p99_ms.median == pytest.approx(2000 - 0.01 * 1500)
    assert found.ttft_ms.median == 2000


def test_a_stream_that_ends_while_the_newcomer_waits_is_an_error() -> None:
    with pytest.raises(EngineError, match="ended before the first token of the newcomer"):
        gaps([Served([Trace(0.0, 2, [0.5, 1.5]), Trace(1.0, 1, [3.0])])])


def test_lengths_of_the_requests_are_the_same_in_every_run_and_their_tokens_are_not() -> None:
    first, second = workloads.serving(0), workloads.serving(1)
    assert [(len(job.prompt), job.tokens) for job in first] == [(len(job.prompt), job.tokens) for job in second]
    assert all(32 <= len(job.prompt) <= 512 and 16 <= job.tokens <= 256 for job in first)
    assert len({tuple(job.prompt) for job in (*first, *second)}) == 128


@pytest.mark.parametrize("cap", [16, 768])
def test_output_lengths_have_the_mean_and_the_cap_that_their_name_says(cap: int) -> None:
    effort = output_lengths.Effort((), requests=4000, runs=1, scale=1)
    lengths = output_lengths.draw_lengths(capped_exponential(cap), effort)
    assert lengths == output_lengths.draw_lengths(capped_exponential(cap), effort)
    assert 1 <= min(lengths) <= max(lengths) <= cap
    expected = output_lengths.MEAN * (1 - 2.718281828 ** (-cap / output_lengths.MEAN))
    assert sum(lengths) / 4000 == pytest.approx(expected, rel=0.05)


def test_ratios_are_of_runs_one_after_the_other() -> None:
    point = lengths_point("some", [2, 4, 6], [(10.0, 20.0), (40.0, 60.0), (10.0, 30.0)])
    assert (point.static.median, point.continuous.median) == (10, 30)
    assert point.ratio == Spread(2, 1.5, 3, 3)
    assert (point.mean, point.longest, point.variation) == (4, 6, pytest.approx(0.408, abs=0.001))
    assert prefix_point(464, 512, [(100.0, 99.0), (100.0, 101.0), (50.0, 50.0)], 0.9).ratio.median == 1


def test_waste_is_the_share_of_positions_held_that_have_no_token() -> None:
    found = paging.paging(1024, [Steady(running=40, used_tokens=15_000, allocated_blocks=1000, preempted=0.1)])
    assert (found.contiguous, found.ratio.median) == (8, 5)
    assert found.paged_waste.median == 0.0625
    assert found.contiguous_waste.median == pytest.approx(1 - 15_000 / (40 * 2048))


def test_more_requests_run_in_blocks_than_with_room_for_the_longest() -> None:
    found = paging.measure(paging.QUICK)
    assert found.paged.min > found.contiguous
    assert 0 < found.paged_waste.median < 8 / 100 < found.contiguous_waste.median < 1


# ----------------------------------------------------------------------------------------------------------- engines

STALL = Stall([Job([5, 6], 8), Job([7], 8)], Job([8, 9, 10], 3), after=2)


def check_interrupted(served: Served) -> None:
    *streams, newcomer = served.traces
    assert [trace.tokens for trace in served.traces] == [8, 8, 3]
    assert all(sum(at <= newcomer.asked_s for at in stream.token_s) >= STALL.after for stream in streams)


def test_twostep_serves_all_jobs_and_lets_the_newcomer_wait_for_its_moment() -> None:
    settings = {"kv_blocks": 16, "skip_tokenizer_init": True, "chunking": "tokens=64"}
    engine = Twostep(open_model(STORIES), "test", max_num_seqs=2, **settings)
    served = engine.closed([Job([5, 6], 4), Job([7], 2), Job([8], 3)], outstanding=2)
    assert [trace.tokens for trace in served.traces] == [len(trace.token_s) for trace in served.traces] == [4, 2, 3]
    assert served.traces[2].asked_s >= served.traces[1].token_s[-1]
    check_interrupted(Twostep(open_model(STORIES), "test", max_num_seqs=3, **settings).interrupt(STALL))


SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and asked["ignore_eos"] and asked["cache_prompt"] is False
        self.send_response(200 if asked["prompt"] != [99] else 500)
        self.end_headers()
        count = asked["max_tokens"] - (asked["prompt"] == [98])
        for _ in range(count):
            time.sleep(0.01)
            self.say([{"text": "x", "finish_reason": None}])
        self.say([{"text": "", "finish_reason": "length"}])
        self.say([], usage={"completion_tokens": count})

    def say(self, choices, **more):
        self.wfile.write(b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\\n\\n")

    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start_llama_server(folder: Path, text: str) -> HttpEngine:
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return HttpEngine(http_engine.launch_llama_server(folder, "test", 2, Path("m.Q4_1-as-Q4_0.gguf"), ("-b", "256")))


def test_llama_server_is_asked_over_http(tmp_path: Path) -> None:
    with closing(start_llama_server(tmp_path, SERVER)) as engine:
        assert engine.name == "llama-server Q4_0 -b 256"
        assert engine.start_s > 0
        served = engine.closed([Job([1, 2], 4), Job([3], 2), Job([4], 3)], outstanding=2)
        assert [trace.tokens for trace in served.traces] == [len(trace.token_s) for trace in served.traces] == [4, 2, 3]
        check_interrupted(engine.interrupt(STALL))
        with pytest.raises(EngineError, match="llama-server Q4_0 -b 256: generated 2 tokens instead of 3"):
            engine.closed([Job([98], 3)], outstanding=1)
        with pytest.raises(EngineError, match="HTTP 500"):
            engine.closed([Job([99], 3)], outstanding=1)
        with pytest.raises(EngineError, match="a stream ended before all streams had 5 events"):
            engine.interrupt(Stall([Job([5], 2)], Job([6], 1), after=5))


def test_a_llama_server_that_ends_or_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="llama-server Q4_0 -b 256: ended with exit code 1, last output: no memory"):
        start_llama_server(tmp_path, "raise SystemExit('no memory')")
    with pytest.raises(EngineError, match="llama-server: No such file"):
        HttpEngine(http_engine.launch_llama_server(tmp_path / "none", "test", 2, Path("m.Q4_0.gguf")))


def test_openvino_is_asked_line_by_line(tmp_path: Path) -> None:
    log, python = tmp_path / "log", tmp_path / "python"
    answer = '{"traces": [{"asked_s": 1, "token_s": [2, 3]}, {"asked_s": 1.5, "token_s": [4]}]}'
    loop = f"""while read -r line; do echo "$line" >> {log}; echo '{answer}'; done"""
    python.write_text(f"""#!/bin/sh\necho '{{"version": "7"}}'; {loop}\n""")
    python.chmod(0o755)
    engine = OpenVinoServing(python, 2, Path("m.gguf"), "Q4_1")
    assert engine.closed([Job([1, 2], 2), Job([3], 1)], outstanding=2).output_tokens_per_s == 1
    assert engine.interrupt(STALL).traces[1] == Trace(1.5, 1, [4])
    engine.close()
    serve, interrupt = map(json.loads, log.read_text().splitlines())
    assert serve == {"what": "serve", "jobs": [[[1, 2], 2], [[3], 1]], "outstanding": 2}
    assert interrupt == {"what": "interrupt", "jobs": [[[5, 6], 8], [[7], 8], [[8, 9, 10], 3]], "after": 2}


class FakePipeline:
    """Gives each request a token a step, and knows how many were there at most."""

    def __init__(self) -> None:
        self.live: list[FakeHandle] = []
        self.most = 0

    def add_request(self, number: int, prompt: object, config: Any) -> "FakeHandle":
        self.live.append(FakeHandle(config.max_new_tokens))
        self.most = max(self.most, len(self.live))
        return self.live[-1]

    def step(self) -> None:
        for handle in self.live:
            handle.left -= 1
            handle.unread += 1
        self.live = [handle for handle in self.live if handle.left]


class FakeHandle:
    def __init__(self, tokens: int) -> None:
        self.left, self.unread = tokens, 0

    def can_read(self) -> bool:
        return self.unread > 0

    def read(self) -> dict[int, Any]:
        count, self.unread = self.unread, 0
        return {0: SimpleNamespace(generated_ids=[1] * count)}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver beside a library that is not there."""
    genai = SimpleNamespace(GenerationConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda ids: ids))
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    path = Path(batching.__file__).with_name("openvino_driver.py")
    module = ModuleType("openvino_driver")
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module


def test_openvino_is_stepped_until_all_are_complete(driver: Any) -> None:
    pipeline = FakePipeline()
    question = {"what": "serve", "jobs": [[[1], 4], [[2], 1], [[3], 2]], "outstanding": 2}
    found = driver.answer(pipeline, question)["traces"]
    assert [len(one["token_s"]) for one in found] == [4, 1, 2]
    assert pipeline.most == 2
    assert found[2]["asked_s"] >= found[1]["token_s"][-1]


def test_openvino_gets_the_newcomer_when_the_streams_are_under_way(driver: Any) -> None:
    question = {"what": "interrupt", "jobs": [[[1], 8], [[2], 8], [[3], 3]], "after": 2}
    found = driver.answer(FakePipeline(), question)["traces"]
    check_interrupted(Served([Trace(one["asked_s"], len(one["token_s"]), one["token_s"]) for one in found]))


# ------------------------------------------------------------------------------------------------------------ report


@pytest.mark.parametrize(("most", "top", "step"), [(0.97, 1.0, 0.2), (3.1, 4, 1), (2400, 2500, 500), (5, 5, 1)])
def test_axes_end_at_round_numbers_beyond_the_data(most: float, top: float, step: float) -> None:
    axis = batching_tables.axis("ms", most)
    assert (axis.top, axis.step) == (pytest.approx(top), pytest.approx(step))
    assert axis.ticks()[-1] == pytest.approx(axis.top)


def test_a_plot_is_svg_with_a_point_and_a_bar_for_each_value() -> None:
    dots = [Dot(0, 1, 0.5, 2, "a < b"), Dot(10, 4, 4, 5, "c")]
    text = batching_tables.scatter("title", "x & y", "ms", dots, line_y=1)
    assert text == batching_tables.scatter("title", "x & y", "ms", dots, line_y=1)
    root = ElementTree.fromstring(text)
    circles = [element.attrib for element in root.iter() if element.tag.endswith("circle")]
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert [circle["cx"] for circle in circles] == [
        f"{batching_tables.LEFT:.1f}",
        f"{batching_tables.WIDTH - batching_tables.RIGHT:.1f}",
    ]
    assert {"a < b", "c", "x & y", "ms"} <= set(texts)


def test_twostep_is_held_against_the_best_of_the_others() -> None:
    rates = {"Twostep": 40.0, "b": 10.0, "c": 20.0}
    spreads = {name: vars(Spread(rate, rate, rate, 1)) for name, rate in rates.items()}
    engines = [{"engine": name, "output_tokens_per_s": found} for name, found in spreads.items()]
    lines = batching_tables.throughput({"requests": 64, "outstanding": 16, "throughput": engines}).splitlines()
    assert lines[2] == f"| Twostep | 40 (40 to 40) | **2.00 {TIMES}** |"
    assert lines[3] == "| b | 10 (10 to 10) |  |"


def test_a_quick_measurement_yields_a_result_that_all_tables_and_plots_can_be_made_of(
    default_model_path: Path, tmp_path: Path
) -> None:
    assert batching.main(["--quick", "--out", str(tmp_path / "batching-x.json")]) == 0
    [result] = results.read("batching", tmp_path)
    assert result["peers"] is None
    assert [point["hit_rate"] for point in result["prefixes"]] == pytest.approx([0, 2 / 3], abs=0.001)
    assert all(point["gaps"]["longest_ms"]["median"] > 0 for point in result["chunking"])
    text = report.batching(tmp_path)
    assert default_model_path.stem in report.batching_readme(tmp_path)
    assert report.batching_peers(tmp_path) == report.NOT_MEASURED
    plots = batching_tables.plots(result)
    assert all(f"({path})" in text for path in plots)
    assert set(report.render(machine.ROOT, tmp_path)) >= {f"docs/{path}" for path in plots}


def test_peers_are_shown_where_there_were_some(tmp_path: Path) -> None:
    gap = {name: vars(Spread(5.0, 4.0, 6.0, 3)) for name in ("before_ms", "longest_ms", "p99_ms", "ttft_ms")}
    rate = vars(Spread(10.0, 9.0, 11.0, 3))
    engines = [
        {"engine": name, "version": "1", "file": "m.gguf", "output_tokens_per_s": rate} for name in ("Twostep", "b")
    ]
    stalls = [{"name": "b", "gaps": gap}]
    found = {"requests": 64, "outstanding": 16, "newcomer": 2048, "throughput": engines, "stalls": stalls}
    rows = batching_tables.peers_rows(found)
    assert [row[1] for row in rows] == ["Twostep 10, b 10", "b 5"]
    assert batching_tables.peers_rows(None) == []


def test_a_folder_that_is_not_there_is_found_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batching.main(["--quick", "--out", str(tmp_path / "none" / "x.json")]) == 1
    assert capsys.readouterr().err.startswith("benchmarks.batching: --out ")
