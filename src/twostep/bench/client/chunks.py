"""What one event of a streamed answer says, in OpenAI's form with what vLLM and llama.cpp add to it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from twostep.bench.client.failed import FailureError, garbage
from twostep.bench.client.outcome import FailureKind

MAX_ID = 200
MOST_TOKENS = 1 << 31
"""A count from here on is none."""
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Of a delta: what a reader may see. Servers name the thoughts of a model in two ways."""


@dataclass(frozen=True, slots=True)
class Usage:
    """As the server counts; None where it does not say."""

    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """`choices` may be none, as in the chunk that brings only the usage."""

    characters: int
    """Of text, thoughts and arguments of tool calls."""
    has_choice: bool
    is_mute: bool
    """It has a choice that neither begins nor ends the answer and has no text: perhaps a token that completes no
    character."""
    tokens: int | None
    """In this chunk, if it says so."""
    tokens_so_far: int | None
    """Up to this chunk, if it says so."""
    usage: Usage | None
    finish_reason: str | None
    id: str


def read_chunk(event: bytes) -> Chunk:
    """Raises `FailureError` for an error that the server reports, and for what is not a chunk."""
    body = _object(event)
    if body.get("error") is not None:
        raise FailureError(FailureKind.ERROR, _message_of(body))
    try:
        return _chunk(body)
    except (TypeError, AttributeError, KeyError) as error:
        raise garbage(f"a chunk of another form ({error}): {event[:120]!r}") from None


def error_in(text: bytes) -> str:
    """What an error says, of any form."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    return _message_of(body) if isinstance(body, dict) else text.decode(errors="replace")


def _message_of(body: Mapping[str, Any]) -> str:
    """In OpenAI's form or any other."""
    error = body.get("error") or body
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message or body)


def _object(event: bytes) -> dict[str, Any]:
    try:
        body = json.loads(event)
    except (ValueError, RecursionError):
        raise garbage(f"not JSON: {event[:120]!r}") from None
    if not isinstance(body, dict):
        raise garbage(f"no JSON object: {event[:120]!r}")
    return body


def _chunk(body: Mapping[str, Any]) -> Chunk:
    """Raises `TypeError`, `AttributeError` or `KeyError` for another form."""
    choices = body["choices"]
    _check_single(choices)
    deltas = [choice.get("delta") or {} for choice in choices]
    characters = sum(map(_characters, choices, deltas))
    reasons = [reason for choice in choices if (reason := choice.get("finish_reason"))]
    begins = any("role" in delta for delta in deltas)
    usage = _usage(body.get("usage"))
    return Chunk(
        characters=characters,
        has_choice=bool(choices),
        is_mute=bool(choices) and not (characters or reasons or begins),
        tokens=_listed(choices),
        tokens_so_far=_so_far(usage, body.get("timings")),
        usage=usage,
        finish_reason=str(reasons[0]) if reasons else None,
        id=str(body.get("id") or "")[:MAX_ID],
    )


def _check_single(choices: list[Mapping[str, Any]]) -> None:
    """One answer is asked for; tokens of a second would count as those of the first."""
    if len(choices) > 1 or any(choice.get("index") for choice in choices):
        indices = ", ".join(str(choice.get("index")) for choice in choices)
        raise garbage(f"choices {indices} in a chunk, where one was asked for, with index 0")


def _characters(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> int:
    texts = [choice.get("text"), *(delta.get(name) for name in _TEXTS), *_calls(delta)]
    return sum(len(text) for text in texts if _is_text(text))


def _is_text(value: object) -> bool:
    """Raises `TypeError` unless it is text or nothing."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text is a {type(value).__name__}")
    return value is not None


def _calls(delta: Mapping[str, Any]) -> Iterator[Any]:
    """Names and arguments of calls of tools, of which a stream brings pieces."""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        yield from (function.get("name"), function.get("arguments"))


def _listed(choices: list[Mapping[str, Any]]) -> int | None:
    """vLLM lists token ids where they are asked for."""
    lists = [ids for choice in choices if (ids := choice.get("token_ids")) is not None]
    return sum(map(len, lists)) if lists else None


def _usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens")
    return Usage(*map(_count, counts))


def _so_far(usage: Usage | None, timings: Mapping[str, Any] | None) -> int | None:
    """vLLM's `continuous_usage_stats`, else llama.cpp's `timings_per_token`."""
    if usage is not None and usage.output_tokens is not None:
        return usage.output_tokens
    return _count(timings.get("predicted_n")) if timings else None


def _count(value: object) -> int | None:
    """Raises `TypeError` for what is no number of tokens."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_TOKENS:
        raise TypeError(f"{short(value)} is no number of tokens")
    return value
