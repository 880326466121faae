"""The requests that the ledger knows, newest first, in OpenAI's form of a list."""

from typing import Any

from twostep.openai_api.errors import ApiError
from twostep.openai_api.json_text import Many
from twostep.server.observe.finished import Ledger, Reply

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


def read_limit(text: str | None) -> int:
    """Raises `ApiError`."""
    if text is None:
        return DEFAULT_LIMIT
    if not text.isdecimal() or len(text) > len(str(MAX_LIMIT)) or not 1 <= int(text) <= MAX_LIMIT:
        raise ApiError(f"limit is {text[:20]!r}; it has to be an integer from 1 to {MAX_LIMIT}", param="limit")
    return int(text)


def listing(ledger: Ledger, limit: int) -> dict[str, Any]:
    """Of those that ended last, as a `Many`. Times as in the log, of the answer that ended last."""
    newest = ledger.newest(limit)
    return {
        "object": "list",
        "data": Many(map(_row, newest)),
        "first_id": newest[0].id if newest else None,
        "last_id": newest[-1].id if newest else None,
        "has_more": len(ledger) > len(newest),
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
