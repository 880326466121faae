"""The messages between an engine's process and its owner: tagged values, at most one a step.

The same form serves both directions, and any transport (`wire` has the bytes). A change that an older reader would
misread needs a new `wire.VERSION`.
"""

from pathlib import Path
from typing import Any, Self

import msgspec

from twostep.config.configs import EngineConfig
from twostep.engine.backend import Accepted, Capabilities, Snapshot, Submit
from twostep.engine.outputs import Delta, RequestOutput
from twostep.errors import (
    ContextLengthError,
    InvalidParameterError,
    MemoryPlanError,
    ModelFileError,
    RecordingError,
    SamplingError,
    TwostepError,
    WorkerFailedError,
)

# --- to the engine ------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first message: the model's file, and the settings of the engine as plain values by name."""

    path: Path
    settings: dict[str, Any]
    """Of the engine, by name, as the table of settings writes JSON."""

    @classmethod
    def of(cls, path: Path, config: EngineConfig) -> Self:
        return cls(path, config.to_json())

    @property
    def config(self) -> EngineConfig:
        """Raises `InvalidParameterError` for settings that this version does not have."""
        return EngineConfig(**self.settings)


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Ends a request early; its output has what was generated so far."""

    id: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a snapshot, which is sent between two steps."""


ToEngine = Load | Submit | Cancel | Ping

# --- from the engine ----------------------------------------------------------------------------------------------

KINDS: dict[str, type[TwostepError]] = {
    "error": TwostepError,
    "model_file": ModelFileError,
    "invalid_parameter": InvalidParameterError,
    "context_length": ContextLengthError,
    "memory_plan": MemoryPlanError,
    "sampling": SamplingError,
    "recording": RecordingError,
    "worker_failed": WorkerFailedError,
}
"""Errors by the names that they have in messages. Any other travels as the nearest class above it that is here."""
_NAMES = {error: name for name, error in KINDS.items()}


class ErrorData(msgspec.Struct, frozen=True):
    """An error as data: its kind among `KINDS`, its message, and the parameter that it is about."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: TwostepError) -> "ErrorData":
        kind = next(_NAMES[base] for base in type(error).__mro__ if base in _NAMES)
        return cls(kind, str(error), getattr(error, "param", None))

    def error(self) -> TwostepError:
        """The error to raise; of a kind that this version does not know, a `TwostepError`."""
        kind = KINDS.get(self.kind, TwostepError)
        if issubclass(kind, InvalidParameterError):
            return kind(self.message, self.param)
        return kind(self.message)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    capabilities: Capabilities


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request was not accepted."""

    id: str
    error: ErrorData


class StepEnded(msgspec.Struct, frozen=True, tag="step"):
    """A step ended, or a ping was answered: the events, in order for each request, and the state after them."""

    events: tuple[Delta | Refused | Accepted | RequestOutput, ...]
    snapshot: Snapshot


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start or continue; its process ends."""

    error: ErrorData


FromEngine = Ready | StepEnded | Failed
Message = ToEngine | FromEngine
