"""Error replies: every error is answered with OpenAI's error object."""

import json

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostep.errors import EngineDiedError, TwostepError, WorkerFailedError
from twostep.openai_api.api_error import ApiError, refusal
from twostep.server.observe.finished_requests import LEFT

RETRY_AFTER_S = 1
"""`Retry-After` for temporary refusals: the queue has room again whenever an answer ends."""

REFUSAL = "twostep.refusal"
"""Key of the scope: the error that was sent as the reply."""
RECORDED = "twostep.recorded"
"""Key of the scope: the request is in `FinishedRequests`, so it already has a line in the log."""


def api_error(error: TwostepError) -> ApiError:
    """The error to send to the client."""
    if isinstance(error, EngineDiedError):
        return ApiError(str(error), status=500, code="engine_died")
    if isinstance(error, WorkerFailedError):
        return ApiError(str(error), status=500, code="worker_failed")
    return refusal(error)


class ErrorReply(Response):
    """Stores the error in the scope, for the log of refused requests."""

    def __init__(self, error: ApiError, headers: dict[str, str]) -> None:
        # Names sent by clients may contain surrogates, which UTF-8 lacks: the body is ASCII.
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
        headers["Accept-Encoding"] = "gzip, deflate"  # RFC 7694 asks for it in a 415
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorReply(error, headers)


async def on_twostep_error(request: Request, error: Exception) -> Response:
    """Removes the models' folders from the message: it is not for clients."""
    assert isinstance(error, TwostepError)
    reply = api_error(error)
    message = str(reply)
    for folder in request.app.state.model_folders:
        message = message.replace(f"{folder}/", "")
    return error_response(ApiError(message, status=reply.status, param=reply.param, code=reply.code))


HINTS = {
    "/v1/responses": "; use /v1/chat/completions",
    "/v1/embeddings": "; this server completes text only",
}
"""Added to the error for paths of OpenAI's API that are not supported."""


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the router: unknown path, or wrong method."""
    assert isinstance(error, HTTPException)
    problems = {404: f"unknown path{HINTS.get(request.url.path, '')}", 405: "the path does not support this method"}
    problem = f"{request.method} {request.url.path}: {problems.get(error.status_code, error.detail)}"
    response = error_response(ApiError(problem, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def on_client_gone(request: Request, error: Exception) -> Response:
    """No one reads this reply; the status is for the metrics."""
    return Response(status_code=LEFT)


async def on_defect(request: Request, error: Exception) -> Response:
    """A defect of the server. The traceback goes to the log, not to the client."""
    return error_response(ApiError("internal error; see the server's log", status=500))
