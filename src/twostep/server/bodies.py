"""Bodies of requests: read whole, within limits of length and time, and JSON."""

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from twostep.openai_api.errors import ApiError
from twostep.server.flights import ClientGoneError

READ_S = 60.0
"""How long a client may take to send a body: meanwhile it holds a place."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises `ApiError` with status 413 or 408, `ClientGoneError`."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_long(max_bytes)
    try:
        async with asyncio.timeout(READ_S):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(f"the body did not come within {READ_S:.0f} s", status=408) from None
    except ClientDisconnect:
        raise ClientGoneError from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
    return bytes(body)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(f"the body is too long; at most {max_bytes} bytes are read", status=413, code="body_too_long")


def parse(body: bytes) -> Any:
    """JSON as Python's objects. Raises `ApiError`."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise ApiError(f"the body is not JSON: {error}") from None
