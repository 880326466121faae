"""The routes, and what surrounds them."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.errors import TwostepError
from twostep.server.api.completions import Completions
from twostep.server.api.health import Health
from twostep.server.api.models import Models
from twostep.server.api.openapi import Document, serve_page
from twostep.server.api.tokens import Tokens
from twostep.server.http.access import Gate
from twostep.server.http.errors import on_client_gone, on_defect, on_http_exception, on_twostep_error
from twostep.server.http.in_flight import ClientGoneError
from twostep.server.http.origins import LOCAL_ORIGINS, OriginGuard
from twostep.server.observe.endpoints import CountReplies, Observations
from twostep.server.state import ServerState


def create_app(state: ServerState, connections: Callable[[], int] = lambda: 0) -> Starlette:
    """The application. `connections` counts those that are open, where they are limited."""
    routes = _routes(state)
    counting = Middleware(CountReplies, state=state, paths=[route.path for route in routes])
    under = [Middleware(RootPath, root=state.config.root_path)] if state.config.root_path else []
    app = Starlette(
        routes=routes,
        middleware=[*under, counting, *_middleware(state, connections)],
        exception_handlers={
            TwostepError: on_twostep_error,
            ClientGoneError: on_client_gone,
            HTTPException: on_http_exception,
            Exception: on_defect,
        },
    )
    app.state.model_folder = state.model.path.parent
    app.router.redirect_slashes = False  # to an address that it makes of the Host header, which is the client's word
    return app


def _routes(state: ServerState) -> list[Route]:
    completions, models, tokens, health = Completions(state), Models(state), Tokens(state), Health(state)
    observations, root = Observations(state), state.config.root_path
    return [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{name:path}", models.one),
        Route("/v1/config", models.config),
        Route("/v1/requests", observations.requests),
        Route("/v1/requests/{id}", observations.bill),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/metrics", observations.metrics),
        Route("/openapi.json", Document(root), methods=["GET"]),
        Route("/docs", serve_page),
        Route("/", RedirectResponse(f"{root}/docs" if root else "docs"), methods=["GET"]),
    ]


class RootPath:
    """Middleware, the outermost: removes the proxy's path prefix where the proxy has not removed it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root) or "/"}
        await self._app(scope, receive, send)


def _middleware(state: ServerState, connections: Callable[[], int]) -> list[Middleware]:
    """From the outside in: a browser has to see why it was refused."""
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
            allow_headers=["*"],  # clients send many of their own, such as x-stainless-os
            expose_headers=["X-Request-Id"],
        )
        layers.insert(1, cors)
    return layers
