"""Listening sockets, and the URLs at which they are reachable."""

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from ipaddress import IPv6Address, ip_address
from types import TracebackType
from typing import Any, NamedTuple, Self

from twostep.config.configs import ServerConfig
from twostep.errors import TwostepError

TRIES = 8
"""Attempts with port 0 and several addresses: a port that is free on the first may be in use on another."""

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class AddressError(TwostepError):
    """The address cannot be used."""


class Listeners:
    """Listening sockets on one port; a `with` statement closes them."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.sockets = list(sockets)

    @property
    def port(self) -> int:
        port: int = self.sockets[0].getsockname()[1]
        return port

    @property
    def urls(self) -> tuple[str, ...]:
        """The server's URLs for clients on this machine."""
        return tuple(dict.fromkeys(f"http://{_reachable(one)}:{self.port}" for one in self.sockets))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return all(is_loopback(one.getsockname()[0].partition("%")[0]) for one in self.sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self.sockets:
            one.close()


def listen(config: ServerConfig) -> Listeners:
    """Listens on every address of `config.host`. `::` accepts IPv4 too where the system supports it, unless an IPv4
    address is among the hosts. `0.0.0.0` and `::` include the other addresses of their family. Raises `AddressError`.
    """
    for tries_left in reversed(range(TRIES)):
        with ExitStack() as opened:
            try:
                sockets = [opened.enter_context(one) for one in _bound(config)]
            except _PortTakenError as error:
                if config.port or not tries_left:
                    raise AddressError(str(error)) from None
                continue
            opened.pop_all()
            return Listeners(sockets)
    raise AssertionError("the last try returns or raises")


class _PortTakenError(AddressError):
    """The port is in use; another one may be free."""


class _BindAddress(NamedTuple):
    family: socket.AddressFamily
    address: tuple[Any, ...]
    """The argument of `bind`."""


def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """Sockets in the order of the hosts, all on the first one's port. Raises `AddressError`."""
    port, hosts = config.port, {host: _addresses(host, config.port) for host in config.host}
    taken: set[tuple[Any, ...]] = set()
    every = [one for addresses in hosts.values() for one in addresses]
    has_ipv4 = any(one.family == socket.AF_INET for one in every)
    wildcards = {one.family: one for one in every if one.address[0] in ("0.0.0.0", "::")}
    for host, addresses in hosts.items():
        bound, problem = 0, OSError()
        for one in addresses:
            family, (ip, _, *scope) = wildcards.get(one.family, one)
            if (ip, *scope) in taken:
                bound += 1
                continue
            try:
                made = _bind(_BindAddress(family, (ip, port, *scope)), dual=ip == "::" and not has_ipv4)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise _refusal(host, port, error) from None
                problem = error  # a name may resolve to an address that this machine lacks: localhost to ::1
                continue
            bound, port = bound + 1, port or made.getsockname()[1]
            taken.add((ip, *scope))
            yield made
        if not bound:
            raise _refusal(host, port, problem)


def _addresses(host: str, port: int) -> list[_BindAddress]:
    """The addresses of a host. Only names, and addresses that name a network interface, are resolved. Raises
    `AddressError`."""
    host = _as_ipv4(host.strip("[]"))
    if _is_address(host) and "%" not in host:
        ipv6 = ":" in host
        return [
            _BindAddress(socket.AF_INET6, (host, port, 0, 0)) if ipv6 else _BindAddress(socket.AF_INET, (host, port))
        ]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _refusal(host, port, error) from None
    return [_BindAddress(family, address) for family, _, _, _, address in found]


def _bind(to: _BindAddress, *, dual: bool) -> socket.socket:
    """`dual`: accept IPv4 too, if the system can. Raises `OSError`."""
    dual = dual and socket.has_dualstack_ipv6()
    made = socket.create_server(to.address, family=to.family, backlog=1024, dualstack_ipv6=dual)
    # Connections inherit it. asyncio would set it only if the socket's protocol were given. Without it a token would
    # wait for the client's acknowledgement of the one before, up to 40 ms.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _refusal(host: str, port: int, error: OSError) -> AddressError:
    reason = (error.strerror or str(error)).partition(" (while attempting")[0]  # the message names the address already
    kind = _PortTakenError if error.errno == errno.EADDRINUSE else AddressError
    return kind(f"cannot listen on {host}, port {port}: {reason}")


def _reachable(listener: socket.socket) -> str:
    """The host part of a URL that reaches this socket."""
    ip: str = listener.getsockname()[0]
    if listener.family == socket.AF_INET:
        return "127.0.0.1" if ip == "0.0.0.0" else ip
    if ip == "::":
        only_ipv6 = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return "[::1]" if only_ipv6 else "127.0.0.1"
    return f"[{ip.replace('%', '%25')}]"


def is_loopback(name: str) -> bool:
    """Whether `name` is an address that only this machine can reach."""
    return _is_address(name) and ip_address(name).is_loopback


def _as_ipv4(host: str) -> str:
    """Converts an IPv4-mapped IPv6 address such as `::ffff:127.0.0.1` to IPv4; other hosts are unchanged."""
    mapped = IPv6Address(host).ipv4_mapped if ":" in host and _is_address(host) else None
    return str(mapped or host)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
