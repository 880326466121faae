"""The address of a server: its URL, the addresses of its host, and the certificates to trust."""

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
    """Which server certificates are accepted: those of the system, also those in `cacert`, or any."""

    insecure: bool = False
    cacert: Path | None = None

    def context_for(self, url: str) -> ssl.SSLContext | None:
        """None for http. Raises `InvalidParameterError` for TLS options with http, and for an unreadable `cacert`."""
        if urlsplit(url).scheme != "https":
            if self != Trust():
                raise InvalidParameterError(f"--insecure and --cacert need an https:// URL; the URL is {url}", "cacert")
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
            raise InvalidParameterError(f"--cacert is {cacert}, which contains no PEM certificate", "cacert") from None
        except OSError as error:
            raise InvalidParameterError(f"--cacert is {cacert}: {error.strerror}", "cacert") from None


@dataclass(frozen=True)
class Address:
    """An address that accepted a connection."""

    base: str
    """The path before `/completions`: `/v1` for most."""
    authority: str
    """Value of the Host header."""
    name: str
    """Host name, which the certificate must match."""
    ip: str
    port: int
    tls: ssl.SSLContext | None


def base_url(url: str) -> str:
    """As `api_base`. Raises `InvalidParameterError` if `url` is not the URL of a server."""
    if "@" in url:  # may be a password, which must not appear in a message or a result
        raise InvalidParameterError(
            f"the URL contains @; give a URL like {EXAMPLE}, and credentials by --api-key or --header", "url"
        )
    base = api_base(url)
    if base is None:
        raise InvalidParameterError(f"the URL is {url!r}; it must be like {EXAMPLE}", "url")
    return base


def connection_problem(error: OSError) -> str:
    """Explains a failed connection, with a hint if there is one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"certificate not trusted: {error.verify_message} (--cacert FILE adds trusted ones, --insecure accepts any)"
        )
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error}; does the server use https?"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    reason = os.strerror(error.errno)  # asyncio's own text names the call and repeats the address
    is_refused = isinstance(error, ConnectionRefusedError)
    return f"{reason}; no server is running there (--url gives its address)" if is_refused else reason


async def find_address(url: str, trust: Trust) -> Address:
    """The first address of the host that accepts a connection. Raises `TargetError` if none does, and
    `InvalidParameterError` for certificates that cannot be read."""
    parts = urlsplit(url)
    tls = trust.context_for(url)
    name, port = parts.hostname or "", parts.port or (443 if tls else 80)
    problem: OSError | None = None
    try:
        for *_, place in await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM):
            address = Address(parts.path, parts.netloc, name, str(place[0]), port, tls)
            problem = await _try(address)
            if problem is None:
                return address
    except OSError as error:  # the name is unknown
        problem = error
    raise TargetError(f"{url}: {connection_problem(problem) if problem else 'the host has no address'}")


async def _try(address: Address) -> OSError | None:
    """Connects once. Returns the error, or None on success."""
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
    """The URL of the API with its version: `/v1` unless the URL has one, such as `/v3` of OpenVINO Model Server.

    None if `url` is not the URL of a server, or contains a user or a password.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # invalid port or unbalanced bracket
        known = False
    if not known or parts.query or parts.fragment:
        return None
    path = parts.path.rstrip("/")
    version = path.rpartition("/")[2]
    is_versioned = version[:1] == "v" and version[1:].isdecimal()
    return f"{parts.scheme}://{parts.netloc}{path if is_versioned else f'{path}/v1'}"
