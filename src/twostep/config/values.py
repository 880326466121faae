"""Typed values of settings, and the text in which a user writes each: `parse_...` reads it, `text_of` writes it."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from twostep.core.policies import (
    Batching,
    ChunkPolicy,
    Continuous,
    Order,
    ShortestPrefill,
    Static,
    TimeBudget,
    TokenBudget,
    Unchunked,
    by_priority,
    fcfs,
)

NS_PER_MS = 1_000_000
LEAST_MS = 0.001
MOST_MS = 86_400_000.0
"""A day; bounds of every time in milliseconds that a user sets."""
GATHER_NS = 100 * NS_PER_MS
"""How long a static batch waits to be full, unless the setting says otherwise."""

# --- times --------------------------------------------------------------------------------------------------------


def ns_of_ms(milliseconds: float) -> int:
    """Raises `ValueError` unless the time is from `LEAST_MS` to `MOST_MS`."""
    if not LEAST_MS <= milliseconds <= MOST_MS:  # false for NaN
        raise ValueError
    return round(milliseconds * NS_PER_MS)


def ms_text(nanoseconds: int) -> str:
    """Milliseconds, exact, without trailing zeros."""
    whole, rest = divmod(nanoseconds, NS_PER_MS)
    return f"{whole}.{rest:06d}".rstrip("0") if rest else str(whole)


# --- profiles of the machine ----------------------------------------------------------------------------------------

AUTO, NONE = "auto", "none"


# --- chunking -----------------------------------------------------------------------------------------------------

CHUNKING = "none, tokens=N or time=MILLISECONDS"


def parse_chunking(text: str) -> ChunkPolicy:
    """Raises `ValueError` unless the text is one of `CHUNKING`."""
    if text == "none":
        return Unchunked()
    if match := re.fullmatch(r"tokens=([1-9][0-9]*)", text):
        return TokenBudget(int(match[1]))
    if match := re.fullmatch(r"time=([0-9]+(?:\.[0-9]+)?)", text):
        return TimeBudget(ns_of_ms(float(match[1])))
    raise ValueError


# --- batching -----------------------------------------------------------------------------------------------------

BATCHING = "continuous, static=SIZE or static=SIZE,wait=MILLISECONDS"


def parse_batching(text: str) -> Batching:
    """Raises `ValueError` unless the text is one of `BATCHING`."""
    if text == "continuous":
        return Continuous()
    if match := re.fullmatch(r"static=([1-9][0-9]*)(?:,wait=([0-9]+(?:\.[0-9]+)?))?", text):
        wait_ms = match[2]
        if wait_ms is None:
            return Static(int(match[1]), GATHER_NS)
        return Static(int(match[1]), ns_of_ms(float(wait_ms)) if float(wait_ms) else 0)
    raise ValueError


# --- admission ----------------------------------------------------------------------------------------------------


class AdmissionOrder(StrEnum):
    """Which waiting request is admitted first."""

    PRIORITY = "priority"
    """The most urgent one (lowest number), then the one that arrived first."""
    FCFS = "fcfs"
    """The one that arrived first."""
    SHORTEST_PREFILL = "shortest-prefill"
    """Within a priority, the one with the shortest prompt."""

    def order(self, max_model_len: int) -> Order:
        """The scheduler's sort key."""
        match self:
            case AdmissionOrder.FCFS:
                return fcfs
            case AdmissionOrder.PRIORITY:
                return by_priority
            case AdmissionOrder.SHORTEST_PREFILL:
                return ShortestPrefill(max_model_len)


# --- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryShare:
    """A share of free memory for weights, buffers and KV cache together."""

    share: float


@dataclass(frozen=True)
class MemoryBytes:
    """The size of the KV cache in bytes."""

    count: int


@dataclass(frozen=True)
class MemoryBlocks:
    """The size of the KV cache in blocks of 16 tokens."""

    count: int


KvMemory = MemoryShare | MemoryBytes | MemoryBlocks

UNITS = {"B": 1} | {
    f"{prefix}{ending}": base**power
    for ending, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"), 1)
}
KV_MEMORY = (
    f"a share above 0 and at most 1, such as 0.5, a size in {', '.join(UNITS)}, such as 2GiB, or a number of blocks, "
    "such as 500 blocks"
)


def parse_kv_memory(text: str) -> KvMemory:
    """Raises `ValueError` unless the text is one of `KV_MEMORY`."""
    if blocks := re.fullmatch(r"([1-9][0-9]*) *blocks", text.strip()):
        return MemoryBlocks(int(blocks[1]))
    if match := re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)", text.strip()):
        number, unit = float(match[1]), match[2]
        if unit in UNITS and math.isfinite(number) and number * UNITS[unit] >= 1:
            return MemoryBytes(int(number * UNITS[unit]))
        if not unit and 0 < number <= 1:
            return MemoryShare(number)
    raise ValueError


def _size_text(count: int) -> str:
    """In the largest unit that divides it."""
    unit = max((unit for unit in UNITS if count % UNITS[unit] == 0), key=UNITS.__getitem__)
    return f"{count // UNITS[unit]}{unit}"


# --- back to text -------------------------------------------------------------------------------------------------


def text_of(value: ChunkPolicy | Batching | KvMemory) -> str:
    """The text that parses to this value, or to a similar one if no text says exactly this."""
    match value:
        case Unchunked():
            return "none"
        case TokenBudget():
            return f"tokens={value.budget_tokens}"
        case TimeBudget():
            return f"time={ms_text(value.budget_ns)}"
        case Static(size=size, patience_ns=wait_ns):
            return f"static={size}" if wait_ns == GATHER_NS else f"static={size},wait={ms_text(wait_ns)}"
        case MemoryShare(share=share):
            return f"{Decimal(repr(share)):f}".removesuffix(".0")
        case MemoryBytes(count=count):
            return _size_text(count)
        case MemoryBlocks(count=count):
            return f"{count} blocks"
    return "continuous"
