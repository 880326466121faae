"""Who may ask by the page that asks: protects a server on loopback from pages of the web.

A browser lets any page send requests to 127.0.0.1. A page whose name was made to point here (DNS rebinding) even reads
the answers; it is recognised by the name that the browser says it talks to.
"""

from collections.abc import Sequence
from socket import gethostname
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.openai_api.errors import ApiError
from twostep.server.errors import error_response
from twostep.server.limits import OPEN_PATHS
from twostep.server.listening import is_loopback

LOCAL_ORIGINS = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?"
"""Pages that this machine itself serves: programs that could ask without a browser too."""


class OriginGuard:
    """Middleware. Sends 403 to requests that name another host than this one, or come from another one's page."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        allowed_hosts: Sequence[str],
        origins: Sequence[str],
        loopback: bool,
    ) -> None:
        """`hosts` are listened on, by `loopback` only by this machine; `allowed_hosts` may begin with `*.`, or be `*`.

        Where others reach the server hosts are only checked if some are allowed, and origins are not.
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
        """Raises `ApiError`. What no browser sends, a request without a host, is not checked."""
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
        """`host` is what the request calls this server, which was checked: its own pages may call it."""
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
