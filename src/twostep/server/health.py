"""`/health`: is the engine getting on? `/ready`: are requests taken on? Two answers, for whoever watches."""

from starlette.requests import Request
from starlette.responses import Response

from twostep.openai_api.errors import ApiError
from twostep.server.errors import error_response
from twostep.server.slices import JsonReply
from twostep.server.state import ServerState


class Health:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """Status 503 if the process should be started anew: the engine died, or has work and does not get on."""
        client = self._state.client
        if client is None:
            return JsonReply({"status": "loading"})
        if client.died:
            return error_response(ApiError(str(client.died), status=503, code="engine_died"))
        stalled_s = self._state.pulse.stalled_s(client)
        if stalled_s > self._state.config.stall_s:
            problem = f"{client.outstanding} requests are pending and no step has ended for {stalled_s:.0f} s"
            return error_response(ApiError(problem, status=503, code="stalled"))
        return JsonReply({"status": "ok", "pending": client.outstanding})

    async def ready(self, request: Request) -> Response:
        """Status 503 while the model is loaded, while the server ends, and when the engine has died."""
        self._state.engine()
        return JsonReply({"status": "ready"})
