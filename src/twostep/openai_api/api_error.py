"""Errors in OpenAI's form: an HTTP status and an error object."""

from typing import Any

from twostep.errors import ContextLengthError, InvalidParameterError, TwostepError


class ApiError(TwostepError):
    """An error of one request. `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON body of the error reply."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal(error: TwostepError) -> ApiError:
    """Converts an error about a request to an `ApiError`: status 400 unless `error` already has a status."""
    if isinstance(error, ApiError):
        return error
    param = error.param if isinstance(error, InvalidParameterError) else None
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return ApiError(str(error), param=param, code=code)
