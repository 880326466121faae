"""Logs and recordings whose reader or disk is stuck: nothing waits for them, and what is lost is counted."""

import fcntl
import io
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostep.background import BackgroundStream, BackgroundWriter, background_output

LIMIT = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends; it holds as little as the system allows."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    try:
        yield read, write
    finally:
        for end in (read, write):
            try:
                os.close(end)
            except OSError:
                continue


def notice(count: int) -> bytes:
    return b"dropped %d\n" % count


def line(number: int) -> bytes:
    return b"%0100d\n" % number


def read_all(end: int) -> list[bytes]:
    """Until the last writer closes."""
    with os.fdopen(os.dup(end), "rb") as file:
        return file.read().splitlines(keepends=True)


def test_writing_never_waits_and_the_reader_is_told_what_is_missing(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = BackgroundWriter(write, LIMIT, notice=notice)
    os.close(write)  # it has its own
    begun_s = time.monotonic()
    taken = [number for number in range(1000) if writer.write(line(number))]
    assert time.monotonic() - begun_s < 5
    assert writer.dropped == 1000 - len(taken) > 0
    with os.fdopen(os.dup(read), "rb") as reader:
        come = [reader.readline() for _ in taken]
        told = reader.readline()  # though nothing is written any more
        assert writer.write(line(1000))
        assert reader.readline() == line(1000)
    assert told == notice(writer.dropped)
    assert come == [line(number) for number in taken] == [line(number) for number in range(len(taken))]
    assert writer.close()


def test_what_is_missing_is_told_where_it_is_missing(pipe: tuple[int, int]) -> None:
    """A slow reader gets runs of lines, not every other one."""
    read, write = pipe
    writer = BackgroundWriter(write, LIMIT, notice=notice)
    os.close(write)
    number, come = 0, b""
    for _ in range(20):
        for _ in range(100):
            writer.write(line(number))
            number += 1
        come += os.read(read, 1000)
    while not writer.write(line(number)):
        come += os.read(read, 1000)
    writer.close(0)
    expected, gaps = 0, 0
    for found in (come + b"".join(read_all(read))).splitlines(keepends=True):
        if told := re.fullmatch(rb"dropped (\d+)\n", found):
            expected, gaps = expected + int(told[1]), gaps + 1
        elif found.endswith(b"\n"):
            assert found == line(expected)
            expected += 1
    assert expected > 0
    assert 0 < gaps < 20


def test_a_descriptor_that_others_made_non_blocking(pipe: tuple[int, int]) -> None:
    """Whoever shares the open file may have: a terminal's other programs, the parent that made the pipe."""
    read, write = pipe
    os.set_blocking(write, False)
    writer = BackgroundWriter(write, notice=notice)
    os.close(write)
    for number in range(200):
        assert writer.write(line(number))
    with os.fdopen(os.dup(read), "rb") as reader:
        assert [reader.readline() for _ in range(200)] == [line(number) for number in range(200)]
    assert writer.close()


def test_a_reader_that_has_gone_costs_lines_and_nothing_else(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.close(read)
    writer = BackgroundWriter(write, notice=notice)
    for number in range(10):
        assert writer.write(line(number))
    assert writer.close()
    assert isinstance(writer.error, BrokenPipeError)
    assert writer.dropped == 10


def test_a_gone_reader_keeps_no_thread_busy(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.close(read)
    writer = BackgroundWriter(write, notice=notice)
    writer.write(line(0))
    while writer.error is None:
        time.sleep(0.001)
    used_s = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used_s < 0.2
    assert writer.close()


def test_a_file_without_gaps_ends_with_its_first_error() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        writer = BackgroundWriter(full.fileno())
    assert writer.write(line(0))
    while writer.error is None:
        time.sleep(0.001)
    assert not writer.write(line(1))
    assert writer.close()


def test_closing_does_not_wait_for_a_stuck_reader(pipe: tuple[int, int]) -> None:
    writer = BackgroundWriter(pipe[1], notice=notice)
    for number in range(200):
        writer.write(line(number))
    begun_s = time.monotonic()
    assert not writer.close(patience_s=0.1)
    assert time.monotonic() - begun_s < 5
    assert not writer.write(line(200))


def test_closing_waits_for_a_slow_one(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """As long as it takes something now and then."""
    script = "import os, time\nwhile d := os.read(0, 512): os.write(1, d); time.sleep(0.02)"
    out = tmp_path / "out"
    with out.open("wb") as file, subprocess.Popen([sys.executable, "-c", script], stdin=pipe[0], stdout=file) as reader:
        writer = BackgroundWriter(pipe[1], notice=notice)
        os.close(pipe[1])
        for number in range(100):
            writer.write(line(number))
        assert writer.close(patience_s=20)
        os.close(pipe[0])
        assert reader.wait(60) == 0
    assert out.read_bytes() == b"".join(map(line, range(100)))


def test_a_forked_child_neither_writes_nor_waits(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        writer = BackgroundWriter(file.fileno(), notice=notice)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(0 if not writer.write(line(1)) and writer.close() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert writer.write(line(0))
    assert writer.close()
    assert (tmp_path / "log").read_bytes() == line(0)


def test_a_writer_that_nobody_keeps_writes_its_rest_and_ends(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        writer = BackgroundWriter(file.fileno(), notice=notice)
    thread = writer._thread
    writer.write(line(0))
    del writer
    thread.join(10)
    assert not thread.is_alive()
    assert (tmp_path / "log").read_bytes() == line(0)


# --- streams ------------------------------------------------------------------------------------------------------


def test_a_stream_passes_on_whole_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        stream = BackgroundStream(file, LIMIT)
        print("one", "tw\u00f6", file=stream, flush=True)
        print("begun", end="", file=stream)
        print(", ended", file=stream)
        print("no newline", end="", file=stream)
        assert stream.finish()
    assert (tmp_path / "log").read_text() == "one tw\\xf6\nbegun, ended\nno newline"


def test_streams_without_a_descriptor_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(sys, "stdout", None)
    with background_output() as dropped:
        assert (sys.stderr, sys.stdout) == (written, None)
        assert dropped() == 0


PROGRAM = """
import sys
from twostep.background import background_output
with background_output():
    print("first", file=sys.stderr)
    sys.stderr.write("x" * 100_000 + "\\n")
print("last", file=sys.stderr)
raise SystemExit(7)
"""


def test_a_process_ends_though_nobody_reads_its_output(pipe: tuple[int, int]) -> None:
    """With the status that it wants to have."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=pipe[1]) as process:
        try:
            assert process.wait(60) == 7
        finally:
            process.send_signal(signal.SIGKILL)


def test_a_process_s_last_line_is_written() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 7
    assert ended.stderr.splitlines() == [b"first", b"x" * 100_000, b"last"]
