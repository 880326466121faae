"""`twostep bench` from its command line to what it prints and writes."""

import argparse
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_runs import S, outcome
from support.bench_runs import run as run_of
from support.http_server import Served

from twostep.bench.client.outcome import Counting, Failure, FailureKind
from twostep.bench.client.target import Target
from twostep.bench.load.run_record import End, RunRecord
from twostep.bench.load.sweep import Ending
from twostep.bench.report.result import Result, read_result
from twostep.cli import bench as bench_command
from twostep.cli.bench import check_options
from twostep.cli.bench_loads import Loads
from twostep.cli.bench_offline import steps_of
from twostep.cli.bench_runs import Stop
from twostep.cli.main import main
from twostep.engine.outputs import ChunkTime, Timeline
from twostep.errors import TargetError
from twostep.terminal import StatusLine
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.format import write_workload
from twostep.workload.schedule import Closed, Mode, Open

SWEEP = ["--workload", "batch", "--sweep"]
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


def test_a_workload_from_a_pipe_serves_every_level(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_workload(tmp_path / "w", Workload([WorkloadRequest(0.0, 20, 3), WorkloadRequest(0.1, 20, 3)]))
    reader, writer = os.pipe()
    os.write(writer, (tmp_path / "w").read_bytes())
    os.close(writer)
    words = ["--url", server.url, "--model", "small", "--workload", f"/dev/fd/{reader}", "--warmup", "0"]
    _, result = measured(capsys, tmp_path, *words, "--concurrency", "1,2")
    os.close(reader)
    assert [run.summary.served for run in result.runs] == [2, 2]


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
        (["--offline", "--url", "http://127.0.0.1:1"], "--url cannot be used with --offline"),
        (["--offline", "--header", "a:b"], "--header cannot be used with --offline"),
        (["--rate", "1", "--concurrency", "2"], "not allowed with argument"),
        (["--rate", "0"], "argument --rate: '0' is not a list of numbers from 0.001 to 1000000, such as 1,2,4"),
        (["--concurrency", "1.5"], "--concurrency must be a whole number of clients"),
        (["--sweep", "--rate", "1,2", "--goodput", "ttft:1"], "--sweep takes a single starting"),
        (["--sweep", "--concurrency", "2", "--goodput", "ttft:1"], "--sweep rate starts at --rate"),
        (["--chunking", "none"], "--chunking needs --offline"),
        (["--workload", "azure-conv", "--cv", "2"], "--cv is for generated workloads"),
        (["--share", "0.5"], "--share needs --sweep"),
        (["--sweep-s", "30"], "--sweep-s needs --sweep rate"),
        (["--cv", "2"], "--cv needs --rate or --sweep rate"),
        (["--offline", "--endpoint", "chat"], "--endpoint chat cannot be used with --offline"),
        (["--offline", "--no-ignore-eos"], "--no-ignore-eos cannot be used with --offline"),
        (["--read", "x.json", "--rate", "1"], "--rate cannot be used with --read"),
        (["--read", "x.json", "--max-input", "1"], "--max-input cannot be used with --read"),
        (["--warmup", "-1"], "--warmup: '-1' is not a whole number from 0 to 10000"),
        (["--requests", "0"], "--requests: '0' is not a whole number from 1 to 1000000"),
        (["--requests", "many"], "--requests: 'many' is not a whole number from 1 to 1000000"),
        (["--concurrency", "1e30"], "'1e30' is not a list of numbers from 1 to 100000, such as 1,2,4"),
        (["--rate", "1,,2"], "'' is not a list of numbers from 0.001 to 1000000, such as 1,2,4"),
        (["--share", "0"], "--share: '0' is not a number from 1e-06 to 1"),
        *(
            ([f"--{name}", bad], f"argument --{name}: '{bad}' is not a number from")
            for name in ("stall-s", "request-limit-s", "time-limit-s", "sweep-s", "tokens-per-word")
            for bad in ("nan", "inf", "0", "-1", "x")
        ),
        (["--tokens-per-word", "1e-9"], "'1e-9' is not a number from 0.1 to 20"),
    ],
)
def test_what_contradicts_itself_is_refused(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in bench(capsys, *words, code=2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--sweep"], "sweep: needs --goodput"),
        (["--sweep", "--goodput", "itl:50"], "needs a limit on ttft or e2e"),
        (["--goodput", "speed:3"], "goodput: 'speed:3' is not NAME:MILLISECONDS"),
        (["--workload", "no-such"], "no-such: No such file or directory; give a file, or one of"),
        (["--header", "x"], "--header is 'x'; it must have the form NAME:VALUE"),
        (["--extra", "[1]"], "--extra is '[1]'; it must be a JSON object"),
        (["--extra", '{"n": 2}'], "extra fields contain n, which the client sets itself"),
        (["--url", "localhost"], "the URL is 'localhost'; it must be like"),
        (["--read", "/no/such.json"], "/no/such.json: cannot be read"),
        (["--out", "/no/such/folder/x.json"], "/no/such/folder/x.json: no such folder"),
        (["--out", ""], ".: is a folder; give a file"),
        (["--html", "."], ".: is a folder; give a file"),
        (["--out", "x", "--html", "./x"], "x is given for two outputs"),
        (["--sweep", "--goodput", "ttft:9"], "requests of chat wait for earlier answers, so a slow server"),
        ([*SWEEP, "--goodput", "ttft:9000", "--sweep-s", "9"], "9 s of arrivals are too short; allowed: at least 45 s"),
        ([*SWEEP, "--goodput", "ttft:9", "--time-limit-s", "9"], "--time-limit-s 9 is too short for --sweep, whose"),
        (
            ["--workload", "batch", "--sweep", "concurrency", "--concurrency", "99", "--goodput", "itl:9"],
            "--concurrency 99 is more than the 64 conversations or requests",
        ),
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
    problem = f"twostep: {url}/v1: Connection refused; no server is running there (--url gives its address)"
    assert problem in bench(capsys, "--url", url, code=1)


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


# --- what is shown and kept, whatever happens ---------------------------------------------------------------------

Level = Callable[[Stop], RunRecord]
CUT = Failure(FailureKind.CANCELLED, "")


def served(stop: Stop) -> RunRecord:
    return run_of([outcome(i, 0, S) for i in range(4)], mode=Closed(1)).record


def refused(stop: Stop) -> RunRecord:
    raise TargetError("a warm-up request failed")


def signalled(which: signal.Signals, before_a_request: bool) -> Level:
    def level(stop: Stop) -> RunRecord:
        stop.ask(which)
        if before_a_request:
            raise TargetError("stopped before the first request of the run")
        ended = run_of([outcome(0, 0, S), outcome(1, 0, failure=CUT)], mode=Closed(1)).record
        return replace(ended, end=End.INTERRUPTED)

    return level


def as_if(monkeypatch: pytest.MonkeyPatch, *levels: Level) -> None:
    """Runs go as these say, one after the other."""
    coming = iter(levels)

    async def run_load(
        workload: Workload, target: Target, mode: Mode, options: object, line: object, stop: Stop
    ) -> RunRecord:
        return replace(next(coming)(stop), mode=mode)

    monkeypatch.setattr("twostep.cli.bench_runs.run_load", run_load)


def test_finished_levels_outlive_one_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if(monkeypatch, served, refused)
    page = tmp_path / "report.html"
    words = [*SHORT, "--concurrency", "1,3", "--html", str(page)]
    printed = bench(capsys, *words, "--out", str(tmp_path / "result.json"), code=1)
    assert [run.record.mode for run in read_result(tmp_path / "result.json").runs] == [Closed(1)]
    assert page.exists()
    assert "4 of 4 requests served" in printed
    assert "twostep: a warm-up request failed" in printed


def test_a_sweep_that_fails_says_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if(monkeypatch, served, served, refused)
    words = [*SHORT, "--sweep", "concurrency", "--goodput", "ttft:60000", "--out", str(tmp_path / "result.json")]
    printed = bench(capsys, *words, code=1)
    assert "sweep: stopped before the result was found; 2 clients met the limits" in printed
    found = read_result(tmp_path / "result.json").sweep
    assert found is not None
    assert (found.ending, found.met, len(found.points)) == (Ending.STOPPED, 2, 2)


def test_what_there_is_is_in_the_file_after_each_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    seen: list[int] = []

    def looking(stop: Stop) -> RunRecord:
        seen.append(len(read_result(path).runs) if path.exists() else 0)
        return served(stop)

    as_if(monkeypatch, *[looking] * 3)
    bench(capsys, *SHORT, "--concurrency", "1,2,3", "--out", str(path))
    assert seen == [0, 1, 2]


def test_figures_are_shown_though_the_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    as_if(monkeypatch, served)
    monkeypatch.setattr("os.replace", full)
    printed = bench(capsys, *SHORT, "--concurrency", "1,2", "--out", str(tmp_path / "result.json"), code=1)
    assert "4 of 4 requests served" in printed
    assert "result.json: cannot be written: No space left" in printed


def test_a_pipe_gets_one_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    as_if(monkeypatch, served, served)
    bench(capfd, *SHORT, "--concurrency", "1,2", "--out", str(pipe))
    written = os.read(reading, 1 << 16).decode()
    os.close(reading)
    assert len(json.loads(written)["runs"]) == 2


@pytest.mark.parametrize("before_a_request", [True, False])
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_with_what_there_is(
    which: signal.Signals,
    before_a_request: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_if(monkeypatch, served, signalled(which, before_a_request))
    path = tmp_path / "result.json"
    printed = bench(capsys, *SHORT, "--concurrency", "1,2,3", "--out", str(path), code=128 + which)
    assert len(read_result(path).runs) == (1 if before_a_request else 2)
    assert "4 of 4 requests served" in printed
    assert ("1 of 1 request served in 1 s; ended early (interrupted): 1 cut" in printed) != before_a_request
    assert "stopped before the first request" not in printed


def test_a_file_is_shown_by_other_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if(monkeypatch, *[served] * 9)
    path, again = tmp_path / "result.json", tmp_path / "again.json"
    bench(capsys, *SHORT, "--sweep", "concurrency", "--goodput", "ttft:60000", "--out", str(path))
    assert "sweep: " in bench(capsys, "--read", str(path))
    strict = bench(capsys, "--read", str(path), "--goodput", "ttft:900", "--out", str(again))
    assert "0.0% of requests, with TTFT <= 900 ms" in strict
    assert "sweep: " not in strict, "it was found with other limits"
    assert all(run.summary.met == 0 for run in read_result(again).runs)


# --- loads --------------------------------------------------------------------------------------------------------


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_command.add_to(parser.add_subparsers())
    options = parser.parse_args(["bench", *words])
    check_options(options, parser)
    return options


EXAMPLES = [line.strip() for line in bench_command.EXAMPLES.splitlines() if "twostep bench" in line]
DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
EXAMPLES += [line for line in DOCUMENT.splitlines() if line.startswith("twostep bench")]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_understood(example: str) -> None:
    options = parsed(*shlex.split(example)[2:])
    if not options.read:
        loads = Loads(options)
        level = loads.search().start if options.sweep else loads.levels()[0]
        assert loads.at(level).workload.requests


@pytest.mark.parametrize("workload", ["batch", "azure-conv"])
def test_a_rate_of_a_sweep_lasts(workload: str) -> None:
    """A file is repeated if need be."""
    words = ["--workload", workload, "--max-input", "50", "--sweep", "--goodput", "ttft:100", "--requests", "30"]
    for rate in (1.0, 5.0, 100.0):
        load = Loads(parsed(*words)).at(rate)
        starts = [one.arrival_s for one in load.workload.requests]
        assert starts[-1] - starts[0] >= 20 * 0.999
        assert (len(starts) - 1) / (starts[-1] - starts[0]) == pytest.approx(rate, rel=0.001)
        assert f"{rate:g} requests/s, arrivals last" in load.words()


def test_clients_are_no_more_than_can_ask() -> None:
    loads = Loads(parsed("--sweep", "concurrency", "--goodput", "itl:100", "--requests", "9", "--workload", "batch"))
    assert loads.search().highest == 9
    assert loads.at(1.0).words() == "9 requests of batch, 1 client"
    assert loads.at(16.0).words().endswith("16 clients, of which at most 9 can be active at once")
    one = Loads(parsed("--requests", "1", "--concurrency", "1")).at(1.0)
    assert one.words() == "1 request of chat, 1 client"


def test_a_clipping_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    loads = Loads(parsed(*SWEEP, "--goodput", "ttft:100", "--max-input", "30"))
    for rate in (1.0, 4.0, 16.0):
        loads.at(rate)
    assert capsys.readouterr().err.count("prompts clipped") == 1


def test_names_in_a_file_do_not_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hostile.jsonl"
    write_workload(path, Workload([WorkloadRequest(0, 5, 2)], name="\x1b[2Jx", source="\x1b[1A"))
    StatusLine().say(Loads(parsed("--workload", str(path))).at(1.0).words())
    assert capsys.readouterr().err == "twostep: 1 request of \ufffd[2Jx, 1 client\n"
    assert main(["workload", "show", str(path)]) == 0
    assert "name      \ufffd[2Jx\nsource    \ufffd[1A\n" in capsys.readouterr().out
