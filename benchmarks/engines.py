"""What is asked of every engine that is compared, and how Twostep answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.prompts import prompt
from benchmarks.runs import Driver
from twostep.model.loaded import open_model


@dataclass(frozen=True)
class Prefill:
    """Rate of computing one prompt of so many tokens, up to its first output token."""

    tokens: int

    @property
    def name(self) -> str:
        return f"prefill {self.tokens}"


@dataclass(frozen=True)
class Decode:
    """Rate of all `batch` sequences together, each making `tokens` output tokens after `context` tokens."""

    batch: int
    context: int
    tokens: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch}, context {self.context}"


Measure = Prefill | Decode


class Engine(Protocol):
    """One engine with one weight file."""

    name: str
    version: str
    file: str
    """Name of the weight file."""

    def warm_up(self, measures: Sequence[Measure]) -> None:
        """Makes whatever is slow the first time."""
        ...

    def rate(self, measure: Measure, run: int) -> float:
        """Tokens per second of the `run`-th run. Raises `EngineError`."""
        ...

    def close(self) -> None:
        """Ends what the engine keeps running."""
        ...


class Twostep:
    """In this process, on the native executor. Sampling is part of a decode step, the tokens are fed back."""

    name = "Twostep"

    def __init__(self, path: Path, version: str, threads: int, measures: Sequence[Measure]) -> None:
        self.version = version
        self.file = path.name
        decodes = [measure for measure in measures if isinstance(measure, Decode)]
        self._driver = Driver(
            open_model(path).network,
            prompt=max((measure.tokens for measure in measures if isinstance(measure, Prefill)), default=0),
            batch=max((decode.batch for decode in decodes), default=0),
            positions=max((decode.context + decode.tokens for decode in decodes), default=0),
            threads=threads,
        )
        self._driver.fill()

    def warm_up(self, measures: Sequence[Measure]) -> None:
        """Buffers grow, the file's pages come in."""
        for measure in measures:
            self.rate(measure, -1)

    def rate(self, measure: Measure, run: int) -> float:
        match measure:
            case Prefill(tokens):
                done = self._driver.prefill(prompt(tokens, "peers", run))
            case Decode(batch, context, tokens):
                done = self._driver.decode(batch, context, tokens)
        return done.tokens / done.seconds.total

    def close(self) -> None:
        """Nothing runs between steps."""
