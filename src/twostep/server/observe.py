"""`/metrics` and `/v1/requests/{id}`, and what counts replies by status on their way out."""

from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostep.openai_api.errors import ApiError
from twostep.server.bill import bill
from twostep.server.exposition import CONTENT_TYPE
from twostep.server.metrics import Metrics
from twostep.server.state import ServerState

OTHER = "other"
"""The path under which requests for paths that there are not are counted."""


class Observations:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def metrics(self, request: Request) -> Response:
        """As of the engine's last message: its answer does not wait for a step."""
        client = self._state.client
        up = client is not None and client.died is None
        snapshot = client.snapshot if client else None
        text = self._state.metrics.text(self._state.names[0], snapshot, up=up)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def bill(self, request: Request) -> Response:
        """Raises `ApiError` with status 404 if the reply is not, or no longer, in the ledger."""
        id_ = request.path_params["id"]
        reply = self._state.ledger.get(id_)
        if reply is None:
            problem = f"no finished request {id_:.80} is known; the last {self._state.ledger.keep} are, for a while"
            raise ApiError(problem, status=404, param="id", code="request_not_found")
        return JSONResponse(bill(reply))


class CountReplies:
    """Middleware, the outermost: the status of every reply, by path."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        """`paths` are counted by name, all others together."""
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

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
                self._metrics.answered(path, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not begun:  # starlette answers with status 500, outside of all middleware
                self._metrics.answered(path, 500)
            raise
