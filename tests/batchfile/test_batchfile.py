"""Files of requests: what is refused at once, what is answered with an error, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import ANSWER, FakeEngine

from twostep.batchfile.answer_file import AnswerFile
from twostep.batchfile.batch_run import MAX_OUTSTANDING
from twostep.batchfile.request_lines import BatchFileError, check_lines
from twostep.cli.batch import UnansweredError, answer_file
from twostep.cli.main import main
from twostep.input_file import InputFile
from twostep.model.loaded import LoadedModel, open_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model(default_model_path: Path) -> LoadedModel:
    return open_model(default_model_path)


def completion(id_: str, prompt: Any = "Hello", **body: Any) -> dict[str, Any]:
    return {"custom_id": id_, "method": "POST", "url": COMPLETIONS, "body": {"prompt": prompt, **body}}


def chat(id_: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"custom_id": id_, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}


def written(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers_in(path: Path) -> dict[str, dict[str, Any]]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert len(by_id) == len(answers)
    return by_id


def never() -> FakeEngine:
    raise AssertionError("a model was loaded")


def test_answers_in_openai_s_form(model: LoadedModel, tmp_path: Path) -> None:
    requests = written(tmp_path / "in", [chat("a", model="m"), completion("b", seed=3, max_tokens=2)])
    engine = FakeEngine(model)
    answer_file(requests, tmp_path / "out", lambda: engine, ["m"])
    answers = answers_in(tmp_path / "out")
    first, second = answers["a"], answers["b"]
    assert first.keys() == {"id", "custom_id", "response", "error"}
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
    assert first["response"]["body"]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert "ttft_ms" in first["response"]["body"]["timings"]
    assert second["response"]["body"]["choices"][0]["text"] == "Fine,"
    assert {answer["id"] for answer in answers.values()} != {first["id"]}
    assert [params.seed for params in engine.params] == [None, 3]


def test_a_line_of_several_prompts_is_one_answer(model: LoadedModel, tmp_path: Path) -> None:
    requests = written(tmp_path / "in", [completion("a", ["one", "two", "three"], n=2)])
    answer_file(requests, tmp_path / "out", lambda: FakeEngine(model), ["m"])
    [answer] = answers_in(tmp_path / "out").values()
    assert [choice["index"] for choice in answer["response"]["body"]["choices"]] == [0, 1, 2, 3, 4, 5]


def test_a_line_with_a_prompt_that_is_refused_asks_for_none_of_its_prompts(model: LoadedModel, tmp_path: Path) -> None:
    requests = written(tmp_path / "in", [completion("a", ["one", "two", "word " * 2000, "three"]), completion("b")])
    engine = FakeEngine(model)
    with pytest.raises(UnansweredError, match=r"^1 of 2 answers in .* are errors"):
        answer_file(requests, tmp_path / "out", lambda: engine, ["m"])
    assert engine.submitted == ["1.0", "1.1", "2.0"]
    assert engine.aborted == ["1.0", "1.1"]
    answers = answers_in(tmp_path / "out")
    assert [answers[id_]["response"]["status_code"] for id_ in "ab"] == [400, 200]


def test_the_engine_is_closed_whatever_happens(model: LoadedModel, tmp_path: Path) -> None:
    requests = written(tmp_path / "in", [completion(id_) for id_ in "ab"])
    for stop_after in (0, None):
        engine = FakeEngine(model, stop_after=stop_after)
        with pytest.raises(KeyboardInterrupt) if stop_after == 0 else nullcontext():
            answer_file(requests, tmp_path / "out", lambda engine=engine: engine, ["m"])
        assert engine.closed


def test_lines_are_handed_over_as_the_engine_has_room(model: LoadedModel, tmp_path: Path) -> None:
    count = 3 * MAX_OUTSTANDING
    requests = written(tmp_path / "in", (completion(str(number), max_tokens=1) for number in range(count)))
    engine = FakeEngine(model)
    answer_file(requests, tmp_path / "out", lambda: engine, ["m"])
    assert len(answers_in(tmp_path / "out")) == count
    assert engine.most_waiting == MAX_OUTSTANDING


def test_a_bad_body_is_answered_as_such_and_the_others_go_on(model: LoadedModel, tmp_path: Path) -> None:
    lines = [
        completion("hot", temperature="hot"),
        completion("long", "word " * 2000),
        completion("half", ["short", "word " * 2000]),
        completion("other", model="gpt-4o"),
        completion("streamed", stream=True),
        completion("unlucky", seed=13),
        {**completion("bodyless"), "body": None},
        completion("good"),
    ]
    out = tmp_path / "out"
    with pytest.raises(UnansweredError, match=r"^7 of 8 answers in .*out are errors; first: line 1: temperature"):
        answer_file(written(tmp_path / "in", lines), out, lambda: FakeEngine(model), ["m"])
    answers = answers_in(out)
    status = {id_: answer["response"]["status_code"] for id_, answer in answers.items()}
    assert status.pop("good") == 200
    assert status.pop("other") == 404
    assert status.pop("unlucky") == 500
    assert status == dict.fromkeys(["hot", "long", "half", "streamed", "bodyless"], 400)
    assert answers["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert answers["hot"]["response"]["body"]["error"]["param"] == "temperature"


GOOD = json.dumps(completion("a")).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "in contains no requests"),
        (b"\n  \n", "in contains no requests"),
        (GOOD + b"{", "line 2: not JSON: Expecting property name"),
        (b"\xff\xfa\n" + GOOD, "line 1: not JSON: byte 0 is not UTF-8"),
        (GOOD + b"[" * 100_000, "line 2: not JSON: nested too deeply"),
        (b"9" * 5000, "line 1: not JSON: Exceeds the limit"),
        (b"3\n", "line 1: 3 is not an object with custom_id, method, url and body"),
        (GOOD + b"\n" + GOOD, "line 3: custom_id 'a' is also that of line 1"),
        (b'{"custom_id": 3}', "line 1: custom_id is 3; it has to be a string that is not empty"),
        (b'{"custom_id": ""}', "line 1: custom_id is ''; it has to be a string that is not empty"),
        (b'{"custom_id": "a"}', "line 1: method is None; it has to be 'POST'"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}', "line 1: url is '/v1/embeddings'; support"),
        (b'{"custom_id": "a", "method": "POST", "url": ["x"]}', "line 1: url is ['x']; supported: /v1/chat/completi"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_is_done(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(BatchFileError) as refused:
        answer_file(tmp_path / "in", tmp_path / "out", never, ["m"])
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_empty_lines_are_no_requests(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\n" + GOOD + b"  \n\n")
    assert check_lines(InputFile(tmp_path / "in")) == {"a": 2}


def test_a_second_run_answers_only_what_is_left(model: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines = [completion(id_) for id_ in "abcdef"]
    answer_file(written(tmp_path / "in", lines[:2]), out, lambda: FakeEngine(model), ["m"])
    before = out.read_bytes()
    engine = FakeEngine(model)
    answer_file(written(tmp_path / "in", lines), out, lambda: engine, ["m"])
    assert len(engine.submitted) == 4
    assert out.read_bytes().startswith(before)
    assert answers_in(out).keys() == set("abcdef")
    after = out.read_bytes()
    answer_file(tmp_path / "in", out, never, ["m"])
    assert out.read_bytes() == after


def test_errors_of_earlier_runs_are_told_again(model: LoadedModel, tmp_path: Path) -> None:
    lines = [completion("a"), completion("b", temperature="hot"), completion("c", top_p=3)]
    requests, out = written(tmp_path / "in", lines), tmp_path / "out"
    told = "2 of 3 answers in .*out are errors; first: line 2: temperature is 'hot'; .*retry-errors repeats them"
    for load in (lambda: FakeEngine(model), never):
        with pytest.raises(UnansweredError, match=told):
            answer_file(requests, out, load, ["m"])
    with pytest.raises(UnansweredError, match=r"^2 of 4 answers in .* are errors"):
        answer_file(written(tmp_path / "in", [*lines, completion("d")]), out, lambda: FakeEngine(model), ["m"])


def test_errors_are_asked_again_if_so_wished(model: LoadedModel, tmp_path: Path) -> None:
    requests, out = tmp_path / "in", tmp_path / "answers"
    lines = [completion("a"), completion("b", model="other"), completion("c", seed=13), completion("d")]
    with pytest.raises(UnansweredError, match=r"^2 of 4 answers in .* are errors"):
        answer_file(written(requests, lines), out, lambda: FakeEngine(model), ["m"])
    out.chmod(0o640)
    good = [line for line in out.read_bytes().splitlines(keepends=True) if b'"status_code": 200' in line]
    engine = FakeEngine(model)
    with pytest.raises(UnansweredError, match=r"^1 of 4 answers in .* are errors; first: line 3: bad luck"):
        answer_file(requests, out, lambda: engine, ["m", "other"], retry_errors=True)
    assert engine.submitted == ["2.0", "3.0"]
    assert out.read_bytes().startswith(b"".join(good))
    assert answers_in(out).keys() == set("abcd")
    assert out.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"in", "answers"}


def test_nothing_is_rewritten_where_no_answer_is_an_error(model: LoadedModel, tmp_path: Path) -> None:
    requests, out = written(tmp_path / "in", [completion("a")]), tmp_path / "out"
    answer_file(requests, out, lambda: FakeEngine(model), ["m"])
    before = out.stat()
    answer_file(requests, out, never, ["m"], retry_errors=True)
    assert out.stat().st_ino == before.st_ino


def test_a_file_without_its_errors_is_locked_like_the_one_before(tmp_path: Path) -> None:
    out = written(tmp_path / "out", [{"custom_id": "a", "response": None, "error": {"message": "no"}}])
    with AnswerFile(out, ["a"], without_errors=True) as answers:
        assert (answers.answered, out.read_bytes()) == (set(), b"")
        with pytest.raises(BatchFileError, match="another process is writing"):
            AnswerFile(out, ["a"])


def test_salts_reach_the_engine(model: LoadedModel, tmp_path: Path) -> None:
    engine = FakeEngine(model)
    lines = [completion("a", ["x", "y"], cache_salt="ours"), chat("b")]
    answer_file(written(tmp_path / "in", lines), tmp_path / "out", lambda: engine, ["m"])
    assert engine.salts == ["ours", "ours", ""]


def test_wherever_a_kill_tore_the_file_nothing_is_lost_or_doubled(model: LoadedModel, tmp_path: Path) -> None:
    requests = written(tmp_path / "in", [completion(id_, max_tokens=1) for id_ in "abc"])
    answer_file(requests, tmp_path / "out", lambda: FakeEngine(model), ["m"])
    whole = (tmp_path / "out").read_bytes()
    for size in (*range(0, len(whole), 97), len(whole) - 1):
        (tmp_path / "out").write_bytes(whole[:size])
        answer_file(requests, tmp_path / "out", lambda: FakeEngine(model), ["m"])
        assert answers_in(tmp_path / "out").keys() == set("abc")
        kept = whole[: whole.rfind(b"\n", 0, size) + 1]
        assert (tmp_path / "out").read_bytes().startswith(kept)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"custom_id": "z", "response": {}, "error": None}, "line 1: custom_id 'z' is not among the requests"),
        ({"custom_id": ["a"], "response": {}, "error": None}, "line 1: custom_id ['a'] is not among the requests"),
        (completion("a"), "line 1: {'custom_id': 'a', 'method': 'POST', 'url': '/v1/completions...' is not an answer"),
        (["a"], "line 1: ['a'] is not an answer to a request"),
    ],
)
def test_answers_to_something_else_are_left_alone(tmp_path: Path, line: object, message: str) -> None:
    requests, out = written(tmp_path / "in", [completion("a")]), written(tmp_path / "out", [line])
    before = out.read_bytes()
    with pytest.raises(BatchFileError) as refused:
        answer_file(requests, out, never, ["m"])
    assert message.split("...")[0] in str(refused.value)
    assert out.read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    requests = written(tmp_path / "in", [completion("a")])
    with AnswerFile(tmp_path / "out", ["a"]), pytest.raises(BatchFileError, match="another process is writing"):
        answer_file(requests, tmp_path / "out", never, ["m"])


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(
    model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = written(tmp_path / "in", [completion(id_) for id_ in "abcd"])
    with pytest.raises(KeyboardInterrupt):
        answer_file(requests, tmp_path / "out", lambda: FakeEngine(model, stop_after=3), ["m"])
    assert answers_in(tmp_path / "out").keys() == set("bcd")
    message = capsys.readouterr().err
    assert message.startswith("twostep: stopped at 3/4 requests, ")
    assert message.endswith(f"the same command resumes with the answers in {tmp_path / 'out'}\n")


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from twostep.batchfile.answer_file import AnswerFile
with AnswerFile(Path(sys.argv[1]), [str(n) for n in range(10**6)]) as answers:
    for number in range(10**6):
        answers.write({"custom_id": str(number), "response": "x" * 5000, "error": None})
        if number == 100:
            print("on the way", flush=True)
"""


def test_a_killed_process_leaves_whole_lines_and_at_most_one_torn(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    with AnswerFile(tmp_path / "out", [str(number) for number in range(10**6)]) as answers:
        count = len(answers.answered)
    assert count > 100
    assert answers.answered == {str(number) for number in range(count)}
    assert answers_in(tmp_path / "out").keys() == answers.answered


THREADS = f"it has to be an integer from 1 to the number of CPUs, which is {os.cpu_count()} here"
KV_MEMORY = (
    "it has to be a share above 0 and at most 1, such as 0.5, a size in B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as "
    "2GiB, or a number of blocks, such as 500 blocks"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0.5"], "--temperature cannot be used with --file: each line of the file sets it"),
        (["--max-tokens", "5"], "--max-tokens cannot be used with --file: each line of the file sets it"),
        (["Why?"], "PROMPT cannot be used with --file: each line of the file sets it"),
        (["--raw"], "--raw cannot be used with --file: each line of the file sets it"),
        (["--stats"], "--executor and --stats cannot be used with --file"),
        (["--threads", "0"], f"--threads is '0'; {THREADS}"),
        (["--kv-memory", "2"], f"--kv-memory is '2'; {KV_MEMORY}"),
        (["--kv-memory", "2 GiBs"], f"--kv-memory is '2 GiBs'; {KV_MEMORY}"),
        (["--kv-memory", "0"], f"--kv-memory is '0'; {KV_MEMORY}"),
        (["--kv-memory", "50%"], f"--kv-memory is '50%'; {KV_MEMORY}"),
        ([], "{file} contains no requests"),
    ],
)
def test_options_that_a_file_makes_void(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "in", [])
    assert main(["generate", *arguments, "--file", str(file), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"twostep: {message.format(file=file)}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "x"], "--file and --out must be given together"),
        (["--out", "x"], "--file and --out must be given together"),
        (["Why?", "--served-model-name", "x"], "--served-model-name needs --file"),
        (["Why?", "--max-num-seqs", "3"], "--max-num-seqs needs --file"),
        (["Why?", "--kv-memory", "1GB"], "--kv-memory needs --file"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", *arguments])
    assert capsys.readouterr().err == f"twostep: {message} (see twostep generate --help)\n"


@pytest.mark.parametrize("tail", [b"my precious notes", b'{"custom_id": "a", "method": "POST"}', b"\0"])
def test_a_last_line_without_an_end_that_is_no_torn_answer_is_never_cut_off(tmp_path: Path, tail: bytes) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(tail)
    with pytest.raises(BatchFileError, match="is not an answer"):
        AnswerFile(out, {"a": 1})
    assert out.read_bytes() == tail


def test_requests_from_a_pipe_are_checked_and_answered(model: LoadedModel, tmp_path: Path) -> None:
    lines = [completion("a"), chat("b")]
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe:
        pipe.writelines(json.dumps(line).encode() + b"\n" for line in lines)
    answer_file(Path(f"/dev/fd/{reader}"), tmp_path / "out", lambda: FakeEngine(model), ["m"])
    os.close(reader)
    assert answers_in(tmp_path / "out").keys() == {"a", "b"}
