"""What a page of the web, a proxy or a compressing client sends: who is let in, and what a body may become."""

import asyncio
import gzip
import json
import socket
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_server import NAME, Host, Served

from twostep.config.configs import ServerConfig
from twostep.errors import InvalidParameterError
from twostep.openai_api.api_error import ApiError
from twostep.server.http.request_body import Inflater
from twostep.server.observe.request_logs import MAX_PATH, LogLines, RefusalsLog

SHORT: dict[str, Any] = {"model": NAME, "prompt": "One, two,", "max_tokens": 2}
BODY = json.dumps(SHORT).encode()
JSON = {"Content-Type": "application/json"}


def post(front: Served, content: bytes = BODY, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    return httpx.post(front.url + path, content=content, headers={**JSON, **named}, timeout=30)


def assert_error(reply: httpx.Response, status: int, code: str | None) -> str:
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
    message = reply.json()["error"]["message"]
    assert isinstance(message, str)
    return message


# --- hosts and origins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.0.2.7", "[2001:db8::1]:80"]
)
def test_a_name_made_to_point_here_is_refused(fake_server: Served, host: str) -> None:
    assert "--allowed-hosts" in assert_error(post(fake_server, Host=host), 403, "host_not_allowed")
    for path in ("/v1/models", "/health", "/docs", "/metrics", "/nothing"):
        assert httpx.get(fake_server.url + path, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1234", "chat.localhost", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "localhost."]
)
def test_names_of_this_machine_are_not(fake_server: Served, host: str) -> None:
    assert post(fake_server, Host=host).status_code == 200


def test_nor_is_its_own_name(fake_server: Served) -> None:
    assert post(fake_server, Host=f"{socket.gethostname()}:80").status_code == 200


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        (("llm.example",), "LLM.example:80", "x.llm.example"),
        (("*.lan",), "box.lan", "lan"),
        (("*",), "any.example", None),
    ],
)
def test_more_hosts_can_be_allowed(fake_host: Host, allowed: tuple[str, ...], good: str, bad: str | None) -> None:
    with fake_host.front(allowed_hosts=allowed) as front:
        assert post(front, Host=good).status_code == 200
        assert post(front, Host=good, Origin=f"https://{good.lower()}").status_code == 200
        assert bad is None or post(front, Host=bad).status_code == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example", "http://[::1", "file://", "evil"]
)
def test_pages_of_others_are_refused(fake_server: Served, origin: str) -> None:
    """Even if nothing of the answer could be read: the work would be done."""
    assert "--allowed-origins" in assert_error(post(fake_server, Origin=origin), 403, "origin_not_allowed")
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{fake_server.url}/v1/completions", headers=asks)
    assert preflight.status_code == 403
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://app.localhost", "http://127.0.0.1:5173", "http://[::1]:1"]
)
def test_pages_of_this_machine_may_call_it(fake_server: Served, origin: str) -> None:
    reply = post(fake_server, Origin=origin)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, origin)
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert httpx.options(f"{fake_server.url}/v1/completions", headers=asks).status_code == 200


def test_allowed_origins_are_let_in(fake_host: Host) -> None:
    with fake_host.front(allowed_origins=("https://chat.example", "null")) as front:
        assert post(front, Origin="https://chat.example").status_code == 200
        assert post(front, Origin="null").status_code == 200
        assert post(front, Origin="https://other.example").status_code == 403


def test_a_server_for_others_checks_hosts_only_if_told(fake_host: Host) -> None:
    with fake_host.front(loopback=False) as front:
        assert post(front, Host="any.example", Origin="https://any.example").status_code == 200
    with fake_host.front(loopback=False, allowed_hosts=("llm.example",)) as front:
        assert post(front, Host="any.example").status_code == 403
        assert post(front, Host="llm.example").status_code == 200
        assert httpx.get(f"{front.url}/health", headers={"Host": "10.0.0.7"}).status_code == 200


# --- bodies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/xml",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_is_not_sent_as_json_is_refused(fake_server: Served, kind: str, path: str) -> None:
    message = assert_error(post(fake_server, path=path, content_type=kind), 415, "unsupported_media_type")
    assert kind.partition(";")[0] in message
    assert "application/json" in message


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json", ""]
)
def test_json_by_its_names(fake_server: Served, kind: str) -> None:
    assert post(fake_server, content_type=kind).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", "deflate", "identity"])
def test_compressed_bodies(fake_server: Served, encoding: str) -> None:
    packed = {"deflate": zlib.compress(BODY), "identity": BODY}.get(encoding, gzip.compress(BODY))
    assert post(fake_server, packed, content_encoding=encoding).status_code == 200


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress"])
def test_other_encodings_are_named(fake_server: Served, encoding: str) -> None:
    reply = post(fake_server, content_encoding=encoding)
    assert encoding in assert_error(reply, 415, "unsupported_encoding")
    assert reply.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (BODY, "incorrect header"),
        (gzip.compress(BODY)[:-9], "is truncated"),
        (b"", "is truncated"),
        (gzip.compress(BODY) + b"x", "bytes follow"),
        (gzip.compress(BODY) * 2, "bytes follow"),
        (gzip.compress(BODY)[:-8] + bytes(8), "incorrect"),
    ],
)
def test_damaged_compression_is_no_bad_json(fake_server: Served, content: bytes, why: str) -> None:
    message = assert_error(post(fake_server, content, content_encoding="gzip"), 400, None)
    assert "cannot be decompressed as gzip" in message
    assert why in message


def test_a_bomb_is_refused_before_it_has_become_large(fake_host: Host) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    with fake_host.front(max_body_bytes=100_000) as front:
        assert len(bomb) < 100_000
        assert "uncompressed" in assert_error(post(front, bomb, content_encoding="gzip"), 413, "body_too_long")
        assert front.state.bodies.reserved == 0


@pytest.mark.parametrize("size", [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 128 << 10, 300_000])
@pytest.mark.parametrize("cut", [7, 1 << 20])
def test_however_a_body_is_cut_it_becomes_the_same(size: int, cut: int) -> None:
    plain = bytes(number % 7 for number in range(size))
    packed = gzip.compress(plain)

    async def inflated() -> bytes:
        stream, made = Inflater("gzip"), b""
        for at in range(0, len(packed), cut):
            async for part in stream.parts(packed[at : at + cut]):
                assert len(part) <= 64 << 10
                made += part
        stream.end()
        return made

    assert asyncio.run(inflated()) == plain


# --- names, paths, keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stripped", [True, False])
def test_under_a_path_of_a_proxy(fake_host: Host, stripped: bool) -> None:
    """Whether the proxy takes the path away or not."""
    root = "" if stripped else "/llm"
    with fake_host.front(root_path="/llm") as front:
        assert httpx.get(f"{front.url}{root}/").headers["location"] == "/llm/docs"
        assert httpx.get(f"{front.url}{root}/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert 'href="openapi.json"' in httpx.get(f"{front.url}{root}/docs").text
        assert post(front, path=f"{root}/v1/completions").status_code == 200
        assert httpx.get(f"{front.url}{root}/llmx").status_code == 404
        assert 'path="/v1/completions"' in httpx.get(f"{front.url}/metrics").text


def test_the_description_without_a_path_or_a_key(fake_host: Host) -> None:
    """Links are relative, so that it works under any path; and a browser could send no key."""
    with fake_host.front(api_key=("key",)) as front:
        assert httpx.get(f"{front.url}/").headers["location"] == "docs"
        assert httpx.get(f"{front.url}/docs").status_code == 200
        assert "servers" not in httpx.get(f"{front.url}/openapi.json").json()
        assert httpx.get(f"{front.url}/v1/models").status_code == 401


@pytest.mark.parametrize("root", ["llm", "/llm/", "//", "/a b", "/a?b", "http://x/llm"])
def test_what_is_no_path(root: str) -> None:
    with pytest.raises(InvalidParameterError, match="root_path"):
        ServerConfig(root_path=root)


def test_the_log_quotes_paths_that_there_are_not(tmp_path: Path) -> None:
    path = "/v1/x\n2026 200 /forged\x1b[2J\u2028" + "y" * 500
    for as_json in (False, True):
        with (tmp_path / "log").open("w+") as file:
            log = RefusalsLog(LogLines(file, as_json=as_json), later=lambda *_: None)
            log.write("other", 404, ApiError("no such path", status=404), path)
            file.seek(0)
            written = file.read()
        assert len(written.splitlines()) == 1
        assert "/v1/x\\n2026 200 /forged" in written
        assert "\x1b" not in written
        assert len(written) < 3 * MAX_PATH + 200


def test_requests_for_paths_that_there_are_not_are_logged_with_them(
    fake_host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    with fake_host.front(log="text") as front:
        httpx.get(f"{front.url}/v1/embedings")
        httpx.get(f"{front.url}/v1/models/gpt-4")
    said = capfd.readouterr().err
    assert "404 '/v1/embedings': refused" in said
    assert "404 '/v1/models/gpt-4': refused" in said
