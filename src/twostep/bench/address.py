"""Where a server is: its URL taken apart, and the addresses of its host looked up once for all requests."""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from twostep.bench.urls import EXAMPLE, api_base
from twostep.errors import InvalidParameterError, TargetError

CONNECT_S = 10


@dataclass(frozen=True)
class Address:
    """One that a connection was made to."""

    base: str
    """The path before `/completions`: `/v1` for most."""
    authority: str
    """What the Host header says."""
    name: str
    """The host's, which its certificate has to be for."""
    ip: str
    port: int
    tls: ssl.SSLContext | None


def base_url(url: str) -> str:
    """As `api_base`. Raises `InvalidParameterError` if it is no URL of a server."""
    if "@" in url:  # perhaps a password, which no message and no result may show
        raise InvalidParameterError(
            f"the URL has an @; it has to be like {EXAMPLE}, without user and password (--api-key, --header)", "url"
        )
    base = api_base(url)
    if base is None:
        raise InvalidParameterError(f"the URL is {url!r}; it has to be like {EXAMPLE}", "url")
    return base


async def find_address(url: str) -> Address:
    """The first of the host's addresses that takes a connection. Raises `TargetError` if none does."""
    parts = urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    name, port = parts.hostname or "", parts.port or (443 if tls else 80)
    problem: OSError | None = None
    try:
        for *_, place in await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM):
            address = Address(parts.path, parts.netloc, name, str(place[0]), port, tls)
            problem = await _tried(address)
            if problem is None:
                return address
    except OSError as error:  # the name is unknown
        problem = error
    raise TargetError(f"{url}: no connection: {problem}")


async def _tried(address: Address) -> OSError | None:
    """What keeps a connection from being made."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(address.ip, address.port)
    except TimeoutError:
        return TimeoutError(f"none within {CONNECT_S} s")
    except OSError as error:
        return error
    writer.close()
    return None
