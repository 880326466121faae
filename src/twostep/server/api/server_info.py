"""What the server serves and how it is.

`/health`: does the engine make progress? `/ready`: are requests accepted? `/v1/models`: the served model under all its
names. `/v1/config`: the settings in effect. `/metrics`: Prometheus metrics.
"""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twostep.config.effective import config_answer
from twostep.engine.backend import Worker
from twostep.openai_api.api_error import ApiError
from twostep.server.http.error_replies import error_response
from twostep.server.http.replies import JsonReply
from twostep.server.observe.prometheus_metrics import CONTENT_TYPE, dropped_lines, exposition, of_workers
from twostep.server.state import ServerState


def problem(state: ServerState) -> ApiError | None:
    """Why the process should be restarted; None if it should not, for example while an engine loads the model."""
    for served in state.models:
        backend = served.backend
        if backend.phase == "failed":
            return ApiError(str(backend.error), status=503, code="engine_died")
        stalled_s = max((worker.stalled_s for worker in backend.workers()), default=0.0)
        if stalled_s > state.config.stall_s:
            pending = f"{backend.outstanding} requests are pending and no step has completed for {stalled_s:.0f} s"
            return ApiError(pending, status=503, code="stalled")
    return None


def _budget(workers: Sequence[Worker]) -> dict[str, Any] | None:
    """How the budget by time is kept; None before the first step that has one. Times in ms."""
    kept = [worker.snapshot.measured.promised for worker in workers if worker.snapshot is not None]
    if not any(one.steps for one in kept):
        return None
    least_ns = max(one.least_ns for one in kept)
    return {
        "budget_ms": max(one.budget_ns for one in kept) / 1e6,
        "steps": sum(one.steps for one in kept),
        "late_steps": sum(one.late for one in kept),
        "late_steps_starved": sum(one.late_starved for one in kept),
        "impossible_steps": {
            "decodes": sum(one.over_decodes for one in kept),
            "prompt": sum(one.over_prompts for one in kept),
        },
        "least_possible_ms": least_ns / 1e6 if least_ns else None,
    }


class ServerInfo:
    """The handlers of these routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """Status 503 if the process should be restarted: the engine died for good, or is stuck with pending work."""
        if (found := problem(self._state)) is not None:
            return error_response(found)
        phases = [served.backend.phase if served.prepared else "loading" for served in self._state.models]
        for phase in ("loading", "restarting"):
            if phase in phases:
                return JsonReply({"status": phase})
        pending = sum(served.backend.outstanding for served in self._state.models)
        return JsonReply({"status": "ok", "pending": pending})

    async def ready(self, request: Request) -> Response:
        """Status 503 while the model loads, during shutdown, and when the engine has died."""
        for served in self._state.models:
            self._state.check_accepting(served)
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
        served = self._state.models[0]
        answer = config_answer(self._state.config, self._state.check_accepting(served))
        return JsonReply({**answer, "itl_budget": _budget(served.backend.workers())})

    async def metrics(self, request: Request) -> Response:
        """As of the engine's last message: it does not wait for a step."""
        state = self._state
        first, *others = [
            (served.names[0], [*served.metrics.of_replies(), *of_workers(served.backend.workers())])
            for served in state.models
        ]
        first[1].extend([*state.http_replies.families(), dropped_lines(state.dropped_lines())])
        return Response(exposition([first, *others]), headers={"content-type": CONTENT_TYPE})

    def _model(self, name: str) -> dict[str, Any]:
        served = self._state.named(name)
        capabilities = self._state.check_accepting(served)
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_s,
            "owned_by": "twostep",
            "root": served.model.path.name,
            "parent": None,
            "max_model_len": capabilities.max_sequence_tokens,
        }
