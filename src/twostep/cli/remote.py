"""A connection to an OpenAI-compatible server, for commands that ask one thing at a time.

The HTTP client is that of `twostep bench`, on an event loop for each request, which runs while its reply is awaited.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from twostep.bench.client.address import Trust, base_url, find_address
from twostep.bench.client.http import Patience, Request, exchange
from twostep.bench.client.outcome import FailureError, told
from twostep.bench.client.reply import Refusal, check_plain
from twostep.bench.client.target import Target
from twostep.errors import TwostepError

PATIENCE = Patience(stall_s=1e8, request_s=1e8)
"""An answer may take any time, as Ctrl-C stops it. How long a connection may take `find_address` knows."""


class ServerError(TwostepError):
    """The server answers with an error, or not as it should: what it says."""


class Remote:
    """A server by its address, with or without `/v1`. Raises `InvalidParameterError` if `url` is none."""

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
        """The body of a successful answer as it comes. Raises as `get`, when it is read.

        Leaving closes the connection, by which a server knows that nobody waits any more.
        """
        sent = b"" if body is None else json.dumps(body).encode()
        with closing(_Exchange(self.url, self._trust, Request(method, path, self._headers, sent))) as running:
            yield running.chunks()


class _Exchange:
    """One request; a `Reader` that hands its reply on."""

    def __init__(self, url: str, trust: Trust, request: Request) -> None:
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
            raise ServerError(f"{self._url}{self._request.path}: {told(failure)}")

    def close(self) -> None:
        """Ends what is under way; Ctrl-C may have come at any point of it."""
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
        """All is there."""


def json_object(data: bytes) -> dict[str, Any]:
    """Raises `ServerError` if it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"no JSON object came, but {data[:60]!r}; is it an OpenAI-compatible server?")
    return value
