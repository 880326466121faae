"""`/health`: is the engine getting on? `/ready`: are requests taken on? Two answers, for whoever watches."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from twostep.openai_api.errors import ApiError
from twostep.server.errors import error_response
from twostep.server.state import ServerState


class Health:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """Status 503 if the process should be restarted: the engine died for good, or is stuck with work pending."""
        client = self._state.client
        if client is None:
            return JSONResponse({"status": "loading"})
        if client.died and self._state.restarting:
            return JSONResponse({"status": "restarting"})
        if client.died:
            return error_response(ApiError(str(client.died), status=503, code="engine_died"))
        stalled_s = self._state.pulse.stalled_s(client)
        if stalled_s > self._state.config.stall_s:
            problem = f"{client.outstanding} requests are pending and no step has ended for {stalled_s:.0f} s"
            return error_response(ApiError(problem, status=503, code="stalled"))
        return JSONResponse({"status": "ok", "pending": client.outstanding})

    async def ready(self, request: Request) -> Response:
        """Status 503 while the model is loaded, while the server ends, and when the engine has died."""
        self._state.engine()
        return JSONResponse({"status": "ready"})
