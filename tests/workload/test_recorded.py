"""`twostep serve --record-workload`: the traffic that came is in the file, what was said in it is not."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.breakdowns import output, reply
from support.http_server import Host, Served

from twostep.background import BackgroundWriter
from twostep.config.configs import EngineConfig, ServerConfig
from twostep.engine.outputs import Timeline
from twostep.errors import WorkloadError
from twostep.server.front import serve
from twostep.server.observe.traffic_recorder import BlockNumbers, TrafficRecorder
from twostep.workload.definition import Workload
from twostep.workload.format import read_workload

FIRST, OTHER = list(range(5000, 5040)), list(range(6000, 6040))


def silent(line: str) -> None:
    raise AssertionError(line)


@contextmanager
def recording(server_host: Host, path: Path) -> Iterator[Served]:
    with server_host.front(record_workload=str(path)) as front:
        yield front


def ask(front: Served, prompt: Any, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, **more}
    return httpx.post(f"{front.url}/v1/completions", json=body, timeout=30)


def read_when(path: Path, rows: int) -> Workload:
    """The last byte of a reply may be here a little before its row is written."""
    deadline_s = time.monotonic() + 10
    while len((read := read_workload(path, silent)).requests) < rows and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return read


def test_traffic_is_a_workload_while_the_server_runs(server_host: Host, tmp_path: Path) -> None:
    """So it is one if the server is killed too."""
    path = tmp_path / "traffic.jsonl"
    with recording(server_host, path) as front:
        for number, prompt in enumerate((FIRST, OTHER, FIRST + OTHER), 1):
            assert ask(front, prompt, stream=number == 2).status_code == 200
            read_when(path, number)
        read = read_when(path, 3)
    assert read.requests[0].arrival_s == 0.0
    assert [(request.input_tokens, request.output_tokens) for request in read.requests] == [(40, 3), (40, 3), (80, 3)]
    assert [request.blocks for request in read.requests] == [(0, 1), (2, 3), (0, 1, 4, 5, 6)]
    assert read.source == "recorded by twostep serve, small"
    assert read_workload(path, silent) == read


def test_arrivals_are_those_of_the_requests(server_host: Host, tmp_path: Path) -> None:
    with recording(server_host, tmp_path / "w") as front:
        ask(front, FIRST)
        time.sleep(0.3)
        ask(front, FIRST)
        read = read_when(tmp_path / "w", 2)
    assert 0.3 <= read.requests[1].arrival_s < 10


def test_there_is_no_text_and_no_token(server_host: Host, tmp_path: Path) -> None:
    path = tmp_path / "w"
    with recording(server_host, path) as front:
        said = ask(front, "Swordfish swordfish " * 20, n=2, temperature=0).json()
        read_when(path, 2)
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert header.keys() == {"twostep_workload", "block_tokens", "name", "source", "order"}
    for row in rows:
        assert row.keys() == {"arrival_s", "input_tokens", "output_tokens", "blocks"}
        assert row["blocks"] == list(range(said["usage"]["prompt_tokens"] // 16))


def test_each_prompt_and_each_choice_has_a_row(server_host: Host, tmp_path: Path) -> None:
    with recording(server_host, tmp_path / "w") as front:
        ask(front, [FIRST, OTHER], n=2)
        read = read_when(tmp_path / "w", 4)
    assert sorted(request.blocks for request in read.requests) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_another_salt_makes_another_prompt(server_host: Host, tmp_path: Path) -> None:
    with recording(server_host, tmp_path / "w") as front:
        for number, salt in enumerate(("a", "b", "a"), 1):
            ask(front, FIRST, cache_salt=salt)
            read = read_when(tmp_path / "w", number)
    assert [request.blocks for request in read.requests] == [(0, 1), (2, 3), (0, 1)]


def test_who_leaves_has_the_tokens_that_came(server_host: Host, tmp_path: Path) -> None:
    body = {"prompt": FIRST, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with recording(server_host, tmp_path / "w") as front:
        with httpx.Client(timeout=30) as http, http.stream("POST", f"{front.url}/v1/completions", json=body) as events:
            next(events.iter_lines())
        read = read_when(tmp_path / "w", 1)
    assert 1 <= read.requests[0].output_tokens < 3000


def test_what_is_turned_away_has_no_row(server_host: Host, tmp_path: Path) -> None:
    with recording(server_host, tmp_path / "w") as front:
        assert ask(front, FIRST, temperature=-1).status_code == 400
        assert ask(front, FIRST * 1000).status_code == 400
        ask(front, OTHER)
        read = read_when(tmp_path / "w", 1)
    assert [request.input_tokens for request in read.requests] == [40]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_server_wrote_can_be_read_however_it_ended(
    number: signal.Signals, default_model_path: Path, tmp_path: Path
) -> None:
    """The command as a user starts it."""
    path = tmp_path / "w"
    code = "import sys; from twostep.cli.main import main; sys.exit(main())"
    flags = [str(default_model_path), "--port", "0", "--kv-memory", "64MiB", "--record-workload", str(path)]
    command = [sys.executable, "-W", "error", "-c", code, "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            address = next(found for line in served.stdout if (found := re.search(r"at (http://\S+),", line)))
            body = {"prompt": FIRST, "max_tokens": 3, "ignore_eos": True}
            assert httpx.post(f"{address[1]}/v1/completions", json=body, timeout=30).status_code == 200
            read_when(path, 1)
            served.send_signal(number)
            served.wait(20)
        finally:
            served.kill()
    [request] = read_workload(path, silent).requests
    assert (request.input_tokens, request.output_tokens, request.blocks) == (40, 3, (0, 1))


def test_a_server_that_cannot_record_does_not_start(default_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "w").touch()
    config = ServerConfig(port=0, record_workload=str(tmp_path / "w"))
    with pytest.raises(WorkloadError, match="exists and is not overwritten"):
        serve(config, EngineConfig(), default_model_path, lambda config, ready: None)


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text("precious")
    with pytest.raises(WorkloadError) as caught:
        TrafficRecorder(path, "small")
    assert str(caught.value) == (
        f"record_workload: {path} exists and is not overwritten; choose another name"
    )  # fmt: skip
    assert path.read_text() == "precious"


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "w"
    with pytest.raises(WorkloadError) as caught:
        TrafficRecorder(path, "small")
    assert str(caught.value) == f"record_workload: {path}: No such file or directory"


def test_on_a_full_disk_the_recording_ends_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TrafficRecorder(tmp_path / "w", "small")
    recorder._writer.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(recorder, "_writer", BackgroundWriter(full.fileno()))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.add_reply(reply(output(Timeline(0, 0, (), (5, 6), (), 6))))
        recorder.close()
    assert caplog.messages == [f"{tmp_path}/w: No space left on device; the recording of the workload ends here"]
    assert read_workload(tmp_path / "w", silent).requests == []


def test_a_disk_that_is_stuck_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TrafficRecorder(tmp_path / "w", "small")
    recorder._writer.close()
    read, write = os.pipe()
    monkeypatch.setattr(recorder, "_writer", BackgroundWriter(write, 4096))
    with caplog.at_level(logging.WARNING):
        for _ in range(3000):
            recorder.add_reply(reply(output(Timeline(0, 0, (), (5, 6), (), 6))))
        recorder.close()
    assert caplog.messages == [f"{tmp_path}/w: the disk does not keep up; the recording of the workload ends here"]
    os.close(read)
    os.close(write)


# --- numbers of blocks --------------------------------------------------------------------------------------------


def test_blocks_are_numbered_in_order_of_first_sight() -> None:
    numbers = BlockNumbers(10)
    assert numbers.of([b"a", b"b"]) == (0, 1)
    assert numbers.of([b"c", b"a"]) == (2, 0)


def test_the_end_of_a_prompt_is_forgotten_before_its_begin() -> None:
    numbers = BlockNumbers(3)
    numbers.of([b"a", b"b", b"c"])
    numbers.of([b"d"])
    assert numbers.of([b"a", b"b", b"c"]) == (0, 1, 4)


@settings(deadline=None)
@given(prompts=st.lists(st.lists(st.binary(max_size=1), unique=True, max_size=6), max_size=20), most=st.integers(1, 4))
def test_so_many_are_remembered_and_no_number_means_two_blocks(prompts: list[list[bytes]], most: int) -> None:
    numbers, meaning = BlockNumbers(most), dict[int, bytes]()
    for prompt in prompts:
        for number, block in zip(numbers.of(prompt), prompt, strict=True):
            assert meaning.setdefault(number, block) == block
        assert len(numbers) <= most
