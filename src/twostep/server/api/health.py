"""`/health`: is the engine getting on? `/ready`: are requests taken on? Two answers, for whoever watches."""

from starlette.requests import Request
from starlette.responses import Response

from twostep.openai_api.errors import ApiError
from twostep.server.http.errors import error_response
from twostep.server.http.slices import JsonReply
from twostep.server.state import ServerState


def problem(state: ServerState) -> ApiError | None:
    """Why the process should be restarted; None if it should not, as while an engine loads the model, again or not."""
    for served in state.models:
        backend = served.backend
        if backend.phase == "failed":
            return ApiError(str(backend.error), status=503, code="engine_died")
        stalled_s = max((worker.stalled_s for worker in backend.workers()), default=0.0)
        if stalled_s > state.config.stall_s:
            pending = f"{backend.outstanding} requests are pending and no step has ended for {stalled_s:.0f} s"
            return ApiError(pending, status=503, code="stalled")
    return None


class Health:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """Status 503 if the process should be restarted: the engine died for good, or is stuck with work pending."""
        if (found := problem(self._state)) is not None:
            return error_response(found)
        phases = [served.backend.phase if served.prepared else "loading" for served in self._state.models]
        for phase in ("loading", "restarting"):
            if phase in phases:
                return JsonReply({"status": phase})
        pending = sum(served.backend.outstanding for served in self._state.models)
        return JsonReply({"status": "ok", "pending": pending})

    async def ready(self, request: Request) -> Response:
        """Status 503 while the model is loaded, while the server ends, and when the engine has died."""
        for served in self._state.models:
            self._state.check_accepting(served)
        return JsonReply({"status": "ready"})
