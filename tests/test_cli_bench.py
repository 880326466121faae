"""`twostep bench` from its command line to what it prints and writes."""

import json
import socket
import sys
from pathlib import Path

import pytest
from support.http_server import Served

from twostep.bench.outcome import Counting
from twostep.bench.record import Closed, Open
from twostep.bench.result import Result, read_result
from twostep.bench.sweep import Ending
from twostep.cli.bench_offline import steps_of
from twostep.cli.main import main
from twostep.engine.outputs import ChunkTime, Timeline

SHORT = ["--workload", "batch", "--requests", "4", "--max-input", "40", "--max-output", "6", "--warmup", "1"]


@pytest.fixture(autouse=True)
def own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the command line, which results repeat: pytest's own are put back."""
    monkeypatch.setattr(sys, "argv", ["twostep"])


def bench(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What is printed; what is said on the way is not looked at."""
    sys.argv[1:] = ["bench", *words]
    try:
        ended = main(sys.argv[1:])
    except SystemExit as exit_:
        ended = int(str(exit_.code))
    out, err = capsys.readouterr()
    assert ended == code, err
    return out if code == 0 else out + err


def measured(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[str, Result]:
    printed = bench(capsys, *words, "--out", str(folder / "result.json"))
    return printed, read_result(folder / "result.json")


def test_a_server_at_several_loads(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    words = ["--url", server.url, "--model", "small", *SHORT, "--concurrency", "1,3", "--html", str(page)]
    printed, result = measured(capsys, tmp_path, *words, "--goodput", "ttft:60000")
    assert [run.record.mode for run in result.runs] == [Closed(1), Closed(3)]
    for run in result.runs:
        assert run.summary.served == run.summary.met == 4
        assert all(
            len(one.token_ns) == one.asked_output_tokens and one.counted is Counting.STATED
            for one in run.record.outcomes
        )
        assert all(one.cached_tokens == 0 for one in run.record.outcomes), "prompts are new in every run"
    assert "clients" in printed
    assert page.read_text().startswith("<!DOCTYPE html>")
    shown = bench(capsys, "--read", str(tmp_path / "result.json"))
    assert shown == printed


def test_a_rate(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", server.url, "--model", "small", "--endpoint", "chat", *SHORT, "--rate", "20"]
    _, result = measured(capsys, tmp_path, *words)
    [run] = result.runs
    assert (run.record.mode, run.rate, run.summary.served) == (Open(), 20, 4)
    due = [one.due_ns for one in run.record.outcomes]
    assert due == sorted(due) != [due[0]] * 4


def test_the_same_salt_is_found_in_the_prefix_cache(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url", server.url, "--model", "small", *SHORT, "--concurrency", "1", "--salt", "same"]
    measured(capsys, tmp_path, *words)
    _, result = measured(capsys, tmp_path, *words)
    cached = [one.cached_tokens for one in result.runs[0].record.outcomes]
    asked = [one.input_tokens for one in result.runs[0].record.outcomes]
    assert cached == [(tokens - 1) // 16 * 16 for tokens in asked if tokens]


def test_a_sweep_that_finds_even_the_least_too_much(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url", server.url, "--model", "small", *SHORT, "--sweep", "concurrency", "--goodput", "ttft:0.001"]
    printed, result = measured(capsys, tmp_path, *words)
    assert result.sweep is not None
    assert result.sweep.ending in (Ending.BELOW, Ending.CLIENT), "on a busy machine the client is late as well"
    assert result.sweep.met is None
    assert "sweep: " in printed


def test_the_engine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--offline", *SHORT, "--concurrency", "2", "--max-num-seqs", "2", "--kv-memory", "64MiB"]
    _, result = measured(capsys, tmp_path, *words)
    [run] = result.runs
    assert run.summary.served == 4
    assert all(one.input_tokens == one.asked_input_tokens for one in run.record.outcomes)
    assert sum(step.prefill_tokens for step in run.steps) == run.summary.input_tokens
    assert sum(step.decode_tokens for step in run.steps) == run.summary.output_tokens - 4
    assert all(step.start_ns <= step.end_ns for step in run.steps)


def test_steps_are_told_from_what_they_gave() -> None:
    chunks = (ChunkTime(100, 200, 8, step=1), ChunkTime(210, 300, 4, step=2))
    lines = [Timeline(90, chunks=chunks, token_ns=(300, 350)), Timeline(0, token_ns=(50, 300, 350))]
    steps = [(step.start_ns, step.end_ns, step.prefill_tokens, step.decode_tokens) for step in steps_of(lines, 0)]
    assert steps == [(100, 200, 8, 0), (210, 300, 4, 1), (300, 350, 0, 2)]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--offline", "--url", "http://127.0.0.1:1"], "--url is for a server; --offline has none"),
        (["--offline", "--header", "a:b"], "--header is for a server"),
        (["--rate", "1", "--concurrency", "2"], "not allowed with argument"),
        (["--rate", "0"], "argument --rate: '0' is not a list of numbers from 0.001 to 1000000, such as 1,2,4"),
        (["--concurrency", "1.5"], "--concurrency is a number of clients"),
        (["--sweep", "--rate", "1,2", "--goodput", "ttft:1"], "--sweep begins with one"),
        (["--sweep", "--concurrency", "2", "--goodput", "ttft:1"], "--sweep looks for the highest rate"),
        (["--chunking", "none"], "--chunking is for --offline"),
        (["--workload", "azure-conv", "--cv", "2"], "--cv is for what is made up"),
        (["--share", "0.5"], "--share is for --sweep"),
    ],
)
def test_what_contradicts_itself_is_refused(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in bench(capsys, *words, code=2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--sweep"], "sweep: needs a limit for goodput"),
        (["--sweep", "--goodput", "itl:50"], "needs a limit on ttft or e2e"),
        (["--goodput", "speed:3"], "goodput: 'speed:3' is not NAME:MILLISECONDS"),
        (["--workload", "no-such"], "no-such: No such file or directory; it has to be a file, or one of"),
        (["--header", "x"], "--header is 'x'; it has to be NAME:VALUE"),
        (["--extra", "[1]"], "--extra is '[1]'; it has to be a JSON object"),
        (["--extra", '{"n": 2}'], "extra fields name n, which the client sets itself"),
        (["--url", "localhost"], "the URL is 'localhost'; it has to be like"),
        (["--read", "/no/such.json"], "/no/such.json: cannot be read"),
        (["--out", "/no/such/folder/x.json"], "/no/such/folder/x.json: no such folder"),
        (["--offline", "--workload", "batch", "--length-scale", "99"], "clip with --max-input and --max-output"),
    ],
)
def test_bad_words_are_named(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint in bench(capsys, *words, code=1)


def test_all_changes_of_a_workload_are_made(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", server.url, "--model", "small", "--workload", "mooncake-conversation", "--concurrency", "4"]
    changes = "--from-s 100 --to-s 900 --length-scale 0.01 --max-input 30 --max-output 2 --requests 5"
    _, result = measured(capsys, tmp_path, *words, *changes.split())
    [run] = result.runs
    assert run.summary.served == 5
    for change in ("from 100 s to 900 s", "first 5", "lengths times 0.01", "clipped to 30, answers to 2"):
        assert change in run.record.source


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert f"{url}/v1: no connection" in bench(capsys, "--url", url, code=1)


def test_nothing_served_is_a_failure(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt longer than the context: the probe is answered, the requests are not."""
    words = ["--url", server.url, "--model", "small", "--workload", "batch", "--requests", "1", "--length-scale", "99"]
    printed = bench(capsys, *words, "--concurrency", "1", "--warmup", "0", code=1)
    assert "0 of 1 request served" in printed
    assert "HTTP status" in printed


def test_secrets_are_not_written(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", server.url, "--model", "small", *SHORT, "--concurrency", "4"]
    measured(capsys, tmp_path, *words, "--api-key", "hush", "--header=a:hush")
    written = (tmp_path / "result.json").read_text()
    assert "hush" not in written
    assert json.loads(written)["command"][:2] == ["twostep", "bench"]
