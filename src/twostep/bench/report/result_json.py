"""Converts frozen dataclasses to JSON values and back, with checks; the field types define the format.

An object has exactly the fields of its class. Where several classes are possible, `kind` names the class. Times are
ISO 8601, enumerations are their values. `token_gaps_ns` holds the tokens of a request: the time of the first token,
then the gap before each further one.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from itertools import accumulate, pairwise
from math import isfinite
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from twostep.bench.client.outcome import Outcome
from twostep.errors import InvalidParameterError, ResultError
from twostep.workload.schedule import Closed, Open

KINDS: dict[type, str] = {Open: "open", Closed: "closed"}
"""Classes that need `kind`."""
GAPS = "token_gaps_ns"
OMITTED = "simulated"
"""A field that a file has only if it says something: it came after files of this format had been written."""

PLAIN: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: type(value) is bool, "true or false"),
    str: (lambda value: type(value) is str, "a string"),
    int: (lambda value: type(value) is int and value >= 0, "a whole number from 0"),
    float: (lambda value: type(value) in (int, float) and isfinite(value), "a number"),
}
"""For each plain type, the check of a value and the text of an error."""


def wrong(where: str, value: object, allowed: str) -> NoReturn:
    raise ResultError(f"{where} is {short(value)}, not {allowed}")


def lines(value: Any, depth: int) -> str:
    """JSON with one line per member of the outer `depth` levels; lists of plain values stay on one line."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    is_plain = not isinstance(value, dict) and not any(isinstance(member, dict | list) for member in members)
    if depth == 0 or not members or is_plain:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(item, depth - 1)}" for key, item in value.items()) + "\n}"
    return "[\n" + ",\n".join(lines(item, depth - 1) for item in value) + "\n]"


# --- to JSON ------------------------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if is_dataclass(value):
        return dict(_members(value))
    return value


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in KINDS:
        yield "kind", KINDS[type(value)]
    for field in fields(value):
        member = getattr(value, field.name)
        if isinstance(value, Outcome) and field.name == "token_ns":
            yield GAPS, [*member[:1], *(after - before for before, after in pairwise(member))]
        elif member is not None or field.name != OMITTED:
            yield field.name, encode(member)


# --- from JSON ----------------------------------------------------------------------------------------------------


def decode(kind: Any, value: object, where: str) -> Any:
    """A value of type `kind`. Raises `ResultError` naming the member."""
    if get_origin(kind) is UnionType:
        return _decode_one_of(get_args(kind), value, where)
    if get_origin(kind) is tuple:
        return _decode_many(get_args(kind)[0], value, where)
    if is_dataclass(kind):
        return _decode_object(kind, value, where)
    if kind is datetime:
        return _decode_time(value, where)
    if issubclass(kind, StrEnum):
        return _decode_word(kind, value, where)
    return _decode_plain(kind, value, where)


def _decode_one_of(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    first, *others = [kind for kind in kinds if kind is not NoneType]
    if not others:
        return decode(first, value, where)
    named = {KINDS[kind]: kind for kind in (first, *others)}
    word = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(value, dict) or word not in named:
        wrong(f"{where}.kind", word, " or ".join(named))
    return decode(named[word], {key: item for key, item in value.items() if key != "kind"}, where)


def _decode_many(kind: Any, value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        wrong(where, value, "a list")
    if kind is int and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)  # fast path for token times
    return tuple(decode(kind, item, f"{where}[{i}]") for i, item in enumerate(value))


def _decode_object(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        wrong(where, value, "an object")
    known = _types(kind)
    value = {OMITTED: None, **value} if OMITTED in known else value
    if missing := known.keys() - value.keys():
        raise ResultError(f"{where} has no {min(missing)!r}")
    if unknown := value.keys() - known.keys():
        raise ResultError(f"{where} has an unknown field {short(min(unknown))}")
    members = {name: decode(type_, value[name], f"{where}.{name}") for name, type_ in known.items()}
    if kind is Outcome:
        members["token_ns"] = tuple(accumulate(members.pop(GAPS)))
    try:
        return kind(**members)
    except (ValueError, InvalidParameterError) as error:
        raise ResultError(f"{where}: {error}") from error


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Types of the fields of such an object in a file."""
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in fields(kind)}
    if kind is Outcome:
        types[GAPS] = types.pop("token_ns")
    return types


def _decode_time(value: object, where: str) -> datetime:
    try:
        return datetime.fromisoformat(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        wrong(where, value, "a time in ISO 8601")


def _decode_word(kind: type[StrEnum], value: object, where: str) -> StrEnum:
    for member in kind:
        if member == value:
            return member
    wrong(where, value, f"one of {', '.join(kind)}")


def _decode_plain(kind: type, value: object, where: str) -> object:
    fits, allowed = PLAIN[kind]
    if not fits(value):
        wrong(where, value, allowed)
    return value
