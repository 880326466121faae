"""Addresses that a server listens on: each answers, and what is printed is one of them."""

import socket
from contextlib import closing

import pytest

from twostep.config.configs import ServerConfig
from twostep.server.http.listening import AddressError, Listeners, listen

HAS_IPV6 = socket.has_ipv6 and socket.has_dualstack_ipv6()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this system has no IPv6")


def listening(*hosts: str, port: int = 0) -> Listeners:
    return listen(ServerConfig(host=hosts, port=port))


def answers(ip: str, port: int) -> bool:
    try:
        with closing(socket.create_connection((ip, port), timeout=5)):
            return True
    except OSError:
        return False


def assert_urls_answer(listeners: Listeners) -> None:
    for url in listeners.urls:
        host, _, port = url.removeprefix("http://").rpartition(":")
        assert answers(host.strip("[]"), int(port)), url


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_any_address_of_ipv6_takes_ipv4_too(host: str) -> None:
    with listening(host) as listeners:
        assert answers("127.0.0.1", listeners.port)
        assert answers("::1", listeners.port)
        assert listeners.urls == (f"http://127.0.0.1:{listeners.port}",)
        assert not listeners.loopback


@needs_ipv6
@pytest.mark.parametrize("hosts", [("::", "0.0.0.0"), ("0.0.0.0", "::"), ("127.0.0.1", "::")])
def test_both_kinds_may_be_named(hosts: tuple[str, str]) -> None:
    """Without being in each other's way."""
    with listening(*hosts) as listeners:
        assert len(listeners.sockets) == 2
        assert answers("127.0.0.1", listeners.port)
        assert answers("::1", listeners.port)
        assert len(listeners.urls) == 2
        assert_urls_answer(listeners)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", pytest.param("::1", marks=needs_ipv6)])
def test_what_is_printed_answers(host: str) -> None:
    with listening(host) as listeners:
        assert listeners.urls
        assert_urls_answer(listeners)
        assert listeners.loopback == (host != "0.0.0.0")


@needs_ipv6
def test_a_name_is_all_its_addresses() -> None:
    """A client may try either first."""
    names = {place[4][0] for place in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    with listening("localhost") as listeners:
        assert {one.getsockname()[0] for one in listeners.sockets} == names


def test_the_same_twice_is_once() -> None:
    with listening("127.0.0.1", "127.0.0.1", "127.0.0.2") as listeners:
        assert [one.getsockname()[0] for one in listeners.sockets] == ["127.0.0.1", "127.0.0.2"]
        assert len({one.getsockname()[1] for one in listeners.sockets}) == 1


@pytest.mark.parametrize(
    "hosts",
    [
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "localhost", "0.0.0.0"),
        pytest.param(("::1", "::"), marks=needs_ipv6),
        pytest.param(("::", "::1", "127.0.0.1", "0.0.0.0"), marks=needs_ipv6),
    ],
)
def test_all_addresses_include_each(hosts: tuple[str, ...]) -> None:
    """Listening on one and on all would be "Address already in use", by ourselves."""
    with listening(*hosts) as listeners:
        bound = {one.getsockname()[0] for one in listeners.sockets}
        assert bound & {"0.0.0.0", "::"} == {*hosts} & {"0.0.0.0", "::"}
        assert len({one.family for one in listeners.sockets}) == len(listeners.sockets)
        assert_urls_answer(listeners)
        assert not listeners.loopback


@needs_ipv6
def test_an_ipv4_address_in_the_form_of_ipv6_is_one() -> None:
    with listening("::ffff:127.0.0.1") as listeners:
        assert listeners.urls == (f"http://127.0.0.1:{listeners.port}",)
        assert listeners.loopback


def test_a_token_does_not_wait_for_the_one_before() -> None:
    """Nagle's algorithm is off on each socket."""
    with listening("127.0.0.1", "127.0.0.2") as listeners:
        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in listeners.sockets)


def test_a_port_in_use_is_told_and_nothing_stays_open() -> None:
    with listening("127.0.0.2") as taken:
        with pytest.raises(AddressError, match=rf"^cannot listen on 127.0.0.2, port {taken.port}: "):
            listening("127.0.0.1", "127.0.0.2", port=taken.port)
        with listening("127.0.0.1", port=taken.port):
            pass


def test_of_free_ports_one_is_found_that_is_free_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    create, tries = socket.create_server, []

    def sometimes(address: tuple[str, int], **named: object) -> socket.socket:
        if address[0] == "127.0.0.2":
            tries.append(address)
            if len(tries) == 1:
                raise OSError(98, "Address already in use")
        return create(address, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", sometimes)
    with listening("127.0.0.1", "127.0.0.2") as listeners:
        assert len(tries) == 2
        assert len(listeners.sockets) == 2


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "300.0.0.1"])
def test_addresses_that_are_not_ours(host: str) -> None:
    with pytest.raises(AddressError, match=f"^cannot listen on {host}, port 0: ."):
        listening(host)
