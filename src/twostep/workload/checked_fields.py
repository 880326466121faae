"""Checked reading of a workload file: lines, JSON values, numbers. Errors name the file, line and field, and say what
is allowed."""

from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from json import JSONDecodeError, JSONDecoder
from math import isfinite
from reprlib import repr as short
from typing import NoReturn

from twostep.errors import InvalidParameterError, WorkloadError
from twostep.input_file import InputFile

MOST_TOKENS = 100_000_000
"""Maximum tokens of one prompt or answer."""


def wrong(name: str, value: object, allowed: str) -> NoReturn:
    raise WorkloadError(f"{name} is {short(value)}; it must be {allowed}")


def whole(value: object, name: str, least: int, most: int) -> int:
    """An integer in the range; True and False are rejected."""
    if type(value) is not int or not least <= value <= most:
        wrong(name, value, f"a whole number from {least} to {most}")
    return value


def tokens(value: object, name: str) -> int:
    """A token count, at least 1."""
    return whole(value, name, 1, MOST_TOKENS)


def seconds(value: object, name: str) -> float:
    """Finite and not negative."""
    if type(value) not in (int, float) or not isinstance(value, int | float) or not 0 <= value <= 1e12:
        wrong(name, value, "a number of seconds, 0 or more")
    return float(value)


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        wrong(name, value, "a string")
    return value


def record(value: object, required: Collection[str], optional: Collection[str] = ()) -> dict[str, object]:
    """An object with all `required` and only `optional` further fields."""
    if not isinstance(value, dict):
        raise WorkloadError(f"{short(value)} is not an object with {', '.join(required)}")
    for name in required:
        if name not in value:
            raise WorkloadError(f"{name} is missing")
    for name in value:
        if name not in required and name not in optional:
            raise WorkloadError(f"unknown field {short(name)}; known are {', '.join([*required, *optional])}")
    return value


def number_in(written: str, name: str) -> float:
    """A finite number in a CSV field."""
    try:
        value = float(written)
    except ValueError:
        wrong(name, written, "a number")
    if not isfinite(value):
        wrong(name, written, "a finite number")
    return value


def count_in(written: str, name: str) -> int:
    """A count in a CSV field; 0 is allowed."""
    if not (written.isascii() and written.isdigit()) or len(written) > 9:
        wrong(name, written, f"a whole number from 0 to {MOST_TOKENS}")
    return whole(int(written), name, 0, MOST_TOKENS)


Say = Callable[[str], None]
"""Prints one line for the user about what was skipped, sorted or clipped. No such change is silent."""

MOST_LINE_BYTES = 16 << 20
MOST_LINES = 6_000_000
"""About a gigabyte of requests. The longest known public trace has 5.3 million."""


def numbered_lines(source: InputFile) -> Iterator[tuple[int, bytes]]:
    """Yields non-empty lines with their numbers from 1, without a byte order mark. Reads line by line.

    Raises `WorkloadError` for lines that are too long, and for too many.
    """
    with source.open() as file:
        for number in count(1):
            line = file.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_LINE_BYTES:
                most = f"the maximum of {MOST_LINE_BYTES >> 20} MiB"
                raise WorkloadError(f"{source}, line {number}: longer than {most}")
            if number > MOST_LINES:
                raise WorkloadError(f"{source} has more than {MOST_LINES} lines, the maximum; split the file")
            line = line.removeprefix(BOM_UTF8) if number == 1 else line
            if line.strip():
                yield number, line


@contextmanager
def naming(source: InputFile, line: int) -> Iterator[None]:
    """Prefixes a `WorkloadError` raised inside with file and line."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(f"{source}, line {line}: {error}") from None


def _object(members: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        repeated = next(name for name in names if names.count(name) > 1)
        raise WorkloadError(f"{short(repeated)} appears more than once")
    return found


_DECODER = JSONDecoder(object_pairs_hook=_object)


def from_json(line: bytes) -> object:
    """Parses JSON. Raises `WorkloadError`, also for a repeated key, which would be ambiguous."""
    try:
        value: object = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise WorkloadError(f"byte {error.start} is not UTF-8") from None
    except JSONDecodeError as error:
        raise WorkloadError(f"not JSON: {error.msg}, at column {error.colno}") from None
    except RecursionError:
        raise WorkloadError("not JSON: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise WorkloadError(f"not JSON: {error}") from None
    return value


def is_torn(line: bytes) -> bool:
    """Whether this last line is incomplete because its writer was killed."""
    if line.endswith(b"\n"):
        return False
    try:
        _DECODER.decode(line.decode())
    except (JSONDecodeError, UnicodeDecodeError, RecursionError):
        return True
    except (ValueError, WorkloadError):  # complete, but invalid
        return False
    return False


def check_within(name: str, value: float | None, least: float, most: float) -> None:
    """Raises `InvalidParameterError` if `value` is out of range. None is allowed."""
    if value is not None and not least <= value <= most:
        shown = short(value) if isinstance(value, int) else f"{value:g}"
        raise InvalidParameterError(f"{name} is {shown}; it must be from {least:g} to {most:g}", name)
