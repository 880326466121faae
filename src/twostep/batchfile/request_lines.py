"""The request file: one JSON object per line, `{"custom_id", "method": "POST", "url", "body"}`, as for OpenAI."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twostep.engine.refusals import shown
from twostep.errors import TwostepError
from twostep.input_file import InputFile
from twostep.openai_api.api_request import ENDPOINTS


class BatchFileError(TwostepError):
    """The whole file cannot be used; the message names the line and the problem."""


@dataclass(frozen=True)
class BatchLine:
    """One request. `body` is not checked here: an invalid one gets an error as its answer."""

    number: int
    custom_id: str
    url: str
    body: Any


def read_lines(file: InputFile) -> Iterator[BatchLine]:
    """Yields the requests of a file as they are read; empty lines are skipped. Raises `BatchFileError`."""
    with file.open() as lines:
        for number, raw in enumerate(lines, 1):
            if raw.strip():
                yield _line(number, json_line(file, number, raw), f"{file}, line {number}")


def check_lines(file: InputFile) -> dict[str, int]:
    """Line numbers by custom id, in the file's order. Raises `BatchFileError` at the first line that is not a request
    or that repeats a custom id."""
    numbers: dict[str, int] = {}
    for line in read_lines(file):
        first = numbers.setdefault(line.custom_id, line.number)
        if first != line.number:
            problem = f"custom_id {shown(line.custom_id)} is also that of line {first}"
            raise BatchFileError(f"{file}, line {line.number}: {problem}")
    if not numbers:
        raise BatchFileError(f"{file} contains no requests")
    return numbers


def json_line(file: object, number: int, raw: bytes) -> Any:
    """The line's value. Raises `BatchFileError`, which names `file`, if the line is not JSON."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        problem = f"{error.msg}, at column {error.colno}"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:  # an integer of thousands of digits
        problem = str(error)
    raise BatchFileError(f"{file}, line {number}: not JSON: {problem}")


def _line(number: int, value: object, where: str) -> BatchLine:
    if not isinstance(value, dict):
        raise BatchFileError(f"{where}: {shown(value)} is not an object with custom_id, method, url and body")
    custom_id, method, url = value.get("custom_id"), value.get("method"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchFileError(f"{where}: custom_id is {shown(custom_id)}; it has to be a string that is not empty")
    if method != "POST":
        raise BatchFileError(f"{where}: method is {shown(method)}; it has to be 'POST'")
    if url not in list(ENDPOINTS):
        raise BatchFileError(f"{where}: url is {shown(url)}; supported: {', '.join(ENDPOINTS)}")
    return BatchLine(number, custom_id, str(url), value.get("body"))
