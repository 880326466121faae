"""Where a server is: its URL, the addresses of its host, and the certificates that are trusted."""

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from twostep.errors import InvalidParameterError, TargetError

CONNECT_S = 10


@dataclass(frozen=True)
class Trust:
    """Which certificates of a server are accepted: the system's, those in `cacert` too, or any."""

    insecure: bool = False
    cacert: Path | None = None

    def context_for(self, url: str) -> ssl.SSLContext | None:
        """None for http. Raises `InvalidParameterError` where there is nothing to trust, or nothing can be read."""
        if urlsplit(url).scheme != "https":
            if self != Trust():
                raise InvalidParameterError(f"--insecure and --cacert are for https://; the URL is {url}", "cacert")
            return None
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.cacert is not None:
            self._load(context, self.cacert)
        return context

    def _load(self, context: ssl.SSLContext, cacert: Path) -> None:
        try:
            context.load_verify_locations(cacert)
        except ssl.SSLError:
            raise InvalidParameterError(f"--cacert is {cacert}, in which no certificate is (PEM)", "cacert") from None
        except OSError as error:
            raise InvalidParameterError(f"--cacert is {cacert}: {error.strerror}", "cacert") from None


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


def connection_words(error: OSError) -> str:
    """Why there is no connection, for a person, and what helps."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message} (--cacert FILE trusts more, --insecure any)"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error}; does the server speak https?"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    reason = os.strerror(error.errno)  # asyncio's own text names the call and repeats the address
    is_refused = isinstance(error, ConnectionRefusedError)
    return f"{reason}; no server runs there (--url says where it is)" if is_refused else reason


async def find_address(url: str, trust: Trust) -> Address:
    """The first of the host's addresses that takes a connection. Raises `TargetError` if none does, and
    `InvalidParameterError` for certificates that cannot be read."""
    parts = urlsplit(url)
    tls = trust.context_for(url)
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
    raise TargetError(f"{url}: {connection_words(problem) if problem else 'the host has no address'}")


async def _tried(address: Address) -> OSError | None:
    """What keeps a connection from being made."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(address.ip, address.port)
    except TimeoutError:
        return TimeoutError(f"no connection within {CONNECT_S} s")
    except OSError as error:
        return error
    writer.close()
    return None


EXAMPLE = "http://127.0.0.1:8000"


def api_base(url: str) -> str | None:
    """With the API's version at its end: `/v1` unless the URL has one, as OpenVINO Model Server's `/v3`.

    None for what is no URL of a server, or has a user or a password in it.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # the port is none, or a bracket is open
        known = False
    if not known or parts.query or parts.fragment:
        return None
    path = parts.path.rstrip("/")
    version = path.rpartition("/")[2]
    is_versioned = version[:1] == "v" and version[1:].isdecimal()
    return f"{parts.scheme}://{parts.netloc}{path if is_versioned else f'{path}/v1'}"
