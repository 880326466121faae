"""A partner for `twostep chat` at an OpenAI-compatible server, over `http.client` and server-sent events."""

import argparse
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from twostep.cli.chat import Message, Said
from twostep.errors import InvalidParameterError, TwostepError

CONNECT_S = 10
"""How long a connection may take; an answer may take any time, as Ctrl-C stops it."""
MAX_ERROR_BYTES = 1 << 16


class ServerError(TwostepError):
    """The server cannot be reached, or answers with an error: what it says."""


class RemotePartner:
    """Asks the server for its models if none is named."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._url = _base(options.url)
        self._key = options.api_key or os.environ.get("TWOSTEP_API_KEY")
        asked = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
        self._asked = {name: value for name, value in asked.items() if value is not None}
        self._model = options.model or self._first_model()
        self.name = f"{self._model} at {self._url}"

    def answer(self, messages: list[Message], said: Said) -> Generator[str, None, None]:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "messages": messages, **usage, **self._asked}
        with self._response("POST", "/chat/completions", body) as response:
            for event in _events(response):
                if counted := event.get("usage"):
                    said.tokens = counted.get("completion_tokens")
                for choice in event.get("choices", ()):
                    said.cut |= choice.get("finish_reason") == "length"
                    if text := choice.get("delta", {}).get("content"):
                        yield text

    def close(self) -> None:
        """Each answer has its own connection, which is closed with it."""

    def _first_model(self) -> str:
        with self._response("GET", "/models") as response:
            models = _json(response.read())
        names = [model["id"] for model in models.get("data", ()) if isinstance(model, dict) and "id" in model]
        if not names:
            raise ServerError(f"{self._url} lists no models; is it an OpenAI-compatible server?")
        return str(names[0])

    @contextmanager
    def _response(self, method: str, path: str, body: object = None) -> Iterator[HTTPResponse]:
        """A successful answer. Leaving closes its connection, by which a server knows that nobody waits any more."""
        url = urlsplit(self._url)
        connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.netloc, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)
            connection.request(method, url.path + path, _encoded(body), self._headers())
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"{self._url}{path}: {_problem(response)}")
            yield response
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self._url}: {_words(error)}") from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        return headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {})


def _base(url: str) -> str:
    """Where the API is: servers print their address with `/v1` or without."""
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # the port is none
        known = False
    if not known:
        raise InvalidParameterError(f"--url is {url!r}; it has to be like http://127.0.0.1:8000", "url")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else f'{path}/v1'}"


def _encoded(body: object) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream up to its end mark. Raises `ServerError` for an error event and a stream without end."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = _json(data)
        if "error" in event:
            raise ServerError(_message(event))
        yield event
    raise ServerError("the server ended the answer before its end")


def _problem(response: HTTPResponse) -> str:
    """What an answer with an error says, in OpenAI's form or any other."""
    try:
        return _message(_json(response.read(MAX_ERROR_BYTES)))
    except ServerError:
        return f"{response.status} {response.reason}"


def _message(event: dict[str, Any]) -> str:
    error = event.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or event).split())


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"no JSON object came, but {data[:60]!r}; is it an OpenAI-compatible server?")
    return value


def _words(error: OSError | HTTPException) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_S} s"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"the answer broke off ({type(error).__name__})"
