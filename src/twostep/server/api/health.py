"""`/health`: is the engine getting on? `/ready`: are requests taken on? Two answers, for whoever watches."""

from starlette.requests import Request
from starlette.responses import Response

from twostep.openai_api.errors import ApiError
from twostep.server.http.errors import error_response
from twostep.server.http.slices import JsonReply
from twostep.server.state import ServerState


def problem(state: ServerState) -> ApiError | None:
    """Why the process should be restarted; None if it should not, as while an engine loads the model, again or not."""
    client = state.client
    if client is None or (client.died and state.restarting):
        return None
    if client.died:
        return ApiError(str(client.died), status=503, code="engine_died")
    stalled_s = state.pulse.stalled_s(client)
    if stalled_s <= state.config.stall_s:
        return None
    pending = f"{client.outstanding} requests are pending and no step has ended for {stalled_s:.0f} s"
    return ApiError(pending, status=503, code="stalled")


class Health:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """Status 503 if the process should be restarted: the engine died for good, or is stuck with work pending."""
        if (found := problem(self._state)) is not None:
            return error_response(found)
        client = self._state.client
        if client is None:
            return JsonReply({"status": "loading"})
        if client.died:
            return JsonReply({"status": "restarting"})
        return JsonReply({"status": "ok", "pending": client.outstanding})

    async def ready(self, request: Request) -> Response:
        """Status 503 while the model is loaded, while the server ends, and when the engine has died."""
        self._state.engine()
        return JsonReply({"status": "ready"})
