"""The ASGI application: its routes, and the middleware around them."""

from collections.abc import Callable, Collection

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostep.errors import TwostepError
from twostep.server.api.completions import Completions
from twostep.server.api.openapi import Document, serve_page
from twostep.server.api.request_history import RequestHistory
from twostep.server.api.server_info import ServerInfo
from twostep.server.api.tokens import Tokens
from twostep.server.http.access import LOCAL_ORIGINS, OPEN_PATHS, Gate, OriginGuard
from twostep.server.http.error_replies import (
    RECORDED,
    REFUSAL,
    on_client_gone,
    on_defect,
    on_http_exception,
    on_twostep_error,
)
from twostep.server.http.in_flight import ClientGoneError
from twostep.server.state import ServerState

OTHER = "other"
"""The path under which requests to unknown paths are counted."""


def create_app(state: ServerState, connections: Callable[[], int] = lambda: 0) -> Starlette:
    """The application. `connections` returns the number of open connections, which is limited."""
    table = routes(state)
    counting = Middleware(CountReplies, state=state, paths=[route.path for route in table])
    outermost = [Middleware(RootPath, root=state.config.root_path)] if state.config.root_path else []
    app = Starlette(
        routes=table,
        middleware=[*outermost, counting, *_middleware(state, connections)],
        exception_handlers={
            TwostepError: on_twostep_error,
            ClientGoneError: on_client_gone,
            HTTPException: on_http_exception,
            Exception: on_defect,
        },
    )
    app.state.model_folders = [served.model.path.parent for served in state.models]
    app.router.redirect_slashes = False  # the target would come from the Host header, which the client chooses
    return app


def routes(state: ServerState) -> list[Route]:
    """Every endpoint; `api/openapi.py` describes them."""
    completions, tokens, info, history = Completions(state), Tokens(state), ServerInfo(state), RequestHistory(state)
    root = state.config.root_path
    return [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/v1/config", info.config),
        Route("/v1/requests", history.requests),
        Route("/v1/requests/{name}", history.breakdown),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", info.health),
        Route("/ready", info.ready),
        Route("/metrics", info.metrics),
        Route("/openapi.json", Document(root), methods=["GET"]),
        Route("/docs", serve_page),
        Route("/", RedirectResponse(f"{root}/docs" if root else "docs"), methods=["GET"]),
    ]


class CountReplies:
    """Middleware: counts the replies by path and status; logs refusals."""

    def __init__(self, app: ASGIApp, state: ServerState, paths: Collection[str]) -> None:
        """`paths` are counted by name, all others together, as clients choose them."""
        self._app, self._paths = app, frozenset(paths)
        self._replies, self._refusals = state.http_replies, state.refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else OTHER
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._replies.count(path, message["status"])
                self._log(scope, path, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not begun:  # starlette answers with status 500, outside all middleware
                self._replies.count(path, 500)
            raise

    def _log(self, scope: Scope, path: str, status: int) -> None:
        """Answers to health checks are not refusals; recorded requests are logged as replies."""
        error = scope.get(REFUSAL)
        if error is not None and self._refusals is not None and not scope.get(RECORDED) and path not in OPEN_PATHS:
            self._refusals.write(path, status, error, unknown_path=None if path in self._paths else scope["path"])


class RootPath:
    """Middleware, the outermost: removes the path prefix if the proxy has not removed it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root) or "/"}
        await self._app(scope, receive, send)


def _middleware(state: ServerState, connections: Callable[[], int]) -> list[Middleware]:
    """From the outside in. CORS headers come first, so that a browser sees why a request was refused."""
    config = state.config
    gate = Middleware(Gate, api_keys=config.api_key, connections=connections, max_connections=config.max_connections)
    guard = Middleware(
        OriginGuard,
        hosts=config.host,
        allowed_hosts=config.allowed_hosts,
        origins=config.allowed_origins,
        loopback=state.loopback,
    )
    layers = [guard, gate]
    if config.allowed_origins or state.loopback:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_origin_regex=LOCAL_ORIGINS if state.loopback else None,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send various headers, such as x-stainless-os
            expose_headers=["X-Request-Id"],
        )
        layers.insert(1, cors)
    return layers
