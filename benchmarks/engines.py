"""Engines that are compared in process: Twostep, and llama.cpp through its own programs."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.jobs import prompt
from benchmarks.measurement import EngineError
from benchmarks.model_driver import Driver
from twostep.model.loaded import open_model


@dataclass(frozen=True)
class Prefill:
    """Prefill rate of one prompt of `tokens` tokens, up to its first output token."""

    tokens: int

    @property
    def name(self) -> str:
        return f"prefill {self.tokens}"


@dataclass(frozen=True)
class Decode:
    """Total decode rate of `batch` sequences that generate `tokens` tokens each after `context` tokens."""

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
        """Does everything that is slow the first time."""
        ...

    def rate(self, measure: Measure, run: int) -> float:
        """Tokens per second of the `run`-th run. Raises `EngineError`."""
        ...

    def close(self) -> None:
        """Stops the engine."""
        ...


class Twostep:
    """Twostep in this process, on the native executor. Decode steps include sampling and feed tokens back."""

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
        """Grows buffers and loads the pages of the file."""
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
        """Nothing to stop."""


WARM_TOKENS = 1024
"""Prompts of at least this length need no warm-up run, as its effect is negligible."""


class LlamaCpp:
    """llama.cpp through its own programs in `folder`: `llama-bench` for prefill and one sequence, `llama-batched-bench`
    for several. `label` names the weight format of `model`. Each run is a separate process."""

    def __init__(self, folder: Path, version: str | None, threads: int, model: Path, label: str) -> None:
        self.name = f"llama.cpp {label}"
        self.file = model.name
        self.version = version or programs_version(folder)
        self._folder, self._threads, self._model = folder, threads, model

    def warm_up(self, measures: Sequence[Measure]) -> None:
        """Nothing to do: the programs warm up themselves."""

    def rate(self, measure: Measure, run: int) -> float:
        match measure:
            case Prefill(tokens):
                warm = ["--no-warmup"] if tokens >= WARM_TOKENS else []
                return float(self._bench(["-p", str(tokens), "-n", "0", *warm])["avg_ts"])
            case Decode(1, context, tokens):
                return float(self._bench(["-p", "0", "-n", str(tokens), "-d", str(context)])["avg_ts"])
            case Decode(batch, context, tokens):
                return self._batched(batch, context, tokens)

    def close(self) -> None:
        """Nothing to stop."""

    def _bench(self, arguments: list[str]) -> dict[str, Any]:
        return self._run("llama-bench", ["-t", str(self._threads), "-r", "1", "-o", "jsonl", *arguments])

    def _batched(self, batch: int, context: int, tokens: int) -> float:
        sizes = ["-npp", str(context), "-ntg", str(tokens), "-npl", str(batch), "-c", str(batch * (context + tokens))]
        threads = ["-t", str(self._threads), "-tb", str(self._threads)]
        return float(self._run("llama-batched-bench", [*threads, *sizes, "--output-format", "jsonl"])["speed_tg"])

    def _run(self, program: str, arguments: list[str]) -> dict[str, Any]:
        """Runs a program that prints one line of JSON, and returns it."""
        output = _output([str(self._folder / program), "-m", str(self._model), *arguments])
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if len(lines) != 1:
            raise EngineError(f"{program}: printed {len(lines)} results instead of one")
        found: dict[str, Any] = json.loads(lines[0])
        return found


def programs_version(folder: Path) -> str:
    """Version of the programs in `folder`. Raises `EngineError`."""
    return _output([str(folder / "llama-bench"), "--version"]).partition("\n")[0]


def requantise(programs: Path, source: Path, kind: str, folder: Path) -> Path:
    """Converts `source` to weight format `kind`, as a file in `folder`. Raises `EngineError`."""
    target = folder / f"{source.stem}-as-{kind}.gguf"
    _output([str(programs / "llama-quantize"), "--allow-requantize", str(source), str(target), kind])
    return target


def _output(command: list[str]) -> str:
    """Output of a program. Raises `EngineError` with its last line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EngineError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(f"{command[0]}: exit code {done.returncode}: {last}")
    return done.stdout
