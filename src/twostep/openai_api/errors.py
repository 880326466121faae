"""Errors as OpenAI's clients expect them: a status and an error object."""

from typing import Any

from twostep.errors import ContextLengthError, InvalidParameterError, TwostepError


class ApiError(TwostepError):
    """What is wrong with one request, or went wrong with it. `status` is that of HTTP."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object to answer with."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal(error: TwostepError) -> ApiError:
    """A request that cannot be taken on, as an error of whoever sent it: status 400 unless `error` has its own."""
    if isinstance(error, ApiError):
        return error
    param = error.param if isinstance(error, InvalidParameterError) else None
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return ApiError(str(error), param=param, code=code)
