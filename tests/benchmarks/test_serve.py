"""The benchmark of the server: what it makes of bytes and of the kernel's texts, its arithmetic, its table."""

import asyncio
import json
import pickle
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report, results, serve, serve_tables, serving_front, serving_rates
from benchmarks.http_client import Reply, fetch
from benchmarks.http_load import Ask, asks, closed_loop, health_during
from benchmarks.jobs import Job
from benchmarks.measurement import EngineError, Spread
from benchmarks.server_process import Pair, Server, cpu_s, resident_bytes
from benchmarks.serving_rates import Http

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
TIMINGS = {"predicted_n": 4, "prompt_ms": 90.0, "ttft_ms": 91.5}


def reply(received: bytes, first_s: float = 1.125, last_s: float = 1.5) -> Reply:
    return Reply(asked_s=1.0, first_s=first_s, last_s=last_s, received=received)


def streamed(timings: dict[str, float]) -> bytes:
    last = json.dumps({"choices": [], "timings": timings}).encode()
    return OK + b'data: {"choices":[]}\n\ndata: ' + last + b"\n\ndata: [DONE]\n\n"


# ------------------------------------------------------------------------------------------------------------ client


def test_timings_are_those_of_the_last_event_whatever_pieces_the_body_came_in() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n16\r\n"
    chunked += b' {"timings":{"a":1}}\n\n\r\n0\r\n\r\n'
    assert reply(chunked).timings() == {"a": 1}
    assert reply(streamed(TIMINGS)).timings() == TIMINGS


@pytest.mark.parametrize(
    ("received", "complaint"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\nlater", "HTTP 503: later"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "incomplete reply: IncompleteRead"),
        (b"nonsense", "incomplete reply: BadStatusLine"),
        (OK + b'data: {"error":"x"}\n\ndata: [DONE]\n\n', 'the stream ended without timings: data: {"error":"x"}'),
        (OK, "the stream ended without timings: data: {}"),
    ],
)
def test_a_reply_that_is_no_answer_is_an_error(received: bytes, complaint: str) -> None:
    with pytest.raises(EngineError, match=re.escape(complaint)) as caught:
        reply(received).timings()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def with_server(handler: Handler, path: str) -> Reply:
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        return await fetch(server.sockets[0].getsockname()[1], path, b"{}")


async def in_two_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"{}")
    writer.write(OK)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(b"body")
    writer.close()


async def hanging_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"{}")
    writer.write(OK)
    writer.close()


def test_the_first_byte_is_the_bodys_not_the_heads() -> None:
    got = asyncio.run(with_server(in_two_pieces, "/x"))
    assert got.body() == b"body"
    assert got.first_s - got.asked_s >= 0.04


def test_a_server_that_hangs_up_is_an_error() -> None:
    with pytest.raises(EngineError, match="/x: connection closed without an answer"):
        asyncio.run(with_server(hanging_up, "/x"))


# -------------------------------------------------------------------------------------------------------- arithmetic


def test_the_ratio_is_that_of_runs_one_after_the_other() -> None:
    runs = [Http(rate, 0.01, 0.05, 0.9, Pair(80e6, 300e6)) for rate in (90.0, 200.0, 95.0)]
    found = serving_rates.rates(serving_rates.FULL, [100.0, 400.0, 100.0], runs)
    assert found.ratio == Spread(0.9, 0.5, 0.95, 3)
    assert (found.llm.median, found.http.median, found.cpu_client.median) == (100, 95, 0.01)
    assert found.resident_mb == (80, 300)


def test_added_is_what_the_client_waited_for_beside_connecting_and_the_engines_steps() -> None:
    replies = [replace(reply(streamed(TIMINGS), first_s=1.002 + ms / 1000), connected_s=1.002) for ms in (92, 93, 98)]
    found = serving_front.idle(80, replies)
    assert (found.first_byte.p50, found.added.n) == (pytest.approx(95), 3)
    assert (found.connecting.p50, found.connecting.max) == (pytest.approx(2), pytest.approx(2))
    assert (found.added.p50, found.added.max) == (pytest.approx(3), pytest.approx(8))
    assert found.before_step.p50 == pytest.approx(1.5)


def test_memory_and_cpu_time_are_read_from_the_kernels_texts() -> None:
    assert resident_bytes("Name:\tpython\nVmHWM:\t  900 kB\nVmRSS:\t  800 kB\n") == 800 * 1024
    many = cpu_s("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 300 100 0 0 20 0 9")
    assert many == 4 * cpu_s("7 (python) S 1 7 7 0 -1 0 0 0 0 0 60 40 0 0 20 0 9")


# -------------------------------------------------------------------------------------------------------- the server


def test_a_server_that_does_not_start_is_named_with_its_last_words(default_model_path: Path) -> None:
    with pytest.raises(EngineError, match=r"exit code 1, last output: .*max_num_seqs"):
        Server(default_model_path, ["--max-num-seqs", "0"])


def test_clients_ask_everything_and_health_answers_meanwhile(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTEP_API_KEY", "not for the server that is measured")
    asked = asks([Job([5, 6, 7], 4), Job([8], 2), Job([9], 3)])
    with Server(default_model_path, serving_rates.FLAGS) as server:
        load = closed_loop(server.port, asked, outstanding=2)
        during = health_during(server.port, asked[0], pause_s=0.001)
        with pytest.raises(EngineError, match="HTTP 404"):
            closed_loop(server.port, [Ask("/none", b"{}")]).replies[0].body()
        assert min(server.resident_bytes()) > 10e6
        assert min(server.cpu_s()) > 0
    assert sorted(reply.timings()["predicted_n"] for reply in load.replies) == [2, 3, 4]
    assert during.replies[0].timings()["predicted_n"] == 4
    assert {reply.body() for reply in during.replies[1:]} <= {b'{"status":"ok","pending":%d}' % n for n in (0, 1)}


def test_a_quick_measurement_yields_a_result_that_both_tables_can_be_made_of(tmp_path: Path) -> None:
    assert serve.main(["--quick", "--out", str(tmp_path / "serve-x.json")]) == 0
    [result] = results.read("serve", tmp_path)
    assert 0 < result["rates"]["cpu_client"]["median"] < result["rates"]["cpu_engine"]["median"] < 1.1
    assert 0 < result["idle"]["before_step"]["p50"] < result["idle"]["added"]["p50"]
    assert result["health"]["latency"]["n"] > 1
    whole, short = report.serve(tmp_path), report.serve_readme(tmp_path)
    targets = [row for row in serve_tables.serve(result).splitlines() if not row.endswith("|  |")]
    assert all(row in whole for row in short.splitlines())
    assert sum(row in short for row in targets if row.startswith("| ")) == 6
    assert result["machine"]["cpu"] in whole
