"""The events of a streamed answer: server-sent events, and what OpenAI-style chunks in them say."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, NamedTuple

from twostep.bench.client.outcome import FailureError, FailureKind, garbage

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
class StreamChunk:
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


def read_chunk(event: bytes) -> StreamChunk:
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


def _chunk(body: Mapping[str, Any]) -> StreamChunk:
    """Raises `TypeError`, `AttributeError` or `KeyError` for another form."""
    choices = body["choices"]
    _check_single(choices)
    deltas = [choice.get("delta") or {} for choice in choices]
    characters = sum(map(_characters, choices, deltas))
    reasons = [reason for choice in choices if (reason := choice.get("finish_reason"))]
    begins = any("role" in delta for delta in deltas)
    usage = _usage(body.get("usage"))
    return StreamChunk(
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


MAX_EVENT_BYTES = 1 << 20
ERROR = b"error"
"""Kind of events that bring one."""


class Event(NamedTuple):
    data: bytes
    kind: bytes = b""
    """Its `event` field."""


class SseParser:
    """Gives each event when its last byte is there. Keeps at most `max_event_bytes` and one read."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()
        """Of a line whose end has not come."""
        self._data: list[bytes] = []
        """Of the event whose end has not come, by lines."""
        self._size = 0
        """Of `_data`, in bytes."""
        self._kind = b""
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that end in these bytes. Raises `FailureError` for an event that is too long."""
        if self._after_cr and data:  # a CR has ended the line already; an LF after it ends no other
            data, self._after_cr = data.removeprefix(b"\n"), False
        events = [event for line in self._lines(data) if (event := self._line(line)) is not None]
        if len(self._rest) + self._size > self._max:
            raise garbage(f"an event of more than {self._max} bytes")
        return events

    def _lines(self, data: bytes) -> list[bytes]:
        """Whole lines, without their ends."""
        if b"\n" not in data and b"\r" not in data:
            self._rest += data
            return []
        self._after_cr = data.endswith(b"\r")
        lines = (bytes(self._rest) + data).splitlines(keepends=True)
        self._rest = bytearray() if lines[-1].endswith((b"\n", b"\r")) else bytearray(lines.pop())
        return [line.rstrip(b"\r\n") for line in lines]

    def _line(self, line: bytes) -> Event | None:
        """The event if this line, an empty one, ends one that has data."""
        if not line:
            return self._ended()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name in (b"data", ERROR):  # older servers of llama.cpp put the data of an error into a field of that name
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
