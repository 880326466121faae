"""What is asked of any server that speaks OpenAI's completions, with prompts of token ids, and what its replies say."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import http_load
from benchmarks.errors import EngineError
from benchmarks.event_stream import events
from benchmarks.http_client import Reply
from benchmarks.http_load import Ask
from benchmarks.jobs import Job, Stall
from benchmarks.traces import Served, Trace

COUNTED = {"stream_options": {"include_usage": True}}
"""Makes a server say how many tokens it gave."""


def asks(jobs: Sequence[Job], further: Mapping[str, Any] | None = None) -> list[Ask]:
    """Streamed, greedy, as long as asked for; with `further` fields that a server wants."""
    return [Ask("/v1/completions", json.dumps(_body(job) | dict(further or {})).encode()) for job in jobs]


def _body(job: Job) -> dict[str, Any]:
    asked = {"prompt": list(job.prompt), "max_tokens": job.tokens}
    return {**asked, "temperature": 0, "ignore_eos": True, "stream": True}


class Completions:
    """One server on this machine, asked by this process."""

    def __init__(self, name: str, port: int, further: Mapping[str, Any] | None = None) -> None:
        self._name, self._port = name, port
        self._further = {**COUNTED, **(further or {})}

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        with self._named():
            load = http_load.closed_loop(self._port, self._asks(jobs), outstanding)
            return self._served(jobs, load.replies)

    def interrupt(self, stall: Stall) -> Served:
        with self._named():
            [newcomer] = self._asks([stall.newcomer])
            load = http_load.interrupted(self._port, self._asks(stall.streams), newcomer, stall.after)
            return self._served([*stall.streams, stall.newcomer], load.replies)

    def _asks(self, jobs: Sequence[Job]) -> list[Ask]:
        return asks(jobs, self._further)

    def _served(self, jobs: Sequence[Job], replies: Sequence[Reply]) -> Served:
        return Served([trace(job, reply) for job, reply in zip(jobs, replies, strict=True)])

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            raise EngineError(f"{self._name}: {error}") from error


def trace(job: Job, reply: Reply) -> Trace:
    """A time for each event that gave something. Tokens that end within a character come with the next.

    Raises `EngineError` if the server did not give as many tokens as asked for.
    """
    times, tokens = list[float](), None
    for event in events(reply):
        chunk = json.loads(event.data)
        if _gives(chunk.get("choices") or []):
            times.append(event.at_s)
        if usage := chunk.get("usage"):
            tokens = usage["completion_tokens"]
    if tokens != job.tokens or not times:
        raise EngineError(f"gave {tokens} tokens instead of {job.tokens}")
    return Trace(reply.asked_s, tokens, times)


def _gives(choices: Sequence[Mapping[str, Any]]) -> bool:
    """All but the last, which is there to say why the answer ended, and events of none, which have the usage."""
    return any(choice["text"] or choice.get("finish_reason") is None for choice in choices)
