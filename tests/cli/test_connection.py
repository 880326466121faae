"""One client and one wording for every command that asks a server: keys, certificates, and nobody there."""

import json
import socket
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from twostep.cli.main import main

CERTIFICATE = Path(__file__).parents[1] / "data" / "tls-127.0.0.1.pem"
"""Its own issuer, with its key: for this test alone."""
COMMANDS = [["chat", "--url"], ["explain", "--url"], ["bench", "--requests", "1", "--url"]]
BILL = "/v1/requests?limit=1"


class Handler(BaseHTTPRequestHandler):
    """Wants a key; lists one model, and has served no request."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer sesame":
            self.answer(401, {"error": {"message": "that is no key"}})
        elif self.path == BILL:
            self.answer(200, {"first_id": None})
        else:
            self.answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.answer(400, {"error": {"message": "nothing is answered here"}})

    def answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that do not trust it leave."""


def serving(tls: bool) -> Iterator[str]:
    with Server(("127.0.0.1", 0), Handler) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def plain() -> Iterator[str]:
    yield from serving(tls=False)


@pytest.fixture
def tls() -> Iterator[str]:
    yield from serving(tls=True)


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line on standard error: `bench` says before what it is about to measure."""
    assert main(words) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("twostep: ")
    return line.removeprefix("twostep: ")


each_command = pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])


@each_command
def test_nobody_there(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    problem = "Connection refused; no server is running there (--url gives its address)"
    assert complaint(capsys, *words, url) == f"{url}/v1: {problem}"


@each_command
@pytest.mark.parametrize("key", [[], ["--api-key", "wrong"]])
def test_a_key_that_is_missing_or_wrong(
    words: list[str], key: list[str], plain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint(capsys, *words, plain, *key)
    assert message.startswith(f"{plain}/v1/")
    assert message.endswith(": status 401: that is no key; the key is set by --api-key or TWOSTEP_API_KEY")


@each_command
def test_a_certificate_that_is_not_trusted(words: list[str], tls: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = complaint(capsys, *words, tls, "--api-key", "sesame")
    assert message.startswith(f"{tls}/v1/")
    assert ": certificate not trusted: self-signed certificate" in message.replace("self signed", "self-signed")
    assert message.endswith("(--cacert FILE adds trusted ones, --insecure accepts any)")


def test_a_named_model_does_not_hide_the_certificate(tls: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "certificate not trusted" in complaint(capsys, "bench", "--url", tls, "--model", "m")


@each_command
@pytest.mark.parametrize("trust", [["--insecure"], ["--cacert", str(CERTIFICATE)]], ids=lambda words: words[0])
def test_a_certificate_that_is_to_be_trusted(
    words: list[str],
    trust: list[str],
    tls: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes then is the server's own answer."""
    monkeypatch.setattr("sys.stdin", StringIO(""))
    command = [*words, tls, "--api-key", "sesame", *trust]
    if words[0] == "chat":
        assert main(command) == 0
        assert capsys.readouterr().err.startswith(f"m at {tls}/v1; /help")
    else:
        expected = {
            "explain": "the server has no finished request to explain",
            "bench": "status 400: nothing is answered here",
        }
        assert complaint(capsys, *command).endswith(expected[words[0]])


@each_command
@pytest.mark.parametrize(
    ("url", "trust", "problem"),
    [
        ("https://127.0.0.1:9", ["--cacert", "/none"], "--cacert is /none: No such file or directory"),
        ("https://127.0.0.1:9", ["--cacert", __file__], f"--cacert is {__file__}, which contains no PEM cert"),
        ("https://127.0.0.1:9", ["--cacert", "/none", "--insecure"], "--insecure and --cacert exclude each other"),
        ("http://127.0.0.1:9", ["--insecure"], "--insecure and --cacert need an https:// URL; the URL is http:"),
    ],
)
def test_what_cannot_be_trusted(
    words: list[str], url: str, trust: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(capsys, *words, url, *trust).startswith(problem)


def test_a_server_of_tls_that_is_asked_without(tls: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever its library does with it, the message names the address."""
    assert complaint(capsys, "explain", "--url", tls.replace("https", "http")).startswith(tls.replace("https", "http"))
