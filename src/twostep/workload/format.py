"""The workload file format: JSON lines, a header and one object per request. See docs/workloads.md."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Any

from twostep.errors import WorkloadError
from twostep.input_file import InputFile
from twostep.workload.checked_fields import (
    Say,
    from_json,
    is_torn,
    naming,
    numbered_lines,
    record,
    seconds,
    text,
    tokens,
    whole,
    wrong,
)
from twostep.workload.definition import Workload, WorkloadRequest

MARK = "twostep_workload"
"""The header key that identifies a workload; its value is the format version."""

VERSION = 1
BY_ARRIVAL, BY_END = "arrival", "end"
"""Orders of rows. A server records a request when it ends; its arrival times are of any clock."""

MOST_BLOCK_NUMBER = 2**63 - 1


@dataclass(frozen=True)
class _Header:
    block_tokens: int
    name: str
    source: str
    order: str


def read_workload(path: Path, say: Say) -> Workload:
    """Reads and checks every row. Skips an incomplete last line and reports it through `say`.

    Raises `WorkloadError` naming file, line and field, and what is allowed; `OSError` if there is no file.
    """
    return read_lines(InputFile(path), say)


def read_lines(source: InputFile, say: Say) -> Workload:
    """As `read_workload`."""
    lines = numbered_lines(source)
    number, first = next(lines, (1, b""))
    with naming(source, number):
        header = _decode_header(from_json(first))
    requests: list[WorkloadRequest] = []
    last_s = 0.0
    for number, line in lines:
        if is_torn(line):
            say(f"{source}, line {number}: the last line is incomplete and was skipped")
            break
        with naming(source, number):
            request = _decode_request(from_json(line), len(requests), header)
            last_s = _checked_order(request, last_s, header)
        requests.append(request)
    in_order = from_first(requests) if header.order == BY_END else requests
    return Workload(in_order, header.block_tokens, header.name, header.source)


def write_workload(path: Path, workload: Workload) -> None:
    """Writes the file, replacing an existing one. `read_workload` returns an equal workload."""
    with path.open("w", encoding="ascii") as file:
        file.write(header_line(workload))
        file.writelines(map(request_line, workload.requests))


def header_line(workload: Workload, order: str = BY_ARRIVAL) -> str:
    """The header line of a workload; its requests are ignored."""
    header: dict[str, Any] = {
        MARK: VERSION,
        "block_tokens": workload.block_tokens,
        "name": workload.name,
        "source": workload.source,
    }
    return _line(header if order == BY_ARRIVAL else header | {"order": order})


def request_line(request: WorkloadRequest) -> str:
    """A row, without fields that have their default."""
    row: dict[str, Any] = {
        "arrival_s": request.arrival_s,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
    }
    if request.blocks:
        row["blocks"] = request.blocks
    if request.after is not None:
        row["after"] = request.after
    if request.text is not None:
        row["text"] = request.text
    return _line(row)


def from_first(requests: Iterable[WorkloadRequest]) -> list[WorkloadRequest]:
    """Sorts requests by arrival, counted from the first and rounded to microseconds. None may have `after`."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return [replace(one, arrival_s=round(one.arrival_s - ordered[0].arrival_s, 6)) for one in ordered]


def is_in_order(requests: Sequence[WorkloadRequest]) -> bool:
    return all(one.arrival_s <= next_.arrival_s for one, next_ in pairwise(requests))


def _line(value: dict[str, Any]) -> str:
    return dumps(value, separators=(",", ":"), allow_nan=False) + "\n"


def _decode_header(value: object) -> _Header:
    if not isinstance(value, dict) or MARK not in value:
        raise WorkloadError(f'not a workload: the first line must be an object with "{MARK}": {VERSION}')
    if value[MARK] != VERSION:
        wrong(MARK, value[MARK], f"{VERSION}, the only version that this version of Twostep reads")
    fields = record(value, (MARK, "block_tokens"), ("name", "source", "order"))
    if (order := fields.get("order", BY_ARRIVAL)) not in (BY_ARRIVAL, BY_END):
        wrong("order", order, f"{BY_ARRIVAL} or {BY_END}")
    name, source = text(fields.get("name", ""), "name"), text(fields.get("source", ""), "source")
    return _Header(tokens(fields["block_tokens"], "block_tokens"), name, source, str(order))


def _decode_request(value: object, number: int, header: _Header) -> WorkloadRequest:
    """Decodes the request with this number, from 0."""
    fields = record(value, ("arrival_s", "input_tokens", "output_tokens"), ("blocks", "after", "text"))
    input_tokens = tokens(fields["input_tokens"], "input_tokens")
    return WorkloadRequest(
        seconds(fields["arrival_s"], "arrival_s"),
        input_tokens,
        tokens(fields["output_tokens"], "output_tokens"),
        _decode_blocks(fields.get("blocks", []), -(-input_tokens // header.block_tokens)),
        _decode_after(fields["after"], number, header) if "after" in fields else None,
        text(fields["text"], "text") if "text" in fields else None,
    )


def _decode_blocks(value: object, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= MOST_BLOCK_NUMBER for one in value):
        wrong("blocks", value, f"a list of whole numbers from 0 to {MOST_BLOCK_NUMBER}")
    if len(value) > most:
        raise WorkloadError(f"blocks has {len(value)} members; input_tokens and block_tokens allow at most {most}")
    return tuple(value)


def _decode_after(value: object, number: int, header: _Header) -> int:
    if header.order == BY_END:
        raise WorkloadError(f"after is {value!r}; it is not allowed with order {BY_END}")
    if number == 0:
        raise WorkloadError(f"after is {value!r}; the first request has no earlier one")
    return whole(value, "after", 0, number - 1)


def _checked_order(request: WorkloadRequest, last_s: float, header: _Header) -> float:
    """The latest arrival so far."""
    if header.order == BY_END or request.after is not None:
        return last_s
    if request.arrival_s < last_s:
        raise WorkloadError(f"arrival_s is {request.arrival_s:g}; it must be at least {last_s:g}, as rows are in order")
    return request.arrival_s
