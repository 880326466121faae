"""A workload's file line by line, never the whole, with errors that name the line."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from json import JSONDecodeError, JSONDecoder
from reprlib import repr as short

from twostep.errors import WorkloadError
from twostep.input_file import InputFile

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
