"""`twostep generate --file` with the real engine: killed, stopped, taken up again."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

COMMAND = Path(sys.executable).parent / "twostep"
COUNT = 40
ENGINE = ("--max-num-seqs", "4", "--kv-memory", "64MiB", "--max-model-len", "256")


def body(number: int) -> dict[str, Any]:
    """Every fifth request is answered in the chat form, every seventh with two choices."""
    asked = {"temperature": 0, "max_tokens": 8 + number % 40, "n": 2 if number % 7 == 0 else 1}
    if number % 5:
        return {"prompt": f"Question {number}: what is {number} times {number + 1}? Answer:", **asked}
    return {"messages": [{"role": "user", "content": f"Tell me about the number {number}."}], **asked}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "requests.jsonl"
    with path.open("w") as file:
        for number in range(COUNT):
            url = "/v1/completions" if number % 5 else "/v1/chat/completions"
            line = {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body(number)}
            file.write(json.dumps(line) + "\n")
    return path


def command(requests: Path, out: Path, *more: str) -> Sequence[str | Path]:
    return [COMMAND, "generate", "--file", requests, "--out", out, *ENGINE, *more]


def finish(requests: Path, out: Path, *more: str) -> str:
    """Runs to the end; what was said on standard error."""
    result = subprocess.run(command(requests, out, *more), capture_output=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, b""), result.stderr
    return result.stderr.decode()


def stop(requests: Path, out: Path, number: signal.Signals, answers: int, *more: str) -> tuple[int, str]:
    """Sends the signal when so many answers are there; exit code and standard error."""
    with subprocess.Popen(command(requests, out, *more), stderr=subprocess.PIPE) as process:
        started_s = monotonic()
        while not out.exists() or out.read_bytes().count(b"\n") < answers:
            assert process.poll() is None, "it ended too early"
            assert monotonic() - started_s < 60
            sleep(0.005)
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read().decode()
    return process.returncode, said


def said_by_model(out: Path) -> dict[str, list[Any]]:
    """What of each answer must not depend on when and beside whom it was computed."""
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer["response"] for answer in answers}
    assert len(by_id) == len(answers)
    assert all(response["status_code"] == 200 for response in by_id.values())
    return {id_: response["body"]["choices"] for id_, response in by_id.items()}


@pytest.fixture(scope="module")
def uninterrupted(requests: Path, default_model_path: Path) -> dict[str, list[Any]]:
    finish(requests, requests.with_name("whole.jsonl"))
    answers = said_by_model(requests.with_name("whole.jsonl"))
    assert answers.keys() == {f"id-{number}" for number in range(COUNT)}
    return answers


def test_killed_twice_and_resumed_it_has_the_same_answers(
    requests: Path, tmp_path: Path, uninterrupted: dict[str, list[Any]]
) -> None:
    out = tmp_path / "answers.jsonl"
    for answers in (6, 20):
        code, _ = stop(requests, out, signal.SIGKILL, answers)
        assert code == -signal.SIGKILL
        assert answers <= out.read_bytes().count(b"\n") < COUNT
    finish(requests, out)
    assert said_by_model(out) == uninterrupted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_keeps_what_is_finished_and_says_how_to_go_on(
    requests: Path, tmp_path: Path, uninterrupted: dict[str, list[Any]], number: signal.Signals, code: int
) -> None:
    out = tmp_path / "answers.jsonl"
    ended_with, said = stop(requests, out, number, 5)
    assert ended_with == code
    last = said.splitlines()[-1]
    assert re.match(rf"twostep: stopped at \d+/{COUNT} requests, ", last)
    assert last.endswith(f"the same command resumes with the answers in {out}")
    assert "Traceback" not in said
    kept = said_by_model(out)
    assert 5 <= len(kept) < COUNT
    assert kept.items() <= uninterrupted.items()


def test_a_recording_is_not_taken_up_again_and_it_says_what_to_do(
    requests: Path, tmp_path: Path, uninterrupted: dict[str, list[Any]]
) -> None:
    out, recording = tmp_path / "answers.jsonl", ("--record", str(tmp_path / "one.rec"))
    _, said = stop(requests, out, signal.SIGTERM, 5, *recording)
    assert said.splitlines()[-1].endswith(f"the same command with another --record resumes with the answers in {out}")
    again = subprocess.run(command(requests, out, *recording), capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 1
    assert again.stderr.endswith("one.rec exists; a recording is never overwritten, give --record another name\n")
    finish(requests, out, "--record", str(tmp_path / "two.rec"))
    assert said_by_model(out) == uninterrupted


def test_it_says_at_the_start_how_memory_is_divided_and_what_is_set(
    requests: Path, tmp_path: Path, uninterrupted: dict[str, list[Any]]
) -> None:
    out, recording = tmp_path / "answers.jsonl", tmp_path / "run.rec"
    said = finish(requests, out, "--chunking", "tokens=64", "--record", str(recording))
    lines = said.splitlines()
    assert all(line.startswith("twostep: ") for line in lines)
    assert any("KV cache: 64.0 MiB stated = 182 blocks of 16 tokens" in line for line in lines)
    assert any("4 sequences at a time, continuous batching" in line for line in lines)
    assert any("prompts cut by tokens=64; context 256" in line for line in lines)
    assert said_by_model(out) == uninterrupted
    replayed = subprocess.run([COMMAND, "replay", recording], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"identical plans, byte for byte: (\d+) of \1\n", replayed.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs is '0'; it has to be an integer from 1"),
        (["--chunking", "some"], "--chunking is 'some'; it has to be none, tokens=N, time=MILLISECONDS or time=auto"),
        (["--max-model-len", "9000"], "max_model_len is 9000; it has to be from 2 to the context, 8192"),
        (["--kv-memory", "100TiB"], "the KV cache does not fit: "),
        (["--kv-memory", "1KiB"], "the KV cache does not hold "),
        (["--out", "-"], "--out is -; answers go into a file"),
    ],
)
@pytest.mark.usefixtures("default_model_path")
def test_engine_options_out_of_range(requests: Path, tmp_path: Path, options: list[str], message: str) -> None:
    arguments = [COMMAND, "generate", "--file", requests, "--out", tmp_path / "out", *options]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})
    assert result.returncode == 1
    assert result.stderr.startswith(f"twostep: {message}")
    assert result.stderr.count("\n") == 1
