"""Errors as replies: always OpenAI's error object, whatever went wrong."""

import json

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostep.errors import EngineDiedError, TwostepError, WorkerFailedError
from twostep.openai_api.errors import ApiError, refusal
from twostep.server.observe.finished import LEFT

RETRY_AFTER_S = 1
"""What clients are told to wait for who are sent away for now: places come free whenever somebody's answer ends."""

REFUSAL = "twostep.refusal"
"""Key of the scope: the error that a request was answered with."""
IN_LEDGER = "twostep.in_ledger"
"""Key of the scope: the ledger was told of the request, so that it has its line in the log already."""


def api_error(error: TwostepError) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, EngineDiedError):
        return ApiError(str(error), status=500, code="engine_died")
    if isinstance(error, WorkerFailedError):
        return ApiError(str(error), status=500, code="worker_failed")
    return refusal(error)


class ErrorReply(Response):
    """Leaves what was wrong in the scope, for the log of refusals."""

    def __init__(self, error: ApiError, headers: dict[str, str]) -> None:
        # Names from outside may hold what UTF-8 cannot: the body is plain ASCII.
        super().__init__(json.dumps(error.body()), error.status, headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSAL] = self._error
        await super().__call__(scope, receive, send)


def error_response(error: ApiError) -> Response:
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.code == "unsupported_encoding":
        headers["Accept-Encoding"] = "gzip, deflate"  # what RFC 7694 wants of a 415
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorReply(error, headers)


async def on_twostep_error(request: Request, error: Exception) -> Response:
    """Errors about the model's file name it; where it lies is not for clients."""
    assert isinstance(error, TwostepError)
    told = api_error(error)
    message = str(told)
    for folder in request.app.state.model_folders:
        message = message.replace(f"{folder}/", "")
    return error_response(ApiError(message, status=told.status, param=told.param, code=told.code))


HINTS = {
    "/v1/responses": "; use /v1/chat/completions",
    "/v1/embeddings": "; this server completes text only",
}
"""What those are told who ask for a part of OpenAI's API that is not here."""


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router says: no such path, or not by this method."""
    assert isinstance(error, HTTPException)
    problems = {404: f"there is no such path{HINTS.get(request.url.path, '')}", 405: "the path has no such method"}
    problem = f"{request.method} {request.url.path}: {problems.get(error.status_code, error.detail)}"
    response = error_response(ApiError(problem, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=LEFT)


async def on_defect(request: Request, error: Exception) -> Response:
    """Ours. The traceback goes to the log, not to the client."""
    return error_response(ApiError("internal error; the server's log says more", status=500))
