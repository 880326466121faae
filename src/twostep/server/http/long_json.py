"""Decodes JSON of long bodies in small steps, so that other threads can run in between.

The standard library decodes a body in one step, up to 35 ms per MB, and holds the interpreter's lock meanwhile: the
event loop waits whatever thread it runs in. This decoder takes up to ten times as long for bodies of very many members.
"""

import json
import re
from collections.abc import Callable
from json import decoder
from typing import Any

RUN = 16 << 10
"""Characters of numbers decoded at once (0.2 ms): token ids come in hundreds of thousands."""

_blank = re.compile(r"[ \t\n\r]*").match
_numbers = re.compile(r"[-+.0-9eE, \t\n\r]*").match
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_scan_text: Callable[[str, int, bool], tuple[str, int]] = decoder.scanstring  # type: ignore[attr-defined]


def loads(body: bytes | bytearray) -> Any:
    """Like `json.loads`, with the same result for every body. Raises `ValueError`, `RecursionError`."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    value, at = _value(text, _blank(text).end())  # type: ignore[union-attr]  # it always matches
    if (at := _after(text, at)) != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return value


def _after(text: str, at: int) -> int:
    """The position of the next character that is not whitespace."""
    return _blank(text, at).end()  # type: ignore[union-attr]


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and the position after it."""
    match text[at : at + 1]:
        case "[":
            return _array(text, _after(text, at + 1))
        case "{":
            return _object(text, _after(text, at + 1))
    try:
        return _scan(text, at)
    except StopIteration as stop:
        raise json.JSONDecodeError("Expecting value", text, stop.value) from None


def _array(text: str, at: int) -> tuple[list[Any], int]:
    """Decodes from the first member or the end."""
    made: list[Any] = []
    if text[at : at + 1] == "]":
        return made, at + 1
    while True:
        at = _run(text, at, made)
        value, at = _value(text, at)
        made.append(value)
        at, is_end = _next(text, at, "]")
        if is_end:
            return made, at


def _run(text: str, at: int, made: list[Any]) -> int:
    """Decodes numbers, up to the last comma within `RUN`, and returns the position of the next member. Returns `at` if
    there are too few numbers, or if there is an error: it is then located member by member."""
    cut = text.rfind(",", at, _numbers(text, at, at + RUN).end())  # type: ignore[union-attr]
    if cut - at < 64:
        return at
    try:
        made += json.loads(f"[{text[at:cut]}]")
    except ValueError:
        return at
    return _after(text, cut + 1)


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Decodes from the first name or the end."""
    made: dict[str, Any] = {}
    if text[at : at + 1] == "}":
        return made, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _scan_text(text, at + 1, True)
        at = _after(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        made[name], at = _value(text, _after(text, at + 1))
        at, is_end = _next(text, at, "}")
        if is_end:
            return made, at


def _next(text: str, at: int, end: str) -> tuple[int, bool]:
    """Reads the separator after a member: returns the position of the next member, or of the end and true. Raises
    `ValueError`."""
    at = _after(text, at)
    if text[at : at + 1] == end:
        return at + 1, True
    if text[at : at + 1] != ",":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    return _after(text, at + 1), False
