"""The interface of engines that serve requests, and its implementation by Twostep."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any, Protocol

from benchmarks.jobs import Job, Stall
from benchmarks.traces import Served, Trace
from twostep.config.configs import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.outputs import Delta, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.model.loaded import LoadedModel


class ServingEngine(Protocol):
    """An engine with one weight file; greedy sampling, no shared prefixes."""

    name: str
    version: str
    file: str

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        """Serves all jobs, `outstanding` at a time; submits the next when one is complete. Raises `EngineError`."""
        ...

    def interrupt(self, stall: Stall) -> Served:
        """Serves the streams, and the newcomer once each stream has `after` tokens. Raises `EngineError`."""
        ...

    def close(self) -> None:
        """Stops the engine."""
        ...


class Twostep:
    """Twostep in this process. Each measurement uses a new engine with its own memory and threads."""

    def __init__(self, model: LoadedModel, version: str, name: str = "Twostep", **settings: Any) -> None:
        """`settings`: keywords of `EngineConfig`."""
        self.name, self.version, self.file = name, version, model.path.name
        self._model, self._config = model, EngineConfig(**settings)

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        with self._session() as session:
            left = list(reversed(jobs))
            while left or session.engine.outstanding:
                while left and session.engine.outstanding < outstanding:
                    session.ask(left.pop())
                session.turn()
            return session.served()

    def interrupt(self, stall: Stall) -> Served:
        with self._session() as session:
            streams = [session.ask(job) for job in stall.streams]
            while min(session.counts[stream] for stream in streams) < stall.after:
                session.turn()
            session.ask(stall.newcomer)
            while session.engine.outstanding:
                session.turn()
            return session.served()

    def close(self) -> None:
        """Nothing to stop."""

    @contextmanager
    def _session(self) -> "Iterator[Session]":
        engine = Engine(self._model, self._config)
        try:
            yield Session(engine)
        finally:
            engine.close()


class Session:
    """Submits requests to an engine and records token times, which are the ends of its steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counts: dict[str, int] = {}
        """Tokens so far, by id."""
        self._asked_ns: dict[str, int] = {}
        self._outputs: dict[str, RequestOutput] = {}

    def ask(self, job: Job) -> str:
        """Submits a streamed request, with text, as a server does."""
        now = monotonic_ns()
        params = SamplingParams(temperature=0.0, max_tokens=job.tokens, ignore_eos=True)
        id_ = self.engine.submit(job.prompt, params, stream=True)
        self._asked_ns[id_], self.counts[id_] = now, 0
        return id_

    def turn(self) -> None:
        for event in self.engine.turn():
            match event:
                case Delta():
                    self.counts[event.id] += len(event.token_ids)
                case RequestOutput():
                    self._outputs[event.id] = event

    def served(self) -> Served:
        """Traces in the order of submission; all requests must be complete."""
        return Served([_trace(asked, self._outputs[id_]) for id_, asked in self._asked_ns.items()])


def _trace(asked_ns: int, output: RequestOutput) -> Trace:
    times = output.choices[0].timeline.token_ns
    return Trace(asked_ns / 1e9, output.output_tokens, [ns / 1e9 for ns in times])
