"""Input that can be read only once is read as often as a file can, by every command that reads one."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.bench_runs import MS, outcome, result, run

from twostep.bench.report.result import result_text
from twostep.cli.main import main
from twostep.config.configs import serve_settings
from twostep.input_file import CHUNK_BYTES, InputFile

TEXT = b"".join(b"line %d\n" % number for number in range(40_000))
ROWS = b"".join(
    json.dumps(row).encode() + b"\n"
    for row in (
        {"twostep_workload": 1, "block_tokens": 16},
        {"arrival_s": 0, "input_tokens": 20, "output_tokens": 3},
        {"arrival_s": 1, "input_tokens": 30, "output_tokens": 3},
    )
)


@contextmanager
def named_pipe(path: Path, content: bytes) -> Iterator[Path]:
    """That somebody writes to, once."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    yield path
    writer.join(30)
    assert not writer.is_alive()


def test_a_pipe_is_read_from_its_beginning_each_time(tmp_path: Path) -> None:
    assert len(TEXT) > 2 * CHUNK_BYTES
    with named_pipe(tmp_path / "pipe", TEXT) as path:
        file = InputFile(path)
        with file.open() as first, file.open() as second:
            assert first.readline() == second.readline() == b"line 0\n"
            assert second.read() == first.read() == TEXT.partition(b"\n")[2]
        with file.open() as third:
            assert third.read() == TEXT
    assert not file.is_file_at(path)


def test_standard_input_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT)))
    given = InputFile(Path("-"))
    (tmp_path / "file").write_bytes(TEXT)
    there = InputFile(tmp_path / "file")
    for file in (given, there, given):
        with file.open() as lines:
            assert lines.read() == TEXT
    assert str(given) == "standard input"
    assert (there.is_file_at(tmp_path / "file"), there.is_file_at(tmp_path)) == (True, False)


def test_no_more_of_an_endless_stream_is_read_than_asked_for() -> None:
    with InputFile(Path("/dev/zero")).open() as stream:
        assert stream.read(10) == bytes(10)


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        InputFile(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        InputFile(tmp_path)


@pytest.mark.parametrize("action", [["show"], ["import", "--out", "/dev/null"]])
def test_a_workload_from_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]) -> None:
    with named_pipe(tmp_path / "pipe", ROWS) as path:
        assert main(["workload", action[0], str(path), *action[1:]]) == 0
    assert "requests  2" in capsys.readouterr().out


def test_a_trace_of_another_format_from_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,7,5\n2024-05-10 00:00:01,8,5\n"
    with named_pipe(tmp_path / "pipe", rows) as path:
        assert main(["workload", "show", str(path)]) == 0
    assert "requests  2" in capsys.readouterr().out


def test_a_shell_s_process_substitution_and_dash() -> None:
    """`<(...)` is a path below /dev/fd."""
    command = [Path(sys.executable).parent / "twostep", "workload", "show"]
    for name in ("/dev/stdin", "-"):
        shown = subprocess.run([*command, name], input=ROWS, capture_output=True, check=True).stdout
        assert b"requests  2" in shown


def test_errors_name_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ROWS + b"{}\n")))
    assert main(["workload", "show", "-"]) == 1
    assert capsys.readouterr().err.startswith("twostep: standard input, line 4: ")


def test_settings_from_a_pipe(tmp_path: Path) -> None:
    with named_pipe(tmp_path / "pipe", b"port = 8001\n") as path:
        assert serve_settings({"config": str(path)}, {}).server.port == 8001


def test_a_result_from_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with named_pipe(tmp_path / "pipe", result_text(result(run([outcome(0, 0, 100 * MS)]))).encode()) as path:
        assert main(["bench", "--read", str(path), "--html", str(tmp_path / "page")]) == 0
    assert "1 of 1 request served" in capsys.readouterr().out
