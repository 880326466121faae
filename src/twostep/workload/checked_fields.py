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


Say = Callable[[str], None]
"""Gets one line for a person: what was left out, sorted or clipped. Nothing of the kind happens in silence."""

MOST_LINE_BYTES = 16 << 20
MOST_LINES = 6_000_000
"""About a gigabyte of requests; the longest public trace that we know has 5.3 million."""


def numbered_lines(source: InputFile) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1, and without a byte order mark before them.

    Raises `WorkloadError`.
    """
    with source.open() as file:
        for number in count(1):
            line = file.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_LINE_BYTES:
                most = f"{MOST_LINE_BYTES >> 20} MiB, the most allowed"
                raise WorkloadError(f"{source}, line {number}: longer than {most}")
            if number > MOST_LINES:
                raise WorkloadError(f"{source} has more than {MOST_LINES} lines, the most allowed; cut it into parts")
            line = line.removeprefix(BOM_UTF8) if number == 1 else line
            if line.strip():
                yield number, line


@contextmanager
def naming(source: InputFile, line: int) -> Iterator[None]:
    """A `WorkloadError` from inside gets file and line put before it."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(f"{source}, line {line}: {error}") from None


def _object(members: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        doubled = next(name for name in names if names.count(name) > 1)
        raise WorkloadError(f"{short(doubled)} is there more than once")
    return found


_DECODER = JSONDecoder(object_pairs_hook=_object)


def from_json(line: bytes) -> object:
    """Raises `WorkloadError`, also for a key that an object has twice: nobody knows which was meant."""
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
    """A last line that its writer did not finish: its process was killed."""
    if line.endswith(b"\n"):
        return False
    try:
        _DECODER.decode(line.decode())
    except (JSONDecodeError, UnicodeDecodeError, RecursionError):
        return True
    except (ValueError, WorkloadError):  # it is whole, and wrong
        return False
    return False


def check_within(name: str, value: float | None, least: float, most: float) -> None:
    """None is allowed. Raises `InvalidParameterError`."""
    if value is not None and not least <= value <= most:
        shown = short(value) if isinstance(value, int) else f"{value:g}"
        raise InvalidParameterError(f"{name} is {shown}; it has to be from {least:g} to {most:g}", name)
