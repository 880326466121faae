"""One request over a connection of its own, by HTTP/1.1 (h11), on asyncio's bare transport: a chunk has the time at
which its bytes came, not that at which a task got to them."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol

import h11

from twostep.bench.client.address import Address, connection_words
from twostep.bench.client.outcome import FailureError, FailureKind, garbage

CLOSING_S = 1.0
"""A reply that is whole may take so long to end as HTTP wants it."""
_STATUS_LINE = b"HTTP/"


@dataclass(frozen=True)
class Patience:
    """Seconds."""

    stall_s: float = 60
    """Without a byte from the server, or until it takes the connection."""
    request_s: float = 600
    """For all of it."""


class Reader(Protocol):
    """Takes a reply as it comes. All may raise `FailureError`, which ends the request."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Names of headers are in lower case."""

    def body(self, data: bytes, at_ns: int) -> bool:
        """Whether the reply is whole, whatever may still come."""

    def end(self) -> None:
        """The reply has ended as HTTP wants it. Not called after `body` has said that it is whole."""


@dataclass(frozen=True)
class Request:
    """`path` comes after the address's base."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""

    def head(self, address: Address) -> h11.Request:
        """Raises `h11.LocalProtocolError` for a header that cannot be sent."""
        own = {"host": address.authority, "connection": "close", "content-length": str(len(self.body))}
        headers = [*own.items(), *self.headers.items()]
        return h11.Request(method=self.method, target=address.base + self.path, headers=headers)


async def exchange(address: Address, request: Request, reader: Reader, patience: Patience) -> None:
    """Sends the request and has the reader take the reply. Raises `FailureError` if that is not whole."""
    try:
        async with asyncio.timeout(patience.request_s):
            connection = await _connected(address, reader, patience)
            try:
                await connection.asked(request.head(address), request.body)
            finally:
                connection.close()
    except TimeoutError:
        raise FailureError(FailureKind.TOO_LONG, f"no end within {patience.request_s:g} s") from None


async def _connected(address: Address, reader: Reader, patience: Patience) -> "_Connection":
    name = address.name if address.tls else None
    try:
        async with asyncio.timeout(patience.stall_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(reader, patience.stall_s),
                address.ip,
                address.port,
                ssl=address.tls,
                server_hostname=name,
            )
            return connection
    except TimeoutError:
        raise FailureError(FailureKind.STALLED, f"no connection within {patience.stall_s:g} s") from None
    except OSError as error:
        kind = FailureKind.TLS if isinstance(error, ssl.SSLError) else FailureKind.REFUSED
        raise FailureError(kind, connection_words(error)) from None


class _Connection(asyncio.Protocol):
    """Until the reply is whole or has failed."""

    def __init__(self, reader: Reader, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader, self._stall_ns = reader, int(stall_s * 1e9)
        self._http = h11.Connection(h11.CLIENT)
        self._first = b""
        """Bytes of a reply, up to as many as a status line must begin with."""
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._whole = False
        self._heard_ns = monotonic_ns()
        self._timer: asyncio.TimerHandle | None = None

    async def asked(self, head: h11.Request, body: bytes) -> None:
        """Raises `FailureError`."""
        parts = [self._http.send(event) for event in (head, h11.Data(body), h11.EndOfMessage())]
        self._transport.write(b"".join(part for part in parts if part))
        self._watch()
        await self._over

    def close(self) -> None:
        """At once; what has not been sent is not sent any more."""
        if self._timer:
            self._timer.cancel()
        self._transport.abort()
        if not self._over.cancel() and not self._over.cancelled():
            self._over.exception()  # somebody has looked at it, whatever ended the waiting

    # --- called by the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard_ns = monotonic_ns()
        try:
            self._check_first(data)
            self._http.receive_data(data)
            self._read()
        except h11.RemoteProtocolError as error:
            self._end(garbage(f"not HTTP: {error}"))
        except FailureError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            return self._end(FailureError(FailureKind.DROPPED, str(exc) or type(exc).__name__))
        try:
            self._http.receive_data(b"")
            self._read()
        except h11.RemoteProtocolError:
            self._end(FailureError(FailureKind.DROPPED, "closed before the reply was whole"))
        except FailureError as error:
            self._end(error)

    # --- what came ------------------------------------------------------------------------------------------------

    def _check_first(self, data: bytes) -> None:
        """h11 waits for the end of a line, which what is not HTTP may never bring."""
        missing = len(_STATUS_LINE) - len(self._first)
        self._first += data[:missing]
        if not _STATUS_LINE.startswith(self._first):
            raise garbage(f"not HTTP: {self._first + data[missing:60]!r}")

    def _read(self) -> None:
        """What has come. Raises `FailureError` or `h11.RemoteProtocolError`."""
        while not self._over.done():
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                self._reader.begin(event.status_code, headers)
            elif isinstance(event, h11.Data):
                self._take(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._message_ended()
            elif not isinstance(event, h11.InformationalResponse):  # there is nothing more to read
                return

    def _take(self, data: bytes) -> None:
        if not self._whole and self._reader.body(data, self._heard_ns):
            self._whole = True
            self._loop.call_later(CLOSING_S, self._end)

    def _message_ended(self) -> None:
        if not self._whole:
            self._reader.end()
        self._end()

    def _end(self, error: FailureError | None = None) -> None:
        """Once; what goes wrong after the reply is whole does not matter."""
        if self._over.done():
            return
        if error is None or self._whole:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _watch(self) -> None:
        """Ends a request that has stalled; looks again when it would have at the earliest."""
        quiet_ns = monotonic_ns() - self._heard_ns
        if quiet_ns >= self._stall_ns:
            self._end(FailureError(FailureKind.STALLED, f"nothing came for {self._stall_ns / 1e9:g} s"))
        else:
            self._timer = self._loop.call_later((self._stall_ns - quiet_ns) / 1e9, self._watch)
