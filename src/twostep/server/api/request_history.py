"""`/v1/requests`: finished requests, newest first, in OpenAI's form of a list, and the latency breakdown of each."""

import asyncio
from typing import Any

from starlette.requests import Request

from twostep.openai_api.api_error import ApiError
from twostep.openai_api.json_text import Many
from twostep.server.http.replies import SlicedReply
from twostep.server.observe.finished_requests import FinishedRequests, Reply
from twostep.server.observe.latency_breakdown import latency_breakdown
from twostep.server.state import ServerState

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


class RequestHistory:
    """The handlers of these routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def requests(self, request: Request) -> SlicedReply:
        """Lists finished requests. Raises `ApiError` if `limit` is out of range."""
        limit = read_limit(request.query_params.get("limit"))
        return SlicedReply(self._state.slices, listing(self._state.finished, limit))

    async def breakdown(self, request: Request) -> SlicedReply:
        """Raises `ApiError` with status 404 if the reply is not recorded, or no longer."""
        id_ = request.path_params["name"]
        reply = self._state.finished.get(id_)
        if reply is None:
            kept = f"the last {self._state.finished.keep} are kept, for a limited time"
            raise ApiError(f"no finished request {id_:.80}; {kept}", status=404, param="id", code="request_not_found")
        whole = await asyncio.to_thread(latency_breakdown, reply)  # 10 µs per line, of which there may be thousands
        choices = Many({**choice, "lines": Many(choice["lines"])} for choice in whole["choices"])
        return SlicedReply(self._state.slices, {**whole, "choices": choices})


def read_limit(text: str | None) -> int:
    """Raises `ApiError`."""
    if text is None:
        return DEFAULT_LIMIT
    if not text.isdecimal() or len(text) > len(str(MAX_LIMIT)) or not 1 <= int(text) <= MAX_LIMIT:
        raise ApiError(f"limit is {text[:20]!r}; it has to be an integer from 1 to {MAX_LIMIT}", param="limit")
    return int(text)


def listing(finished: FinishedRequests, limit: int) -> dict[str, Any]:
    """The requests that ended last, as a `Many`. Times are those of the choice that ended last, as in the log."""
    newest = finished.newest(limit)
    return {
        "object": "list",
        "data": Many(map(_row, newest)),
        "first_id": newest[0].id if newest else None,
        "last_id": newest[-1].id if newest else None,
        "has_more": len(finished) > len(newest),
    }


def _row(reply: Reply) -> dict[str, Any]:
    choices = [choice for output in reply.outputs for choice in output.choices]
    tokens_ns = max((choice.timeline.token_ns for choice in choices), key=lambda ns: ns[-1:], default=())

    def ms(at_ns: tuple[int, ...]) -> float | None:
        return round((at_ns[0] - reply.received_ns) / 1e6, 3) if at_ns else None

    return {
        "id": reply.id,
        "object": "request",
        "endpoint": reply.endpoint,
        "model": reply.model,
        "status": reply.status,
        "created": int(reply.arrived_s),
        "ttft_ms": ms(tokens_ns[:1]),
        "e2e_ms": ms(tokens_ns[-1:]),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in reply.outputs),
        "completion_tokens": sum(output.output_tokens for output in reply.outputs),
    }
