"""Encodes JSON: compact, safe for clients that split lines, and piece by piece for large replies."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_UNSAFE = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""Characters that some clients treat as line ends (`str.splitlines` does), and surrogates, which UTF-8 lacks."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Many:
    """A list that can be long. `pieces` creates and encodes its members one at a time."""

    members: Iterable[Any]


def encode(value: object) -> str:
    """`value` as JSON on one line, for any definition of a line end. The text can always be encoded as UTF-8.

    Raises `ValueError` for NaN and infinities.
    """
    text = _encode(value)
    return text if text.isascii() else _UNSAFE.sub(_escaped, text)


def pieces(value: object) -> Iterator[str]:
    """The text of `encode` in pieces. A piece holds at most one member of a `Many`, unless the member contains one."""
    if isinstance(value, Many):
        yield from _members(value)
    elif isinstance(value, dict) and _has_many(value):
        yield from _fields(value)
    else:
        yield encode(value)


def plain(value: Any) -> Any:
    """`value` with a list in place of each `Many`. A `Many` can be read only once."""
    if isinstance(value, Many):
        return [plain(member) for member in value.members]
    if isinstance(value, dict) and _has_many(value):
        return {key: plain(member) for key, member in value.items()}
    return value


def _members(many: Many) -> Iterator[str]:
    separator = "["
    for member in many.members:
        if _has_many(member):
            yield separator
            yield from pieces(member)
        else:
            yield separator + encode(member)
        separator = ","
    yield "[]" if separator == "[" else "]"


def _fields(fields: dict[str, Any]) -> Iterator[str]:
    separator = "{"
    for key, member in fields.items():
        yield f"{separator}{encode(key)}:"
        yield from pieces(member)
        separator = ","
    yield "}"


def _has_many(value: object) -> bool:
    return isinstance(value, Many) or (isinstance(value, dict) and any(map(_has_many, value.values())))


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
