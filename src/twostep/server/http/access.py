"""Middleware that decides whether a request is served, before its body is read.

`Gate` checks API keys and the number of connections. `OriginGuard` checks the Host and Origin headers, which protects a
server on loopback from web pages: a browser lets any page send requests to 127.0.0.1. A page whose own name resolves to
127.0.0.1 (DNS rebinding) can even read the answers; its Host header reveals it.
"""

from collections.abc import Callable, Sequence
from hmac import compare_digest
from socket import gethostname
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.openai_api.api_error import ApiError
from twostep.server.http.error_replies import error_response
from twostep.server.http.listening import is_loopback

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Health checks need no key and are answered however many connections are open."""

PUBLIC_PATHS = frozenset({"/", "/docs", "/openapi.json"})
"""The API description needs no key: a browser could not send one, and it is the same for all servers."""


class Gate:
    """Middleware. Refuses requests over the connection limit and requests without a valid API key."""

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], connections: Callable[[], int], max_connections: int
    ) -> None:
        """`connections` returns the number of open connections."""
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._connections, self._max_connections = connections, max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
                self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self._connections() > self._max_connections:
            problem = f"connection limit ({self._max_connections}) reached; try again later"
            raise ApiError(problem, status=503, code="too_many_connections")
        if self._keys and path not in PUBLIC_PATHS and not self._knows(headers.get("authorization", "")):
            problem = "a valid API key is required: send the header 'Authorization: Bearer KEY'"
            raise ApiError(problem, status=401, code="invalid_api_key")

    def _knows(self, authorization: str) -> bool:
        """Takes the same time for every wrong key: all keys are compared, each in constant time."""
        scheme, _, key = authorization.partition(" ")
        sent = key.strip().encode("latin-1")  # as the bytes of headers were decoded
        matches = [compare_digest(sent, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


LOCAL_ORIGINS = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?"
"""Pages served by programs on this machine, which can send requests without a browser anyway."""


class OriginGuard:
    """Middleware. Answers 403 if the Host header names another machine, or the request comes from another's page."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        allowed_hosts: Sequence[str],
        origins: Sequence[str],
        loopback: bool,
    ) -> None:
        """`hosts` are the listening hosts; `loopback`: only this machine can reach them. `allowed_hosts` are names,
        `*.name` or `*`. Without `loopback` the Host header is checked only if there are `allowed_hosts`, the Origin
        never.
        """
        self._app, self._origins, self._loopback = app, frozenset(origins), loopback
        self._names = frozenset(name.strip("[]").lower() for name in (gethostname(), *hosts, *allowed_hosts))
        self._suffixes = tuple(name[1:].lower() for name in allowed_hosts if name.startswith("*."))
        self._checks_hosts = (loopback or bool(allowed_hosts)) and "*" not in allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises `ApiError`. A request without a Host header passes: browsers always send one."""
        probe = path in OPEN_PATHS and not self._loopback  # by an orchestrator that knows only an address
        host = headers.get("host", "")
        if self._checks_hosts and host and not probe and not self._is_host(_name(host)):
            problem = f"the Host header {host[:100]!r} is not a name of this server; add it with --allowed-hosts"
            raise ApiError(problem, status=403, code="host_not_allowed")
        for origin in headers.getlist("origin") if self._loopback else ():
            if not self._is_origin(origin, _name(host)):
                problem = f"pages of {origin[:100]!r} may not call this server; allow them with --allowed-origins"
                raise ApiError(problem, status=403, code="origin_not_allowed")

    def _is_host(self, name: str) -> bool:
        local = name == "localhost" or name.endswith(".localhost") or is_loopback(name)
        return local or name in self._names or name.endswith(self._suffixes)

    def _is_origin(self, origin: str, host: str) -> bool:
        """`host`: the name in the Host header, which was checked. Pages of the same host may call the server."""
        if not self._origins.isdisjoint({"*", origin}):
            return True
        try:
            name = urlsplit(origin).hostname
        except ValueError:
            return False
        return name is not None and (name == host or self._is_host(name))


def _name(authority: str) -> str:
    """The host without its port, in lower case."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower().removesuffix(".")
