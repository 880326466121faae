"""Checks the Host and Origin headers: protects a server on loopback from web pages.

A browser lets any page send requests to 127.0.0.1. A page whose own name resolves to 127.0.0.1 (DNS rebinding) can even
read the answers; the Host header gives it away.
"""

from collections.abc import Sequence
from socket import gethostname
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.openai_api.errors import ApiError
from twostep.server.http.access import OPEN_PATHS
from twostep.server.http.errors import error_response
from twostep.server.http.listening import is_loopback

LOCAL_ORIGINS = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?"
"""Pages served by programs on this machine, which could send requests without a browser."""


class OriginGuard:
    """Middleware. Answers 403 to requests whose Host header names another machine, or from another's page."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        allowed_hosts: Sequence[str],
        origins: Sequence[str],
        loopback: bool,
    ) -> None:
        """`hosts` are those listened on; `loopback`: for this machine only. `allowed_hosts` are names, `*.name`
        or `*`. Without `loopback` the Host header is checked only if there are `allowed_hosts`, the Origin never.
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
        watched = path in OPEN_PATHS and not self._loopback  # by an orchestrator that knows only an address
        host = headers.get("host", "")
        if self._checks_hosts and host and not watched and not self._is_host(_name(host)):
            problem = f"the Host header is {host[:100]!r}, which is not this server; --allowed-hosts allows more names"
            raise ApiError(problem, status=403, code="host_not_allowed")
        for origin in headers.getlist("origin") if self._loopback else ():
            if not self._is_origin(origin, _name(host)):
                problem = f"pages of {origin[:100]!r} may not call this server; --allowed-origins allows more"
                raise ApiError(problem, status=403, code="origin_not_allowed")

    def _is_host(self, name: str) -> bool:
        local = name == "localhost" or name.endswith(".localhost") or is_loopback(name)
        return local or name in self._names or name.endswith(self._suffixes)

    def _is_origin(self, origin: str, host: str) -> bool:
        """`host` is the Host header's name, which was checked: pages of the same host may call the server."""
        if not self._origins.isdisjoint({"*", origin}):
            return True
        try:
            name = urlsplit(origin).hostname
        except ValueError:
            return False
        return name is not None and (name == host or self._is_host(name))


def _name(authority: str) -> str:
    """A host without its port, in lower case."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower().removesuffix(".")
