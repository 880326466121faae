"""Messages over a stream socket: pickles, each after its length. Both ends are ours, one the other's child."""

import pickle
import select
import struct
from collections import deque
from collections.abc import Iterator
from socket import socket
from typing import Any, Generic, TypeVar

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18


def framed(message: object) -> bytes:
    """As `Frames` takes it apart."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Puts messages together from bytes as they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes."""
        self._data += data
        start = 0
        while (whole := self._end(start)) <= len(self._data):
            yield pickle.loads(memoryview(self._data)[start + _LENGTH.size : whole])
            start = whole
        del self._data[:start]

    def _end(self, start: int) -> int:
        """Of the message that begins there; of its length, as long as that is not known."""
        begun = start + _LENGTH.size
        known = begun <= len(self._data)
        return begun + (_LENGTH.unpack_from(self._data, start)[0] if known else 0)


class Wire(Generic[Outgoing, Incoming]):
    """One end, for a thread that waits. All raise `OSError` when the other end is gone, `recv` also `EOFError`."""

    def __init__(self, end: socket) -> None:
        self._socket = end
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._frames = Frames()
        self._come: deque[Incoming] = deque()

    def poll(self, timeout_s: float | None) -> bool:
        """Whether `recv` has something to say, within this time; None waits for ever."""
        return bool(self._come or self._readable.poll(None if timeout_s is None else 1000 * timeout_s))

    def recv(self) -> Incoming:
        """The next message; waits for it."""
        while not self._come:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._come.extend(self._frames.feed(data))
        return self._come.popleft()

    def send(self, message: Outgoing) -> None:
        """Waits until the socket has taken all of it."""
        self._socket.sendall(framed(message))
