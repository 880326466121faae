"""When each server-sent event of a reply came, found afterwards: while tokens come, nothing is taken apart."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from benchmarks.http_client import HEAD_END, Reply

EVENT_END = b"\n\n"
DATA, DONE = b"data: ", b"[DONE]"


@dataclass(frozen=True)
class Event:
    """`at_s`: when its last byte was there."""

    at_s: float
    data: bytes


def events(reply: Reply) -> list[Event]:
    """Those with data, `[DONE]` left out. Raises `EngineError` unless the status is 200 and the reply whole."""
    reply.body()
    body, places = _unpacked(reply.received)
    found, start = list[Event](), 0
    while (end := body.find(EVENT_END, start)) >= 0:
        event, start = body[start:end], end + len(EVENT_END)
        if event.startswith(DATA) and event != DATA + DONE:
            found.append(Event(_when(reply, _received(places, start - 1)), event.removeprefix(DATA)))
    return found


Places = list[tuple[int, int]]
"""Where pieces of the body begin: in the body, and in what was received."""


def _unpacked(received: bytes) -> tuple[bytes, Places]:
    head, _, rest = received.partition(HEAD_END)
    at = len(received) - len(rest)
    if b"\r\ntransfer-encoding: chunked" not in head.lower():
        return rest, [(0, at)]
    return _unchunked(received, at)


def _unchunked(received: bytes, at: int) -> tuple[bytes, Places]:
    """HTTP's chunked transfer coding (RFC 9112, 7.1); `at` the first chunk."""
    body, places = bytearray(), Places()
    while True:
        line_end = received.index(b"\r\n", at)
        size, start = int(received[at:line_end].partition(b";")[0], 16), line_end + 2
        if size == 0:
            return bytes(body), places
        places.append((len(body), start))
        body += received[start : start + size]
        at = start + size + 2


def _received(places: Places, offset: int) -> int:
    """The offset in what was received of one in the body."""
    in_body, in_received = places[bisect_right(places, offset, key=lambda place: place[0]) - 1]
    return in_received + offset - in_body


def _when(reply: Reply, offset: int) -> float:
    return reply.arrivals[bisect_left(reply.arrivals, offset + 1, key=lambda arrival: arrival[0])][1]
