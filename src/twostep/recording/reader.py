"""Reads a recording turn by turn, without loading the whole file."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from json import loads
from pathlib import Path
from typing import BinaryIO

from twostep.core.loop import Command
from twostep.core.plan import Plan, StepResult
from twostep.errors import RecordingError
from twostep.input_file import InputFile
from twostep.recording.codec import decode_command, decode_plan, decode_result
from twostep.recording.header import Header, decode_header
from twostep.recording.values import many, record, whole, wrong

LONGEST_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RecordedStep:
    result: StepResult
    plan: Plan


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the loop. `line`: its line in the file, from 1. `times_ns`: the clock readings of the loop, in
    order."""

    line: int
    times_ns: tuple[int, ...]
    before: tuple[Command, ...]
    during: tuple[Command, ...] = ()
    step: RecordedStep | None = None
    """None if the turn ran no step."""


class Recording:
    """A recording: its header, read at once, and its turns. The path may be a pipe, or - for standard input.

    Raises `RecordingError`, or `OSError` if there is no file.
    """

    def __init__(self, path: Path) -> None:
        self._file = InputFile(path)
        self.torn_line: int | None = None
        """Number of the last line if it is incomplete because the process was killed; set after all turns were read."""
        with self._file.open() as file:
            line = file.readline(LONGEST_HEADER_BYTES)
        with self.naming(1):
            self.header = _read_header(line)

    def turns(self) -> Iterator[Turn]:
        """Yields the checked turns in order. Skips an incomplete last line."""
        with self._file.open() as file:
            file.readline()
            yield from self._turns(file)

    def naming(self, line: int) -> "_Naming":
        """A context that prefixes a `RecordingError` with file and line."""
        return _Naming(f"{self._file}, line {line}")

    def _turns(self, file: BinaryIO) -> Iterator[Turn]:
        last_ns = 0
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                self.torn_line = number
                return
            with self.naming(number):
                turn = _decode_turn(number, last_ns, _from_json(line))
            last_ns = turn.times_ns[-1]
            yield turn


class _Naming:
    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, RecordingError):
            raise RecordingError(f"{self._where}: {error}") from error


def _read_header(line: bytes) -> Header:
    """Reads the header from an arbitrary line. Raises `RecordingError`."""
    if not line.startswith(b"{"):
        raise RecordingError("not a recording of Twostep")
    if not line.endswith(b"\n"):
        raise RecordingError("incomplete first line, or not a recording of Twostep")
    return decode_header(_from_json(line))


def _from_json(line: bytes) -> object:
    try:
        value: object = loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"not JSON: {error}") from error
    return value


def _decode_turn(line: int, last_ns: int, value: object) -> Turn:
    if not isinstance(value, list) or len(value) not in (2, 5):
        wrong("turn", value, "a list of 2 or 5")
    times_ns = _decode_times(value[0], last_ns)
    if len(value) == 2:
        return Turn(line, times_ns, _decode_commands(value[1], "before"))
    _, before, during, result, plan = record(value, "turn", 5)
    step = RecordedStep(decode_result(result), decode_plan(plan))
    return Turn(line, times_ns, _decode_commands(before, "before"), _decode_commands(during, "during"), step)


def _decode_times(value: object, last_ns: int) -> tuple[int, ...]:
    differences = [whole(item, "times") for item in many(value, "times")]
    return tuple(accumulate(differences, initial=last_ns))[1:] or wrong("times", value, "a list with at least one time")


def _decode_commands(value: object, name: str) -> tuple[Command, ...]:
    return tuple(decode_command(item) for item in many(value, name))
