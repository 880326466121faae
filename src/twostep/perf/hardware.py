"""Hardware as arithmetic sees it: memory, bandwidth and peaks, each row with its source and confidence.

The shipped table has datasheet values. Users add rows in a file of their own, CSV or TOML with the same fields.
"""

import csv
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import Any

from twostep.errors import InvalidParameterError

PEAK_FIELDS = {
    "fp32": "fp32_dense_tflops",
    "fp16": "fp16_dense_tflops",
    "fp8": "fp8_dense_tflops",
    "int8": "int8_dense_tops",
    "fp4": "fp4_dense_tflops",
}
"""For each arithmetic the field that states its peak, without sparsity."""
NUMBERS = ("mem_gb", "mem_bw_gbs", "scaleup_bidir_gbs", "pcie_bidir_gbs", "tdp_w", "usd_per_hour_indicative")
TEXTS = ("vendor", "kind", "name", "form", "mem_type", "scaleup_link", "pcie", "price_basis", "confidence", "source")
FIELDS = ("id", *TEXTS, *NUMBERS, *PEAK_FIELDS.values(), "notes")
REQUIRED = ("mem_gb", "mem_bw_gbs")
CONFIDENCE = ("high", "medium", "low")

HERE = "here"
"""The calibrated machine; its roofs come from a profile, not from a table."""


@dataclass(frozen=True)
class Hardware:
    """One device. Bytes, bytes per second, operations per second, watts."""

    id: str
    name: str
    memory_bytes: float
    bandwidth: float
    peaks: Mapping[str, float]
    """Operations per second by arithmetic, dense. An arithmetic that the device lacks is not in it."""
    link_bandwidth: float | None = None
    """One direction, to another device of the kind; over PCIe where there is no better link."""
    tdp_w: float | None = None
    confidence: str = "low"
    source: str = ""
    notes: str = ""
    measured: bool = False
    """Peaks and bandwidth were measured on this very machine."""

    def peak(self, arithmetic: str) -> float:
        """Operations per second. Raises `InvalidParameterError` for an arithmetic that the device lacks."""
        if arithmetic not in self.peaks:
            raise InvalidParameterError(
                f"{self.id} ({self.name}) has no {arithmetic.upper()} peak in the table; it has: "
                f"{', '.join(kind.upper() for kind in self.peaks)}", "weights"
            )  # fmt: skip
        return self.peaks[arithmetic]

    def ridge(self, arithmetic: str) -> float:
        """The ridge point in operations per byte: below it memory bandwidth is the limit, above it arithmetic."""
        return self.peak(arithmetic) / self.bandwidth


class UnknownHardwareError(InvalidParameterError):
    """No device has this id."""


def bandwidth_at(read: Sequence[tuple[float, float]], working_set: float) -> float:
    """Bytes per second. `read`: bytes of a working set and bytes per second at which it is read again and again;
    between two measured sizes in proportion to their logarithms."""
    points = sorted((log(size), rate) for size, rate in read)
    place = min(max(log(working_set), points[0][0]), points[-1][0])
    pairs = [*pairwise(points)] or [(points[0], points[0])]
    (low, slow), (high, fast) = next(pair for pair in pairs if place <= pair[1][0])
    share = (place - low) / (high - low) if high > low else 0.0
    return slow + share * (fast - slow)


def measured_hardware(
    cpu: str,
    peaks: Mapping[str, float],
    read: Sequence[tuple[float, float]],
    memory_bytes: float,
    working_set: float,
) -> Hardware:
    """The calibrated machine as a device. `peaks`: measured operations per second by arithmetic. `read`: see
    `bandwidth_at`; the bandwidth is that at `working_set`, what a step streams."""
    return Hardware(
        id=HERE,
        name=cpu,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth_at(read, working_set),
        peaks=peaks,
        confidence="high",
        source="twostep calibrate",
        measured=True,
    )


# --- looking up -------------------------------------------------------------------------------------------------------


@cache
def shipped_hardware() -> Mapping[str, Hardware]:
    """The table of the package, by id."""
    text = files("twostep.perf").joinpath("data/hardware.csv").read_text("utf-8")
    return {row.id: row for row in _from_csv(text, "hardware.csv")}


ALIASES = {"a100": "a100-80-sxm", "a100-40": "a100-40-sxm", "h100": "h100-sxm", "h200": "h200-sxm"}


def hardware_named(name: str, own: Mapping[str, Hardware] | None = None) -> Hardware:
    """The row of this id; rows of the user come before the shipped ones. Raises `UnknownHardwareError` that names the
    nearest and all known ids, `InvalidParameterError` for this machine while it is not calibrated."""
    if name.lower() == HERE:
        raise InvalidParameterError(
            "the roofs of this machine are not known: run `twostep calibrate`, which measures them", "hardware"
        )
    known = {**shipped_hardware(), **(own or {})}
    wanted = name.lower()
    if wanted not in known:
        wanted = ALIASES.get(wanted, wanted)
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, [*known, *ALIASES, HERE], n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    names = ", ".join([*known, *ALIASES, HERE])
    words = f"unknown hardware {name!r}{hint} Known: {names}. Add your own with --hardware-file"
    raise UnknownHardwareError(words, "hardware")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_hardware(path: Path) -> dict[str, Hardware]:
    """The rows of a user's file by id: `.toml` with `[[hardware]]` tables, or `.csv`. Raises `InvalidParameterError`
    that names line and field of a row that cannot be used."""
    if path.suffix not in (".toml", ".csv"):
        raise InvalidParameterError(f"{path}: a hardware file ends in .toml or .csv", "hardware-file")
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InvalidParameterError(f"{path}: cannot be read: {error.strerror}", "hardware-file") from error
    except UnicodeDecodeError:
        raise InvalidParameterError(f"{path}: is not UTF-8 text", "hardware-file") from None
    rows = _from_toml(text, str(path)) if path.suffix == ".toml" else _from_csv(text, str(path))
    found = dict[str, Hardware]()
    for row in rows:
        if row.id in found:
            raise InvalidParameterError(f"{path}: two rows have the id {row.id!r}", "hardware-file")
        found[row.id] = row
    if not found:
        raise InvalidParameterError(f"{path}: has no hardware", "hardware-file")
    return found


def _from_csv(text: str, file: str) -> Iterator[Hardware]:
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        where = f"{file}: line {reader.line_num}"
        if None in row or None in row.values():
            raise InvalidParameterError(f"{where}: has not as many fields as the first line", "hardware-file")
        yield _hardware({key: value for key, value in row.items() if value != ""}, where)


def _from_toml(text: str, file: str) -> Iterator[Hardware]:
    try:
        tables = tomllib.loads(text).get("hardware")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidParameterError(f"{file}: is not TOML: {error}", "hardware-file") from None
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidParameterError(f"{file}: has to consist of [[hardware]] tables", "hardware-file")
    heads = [number for number, line in enumerate(text.splitlines(), 1) if line.strip() == "[[hardware]]"]
    lines = heads if len(heads) == len(tables) else [1] * len(tables)
    for line, table in zip(lines, tables, strict=True):
        yield _hardware(table, f"{file}: line {line}")


def _hardware(row: Mapping[str, Any], where: str) -> Hardware:
    if unknown := [key for key in row if key not in FIELDS]:
        near = get_close_matches(unknown[0], FIELDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidParameterError(f"{where}: unknown field {unknown[0]!r}{hint} Fields: {', '.join(FIELDS)}",
                                    "hardware-file")  # fmt: skip
    texts = {key: _text(row, key, where) for key in ("id", *TEXTS, "notes")}
    numbers = {key: _number(row, key, where) for key in (*NUMBERS, *PEAK_FIELDS.values())}
    peaks = {kind: 1e12 * value for kind, field in PEAK_FIELDS.items() if (value := numbers[field]) is not None}
    _check(texts, numbers, peaks, where)
    link = numbers["scaleup_bidir_gbs"] or numbers["pcie_bidir_gbs"]
    return Hardware(
        id=texts["id"].lower(),
        name=texts["name"] or texts["id"],
        memory_bytes=1e9 * (numbers["mem_gb"] or 0),
        bandwidth=1e9 * (numbers["mem_bw_gbs"] or 0),
        peaks=peaks,
        link_bandwidth=link and 1e9 * link / 2,
        tdp_w=numbers["tdp_w"],
        confidence=texts["confidence"] or "low",
        source=texts["source"] or where,
        notes=texts["notes"],
    )


def _check(
    texts: Mapping[str, str], numbers: Mapping[str, float | None], peaks: Mapping[str, float], where: str
) -> None:
    missing = [field for field in REQUIRED if numbers[field] is None]
    if not texts["id"]:
        missing.insert(0, "id")
    if missing:
        raise InvalidParameterError(f"{where}: field {missing[0]!r} is missing", "hardware-file")
    if texts["id"].lower() == HERE:
        raise InvalidParameterError(f"{where}: field 'id' is 'here', which is the calibrated machine", "hardware-file")
    if not peaks:
        raise InvalidParameterError(f"{where}: needs a peak, one of {', '.join(PEAK_FIELDS.values())}", "hardware-file")
    if texts["confidence"] not in ("", *CONFIDENCE):
        raise InvalidParameterError(
            f"{where}: field 'confidence' is {texts['confidence']!r:.60}; it has to be {', '.join(CONFIDENCE)}",
            "hardware-file",
        )


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field, "")
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidParameterError(f"{where}: field {field!r} is {value!r:.60}; it has to be text", "hardware-file")
    return value


def _number(row: Mapping[str, Any], field: str, where: str) -> float | None:
    value = row.get(field)
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not isfinite(number) or number <= 0:
        raise InvalidParameterError(
            f"{where}: field {field!r} is {value!r:.60}; it has to be a number above 0", "hardware-file"
        )
    return number
