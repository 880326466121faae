"""Requests to an OpenAI-compatible server, one at a time, for `chat --url` and `explain`.

Uses the HTTP client of `twostep bench`, on an event loop of its own that runs while a reply is awaited."""

import argparse
import asyncio
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from twostep.bench.client.address import Trust, base_url, find_address
from twostep.bench.client.event_stream import ERROR, SseParser, error_in
from twostep.bench.client.http import HttpRequest, Patience, exchange
from twostep.bench.client.outcome import FailureError, failure_message, one_line
from twostep.bench.client.reply import Refusal, check_plain
from twostep.bench.client.target import Target
from twostep.cli import connection
from twostep.cli.chat import Message, Said
from twostep.errors import TwostepError

PATIENCE = Patience(stall_s=1e8, request_s=1e8)
"""No time limit for answers, as Ctrl-C stops them. `find_address` limits the time to connect."""


class ServerError(TwostepError):
    """The server answered with an error, or not as an OpenAI-compatible server should: gives its message."""


class Remote:
    """A server at a URL, with or without `/v1`. Raises `InvalidParameterError` for an invalid URL."""

    def __init__(self, url: str, api_key: str | None, trust: Trust) -> None:
        self.url = base_url(url)
        self._headers = Target(self.url, api_key=api_key).all_headers()
        self._trust = trust
        trust.context_for(self.url)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at this path. Raises `TargetError` if the server cannot be reached, and `ServerError`."""
        with self.response("GET", path) as chunks:
            return json_object(b"".join(chunks))

    @contextmanager
    def response(self, method: str, path: str, body: object = None) -> Iterator[Iterator[bytes]]:
        """The body of a successful reply, in pieces as they arrive. Raises as `get`, while it is read.

        Leaving the context closes the connection, which cancels the request on the server.
        """
        sent = b"" if body is None else json.dumps(body).encode()
        with closing(_Exchange(self.url, self._trust, HttpRequest(method, path, self._headers, sent))) as running:
            yield running.chunks()


class _Exchange:
    """One request; a `Reader` that passes its reply on."""

    def __init__(self, url: str, trust: Trust, request: HttpRequest) -> None:
        self._url, self._trust, self._request = url, trust, request
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._refusal: Refusal | None = None
        self._loop = asyncio.new_event_loop()
        self._asking = self._loop.create_task(self._ask())

    def chunks(self) -> Iterator[bytes]:
        while (chunk := self._loop.run_until_complete(self._chunks.get())) is not None:
            yield chunk
        try:
            self._loop.run_until_complete(self._asking)
            failure = self._refusal and self._refusal.failure()
        except FailureError as error:
            failure = self._refusal.failure() if self._refusal else error.failure
        if failure:
            raise ServerError(f"{self._url}{self._request.path}: {failure_message(failure)}")

    def close(self) -> None:
        """Cancels everything that is running; Ctrl-C may have interrupted it at any point."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(self._asking, *tasks, return_exceptions=True))
        self._loop.close()

    async def _ask(self) -> None:
        try:
            address = await find_address(self._url, self._trust)
            await exchange(address, self._request, self, PATIENCE)
        finally:
            self._chunks.put_nowait(None)

    # --- as a Reader ------------------------------------------------------------------------------------------------

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        if status == 200:
            check_plain(headers)
        else:
            self._refusal = Refusal(status, headers)

    def body(self, data: bytes, at_ns: int) -> bool:
        if self._refusal:
            return self._refusal.body(data)
        self._chunks.put_nowait(data)
        return False

    def end(self) -> None:
        """Nothing to do at the end of the reply."""


def json_object(data: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises `ServerError` if it is not one."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"the reply is not a JSON object: {data[:60]!r}; is it an OpenAI-compatible server?")
    return value


class RemotePartner:
    """Asks the server for its models if none was given."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._server = Remote(options.url, connection.api_key(options), connection.trust(options))
        asked = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
        self._asked = {name: value for name, value in asked.items() if value is not None}
        self._model = options.model or self._first_model()
        self.name = f"{self._model} at {self._server.url}"

    def answer(self, messages: list[Message], said: Said) -> Generator[str, None, None]:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "messages": messages, **usage, **self._asked}
        with self._server.response("POST", "/chat/completions", body) as response:
            for event in _events(response):
                if counted := event.get("usage"):
                    said.tokens = counted.get("completion_tokens")
                for choice in event.get("choices", ()):
                    said.cut |= choice.get("finish_reason") == "length"
                    if text := choice.get("delta", {}).get("content"):
                        yield text

    def close(self) -> None:
        """Nothing to close: each answer closes its own connection."""

    def _first_model(self) -> str:
        models = self._server.get("/models")
        names = [model["id"] for model in models.get("data", ()) if isinstance(model, dict) and "id" in model]
        if not names:
            raise ServerError(f"{self._server.url} lists no models; is it an OpenAI-compatible server?")
        return str(names[0])


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream up to `[DONE]`. Raises `ServerError` for an error event and a stream without end."""
    parser = SseParser()
    for chunk in chunks:
        try:
            events = parser.feed(chunk)
        except FailureError as error:
            raise ServerError(failure_message(error.failure)) from None
        for event in events:
            if event.data == b"[DONE]":
                return
            value = json_object(event.data)
            if event.kind == ERROR or "error" in value:
                raise ServerError(one_line(error_in(event.data)))
            yield value
    raise ServerError("the server closed the stream before [DONE]")
