"""`twostep chat` as a user meets it: with a server that does what a test wants, and with a model of this machine."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

COMMAND = Path(sys.executable).parent / "twostep"

Answer = Callable[[BaseHTTPRequestHandler], None]


class StubServer(ThreadingHTTPServer):
    """Answers each chat request as `answer` says; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.answer: Answer = saying("Hel", "lo!")
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.waiting, self.left = Event(), Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class StubHandler(BaseHTTPRequestHandler):
    server: StubServer

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.respond(json.dumps({"object": "list", "data": [{"id": "stub-1"}, {"id": "stub-2"}]}).encode())

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers["Authorization"])
        self.server.answer(self)

    def respond(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def event(self, value: object) -> None:
        data = value if isinstance(value, str) else json.dumps(value)
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def chunk(text: str | None = None, finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
    content = delta if text is None else {**delta, "content": text}
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]}


def events(handler: Any, *values: object) -> None:
    handler.send_response(200)
    handler.end_headers()
    for value in values:
        handler.event(value)


def saying(*pieces: str, tokens: int | None = 4, finish_reason: str = "stop") -> Answer:
    usage = [] if tokens is None else [{"choices": [], "usage": {"completion_tokens": tokens}}]

    def answer(handler: Any) -> None:
        said = map(chunk, pieces)
        events(handler, chunk("", role="assistant"), *said, chunk(finish_reason=finish_reason), *usage, "[DONE]")

    return answer


def stalling(handler: Any) -> None:
    """Begins an answer, and waits until nobody waits for it."""
    events(handler, chunk("Once upon"))
    handler.server.waiting.set()
    handler.connection.settimeout(30)
    if handler.connection.recv(1) == b"":
        handler.server.left.set()


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat(*arguments: str, said: str = "Hi\n", **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [COMMAND, "chat", *arguments], input=said, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def complaint(*arguments: str, code: int = 1) -> str:
    result = chat(*arguments)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert result.stderr.startswith("twostep: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("twostep: ").rstrip()


class TestWithAServer:
    def test_an_answer_is_shown_and_timed(self, stub: StubServer) -> None:
        result = chat("--url", stub.url)
        assert (result.returncode, result.stdout) == (0, "Hello!\n")
        greeting, times = result.stderr.splitlines()
        assert greeting == f"stub-1 at {stub.url}/v1; /help lists commands, Ctrl-D quits"
        assert re.fullmatch(r"\[TTFT \d+\.\d{3} s, 4 tokens, [\d.]+ tokens/s\]", times)

    def test_all_that_was_said_goes_along(self, stub: StubServer) -> None:
        chat("--url", stub.url, "--system", "Be brief.", said="Hi\n\n  Who are you? \n")
        assert [message["content"] for message in stub.bodies[0]["messages"]] == ["Be brief.", "Hi"]
        roles = [message["role"] for message in stub.bodies[1]["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        contents = [message["content"] for message in stub.bodies[1]["messages"]]
        assert contents == ["Be brief.", "Hi", "Hello!", "Who are you?"]

    def test_what_is_asked_of_the_server(self, stub: StubServer) -> None:
        options = ("--max-tokens", "9", "--temperature", "0.25", "--seed", "3")
        chat("stub-2", "--url", f"{stub.url}/v1/", *options, TWOSTEP_API_KEY="sesame")
        [body] = stub.bodies
        assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("stub-2", 9, 0.25, 3)
        assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
        assert stub.keys == ["Bearer sesame"]

    def test_commands(self, stub: StubServer) -> None:
        said = "Hi\n/system In French.\nWho?\n/reset\nWhat?\n/system\nWhere?\n /etc\n/exit\nNever sent\n"
        assert chat("--url", stub.url, said=said).returncode == 0
        assert [[message["content"] for message in body["messages"]] for body in stub.bodies] == [
            ["Hi"],
            ["In French.", "Hi", "Hello!", "Who?"],
            ["In French.", "What?"],
            ["What?", "Hello!", "Where?"],
            ["What?", "Hello!", "Where?", "Hello!", "/etc"],
        ]

    def test_commands_that_are_none(self, stub: StubServer) -> None:
        result = chat("--url", stub.url, said="/rest\n/help\n")
        assert "twostep: unknown command /rest; /help lists the commands\n" in result.stderr
        assert "/reset         start a new conversation\n" in result.stderr
        assert stub.bodies == []

    def test_a_server_that_counts_no_tokens(self, stub: StubServer) -> None:
        stub.answer = saying("a", "b", "c", tokens=None)
        assert re.search(r"\[TTFT \d\.\d+ s, 3 pieces, [\d.]+ pieces/s\]", chat("--url", stub.url).stderr)

    def test_one_token_has_no_rate(self, stub: StubServer) -> None:
        stub.answer = saying("a", tokens=1)
        assert re.search(r"\[TTFT \d\.\d+ s, 1 tokens\]", chat("--url", stub.url).stderr)

    def test_an_answer_that_was_cut(self, stub: StubServer) -> None:
        stub.answer = saying("a", "b", finish_reason="length")
        assert chat("--url", stub.url).stderr.rstrip().endswith("tokens/s, cut at the token limit]")

    def test_ctrl_c_stops_the_answer_and_nothing_else(self, stub: StubServer) -> None:
        stub.answer = stalling
        with subprocess.Popen(
            [COMMAND, "chat", "--url", stub.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:  # fmt: skip
            assert process.stdin
            assert process.stdout
            process.stdin.write(b"Tell me a story\n")
            process.stdin.flush()
            assert stub.waiting.wait(30)
            assert process.stdout.read(9) == b"Once upon"
            process.send_signal(signal.SIGINT)
            assert stub.left.wait(10), "the server is not told"
            stub.answer = saying("Fine.")
            shown, told = process.communicate(b"And then?\n", timeout=30)
        assert (process.returncode, shown) == (0, b"\nFine.\n")
        assert b"stopped\n" in told
        contents = [message["content"] for message in stub.bodies[1]["messages"]]
        assert contents == ["Tell me a story", "Once upon", "And then?"]


class TestWhatGoesWrong:
    def failed(self, stub: StubServer, answer: Answer) -> str:
        """What is said of an answer that failed; the conversation goes on, and the question is forgotten."""
        good = stub.answer

        def once(handler: Any) -> None:
            stub.answer = good
            answer(handler)

        stub.answer = once
        result = chat("--url", stub.url, said="Hi\nAgain\n")
        assert (result.returncode, result.stdout[-7:]) == (0, "Hello!\n")
        [problem] = [line for line in result.stderr.splitlines() if line.startswith("twostep: ")]
        return problem.removeprefix("twostep: ")

    def test_an_error_in_openai_s_form(self, stub: StubServer) -> None:
        body = b'{"error": {"message": "too\\nlong", "type": "invalid_request_error", "code": null}}'
        problem = self.failed(stub, lambda handler: handler.respond(body, 400))
        assert problem == f"{stub.url}/v1/chat/completions: status 400: too long"
        assert [message["content"] for message in stub.bodies[1]["messages"]] == ["Again"]

    def test_an_error_in_no_form(self, stub: StubServer) -> None:
        problem = self.failed(stub, lambda handler: handler.respond(b"<html>", 502))
        assert problem == f"{stub.url}/v1/chat/completions: status 502: <html>"

    def test_an_error_in_the_middle(self, stub: StubServer) -> None:
        problem = self.failed(stub, lambda handler: events(handler, chunk("He"), {"error": {"message": "engine died"}}))
        assert problem == "engine died"
        assert [message["content"] for message in stub.bodies[1]["messages"]] == ["Hi", "He", "Again"]

    def test_an_answer_without_end(self, stub: StubServer) -> None:
        assert self.failed(stub, lambda handler: events(handler, chunk("He"))).startswith(
            "the server closed the stream before [DONE]"
        )

    def test_an_answer_that_is_no_json(self, stub: StubServer) -> None:
        problem = self.failed(stub, lambda handler: events(handler, "nonsense"))
        assert problem == "the reply is not a JSON object: b'nonsense'; is it an OpenAI-compatible server?"

    def test_nobody_at_the_address(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert (
            complaint("--url", url)
            == f"{url}/v1: Connection refused; no server is running there (--url gives its address)"
        )

    def test_a_password_in_the_url_is_not_shown(self) -> None:
        assert "secret" not in complaint("--url", "http://user:secret@host")

    @pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", "http://[::1"])
    def test_addresses_that_are_none(self, url: str) -> None:
        assert complaint("--url", url) == f"the URL is {url!r}; it must be like http://127.0.0.1:8000"

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["--url", "http://a", "--threads", "1"], "--threads cannot be used with --url"),
            (["--api-key", "x"], "--api-key needs --url"),
        ],
    )
    def test_usage(self, arguments: list[str], problem: str) -> None:
        assert complaint(*arguments, code=2).startswith(problem)


@pytest.mark.usefixtures("default_model_path")
class TestWithAModel:
    def test_a_conversation(self) -> None:
        greedy = ("--temperature", "0", "--max-tokens", "24")
        result = chat(*greedy, said="Name three animals.\nNow say it in French.\n")
        assert result.returncode == 0
        alone = chat(*greedy, said="Now say it in French.\n")
        assert not result.stdout.endswith(alone.stdout), "what was said before makes no difference"
        greeting, *times = result.stderr.splitlines()
        assert greeting.startswith("smollm2-135m; ")
        assert len(times) == 2
        assert all(re.match(r"\[TTFT \d+\.\d{3} s, \d+ tokens, [\d.]+ tokens/s", line) for line in times)

    def test_same_seed_same_answer(self) -> None:
        first, again, other = (chat("--seed", seed, "--max-tokens", "12").stdout for seed in ("1", "1", "2"))
        assert first == again != other

    def test_a_question_that_does_not_fit(self) -> None:
        result = chat("--max-tokens", "4", said="word " * 9000 + "\nHi\n")
        assert result.returncode == 0
        assert re.search(r"twostep: the prompt has \d+ tokens; prompt and answer together have at most", result.stderr)
        assert result.stderr.count("[TTFT") == 1

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["no/such.gguf"], "no/such.gguf: no such file"),
            (["--max-tokens", "0"], "max_tokens is 0; it has to be an integer from 1"),
            (["--temperature", "-1"], "temperature is -1.0; it has to be a number from 0"),
        ],
    )
    def test_what_cannot_be_asked(self, arguments: list[str], problem: str) -> None:
        assert complaint(*arguments).startswith(problem)


def test_at_a_terminal_ctrl_c_throws_a_line_away_and_ctrl_d_leaves(stub: StubServer) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [COMMAND, "chat", "--url", stub.url], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:  # fmt: skip
        os.close(theirs)
        try:
            read_until(ours, "> $")
            os.write(ours, b"half a li")
            read_until(ours, "half a li$")
            interrupt_until_prompted(process, ours)
            os.write(ours, b"Hi\n")
            read_until(ours, r"Hello!\r\n\[TTFT .*\]\r\n> $")
            os.write(ours, b"\x04")
            assert process.wait(20) == 0
        finally:
            process.kill()  # else a failure would wait for it
    os.close(ours)
    assert [message["content"] for message in stub.bodies[0]["messages"]] == ["Hi"]


def interrupt_until_prompted(process: "subprocess.Popen[bytes]", terminal: int) -> None:
    """Python does not see a signal that comes after readline has shown a character and before it waits for the next;
    a person would press Ctrl-C again."""
    for _ in range(30):
        process.send_signal(signal.SIGINT)
        if select.select([terminal], [], [], 1)[0]:
            break
    read_until(terminal, "> $")


def read_until(terminal: int, pattern: str) -> None:
    """What the terminal shows has to come to match in half a minute."""
    shown = ""
    while not re.search(pattern, shown):
        assert select.select([terminal], [], [], 30)[0], f"only {shown!r} came"
        shown += os.read(terminal, 1024).decode()
