"""Checks of JSON values: each function returns its value with a type, or raises `RecordingError` with its name."""

from reprlib import repr as short
from typing import NoReturn

from twostep.errors import RecordingError


def wrong(name: str, value: object, allowed: str) -> NoReturn:
    raise RecordingError(f"{name} is {short(value)}, not {allowed}")


def whole(value: object, name: str, least: int | None = 0) -> int:
    """An integer, at least `least`. True and False are rejected."""
    if type(value) is not int or (least is not None and value < least):
        wrong(name, value, "a whole number" if least is None else f"a whole number from {least}")
    return value


def flag(value: object, name: str) -> bool:
    """A flag, which is stored as 0 or 1."""
    if type(value) is not int or value not in (0, 1):
        wrong(name, value, "0 or 1")
    return value == 1


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        wrong(name, value, "a string")
    return value


def many(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        wrong(name, value, "a list")
    return value


def record(value: object, name: str, count: int) -> list[object]:
    """A list of exactly `count` values."""
    if not isinstance(value, list) or len(value) != count:
        wrong(name, value, f"a list of {count}")
    return value


def wholes(value: object, name: str) -> tuple[int, ...]:
    return tuple(whole(item, name) for item in many(value, name))


def named(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        wrong(name, value, "an object")
    return value
