"""Messages over a stream socket: msgpack, each behind a header with the version of the format and its length."""

import select
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from typing import Any, Generic, TypeVar

import msgspec

from twostep.engine.backend import Submit
from twostep.engine.process.messages import FromEngine, Message, ToEngine
from twostep.engine.text.packed_logprobs import PackedLogprobs
from twostep.errors import InvalidParameterError, TwostepError

VERSION = 2
"""Of the format. It changes with the header and with every message that an older reader would misread."""
MAX_MESSAGE_BYTES = 1 << 30
"""Longest message, without its header: some millions of output tokens with 20 log-probabilities each."""

_HEADER = struct.Struct("!BI")
"""The version, then the length of what follows."""
_READ_BYTES = 1 << 18

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing", bound=Message)


class WireError(TwostepError):
    """The other end sent bytes that are no message of this version: says what they are."""


class MessageTooLargeError(TwostepError):
    """A message has more than `MAX_MESSAGE_BYTES` and was not sent."""


def framed(message: Message) -> bytearray:
    """The bytes to send. Raises `MessageTooLargeError`, and `InvalidParameterError` for a number beyond 64 bits."""
    frame = bytearray(_HEADER.size)
    try:
        _ENCODER.encode_into(message, frame, _HEADER.size)
    except OverflowError:
        raise _too_large(message) from None
    length = len(frame) - _HEADER.size
    if length > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(f"a message has {length} bytes; at most {MAX_MESSAGE_BYTES} are sent")
    _HEADER.pack_into(frame, 0, VERSION, length)
    return frame


class Frames(Generic[Incoming]):
    """Splits the bytes of a socket into messages of one of the two directions."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Incoming]") -> None:
        """`decoder`: `TO_ENGINE` or `FROM_ENGINE`."""
        self._decoder = decoder
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Incoming]:
        """The messages that `data` completes. Raises `WireError`."""
        self._data += data
        start = 0
        while (end := self._end(start)) is not None and end <= len(self._data):
            yield self._decoded(memoryview(self._data)[start + _HEADER.size : end])
            start = end
        del self._data[:start]

    def _end(self, start: int) -> int | None:
        """Where the message that begins at `start` ends; None until its header is complete."""
        begun = start + _HEADER.size
        if begun > len(self._data):
            return None
        version, length = _HEADER.unpack_from(self._data, start)
        if version != VERSION:
            both = "run the same version of Twostep at both ends"
            raise WireError(f"a message has version {version} of the format; this end reads version {VERSION}; {both}")
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length} bytes is announced; at most {MAX_MESSAGE_BYTES} are accepted")
        return begun + int(length)

    def _decoded(self, body: memoryview) -> Incoming:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"a message of {len(body)} bytes cannot be read: {error}") from None


class Wire(Generic[Outgoing, Incoming]):
    """One end, for a thread that waits. All raise `OSError` if the other end is gone, `recv` also `EOFError`."""

    def __init__(self, end: socket, decoder: "msgspec.msgpack.Decoder[Incoming]") -> None:
        self._socket = end
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._frames = Frames(decoder)
        self._received: deque[Incoming] = deque()

    def poll(self, timeout_s: float | None) -> bool:
        """Whether `recv` returns at once or raises, within this time; None waits without a limit."""
        return bool(self._received or self._readable.poll(None if timeout_s is None else 1000 * timeout_s))

    def recv(self) -> Incoming:
        """The next message; waits for it. Raises `WireError` for bytes that are none."""
        while not self._received:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._received.extend(self._frames.feed(data))
        return self._received.popleft()

    def send(self, message: Outgoing) -> None:
        """Returns when the socket has taken all of it. Raises as `framed` does."""
        self._socket.sendall(framed(message))


def _too_large(message: Message) -> InvalidParameterError:
    """Names the parameter that msgpack has no number for."""
    limit, params = 1 << 63, vars(message.params) if isinstance(message, Submit) else {}
    for name, value in params.items():
        if isinstance(value, int) and not -limit <= value < limit:
            return InvalidParameterError(
                f"{name} is a number of {value.bit_length()} bits; it has to fit into 64", name
            )
    return InvalidParameterError("a number of the request has more than 64 bits")


def _to_plain(value: object) -> Any:
    if isinstance(value, PackedLogprobs):
        return value.to_bytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in messages")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is PackedLogprobs:
        return PackedLogprobs.from_bytes(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} has no form in messages")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
TO_ENGINE: "msgspec.msgpack.Decoder[ToEngine]" = msgspec.msgpack.Decoder(ToEngine, dec_hook=_from_plain)
FROM_ENGINE: "msgspec.msgpack.Decoder[FromEngine]" = msgspec.msgpack.Decoder(FromEngine, dec_hook=_from_plain)
