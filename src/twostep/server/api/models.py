"""What is served: `/v1/models` under all its names, `/v1/config` with which settings."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twostep.config.effective import config_answer
from twostep.openai_api.errors import ApiError
from twostep.server.http.slices import JsonReply
from twostep.server.state import ServerState


class Models:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list(self, request: Request) -> Response:
        return JsonReply({"object": "list", "data": [self._model(name) for name in self._state.names]})

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._state.names:
            served = " or ".join(map(repr, self._state.names))
            problem = f"the model {name[:60]!r} is not served here; this is {served}"
            raise ApiError(problem, status=404, param="model", code="model_not_found")
        return JsonReply(self._model(name))

    async def config(self, request: Request) -> Response:
        """The effective settings, who set them, and the arithmetic behind them."""
        _, ready = self._state.engine()
        return JsonReply(config_answer(self._state.config, ready))

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
