"""What the engine's process and its owner say to each other: plain values, one message a step at most."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twostep.config.configs import EngineConfig, SchedulerSettings
from twostep.core.request import FinishReason
from twostep.engine.collector import Event
from twostep.engine.params import SamplingParams
from twostep.engine.timing.meter import Measured

# --- to the engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """The first message: what to serve."""

    path: Path
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Submit:
    """Take on a request; its text comes in deltas if `stream`."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    stream: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request early; nobody waits for its output."""

    id: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Say how you are: answered between two steps."""


ToEngine = Load | Submit | Cancel | Ping

# --- from the engine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. `lines` describe the effective settings, with the arithmetic behind the KV cache."""

    settings: SchedulerSettings
    lines: tuple[str, ...]
    isa: str
    threads: int
    longest: int
    """Most tokens of a prompt and its answer together."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state between two steps. Totals count since the start."""

    steps: int
    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_free: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    preempted_tokens: int
    finished: dict[FinishReason, int]
    measured: Measured


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not taken on."""

    id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Accepted:
    """A streaming request passed all checks and is queued: it will not be `Refused`."""

    id: str


@dataclass(frozen=True, slots=True)
class Turned:
    """A step ended, or a ping was heard: what came of it, and how things stand."""

    events: tuple[Event | Refused | Accepted, ...]
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot start, or cannot go on; its process ends."""

    error: Exception


FromEngine = Ready | Turned | Failed
