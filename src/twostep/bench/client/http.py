"""One HTTP/1.1 request on its own connection, with h11 on an asyncio transport.

Time stamps are taken when bytes arrive, not when a task gets to process them.
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol

import h11

from twostep.bench.client.address import Address, connection_problem
from twostep.bench.client.outcome import FailureError, FailureKind, garbage

CLOSING_S = 1.0
"""Time that a complete answer has to end its HTTP message."""
_STATUS_LINE = b"HTTP/"


@dataclass(frozen=True)
class Patience:
    """Seconds."""

    stall_s: float = 60
    """Maximum time without a byte from the server, and maximum time to connect."""
    request_s: float = 600
    """Maximum time for the whole request."""


class Reader(Protocol):
    """Receives a reply piece by piece. Every method may raise `FailureError`, which ends the request."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Header names are in lower case."""

    def body(self, data: bytes, at_ns: int) -> bool:
        """Returns whether the reply is complete, even if more bytes follow."""

    def end(self) -> None:
        """The HTTP message has ended. Not called after `body` returned True."""


@dataclass(frozen=True)
class HttpRequest:
    """`path` is appended to the base of the address."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""

    def head(self, address: Address) -> h11.Request:
        """Raises `h11.LocalProtocolError` for an invalid header."""
        own = {"host": address.authority, "connection": "close", "content-length": str(len(self.body))}
        headers = [*own.items(), *self.headers.items()]
        return h11.Request(method=self.method, target=address.base + self.path, headers=headers)


async def exchange(address: Address, request: HttpRequest, reader: Reader, patience: Patience) -> None:
    """Sends the request and passes the reply to the reader. Raises `FailureError` if the reply is incomplete."""
    try:
        async with asyncio.timeout(patience.request_s):
            connection = await _connected(address, reader, patience)
            try:
                await connection.send(request.head(address), request.body)
            finally:
                connection.close()
    except TimeoutError:
        raise FailureError(FailureKind.TOO_LONG, f"not complete within {patience.request_s:g} s") from None


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
        raise FailureError(kind, connection_problem(error)) from None


class _Connection(asyncio.Protocol):
    """A connection, until the reply is complete or has failed."""

    def __init__(self, reader: Reader, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader, self._stall_ns = reader, int(stall_s * 1e9)
        self._http = h11.Connection(h11.CLIENT)
        self._first = b""
        """The first bytes of the reply, to check the start of the status line."""
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._whole = False
        self._received_ns = monotonic_ns()
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, head: h11.Request, body: bytes) -> None:
        """Sends the request and waits for the end of the reply. Raises `FailureError`."""
        parts = [self._http.send(event) for event in (head, h11.Data(body), h11.EndOfMessage())]
        self._transport.write(b"".join(part for part in parts if part))
        self._watch()
        await self._over

    def close(self) -> None:
        """Closes at once; unsent bytes are dropped."""
        if self._timer:
            self._timer.cancel()
        self._transport.abort()
        if not self._over.cancel() and not self._over.cancelled():
            self._over.exception()  # marks the exception as retrieved

    # --- called by the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received_ns = monotonic_ns()
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
            self._end(FailureError(FailureKind.DROPPED, "closed before the reply was complete"))
        except FailureError as error:
            self._end(error)

    # --- the reply --------------------------------------------------------------------------------------------------

    def _check_first(self, data: bytes) -> None:
        """Rejects anything but HTTP early: h11 waits for the end of a line, which may never come."""
        missing = len(_STATUS_LINE) - len(self._first)
        self._first += data[:missing]
        if not _STATUS_LINE.startswith(self._first):
            raise garbage(f"not HTTP: {self._first + data[missing:60]!r}")

    def _read(self) -> None:
        """Processes the received bytes. Raises `FailureError` or `h11.RemoteProtocolError`."""
        while not self._over.done():
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                self._reader.begin(event.status_code, headers)
            elif isinstance(event, h11.Data):
                self._take(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._message_ended()
            elif not isinstance(event, h11.InformationalResponse):  # no more events yet
                return

    def _take(self, data: bytes) -> None:
        if not self._whole and self._reader.body(data, self._received_ns):
            self._whole = True
            self._loop.call_later(CLOSING_S, self._end)

    def _message_ended(self) -> None:
        if not self._whole:
            self._reader.end()
        self._end()

    def _end(self, error: FailureError | None = None) -> None:
        """Ends the exchange once. Errors after the reply is complete are ignored."""
        if self._over.done():
            return
        if error is None or self._whole:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _watch(self) -> None:
        """Ends a stalled request; otherwise schedules the next check."""
        quiet_ns = monotonic_ns() - self._received_ns
        if quiet_ns >= self._stall_ns:
            self._end(FailureError(FailureKind.STALLED, f"no byte for {self._stall_ns / 1e9:g} s"))
        else:
            self._timer = self._loop.call_later((self._stall_ns - quiet_ns) / 1e9, self._watch)
