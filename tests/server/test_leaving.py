"""Clients that go, engines that die, servers that end: nothing is left behind, and whoever waits is told."""

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.http_server import NAME, Host, Served, host, within
from support.raw_http import connected, posted, rest

from twostep.config.configs import EngineConfig, ServerConfig
from twostep.engine.backend import Snapshot
from twostep.engine.process.local_backend import LocalBackend
from twostep.server.front import ONE_SIGNAL_S, serve
from twostep.server.http.listening import AddressError

LONG: dict[str, Any] = {"model": NAME, "prompt": "One, two,", "max_tokens": 4000, "ignore_eos": True}


@contextmanager
def stream(url: str, **body: Any) -> Iterator[httpx.Response]:
    """A stream whose headers are here."""
    asked = {**LONG, "stream": True, **body}
    with httpx.Client(timeout=30) as http, http.stream("POST", f"{url}/v1/completions", json=asked) as reply:
        yield reply


def data(reply: httpx.Response) -> list[str]:
    """The rest of its events."""
    return [line.removeprefix("data: ") for line in reply.iter_lines() if line]


def is_idle(snapshot: Snapshot) -> bool:
    return snapshot.running == snapshot.waiting == 0 and snapshot.kv_blocks_free == snapshot.kv_blocks


# --- clients that go ----------------------------------------------------------------------------------------------


async def _ask(url: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Sends a request; whoever aborts the transport of what this returns has gone."""
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content)
    writer.write(head + content)
    return writer


def assert_all_is_given_back(server: Served, server_host: Host) -> None:
    """Soon: a request of this length would take several times as long."""
    assert within(5, lambda: is_idle(server_host.snapshot()))
    assert len(server.state.in_flight) == server.state.admission_queue.size == server_host.backend.outstanding == 0


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("prompt_tokens", [5, 6000], ids=["in decode", "in prefill"])
def test_blocks_are_back_within_a_second(server: Served, server_host: Host, streamed: bool, prompt_tokens: int) -> None:
    """CASES 21."""
    body = {**LONG, "prompt": [5000 + prompt_tokens] * prompt_tokens, "max_tokens": 2000, "stream": streamed}
    writer = server_host.run(_ask(server.url, body))
    assert within(60, lambda: server_host.snapshot().running == 1)
    server_host.loop.call_soon_threadsafe(writer.transport.abort)
    assert_all_is_given_back(server, server_host)


def test_whoever_waits_can_go_too(server: Served, server_host: Host) -> None:
    """CASES 21: from the queue, with other prompts of the same request that run."""
    writer = server_host.run(_ask(server.url, {**LONG, "prompt": ["One, two,"] * 10}))
    assert within(60, lambda: server_host.snapshot().waiting == 2)
    server_host.loop.call_soon_threadsafe(writer.transport.abort)
    assert_all_is_given_back(server, server_host)


def test_fifty_clients_killed_at_random_moments_leave_nothing(server: Served, server_host: Host) -> None:
    """CASES 21."""
    rng = random.Random(1)

    async def ask_and_go() -> None:
        prompt = [rng.randrange(5000, 6000)] * rng.choice([3, 40, 700])
        writer = await _ask(server.url, {**LONG, "prompt": prompt, "stream": rng.random() < 0.5})
        await asyncio.sleep(rng.random() * 1.5)
        writer.transport.abort()

    async def crowd() -> None:
        await asyncio.gather(*(ask_and_go() for _ in range(50)))

    server_host.run(crowd())
    assert_all_is_given_back(server, server_host)
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "pending": 0}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_clients_can_go_in_the_midst_of_a_body(
    server: Served, server_host: Host, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def begin_and_go() -> None:
        address = urlsplit(server.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        while not server.front.server_state.tasks:
            await asyncio.sleep(0.01)
        writer.transport.abort()

    server_host.run(begin_and_go())
    assert within(15, lambda: not server.front.server_state.tasks)
    assert_all_is_given_back(server, server_host)
    assert caplog.records == []


def test_whoever_goes_behind_a_further_request_is_noticed(server: Served, server_host: Host) -> None:
    """Nothing is read beyond the further one: the end is only seen by asking for it."""
    with connected(server.url) as client:
        client.sendall(posted("/v1/completions", LONG))
        assert within(60, lambda: server_host.snapshot().running == 1)
        client.sendall(b"GET /health HTTP/1.1\r\n")
        assert within(60, lambda: any(one.flow.read_paused for one in tuple(server.front.server_state.connections)))
    assert within(15, lambda: not server.state.in_flight)
    assert_all_is_given_back(server, server_host)


def test_long_bodies_of_clients_that_went_keep_nobody_waiting(server: Served) -> None:
    text = {"prompt": "The tortoise and the hare. " * 35_000}
    for number in range(12):
        with connected(server.url) as client:
            client.sendall(posted("/tokenize" if number % 2 else "/v1/completions", text))
            time.sleep(0.02)
    short = httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 1}, timeout=30)
    assert short.status_code == 200
    assert within(60, lambda: server.state.bodies.reserved == 0)


# --- clients that do not read -------------------------------------------------------------------------------------

UNREAD: dict[str, Any] = {**LONG, "stream": True, "n": 8, "logprobs": 20, "return_token_ids": True}
"""Some 10 KB a step."""


@contextmanager
def unread(server: Served, **body: Any) -> Iterator[socket.socket]:
    """Such a stream, when the server can write no more of it."""
    with connected(server.url, receive_bytes=2048) as client:
        client.sendall(posted("/v1/completions", {**UNREAD, **body}))
        yield client


def is_stalled(server: Served) -> bool:
    return any(connection.flow.write_paused for connection in tuple(server.front.server_state.connections))


def test_whoever_does_not_read_is_taken_for_gone(
    server_host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twostep.server.http.connections.STALLED_S", 0.5)
    with server_host.front(small_sends=True) as front, unread(front) as client:
        assert within(60, lambda: is_stalled(front))
        assert within(15, lambda: not front.state.in_flight)
        assert_all_is_given_back(front, server_host)
        assert not rest(client).endswith(b"\r\n0\r\n\r\n"), "the reply came to an end"
    assert caplog.records == []


def test_a_deadline_holds_for_whoever_does_not_read(server_host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """The place is free before the client is told, which it may never hear."""
    with server_host.front(small_sends=True) as front, unread(front):
        assert within(60, lambda: is_stalled(front))
        [flight] = front.state.in_flight._requests
        server_host.loop.call_soon_threadsafe(flight.limit, 0.1)  # which has passed
        assert within(10, lambda: not front.state.admission_queue.size)
        assert_all_is_given_back(front, server_host)
        assert within(15, lambda: not front.front.server_state.connections)
    assert caplog.records == []


# --- clients that do not come to their point ----------------------------------------------------------------------


@pytest.mark.parametrize("before", [b"", posted("/tokenize", {"prompt": "x"}), posted("/tokenize", b"x" * 5000)[:-1]])
def test_a_request_has_to_begin_in_time(server_host: Host, before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind one that was answered, or that was refused before its body was here."""
    monkeypatch.setattr("twostep.server.http.connections.HEAD_S", 0.5)
    with server_host.front(max_body_bytes=1000) as front, connected(front.url) as client:
        client.sendall(before)
        if before:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")
            client.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        assert b"HTTP/1.1" not in rest(client)


def test_slow_bodies_take_no_place(server_host: Host) -> None:
    with server_host.front(max_queue=0) as front, ExitStack() as clients:
        for _ in range(12):
            client = clients.enter_context(connected(front.url))
            client.sendall(posted("/v1/completions", LONG)[:-1])
        assert within(60, lambda: len(front.front.server_state.tasks) == 12)
        reply = httpx.post(f"{front.url}/v1/completions", json={**LONG, "max_tokens": 1}, timeout=30)
    assert reply.status_code == 200


def test_a_request_out_of_time_is_told(server_host: Host) -> None:
    """CASES 28: in mid-stream by an event, before by a status."""
    with server_host.front(request_timeout_s=0.5) as front:
        with stream(front.url) as reply:
            *told, error, last = data(reply)
        whole = httpx.post(f"{front.url}/v1/completions", json=LONG, timeout=30)
    assert "choices" in json.loads(told[-1])
    assert json.loads(error)["error"]["code"] == "timeout"
    assert last == "[DONE]"
    assert (whole.status_code, whole.json()["error"]["message"]) == (504, "the request took longer than 0.5 s")


def test_a_request_may_limit_its_own_time(server: Served) -> None:
    late = httpx.post(f"{server.url}/v1/completions", json={**LONG, "timeout_s": 0.3}, timeout=30)
    in_time = httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 1, "timeout_s": 30}, timeout=30)
    assert (late.status_code, late.json()["error"]["message"]) == (504, "the request took longer than 0.3 s")
    assert in_time.status_code == 200


# --- engines that die ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doomed(default_model_path: Path) -> Iterator[Host]:
    """An engine of its own, with a tiny cache."""
    with host(default_model_path, kv_memory="64 blocks", max_num_seqs=2, chunking="tokens=64") as made:
        yield made


def test_what_can_never_fit_is_refused_at_once(doomed: Host) -> None:
    """CASES 16: with the arithmetic; others go on."""
    with doomed.front() as front:
        refused = httpx.post(f"{front.url}/v1/completions", json={**LONG, "max_tokens": 2000})
        served = httpx.post(f"{front.url}/v1/completions", json={**LONG, "max_tokens": 5}, timeout=30)
    assert refused.status_code == 400
    assert {"126", "64"} <= set(re.findall("[0-9]+", refused.json()["error"]["message"])), "not the arithmetic"
    assert served.status_code == 200


def test_a_hanging_and_a_dead_engine(doomed: Host) -> None:
    """CASES 23, 28. Health is asked meanwhile: it does not wait for the engine."""
    assert isinstance(doomed.backend, LocalBackend)
    backend = doomed.backend
    backend.drain()  # it is started again only for the stream
    process = backend.client._process
    with doomed.front(stall_s=2) as front, stream(front.url, max_tokens=900) as reply:
        lines = reply.iter_lines()
        assert "choices" in next(lines)
        assert httpx.get(f"{front.url}/health").status_code == 200
        process.send_signal(signal.SIGSTOP)
        assert within(60, lambda: httpx.get(f"{front.url}/health").status_code == 503)
        assert httpx.get(f"{front.url}/health").json()["error"]["code"] == "stalled"
        process.send_signal(signal.SIGCONT)
        assert within(60, lambda: httpx.get(f"{front.url}/health").status_code == 200)
        process.kill()
        *_, end, _, last, _ = lines
        assert json.loads(end.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert last == "data: [DONE]"
        backend.client._process.kill()
        assert within(60, lambda: backend.phase == "failed")
        for path in ("/health", "/ready", "/v1/models"):
            assert httpx.get(f"{front.url}{path}").status_code == 503
        refused = httpx.post(f"{front.url}/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_died")


# --- servers that end ---------------------------------------------------------------------------------------------

PROGRAM = """
import socket, sys
from pathlib import Path

def no_network(event, arguments):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and arguments[0].family != socket.AF_UNIX):
        raise RuntimeError(f"{event} {arguments}: a local model needs no network")

sys.addaudithook(no_network)

from twostep.config.configs import EngineConfig
from twostep.config.configs import ServerConfig
from twostep.server import front

def listen(config, listen=front.listen):
    listeners = listen(config)  # the system takes little of what clients do not read
    listeners.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listeners

front.listen = listen
config = ServerConfig(port=int(sys.argv[3]), drain_s=float(sys.argv[2]), served_model_name=("small",), log="off")
engine = EngineConfig(kv_memory="300 blocks")
front.serve(config, engine, Path(sys.argv[1]), lambda config, *_: print(config.port, flush=True))
"""


@contextmanager
def starting(path: Path, drain_s: float, port: int) -> Iterator["subprocess.Popen[str]"]:
    """A server of its own, which cannot reach the network."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(path), str(drain_s), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        try:
            yield served
        finally:
            served.kill()


@contextmanager
def process(path: Path, drain_s: float) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Such a server that is ready, and its address."""
    with starting(path, drain_s, port=0) as served:
        assert served.stdout is not None
        yield served, f"http://127.0.0.1:{int(served.stdout.readline())}"


def test_sigterm_lets_streams_finish(default_model_path: Path) -> None:
    """CASES 22, 41."""
    with process(default_model_path, drain_s=300) as (served, url):
        with stream(url, max_tokens=150) as reply:  # still running, on a busy machine too, when /ready is asked
            served.send_signal(signal.SIGTERM)
            assert within(60, lambda: httpx.get(f"{url}/ready").status_code == 503)
            refused = httpx.post(f"{url}/v1/completions", json=LONG)
            *_, ended, last = data(reply)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert json.loads(ended)["choices"][0]["finish_reason"] == "length"
        assert last == "[DONE]"
        assert served.wait(60) == 0
        assert served.stderr is not None
        [said] = served.stderr.read().splitlines()
        assert said.startswith("twostep: shutting down; 1 in progress, up to 300 s to finish; signal again to exit now")


def test_sigterm_cuts_streams_at_the_deadline(default_model_path: Path) -> None:
    """CASES 22, 28."""
    with process(default_model_path, drain_s=0.3) as (served, url):
        with stream(url) as reply:
            served.send_signal(signal.SIGTERM)
            *_, error, last = data(reply)
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert last == "[DONE]"
        assert served.wait(60) == 0


def test_sigterm_leaves_whoever_does_not_read(default_model_path: Path) -> None:
    with process(default_model_path, drain_s=3) as (served, url), connected(url, receive_bytes=2048) as client:
        client.sendall(posted("/v1/completions", UNREAD))
        assert client.recv(10)
        time.sleep(1)  # until the server can write no more, on all but the slowest machines
        served.send_signal(signal.SIGTERM)
        assert served.wait(20) == 0
        assert served.stderr is not None
        [said] = served.stderr.read().splitlines()
        assert said.startswith("twostep: shutting down; 1 in progress")


def test_a_second_signal_ends_at_once(default_model_path: Path) -> None:
    """CASES 22."""
    with process(default_model_path, drain_s=30) as (served, url), stream(url):
        served.send_signal(signal.SIGTERM)
        assert within(60, lambda: httpx.get(f"{url}/ready").status_code == 503)
        time.sleep(ONE_SIGNAL_S)
        served.send_signal(signal.SIGTERM)
        assert served.wait(20) == 128 + signal.SIGTERM  # sooner than after `drain_s`


def test_a_signal_that_comes_twice_at_once_is_one(default_model_path: Path) -> None:
    """From `timeout make serve` it comes from both."""
    with process(default_model_path, drain_s=0.3) as (served, url), stream(url):
        served.send_signal(signal.SIGTERM)
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0


def test_a_signal_while_the_model_is_loaded(default_model_path: Path) -> None:
    """CASES 22. Who asks then is told."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with starting(default_model_path, drain_s=30, port=port) as served:
        assert within(60, lambda: can_connect(port))
        loading = httpx.get(f"http://127.0.0.1:{port}/ready")
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0
        assert served.stderr is not None
        assert served.stderr.read() == ""
    assert (loading.status_code, loading.json()["error"]["code"]) == (503, "loading")


def test_an_address_in_use_is_named(default_model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(AddressError, match=f"port {config.port}: Address already in use$"):
            serve(config, EngineConfig(), default_model_path, lambda config, ready: None)


def can_connect(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
