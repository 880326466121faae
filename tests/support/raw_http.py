"""Clients that do to a connection what no HTTP library would."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


@contextmanager
def connected(url: str, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A connection; it takes in at most some `receive_bytes` that are not read."""
    with socket.socket() as made:
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(30)
        address = urlsplit(url)
        made.connect((address.hostname, address.port))
        yield made


def posted(path: str, body: Any) -> bytes:
    """A request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content))
    return head + content


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    pieces = []
    try:
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)
