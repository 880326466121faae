"""OpenVINO GenAI in a separate Python process that serves all runs and communicates by lines of JSON."""

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import Decode, Measure, Prefill
from benchmarks.http_load import Overtaken
from benchmarks.jobs import Job, Stall, prompt
from benchmarks.measurement import EngineError
from benchmarks.traces import Served, Trace

DRIVER = Path(__file__).with_name("openvino_driver.py")


@dataclass(frozen=True)
class Tuning:
    """Maximum tokens per step, and KV cache size in tokens; None: 2 GB."""

    chunk_tokens: int = 256
    cache_tokens: int | None = None

    @property
    def arguments(self) -> list[str]:
        return [str(self.chunk_tokens), *([] if self.cache_tokens is None else [str(self.cache_tokens)])]


class OpenVinoProcess:
    """The driver process. `python` belongs to an environment with openvino-genai."""

    def __init__(self, python: Path, threads: int, model: Path, tuning: Tuning | None = None) -> None:
        command = [str(python), "-I", str(DRIVER), str(model), str(threads), *(tuning or Tuning()).arguments]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise EngineError(f"{python}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        try:
            self.version = str(self._answer()["version"])
        except EngineError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **question: Any) -> dict[str, Any]:
        """Raises `EngineError` if the process ended."""
        with suppress(BrokenPipeError):  # reading the answer reports that it ended
            print(json.dumps(question), file=self._questions, flush=True)
        return self._answer()

    def close(self) -> None:
        """Closes the input, which ends the process."""
        self._questions.close()
        self._process.wait()
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        """The next line of JSON; other lines are log output of the library."""
        for line in self._answers:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise EngineError(f"{DRIVER.name}: ended with exit code {self._process.wait()}; its error is printed above")


class OpenVino:
    """Prefill and decode rates of OpenVINO."""

    def __init__(self, python: Path, threads: int, model: Path, label: str) -> None:
        self.name, self.file = f"OpenVINO {label}", model.name
        self._process = OpenVinoProcess(python, threads, model)
        self.version = self._process.version

    def warm_up(self, measures: Sequence[Measure]) -> None:
        """Compiles the shapes of the measurements."""
        for measure in measures:
            self.rate(measure, -1)

    def rate(self, measure: Measure, run: int) -> float:
        """Decode generates one more token, as the first belongs to prefill."""
        match measure:
            case Prefill(tokens):
                return self._rate(prompts=[prompt(tokens, "peers", run)], tokens=1, what="prefill")
            case Decode(batch, context, tokens):
                prompts = [prompt(context, "peers", run, sequence) for sequence in range(batch)]
                return self._rate(prompts=prompts, tokens=tokens + 1, what="decode")

    def close(self) -> None:
        self._process.close()

    def _rate(self, **question: Any) -> float:
        return float(self._process.ask(**question)["rate"])


class OpenVinoServing:
    """Continuous batching of OpenVINO, stepped in its process without HTTP or a client."""

    def __init__(self, python: Path, threads: int, model: Path, label: str, tuning: Tuning | None = None) -> None:
        self.name, self.file = f"OpenVINO {label}", model.name
        self._process = OpenVinoProcess(python, threads, model, tuning)
        self.version = self._process.version

    @property
    def pid(self) -> int:
        return self._process.pid

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        return self._served(what="serve", jobs=_pairs(jobs), outstanding=outstanding)

    def interrupt(self, stall: Stall) -> Served:
        return self._served(what="interrupt", jobs=_pairs([*stall.streams, stall.newcomer]), after=stall.after)

    def overtaken(self, streams: Sequence[Job], newcomers: Sequence[Job], after: int) -> Overtaken:
        """One newcomer after the other, each beside new streams, which are as long as its prompt has steps of 24
        tokens. Raises `EngineError` if they end before its first token."""
        done = Overtaken([], [])
        for newcomer in newcomers:
            tokens = 2 * after + 64 + len(newcomer.prompt) // 24
            served = self.interrupt(Stall([Job(job.prompt, tokens) for job in streams], newcomer, after))
            done.streams.extend(served.traces[:-1])
            done.newcomers.append(served.traces[-1])
        return done

    def close(self) -> None:
        self._process.close()

    def _served(self, **question: Any) -> Served:
        found = self._process.ask(**question)["traces"]
        return Served([Trace(one["asked_s"], len(one["token_s"]), one["token_s"]) for one in found])


def _pairs(jobs: Sequence[Job]) -> list[tuple[list[int], int]]:
    return [(list(job.prompt), job.tokens) for job in jobs]
