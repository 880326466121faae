"""Servers whose output nobody reads, or that have none: they answer as ever, and end when asked to."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_server import within

COMMAND = Path(sys.executable).parent / "twostep"
SMALL = ("smollm2-135m", "--port", "0", "--kv-memory", "64MiB", "--threads", "1")
REQUESTS = 40

pytestmark = pytest.mark.usefixtures("default_model_path")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends; it holds as little as the system allows."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


@contextmanager
def started(command: list[Any], **how: Any) -> Iterator["subprocess.Popen[str]"]:
    """Its standard output is ours to read."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: "subprocess.Popen[str]") -> str:
    """Once it is ready."""
    assert process.stdout
    for line in process.stdout:
        if found := re.search(r" at (http://\S+), ready for requests", line):
            return found[1]
    pytest.fail("the server did not start")


def complete(url: str, **body: Any) -> httpx.Response:
    asked = {"prompt": "One, two,", "max_tokens": 1, "ignore_eos": True, **body}
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=60)


def assert_it_serves(url: str) -> None:
    """Requests of all kinds, more than a small pipe holds lines of."""
    body = {"prompt": "One, two,", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: complete(url), range(REQUESTS)))
        refused = [complete(url, temperature=-1) for _ in range(5)]
        assert complete(url, unheard_of=1).status_code == 200, "a warning is written"
        assert httpx.get(f"{url}/health", timeout=20).json()["status"] == "ok"
        *_, last = [line for line in stream.iter_lines() if line]
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.status_code for reply in refused} == {400}
    assert last == "data: [DONE]"


def assert_it_ends(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_log_that_nobody_reads(pipe: tuple[int, int]) -> None:
    with started([COMMAND, "serve", *SMALL, "--log", "json"], stderr=pipe[1]) as process:
        assert_it_serves(url_of(process))
        assert_it_ends(process)
    log = os.read(pipe[0], 100_000).decode().splitlines()
    assert json.loads(log[0])["event"] in ("reply", "refusal"), "the log was written until the pipe was full"


def test_standard_output_that_nobody_reads(pipe: tuple[int, int]) -> None:
    """The settings in effect are longer than the pipe; what they say of the port comes first."""
    assert pipe[1]
    os.write(pipe[1], b"x" * 4096)
    command = [COMMAND, "serve", *SMALL, "--served-model-name", "small"]
    with subprocess.Popen(command, stdout=pipe[1], stderr=subprocess.PIPE, text=True) as process:
        try:
            [port] = listening(process.pid)
            assert within(60, lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200)
            assert_it_ends(process)
        finally:
            process.kill()


def listening(pid: int) -> list[int]:
    """Ports that a process listens on, as soon as there is one."""
    assert within(60, lambda: bool(_ports(pid))), "it does not listen"
    return _ports(pid)


def _ports(pid: int) -> list[int]:
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


CHATTY = """
import os, pathlib, sys, threading
def chatter():
    for number in range(3000):
        os.write(2, b"%d: %s\\n" % (number, b"x" * 1000))
    (pathlib.Path(__file__).parent / "said").touch()
if "twostep.engine.process.engine_host" in sys.orig_argv:
    threading.Thread(target=chatter, daemon=True).start()
"""
"""A `sitecustomize` whose engine writes 3 MB past Python's streams, as a library of C++ may."""


def test_an_engine_that_says_a_lot_to_nobody(pipe: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CHATTY)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with started([COMMAND, "serve", *SMALL], stderr=pipe[1], env=env) as process:
        url = url_of(process)
        assert within(30, lambda: (tmp_path / "said").exists()), "the engine waits for the reader"
        assert complete(url, max_tokens=20).status_code == 200
        assert metric(url, "log_lines_dropped_total") > 1000
        assert_it_ends(process)


SMALL_BUFFER = """
import sys
from functools import partial
from twostep.background import background_output
from twostep.cli.main import main
from twostep.server import front
front.background_output = partial(background_output, 20_000)
sys.exit(main())
"""


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=20).text
    [value] = re.findall(rf"^twostep:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_dropped_lines_are_counted_and_told(pipe: tuple[int, int]) -> None:
    command = [sys.executable, "-c", SMALL_BUFFER, "serve", *SMALL, "--log", "json"]
    with started(command, stderr=pipe[1]) as process:
        url = url_of(process)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: complete(url), range(60)))
        dropped = int(metric(url, "log_lines_dropped_total"))
        assert dropped > 0
        written = b""
        while not (told := re.search(rb"^twostep: (\d+) log lines? w\w+ dropped", written, re.MULTILINE)):
            written += os.read(pipe[0], 4096)
        assert int(told[1]) == dropped
        before = written[: told.start()].splitlines()
        assert {json.loads(line)["event"] for line in before} == {"reply"}, "whole lines"
        assert len(before) == 60 - dropped
        assert_it_ends(process)


def test_a_measurement_does_not_wait_for_whoever_reads_its_progress(pipe: tuple[int, int]) -> None:
    """A terminal that is paused looks the same."""
    os.write(pipe[1], b"x" * 4096)
    with started([COMMAND, "serve", *SMALL], stderr=subprocess.DEVNULL) as server:
        load = ["--workload", "batch", "--requests", "3", "--max-input", "40", "--max-output", "6"]
        with started([COMMAND, "bench", "--url", url_of(server), *load], stderr=pipe[1]) as bench:
            assert bench.wait(120) == 0
            assert bench.stdout
            assert "TTFT" in bench.stdout.read()


OPENS_FIFOS = """
import pathlib
def open_it(self, mode="r", *how, real=pathlib.Path.open, **more):
    return real(self, "wb" if mode == "xb" and self.is_fifo() else mode, *how, **more)
pathlib.Path.open = open_it
"""
"""A `sitecustomize` that lets recordings be written to pipes, to have a disk that is stuck."""


def test_recordings_to_a_disk_that_is_stuck(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OPENS_FIFOS)
    fifos = [tmp_path / "run.rec", tmp_path / "traffic.jsonl"]
    ends = []
    for fifo in fifos:
        os.mkfifo(fifo)
        ends.append(os.open(fifo, os.O_RDWR))
        fcntl.fcntl(ends[-1], fcntl.F_SETPIPE_SZ, 4096)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    record = ("--record", str(fifos[0]), "--record-workload", str(fifos[1]))
    with started([COMMAND, "serve", *SMALL, *record], stderr=subprocess.PIPE, env=env) as process:
        assert_it_serves(url_of(process))
        assert_it_ends(process)
        assert process.stderr
        log = process.stderr.read()
    assert len(os.read(ends[0], 10_000)) > 3000, "the pipe was not full"
    assert "run.rec: the disk is too slow; the recording ends here" in log
    for end in ends:
        os.close(end)


def test_recordings_to_a_disk_that_is_full(tmp_path: Path) -> None:
    files = [tmp_path / "run.rec", tmp_path / "traffic.jsonl"]
    record = ("--record", str(files[0]), "--record-workload", str(files[1]))
    limited = ["bash", "-c", 'ulimit -f 2; exec "$0" "$@"', COMMAND, "serve", *SMALL, *record]
    with started(limited, stderr=subprocess.PIPE) as process:
        assert_it_serves(url_of(process))
        assert_it_ends(process)
        assert process.stderr
        log = process.stderr.read()
    assert log.count(f"twostep: {files[0]}: File too large; the recording ends here") == 1
    assert log.count(f"{files[1]}: File too large; the recording of the workload ends here") == 1
    assert "died" not in log


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"], ids=["no standard error", "no streams at all"])
def test_closed_streams(closed: str) -> None:
    """As daemons are started, and programs without a console."""
    with subprocess.Popen(["bash", "-c", f'exec "$0" "$@" {closed}', COMMAND, "serve", *SMALL]) as process:
        try:
            [port] = listening(process.pid)
            url = f"http://127.0.0.1:{port}"
            assert within(60, lambda: httpx.get(f"{url}/ready").status_code == 200)
            assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull
            assert complete(url, unheard_of=1).status_code == 200
            assert complete(url, temperature=-1).status_code == 400
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
