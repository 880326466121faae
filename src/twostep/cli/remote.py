"""A connection to an OpenAI-compatible server, over `http.client`: what answers, and what errors say."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from twostep.bench.urls import EXAMPLE, api_base
from twostep.errors import InvalidParameterError, TwostepError

CONNECT_S = 10
"""How long a connection may take; an answer may take any time, as Ctrl-C stops it."""
MAX_ERROR_BYTES = 1 << 16


class ServerError(TwostepError):
    """The server cannot be reached, or answers with an error: what it says."""


class Remote:
    """A server by its address, with or without `/v1`. Raises `InvalidParameterError` if `url` is none."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`api_key`: None takes that of the environment, if there is one."""
        self.url = _base(url)
        self._key = api_key or os.environ.get("TWOSTEP_API_KEY")

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at this path. Raises `ServerError`."""
        with self.response("GET", path) as response:
            return json_object(response.read())

    @contextmanager
    def response(self, method: str, path: str, body: object = None) -> Iterator[HTTPResponse]:
        """A successful answer. Leaving closes its connection, by which a server knows that nobody waits any more."""
        url = urlsplit(self.url)
        connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.netloc, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)
            connection.request(method, url.path + path, _encoded(body), self._headers())
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"{self.url}{path}: {_problem(response)}")
            yield response
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.url}: {_words(error)}") from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        return headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {})


def _base(url: str) -> str:
    base = api_base(url)
    if base is None:
        raise InvalidParameterError(f"--url is {url!r}; it has to be like {EXAMPLE}", "url")
    return base


def _encoded(body: object) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _problem(response: HTTPResponse) -> str:
    """What an answer with an error says, in OpenAI's form or any other."""
    try:
        return message_of(json_object(response.read(MAX_ERROR_BYTES)))
    except ServerError:
        return f"{response.status} {response.reason}"


def message_of(event: dict[str, Any]) -> str:
    """What an object with an error says, on one line."""
    error = event.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or event).split())


def json_object(data: bytes) -> dict[str, Any]:
    """Raises `ServerError` if it is none."""
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
    if isinstance(error, ConnectionRefusedError):
        return f"{error.strerror}; no server runs there (--url says where it is)"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"the answer broke off ({type(error).__name__})"
