"""llama.cpp's `llama-server`, asked over HTTP on this machine: its batching lies in the server, not in the library."""

import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Condition
from time import perf_counter, sleep
from typing import Any

from benchmarks.errors import EngineError
from benchmarks.jobs import Job, Stall
from benchmarks.traces import Served, Trace

SLOTS, SLOT_TOKENS = 16, 2304
"""Requests at a time, and the context of each: what the longest job needs."""
START_LIMIT_S, ANSWER_LIMIT_S = 120, 600


class LlamaServer:
    """`folder` holds llama.cpp's programs. `arguments`: further ones of the server, part of its name here."""

    def __init__(self, folder: Path, version: str, threads: int, model: Path, arguments: Sequence[str] = ()) -> None:
        kind = model.stem.rpartition("-as-")[2].rpartition(".")[2]
        self.name = " ".join(("llama-server", kind, *arguments))
        self.version, self.file = version, model.name
        self._port = _free_port()
        self._process = _start([
            str(folder / "llama-server"), "-m", str(model), "-t", str(threads), "-tb", str(threads),
            "-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "-cb", "--cache-ram", "0", "--no-webui",
            "--host", "127.0.0.1", "--port", str(self._port), *arguments,
        ])  # fmt: skip
        try:
            self._wait_until_ready()
        except EngineError:
            self.close()
            raise

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        with ThreadPoolExecutor(outstanding) as clients:
            return Served(list(clients.map(self._complete, jobs)))

    def interrupt(self, stall: Stall) -> Served:
        progress = _Progress(len(stall.streams))
        with ThreadPoolExecutor(len(stall.streams)) as clients:
            streams = [clients.submit(self._complete, job, progress, i) for i, job in enumerate(stall.streams)]
            progress.wait_for(stall.after)
            newcomer = self._complete(stall.newcomer)
            return Served([*(stream.result() for stream in streams), newcomer])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _complete(self, job: Job, progress: "_Progress | None" = None, stream: int = 0) -> Trace:
        """One request, streamed. Tokens that end within a character come with the next."""
        body = {
            "prompt": list(job.prompt), "n_predict": job.tokens, "ignore_eos": True, "temperature": 0,
            "stream": True, "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        asked, times, count = perf_counter(), list[float](), 0
        for event in self._events(body):
            if not event.get("stop"):
                times.append(perf_counter())
                if progress:
                    progress.note(stream, len(times))
            count = int(event.get("tokens_predicted", count))
        if count != job.tokens or not times:
            raise EngineError(f"llama-server: gave {count} tokens instead of {job.tokens}")
        return Trace(asked, count, times)

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(200).decode(errors="replace")
                raise EngineError(f"llama-server: HTTP {response.status}: {said}")
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
        except (OSError, HTTPException) as error:
            raise EngineError(f"llama-server: {error}") from error
        finally:
            connection.close()

    def _wait_until_ready(self) -> None:
        """The model is loaded when `/health` says so."""
        deadline = perf_counter() + START_LIMIT_S
        while not self._healthy():
            if (code := self._process.poll()) is not None:
                raise EngineError(f"llama-server: ended with exit code {code}")
            if perf_counter() > deadline:
                raise EngineError(f"llama-server: not ready after {START_LIMIT_S} s")
            sleep(0.1)

    def _healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
        with suppress(OSError, HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False


class _Progress:
    """How many tokens each stream has; its clients are threads."""

    def __init__(self, streams: int) -> None:
        self._counts = [0] * streams
        self._changed = Condition()

    def note(self, stream: int, count: int) -> None:
        with self._changed:
            self._counts[stream] = count
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Returns when every stream has so many. Raises `EngineError` if that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: min(self._counts) >= count, ANSWER_LIMIT_S):
                raise EngineError(f"llama-server: the streams did not have {count} tokens after {ANSWER_LIMIT_S} s")


def _start(command: list[str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise EngineError(f"{command[0]}: {error.strerror}") from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
