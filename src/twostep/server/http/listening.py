"""The sockets that a server listens on, and the addresses that they answer at."""

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from types import TracebackType
from typing import Any, NamedTuple, Self

from twostep.config.configs import ServerConfig
from twostep.errors import TwostepError

TRIES = 8
"""With port 0 and several addresses: the port that is free on the first may be in use on another."""

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class AddressError(TwostepError):
    """The address cannot be listened on."""


class Listeners:
    """Listening sockets, all on one port; a `with` statement closes them."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.sockets = list(sockets)

    @property
    def port(self) -> int:
        port: int = self.sockets[0].getsockname()[1]
        return port

    @property
    def urls(self) -> tuple[str, ...]:
        """Where a client on this machine finds the server."""
        return tuple(dict.fromkeys(f"http://{_reachable(one)}:{self.port}" for one in self.sockets))

    @property
    def loopback(self) -> bool:
        """Only this machine reaches it."""
        return all(is_loopback(one.getsockname()[0].partition("%")[0]) for one in self.sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self.sockets:
            one.close()


def listen(config: ServerConfig) -> Listeners:
    """Listens on every address of `config.host`. `::` takes IPv4 too where the system does, unless an IPv4 address is
    among the hosts. Raises `AddressError`."""
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
    """Another one may be free."""


class _Place(NamedTuple):
    family: socket.AddressFamily
    address: tuple[Any, ...]
    """As `bind` takes it."""


def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """In the order of the hosts; the first one's port is that of all. Raises `AddressError`."""
    port, hosts = config.port, {host: _places(host, config.port) for host in config.host}
    taken: set[tuple[Any, ...]] = set()
    has_ipv4 = any(place.family == socket.AF_INET for places in hosts.values() for place in places)
    for host, places in hosts.items():
        bound, problem = 0, OSError()
        for family, (ip, _, *scope) in places:
            if (ip, *scope) in taken:
                bound += 1
                continue
            try:
                made = _bind(_Place(family, (ip, port, *scope)), dual=ip == "::" and not has_ipv4)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise _refusal(host, port, error) from None
                problem = error  # a name may have an address that this machine lacks, localhost that of IPv6
                continue
            bound, port = bound + 1, port or made.getsockname()[1]
            taken.add((ip, *scope))
            yield made
        if not bound:
            raise _refusal(host, port, problem)


def _places(host: str, port: int) -> list[_Place]:
    """Of an address or a name; only names, and addresses that name a network interface, are looked up. Raises
    `AddressError`."""
    host = host.strip("[]")
    if _is_address(host) and "%" not in host:
        return [_Place(socket.AF_INET6, (host, port, 0, 0)) if ":" in host else _Place(socket.AF_INET, (host, port))]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _refusal(host, port, error) from None
    return [_Place(family, address) for family, _, _, _, address in found]


def _bind(place: _Place, *, dual: bool) -> socket.socket:
    """`dual`: IPv4 too, if the system can. Raises `OSError`."""
    dual = dual and socket.has_dualstack_ipv6()
    made = socket.create_server(place.address, family=place.family, backlog=1024, dualstack_ipv6=dual)
    # Connections inherit it. asyncio sets it only where the protocol is named, which it is not here: a token would
    # wait for the client's acknowledgement of the one before, up to 40 ms.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _refusal(host: str, port: int, error: OSError) -> AddressError:
    reason = (error.strerror or str(error)).partition(" (while attempting")[0]  # the address is named already
    kind = _PortTakenError if error.errno == errno.EADDRINUSE else AddressError
    return kind(f"cannot listen on {host}, port {port}: {reason}")


def _reachable(listener: socket.socket) -> str:
    """The address that a client puts into a URL."""
    ip: str = listener.getsockname()[0]
    if listener.family == socket.AF_INET:
        return "127.0.0.1" if ip == "0.0.0.0" else ip
    if ip == "::":
        only_ipv6 = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return "[::1]" if only_ipv6 else "127.0.0.1"
    return f"[{ip.replace('%', '%25')}]"


def is_loopback(name: str) -> bool:
    """Whether it is an address that only this machine reaches."""
    return _is_address(name) and ip_address(name).is_loopback


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
