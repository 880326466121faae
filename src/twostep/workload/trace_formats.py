"""Reads workloads in any known format: Twostep's own, published traces, and the excerpts that come with Twostep."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twostep.errors import WorkloadError
from twostep.input_file import InputFile
from twostep.workload.checked_fields import (
    MOST_TOKENS,
    Say,
    count_in,
    from_json,
    naming,
    number_in,
    numbered_lines,
    whole,
    wrong,
)
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.format import MARK, from_first, is_in_order, read_lines

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Raw:
    """A request of a trace. Tokens may be 0; seconds are of any clock."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A trace format."""

    name: str
    fields: tuple[str, ...]
    """Fields that identify the format; other fields are ignored."""
    is_json: bool
    decode: Callable[[Row], _Raw]
    origin: str
    """Source and licence of the published files."""
    block_tokens: int = 16


def open_workload(path: Path, say: Say) -> Workload:
    """Reads a workload of any known format, which the first line identifies. The path may be a pipe, or - for standard
    input.

    Raises `WorkloadError` naming file, line and field, and what is allowed; `OSError` if there is no file.
    """
    source = InputFile(path)
    number, line = next(numbered_lines(source), (1, b""))
    with naming(source, number):
        names = _field_names(line)
    if MARK in names:
        return read_lines(source, say)
    for trace in TRACES:
        if set(names).issuperset(trace.fields):
            _check_once(trace.fields, names, source, number)
            return _import(source, trace, say)
    known = "; ".join([f"Twostep's ({MARK})", *(f"{trace.name} ({', '.join(trace.fields)})" for trace in TRACES)])
    raise WorkloadError(f"{source}: unknown format; the first line matches none of the known formats: {known}")


def _field_names(line: bytes) -> list[str]:
    """Field names of the first row, or of the CSV header."""
    if not line.lstrip().startswith(b"{"):
        return _csv_fields(line)
    value = from_json(line)
    return list(value) if isinstance(value, dict) else []


def _check_once(fields: Sequence[str], names: Sequence[str], source: InputFile, number: int) -> None:
    """Rejects repeated columns, which would be ambiguous."""
    with naming(source, number):
        for field in fields:
            if names.count(field) > 1:
                raise WorkloadError(f"{field!r} appears more than once")


def _import(source: InputFile, trace: Trace, say: Say) -> Workload:
    """Drops rows without prompt or answer tokens: those requests failed."""
    raws = list(_raws(source, trace))
    served = [
        WorkloadRequest(raw.at_s, raw.input_tokens, raw.output_tokens, raw.blocks)
        for raw in raws
        if raw.input_tokens and raw.output_tokens
    ]
    if len(served) < len(raws):
        say(f"{source}: {len(raws) - len(served)} of {len(raws)} rows dropped because they have no prompt or no answer")
    if not is_in_order(served):
        say(f"{source}: rows were not in order of arrival and have been sorted")
    origin = f"{source.path.name}, {trace.name}: {trace.origin}"
    return Workload(from_first(served), trace.block_tokens, source.path.stem, origin)


def _raws(source: InputFile, trace: Trace) -> Iterator[_Raw]:
    for number, row in (_json_rows if trace.is_json else _csv_rows)(source):
        with naming(source, number):
            missing = [name for name in trace.fields if name not in row]
            if missing:
                raise WorkloadError(f"{', '.join(missing)} is missing")
            raw = trace.decode(row)
        yield raw


def _json_rows(source: InputFile) -> Iterator[tuple[int, Row]]:
    for number, line in numbered_lines(source):
        with naming(source, number):
            value = from_json(line)
            if not isinstance(value, dict):
                wrong("the row", value, "an object")
        yield number, value


def _csv_rows(source: InputFile) -> Iterator[tuple[int, Row]]:
    lines = numbered_lines(source)
    names = _csv_fields(next(lines)[1])
    for number, line in lines:
        with naming(source, number):
            fields = _csv_fields(line)
            if len(fields) != len(names):
                raise WorkloadError(f"{len(fields)} fields; the header has {len(names)}")
        yield number, dict(zip(names, fields, strict=True))


def _csv_fields(line: bytes) -> list[str]:
    """The fields of one line; quoted fields must not span lines."""
    try:
        return next(csv.reader([line.decode()]))
    except UnicodeDecodeError as error:
        raise WorkloadError(f"byte {error.start} is not UTF-8") from None
    except (csv.Error, StopIteration) as error:
        raise WorkloadError(f"neither JSON nor CSV: {error}") from None


# --- formats --------------------------------------------------------------------------------------------------


def _azure(row: Row) -> _Raw:
    """Times have seven fractional digits, of which six are kept. The default time zone is UTC."""
    written = row["TIMESTAMP"]
    try:
        time = datetime.fromisoformat(written)
    except ValueError:
        wrong("TIMESTAMP", written, "a time such as 2023-11-16 18:17:03.9799600")
    at_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return _Raw(
        at_s, count_in(row["ContextTokens"], "ContextTokens"), count_in(row["GeneratedTokens"], "GeneratedTokens")
    )


MOONCAKE_BLOCK_TOKENS = 512


def _mooncake(row: Row) -> _Raw:
    """`timestamp` is in ms. Each of `hash_ids` identifies the prompt up to the end of a block; the last may be
    partial."""
    input_tokens, ids = whole(row["input_length"], "input_length", 0, MOST_TOKENS), row["hash_ids"]
    most = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids) or len(ids) > most:
        wrong("hash_ids", ids, f"a list of at most {most} whole numbers, one for {MOONCAKE_BLOCK_TOKENS} tokens")
    at_s = whole(row["timestamp"], "timestamp", 0, 10**15) / 1000
    return _Raw(at_s, input_tokens, whole(row["output_length"], "output_length", 0, MOST_TOKENS), tuple(ids))


def _burstgpt(row: Row) -> _Raw:
    """`Timestamp` is in s. Failed requests have an answer of 0 tokens."""
    input_tokens, output_tokens = (count_in(row[name], name) for name in ("Request tokens", "Response tokens"))
    return _Raw(number_in(row["Timestamp"], "Timestamp"), input_tokens, output_tokens)


TRACES = (
    Trace(
        "Azure LLM inference trace", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), False, _azure,
        "published in Azure/AzurePublicDataset under CC-BY 4.0; Patel et al., Splitwise, ISCA 2024",
    ),
    Trace(
        "Mooncake trace", ("timestamp", "input_length", "output_length", "hash_ids"), True, _mooncake,
        "published in kvcache-ai/Mooncake under Apache-2.0; Qin et al., Mooncake, FAST 2025", MOONCAKE_BLOCK_TOKENS,
    ),
    Trace(
        "BurstGPT trace", ("Timestamp", "Request tokens", "Response tokens"), False, _burstgpt,
        "published in HPMLL/BurstGPT under CC-BY 4.0; Wang et al., BurstGPT, 2024",
    ),
)  # fmt: skip


EXCERPTS = Path(__file__).parent / "excerpts"
"""SOURCES.md in this folder gives their origin and licence."""


def excerpt_names() -> list[str]:
    return sorted(path.stem for path in EXCERPTS.glob("*.jsonl"))


def find_workload(name: str, say: Say) -> Workload:
    """The excerpt with this name, otherwise the file at this path, in any known format. ./NAME is always a file, and -
    standard input.

    Raises `WorkloadError`.
    """
    if name in excerpt_names():
        return open_workload(EXCERPTS / f"{name}.jsonl", say)
    try:
        return open_workload(Path(name), say)
    except OSError as error:
        excerpts = ", ".join(excerpt_names())
        raise WorkloadError(f"{name}: {error.strerror}; give a file, or one of {excerpts}") from None
