"""The events of a streamed answer: server-sent events, and what OpenAI-style chunks in them say."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, NamedTuple

from twostep.bench.client.outcome import FailureError, FailureKind, garbage

MAX_ID = 200
MOST_TOKENS = 1 << 31
"""Larger counts are invalid."""
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Text fields of a delta. There are two names for reasoning text."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the server; None where it does not report them."""

    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One chunk of a streamed answer. It may have no choices, as the chunk with the usage."""

    characters: int
    """Characters of text, reasoning, and arguments of tool calls."""
    has_choice: bool
    is_mute: bool
    """It has a choice without text in the middle of the answer: possibly a token that ends within a character."""
    tokens: int | None
    """Tokens in this chunk, if reported."""
    tokens_so_far: int | None
    """Tokens up to and including this chunk, if reported."""
    usage: Usage | None
    finish_reason: str | None
    id: str


def read_chunk(event: bytes) -> StreamChunk:
    """Raises `FailureError` if the event reports an error or is not a chunk."""
    body = _object(event)
    if body.get("error") is not None:
        raise FailureError(FailureKind.ERROR, _message_of(body))
    try:
        return _chunk(body)
    except (TypeError, AttributeError, KeyError) as error:
        raise garbage(f"malformed chunk ({error}): {event[:120]!r}") from None


def error_in(text: bytes) -> str:
    """The message of an error in any format."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    return _message_of(body) if isinstance(body, dict) else text.decode(errors="replace")


def _message_of(body: Mapping[str, Any]) -> str:
    """The message in OpenAI's or any other format."""
    error = body.get("error") or body
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message or body)


def _object(event: bytes) -> dict[str, Any]:
    try:
        body = json.loads(event)
    except (ValueError, RecursionError):
        raise garbage(f"not JSON: {event[:120]!r}") from None
    if not isinstance(body, dict):
        raise garbage(f"not a JSON object: {event[:120]!r}")
    return body


def _chunk(body: Mapping[str, Any]) -> StreamChunk:
    """Raises `TypeError`, `AttributeError` or `KeyError` for a malformed chunk."""
    choices = body["choices"]
    _check_single(choices)
    deltas = [choice.get("delta") or {} for choice in choices]
    characters = sum(map(_characters, choices, deltas))
    reasons = [reason for choice in choices if (reason := choice.get("finish_reason"))]
    is_first = any("role" in delta for delta in deltas)
    usage = _usage(body.get("usage"))
    return StreamChunk(
        characters=characters,
        has_choice=bool(choices),
        is_mute=bool(choices) and not (characters or reasons or is_first),
        tokens=_listed(choices),
        tokens_so_far=_so_far(usage, body.get("timings")),
        usage=usage,
        finish_reason=str(reasons[0]) if reasons else None,
        id=str(body.get("id") or "")[:MAX_ID],
    )


def _check_single(choices: list[Mapping[str, Any]]) -> None:
    """Raises `FailureError` for more than one choice: tokens of a second would be counted for the first."""
    if len(choices) > 1 or any(choice.get("index") for choice in choices):
        indices = ", ".join(str(choice.get("index")) for choice in choices)
        raise garbage(f"choices {indices} in a chunk; requested was one, with index 0")


def _characters(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> int:
    texts = [choice.get("text"), *(delta.get(name) for name in _TEXTS), *_calls(delta)]
    return sum(len(text) for text in texts if _is_text(text))


def _is_text(value: object) -> bool:
    """Whether it is text. Raises `TypeError` unless it is text or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text is a {type(value).__name__}")
    return value is not None


def _calls(delta: Mapping[str, Any]) -> Iterator[Any]:
    """Pieces of the names and arguments of tool calls."""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        yield from (function.get("name"), function.get("arguments"))


def _listed(choices: list[Mapping[str, Any]]) -> int | None:
    """Number of listed token ids; vLLM lists them on request."""
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
    """Raises `TypeError` unless it is a token count or None."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_TOKENS:
        raise TypeError(f"{short(value)} is not a token count")
    return value


MAX_EVENT_BYTES = 1 << 20
ERROR = b"error"
"""Type of events that report an error."""


class Event(NamedTuple):
    data: bytes
    kind: bytes = b""
    """The `event` field."""


class SseParser:
    """Parses server-sent events incrementally (HTML standard, section 9.2.6). Buffers at most `max_event_bytes` and one
    read."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()
        """An incomplete line."""
        self._data: list[bytes] = []
        """Data lines of an incomplete event."""
        self._size = 0
        """Bytes in `_data`."""
        self._kind = b""
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """Returns the events completed by these bytes. Raises `FailureError` for an event that is too long."""
        if self._after_cr and data:  # the CR already ended the line
            data, self._after_cr = data.removeprefix(b"\n"), False
        events = [event for line in self._lines(data) if (event := self._line(line)) is not None]
        if len(self._rest) + self._size > self._max:
            raise garbage(f"an event of more than {self._max} bytes")
        return events

    def _lines(self, data: bytes) -> list[bytes]:
        """Complete lines without line endings."""
        if b"\n" not in data and b"\r" not in data:
            self._rest += data
            return []
        self._after_cr = data.endswith(b"\r")
        lines = (bytes(self._rest) + data).splitlines(keepends=True)
        self._rest = bytearray() if lines[-1].endswith((b"\n", b"\r")) else bytearray(lines.pop())
        return [line.rstrip(b"\r\n") for line in lines]

    def _line(self, line: bytes) -> Event | None:
        """The event, if this line is empty and ends one with data."""
        if not line:
            return self._ended()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name in (b"data", ERROR):  # older llama.cpp servers put the data of an error into a field of that name
            self._data.append(value)
            self._size += len(value) + 1
        if name == ERROR:
            self._kind = ERROR
        elif name == b"event":
            self._kind = value
        return None

    def _ended(self) -> Event | None:
        event = Event(b"\n".join(self._data), self._kind) if self._data else None
        self._data, self._size, self._kind = [], 0, b""
        return event
