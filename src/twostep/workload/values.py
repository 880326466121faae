"""Values of a workload's file, checked: each function returns what it was given, typed, or raises `WorkloadError` that
names it and says what is allowed."""

from collections.abc import Collection
from math import isfinite
from reprlib import repr as short
from typing import NoReturn

from twostep.errors import WorkloadError

MOST_TOKENS = 100_000_000
"""Of one prompt or answer."""


def wrong(name: str, value: object, allowed: str) -> NoReturn:
    raise WorkloadError(f"{name} is {short(value)}; it has to be {allowed}")


def whole(value: object, name: str, least: int, most: int) -> int:
    """True and False are no numbers."""
    if type(value) is not int or not least <= value <= most:
        wrong(name, value, f"a whole number from {least} to {most}")
    return value


def tokens(value: object, name: str) -> int:
    """One at least."""
    return whole(value, name, 1, MOST_TOKENS)


def seconds(value: object, name: str) -> float:
    """Finite, not below 0."""
    if type(value) not in (int, float) or not isinstance(value, int | float) or not 0 <= value <= 1e12:
        wrong(name, value, "seconds from 0")
    return float(value)


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        wrong(name, value, "a text")
    return value


def record(value: object, required: Collection[str], optional: Collection[str] = ()) -> dict[str, object]:
    """An object with all of `required` and nothing beyond `optional`."""
    if not isinstance(value, dict):
        raise WorkloadError(f"{short(value)} is no object with {', '.join(required)}")
    for name in required:
        if name not in value:
            raise WorkloadError(f"{name} is missing")
    for name in value:
        if name not in required and name not in optional:
            raise WorkloadError(f"{short(name)} is no field; there are {', '.join([*required, *optional])}")
    return value


def number_in(written: str, name: str) -> float:
    """Of a CSV file: digits, perhaps with a point."""
    try:
        value = float(written)
    except ValueError:
        wrong(name, written, "a number")
    if not isfinite(value):
        wrong(name, written, "a finite number")
    return value


def count_in(written: str, name: str) -> int:
    """Of a CSV file; 0 is allowed."""
    if not (written.isascii() and written.isdigit()) or len(written) > 9:
        wrong(name, written, f"a whole number from 0 to {MOST_TOKENS}")
    return whole(int(written), name, 0, MOST_TOKENS)
