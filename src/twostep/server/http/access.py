"""Who may ask at all: API keys and the number of connections, checked before anything is read."""

from collections.abc import Callable, Sequence
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.openai_api.errors import ApiError
from twostep.server.http.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Whoever watches over the process asks these, without a key and however busy it is."""

PUBLIC_PATHS = frozenset({"/", "/docs", "/openapi.json"})
"""The description of the API needs no key: a browser could not send one, and it is the same for all servers."""


class Gate:
    """Middleware."""

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], connections: Callable[[], int], max_connections: int
    ) -> None:
        """`connections` counts those that are open."""
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
            problem = f"{self._max_connections} connections are open, the most that are served; try again later"
            raise ApiError(problem, status=503, code="too_many_connections")
        if self._keys and path not in PUBLIC_PATHS and not self._knows(headers.get("authorization", "")):
            problem = "an API key is needed: 'Authorization: Bearer KEY' with one that this server was given"
            raise ApiError(problem, status=401, code="invalid_api_key")

    def _knows(self, authorization: str) -> bool:
        """Takes as long for every wrong key: all are compared, each in constant time."""
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")  # as the bytes of headers were decoded
        matches = [compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
