"""`/metrics` and `/v1/requests`, and what counts replies by status on their way out."""

import asyncio
from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostep.openai_api.errors import ApiError
from twostep.openai_api.json_text import Many
from twostep.server.api.listing import listing, read_limit
from twostep.server.http.access import OPEN_PATHS
from twostep.server.http.errors import IN_LEDGER, REFUSAL
from twostep.server.http.slices import SlicedReply
from twostep.server.observe.breakdown import bill
from twostep.server.observe.exposition import CONTENT_TYPE, exposition
from twostep.server.observe.metrics import dropped_lines, of_workers
from twostep.server.state import ServerState

OTHER = "other"
"""The path under which requests for paths that there are not are counted."""


class Observations:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def metrics(self, request: Request) -> Response:
        """As of the engine's last message: its answer does not wait for a step."""
        state = self._state
        first, *others = [
            (served.names[0], [*served.metrics.of_replies(), *of_workers(served.backend.workers())])
            for served in state.models
        ]
        first[1].extend([*state.http_replies.families(), dropped_lines(state.dropped_lines())])
        return Response(exposition([first, *others]), headers={"content-type": CONTENT_TYPE})

    async def requests(self, request: Request) -> SlicedReply:
        """Raises `ApiError` if `limit` is out of range."""
        limit = read_limit(request.query_params.get("limit"))
        return SlicedReply(self._state.slices, listing(self._state.ledger, limit))

    async def bill(self, request: Request) -> SlicedReply:
        """Raises `ApiError` with status 404 if the reply is not, or no longer, in the ledger."""
        id_ = request.path_params["id"]
        reply = self._state.ledger.get(id_)
        if reply is None:
            problem = f"no finished request {id_:.80} is known; the last {self._state.ledger.keep} are, for a while"
            raise ApiError(problem, status=404, param="id", code="request_not_found")
        whole = await asyncio.to_thread(bill, reply)  # 10 µs for each of its lines, of which there may be thousands
        choices = Many({**choice, "lines": Many(choice["lines"])} for choice in whole["choices"])
        return SlicedReply(self._state.slices, {**whole, "choices": choices})


class CountReplies:
    """Middleware, the outermost: the status of every reply, by path; refusals are logged."""

    def __init__(self, app: ASGIApp, state: ServerState, paths: Collection[str]) -> None:
        """`paths` are told by name, all others together: they are what somebody wrote."""
        self._app, self._replies, self._refusals, self._paths = (
            app,
            state.http_replies,
            state.refusals,
            frozenset(paths),
        )

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
            if not begun:  # starlette answers with status 500, outside of all middleware
                self._replies.count(path, 500)
            raise

    def _log(self, scope: Scope, path: str, status: int) -> None:
        """What a watcher of the process is told is no refusal; what the ledger has is logged as a reply."""
        error = scope.get(REFUSAL)
        if error is not None and self._refusals is not None and not scope.get(IN_LEDGER) and path not in OPEN_PATHS:
            self._refusals.write(path, status, error, unknown_path=None if path in self._paths else scope["path"])
