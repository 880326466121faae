"""Kinds of settings: how a value is read from text, TOML and Python, what is allowed, and how JSON shows it."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from twostep.config.values import (
    AUTO,
    BATCHING,
    CHUNKING,
    KV_MEMORY,
    LEAST_MS,
    MOST_MS,
    NONE,
    AdmissionOrder,
    KvMemory,
    MemoryBlocks,
    MemoryBytes,
    MemoryShare,
    ns_of_ms,
    parse_batching,
    parse_chunking,
    parse_kv_memory,
    text_of,
)
from twostep.core.policies import Batching, ChunkPolicy, Continuous, Static, TimeBudget, TokenBudget, Unchunked


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Kind:
    """The values that a setting may have. `from_text` and `from_python` return the typed value and raise `ValueError`
    for any other."""

    allowed: str
    """Follows "it has to be" in an error."""
    from_text: Callable[[str], Any]
    from_python: Callable[[object], Any]
    """Reads a Python value: the typed value itself or, for policies and sizes, its text too. JSON's values are read
    by it as well."""
    toml_types: tuple[type, ...] = (str,)
    to_json: Callable[[Any], Any] = _same
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    """JSON Schema of what `to_json` returns."""
    note: str = ""
    """Follows `allowed` in an error: what holds on this machine only."""

    def from_toml(self, value: object) -> Any:
        """Raises `ValueError`."""
        if type(value) not in self.toml_types:  # `isinstance` would accept true as an integer
            raise ValueError
        return self.from_text(value) if isinstance(value, str) else self.from_python(value)


# --- numbers ------------------------------------------------------------------------------------------------------


def integer(low: int, high: int | None = None, allowed: str = "", note: str = "") -> Kind:
    """Integers from `low` to `high`, both included."""

    def check(value: object) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError
        whole = int(value)
        if whole < low or (high is not None and whole > high):
            raise ValueError
        return whole

    bounds = f"an integer from {low}" + (f" to {high}" if high is not None else "")
    limits = {"minimum": low} | ({"maximum": high} if high is not None and not note else {})
    return Kind(
        allowed or (str(low) if low == high else bounds),
        lambda text: check(int(text)),
        check,
        (int,),
        schema={"type": "integer", **limits},
        note=note,
    )


def cpu_count() -> Kind:
    """A number of threads. The documentation does not depend on the machine that made it."""
    cpus = os.cpu_count() or 1
    return integer(1, cpus, "an integer from 1 to the number of CPUs", f", which is {cpus} here")


def number(low: float) -> Kind:
    """Finite numbers from `low`."""

    def check(value: object) -> float:
        if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or value < low:
            raise ValueError
        return float(value)

    schema = {"type": "number", "minimum": low}
    return Kind(f"a number from {low:g}", lambda text: check(float(text)), check, (int, float), schema=schema)


# --- texts --------------------------------------------------------------------------------------------------------


def text(allowed: str = "text", pattern: str = r".+") -> Kind:
    """Texts that match `pattern`."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError
        return value

    return Kind(allowed, check, check)


def choice(*names: str) -> Kind:
    """One of these texts."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Kind(_one_of(names), check, check, schema={"type": "string", "enum": list(names)})


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def file_path() -> Kind:
    """The path of a file."""

    def check(value: object) -> Path:
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ValueError
        return Path(value)

    return Kind("the path of a file", check, check, to_json=str)


def profile() -> Kind:
    """Which profile of the machine: auto, none, or the path of a file."""
    path = file_path()

    def check(value: object) -> str | Path:
        return str(value) if value in (AUTO, NONE) else path.from_python(value)

    return Kind(f"{AUTO}, {NONE} or {path.allowed}", check, check, to_json=str)


def switch() -> Kind:
    """Yes or no."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

    def read(text: str) -> bool:
        if (value := words.get(text.strip().lower())) is None:
            raise ValueError
        return value

    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Kind("true or false", read, check, (bool,), schema={"type": "boolean"})


def texts(least: int = 0, joined: bool = False) -> Kind:
    """Texts, none of them empty. `joined`: JSON shows them as one text with commas, because programs read that."""

    def check(value: object) -> tuple[str, ...]:
        members = tuple(value) if isinstance(value, tuple | list) else ()
        if not isinstance(value, tuple | list) or len(members) < least:
            raise ValueError
        if not all(isinstance(member, str) and member for member in members):
            raise ValueError
        return members

    return Kind(
        "texts, separated by commas, none of them empty",
        lambda given: check([member.strip() for member in given.split(",")]),
        check,
        (list, str),
        ",".join if joined else list,
        {"type": "string"} if joined else {"type": "array", "items": {"type": "string"}},
    )


# --- policies and sizes -------------------------------------------------------------------------------------------


def _from_typed(types: tuple[type, ...], parse: Callable[[str], Any]) -> Callable[[object], Any]:
    """Reads a text by `parse`, or a value of `types` that some text stands for."""

    def check(value: object) -> Any:
        if isinstance(value, str):
            return parse(value)
        if not isinstance(value, types) or parse(text_of(value)) != value:  # type: ignore[arg-type]
            raise ValueError
        return value

    return check


def chunking() -> Kind:
    """How prompts are cut."""
    read: Callable[[str], ChunkPolicy] = parse_chunking
    return Kind(CHUNKING, read, _from_typed((Unchunked, TokenBudget, TimeBudget), read), to_json=text_of)


def batching() -> Kind:
    """How many requests are admitted."""
    read: Callable[[str], Batching] = parse_batching
    return Kind(BATCHING, read, _from_typed((Continuous, Static), read), to_json=text_of)


def admission() -> Kind:
    """Which waiting request is admitted first."""
    names = tuple(AdmissionOrder)

    def check(value: object) -> AdmissionOrder:
        if not isinstance(value, str):
            raise ValueError
        return AdmissionOrder(value)

    return Kind(_one_of(names), AdmissionOrder, check, to_json=str, schema={"type": "string", "enum": list(names)})


def kv_memory() -> Kind:
    """A share of memory, bytes or blocks; a number of TOML or Python is a share."""
    typed = _from_typed((MemoryShare, MemoryBytes, MemoryBlocks), parse_kv_memory)

    def check(value: object) -> KvMemory:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = MemoryShare(float(value))
        memory: KvMemory = typed(value)
        return memory

    return Kind(KV_MEMORY, parse_kv_memory, check, (str, float, int), text_of)


def itl_budget() -> Kind:
    """Milliseconds between tokens: another form of `chunking` by time."""

    def check(value: object) -> TimeBudget:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError
        return TimeBudget(ns_of_ms(float(value)))

    return Kind(
        f"milliseconds from {LEAST_MS:g} to {MOST_MS:.0f}",
        lambda given: check(float(given)),
        check,
        (int, float),
        schema={"type": "number"},
    )
