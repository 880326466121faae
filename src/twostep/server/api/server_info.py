"""What the server serves and how it is.

`/health`: does the engine make progress? `/ready`: are requests accepted? `/v1/models`: the served model under all its
names. `/v1/config`: the settings in effect. `/metrics`: Prometheus metrics.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twostep.openai_api.api_error import ApiError
from twostep.server.effective import effective
from twostep.server.http.error_replies import error_response
from twostep.server.http.replies import JsonReply
from twostep.server.observe.prometheus_metrics import CONTENT_TYPE, ServerStatus
from twostep.server.state import ServerState


def problem(state: ServerState) -> ApiError | None:
    """Why the process should be restarted; None if it should not, for example while an engine loads the model."""
    client = state.client
    if client is None or (client.died and state.restarting):
        return None
    if client.died:
        return ApiError(str(client.died), status=503, code="engine_died")
    stalled_s = state.progress.stalled_s(client)
    if stalled_s <= state.config.stall_s:
        return None
    pending = f"{client.outstanding} requests are pending and no step has completed for {stalled_s:.0f} s"
    return ApiError(pending, status=503, code="stalled")


class ServerInfo:
    """The handlers of these routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """Status 503 if the process should be restarted: the engine died for good, or is stuck with pending work."""
        if (found := problem(self._state)) is not None:
            return error_response(found)
        client = self._state.client
        if client is None:
            return JsonReply({"status": "loading"})
        if client.died:
            return JsonReply({"status": "restarting"})
        return JsonReply({"status": "ok", "pending": client.outstanding})

    async def ready(self, request: Request) -> Response:
        """Status 503 while the model loads, during shutdown, and when the engine has died."""
        self._state.engine()
        return JsonReply({"status": "ready"})

    async def models(self, request: Request) -> Response:
        return JsonReply({"object": "list", "data": [self._model(name) for name in self._state.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._state.names:
            served = " or ".join(map(repr, self._state.names))
            problem = f"the model {name[:60]!r} is not served here; available: {served}"
            raise ApiError(problem, status=404, param="model", code="model_not_found")
        return JsonReply(self._model(name))

    async def config(self, request: Request) -> Response:
        """The settings in effect, where each was set, and how the derived ones were computed."""
        _, ready = self._state.engine()
        return JsonReply(effective(self._state.config, ready))

    async def metrics(self, request: Request) -> Response:
        """As of the engine's last message: it does not wait for a step."""
        client, supervisor = self._state.client, self._state.supervisor
        status = ServerStatus(
            up=client is not None and client.died is None,
            restarts=supervisor.restarts if supervisor else 0,
            dropped_lines=self._state.dropped_lines(),
        )
        text = self._state.metrics.text(self._state.names[0], client.snapshot if client else None, status)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    def _model(self, name: str) -> dict[str, Any]:
        _, ready = self._state.engine()
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_s,
            "owned_by": "twostep",
            "root": self._state.model.path.name,
            "parent": None,
            "max_model_len": ready.longest,
        }
