"""Engines that die: the server says how, starts a new one, and gives up with a status that tells its supervisor so."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from support.http_server import within

from twostep.engine.process.engine_client import EngineClient, _how_it_ended
from twostep.engine.process.local_backend import MOST_DEATHS, WINDOW_S, LocalBackend
from twostep.errors import EngineDiedError, MemoryPlanError, TwostepError
from twostep.recording.reader import Recording

# --- the supervisor, with engines that are made up ----------------------------------------------------------------


class FakeEngine:
    """Dies when it is told to."""

    def __init__(self) -> None:
        self.death: asyncio.Future[EngineDiedError] = asyncio.get_running_loop().create_future()
        self.died: EngineDiedError | None = None
        self.stopped = False
        self.pinged = False

    async def wait_until_dead(self) -> EngineDiedError:
        self.died = await self.death
        return self.died

    def ping(self) -> None:
        self.pinged = True

    async def stop(self) -> None:
        self.stopped = True


class FakeStarts:
    """Lets each engine die at once, as long as `lives_s` says when; the next one stays."""

    def __init__(self, lives_s: list[float]) -> None:
        self.draining = False
        self.said: list[str] = []
        self.now_s = 0.0
        self.starts: list[int] = []
        self.failures: dict[int, TwostepError] = {}
        self._lives_s = lives_s
        self.out_of_lives = asyncio.Event()

    async def start(self, restart: int) -> EngineClient:
        self.starts.append(restart)
        if restart in self.failures:
            raise self.failures[restart]
        engine = FakeEngine()
        if self._lives_s:
            self.now_s += self._lives_s.pop(0)
            engine.death.set_result(EngineDiedError(f"died at {self.now_s:g}"))
        else:
            self.out_of_lives.set()
        return cast(EngineClient, engine)

    def report(self, event: str, line: str) -> None:
        self.said.append(f"{event}: {line}")


def supervised(lives_s: list[float], prepare: Callable[[FakeStarts], None] = lambda _: None) -> tuple[FakeStarts, str]:
    """Engines that live so long each, and one more that stays; how the backend ended."""

    async def run() -> tuple[FakeStarts, str]:
        starts = FakeStarts(lives_s)
        prepare(starts)
        backend = LocalBackend(starts.start, starts.report, lambda: starts.now_s)
        if starts.draining:
            backend.drain()
        running = asyncio.create_task(backend.run(lambda: None))
        done, _ = await asyncio.wait([running, waiting := asyncio.create_task(starts.out_of_lives.wait())],
                                     return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        waiting.cancel()
        if running in done:
            assert backend.phase == ("failed" if backend.client else "loading")
            return starts, str(running.exception())
        await asyncio.sleep(0)
        assert backend.phase == "ready"
        assert backend.restarts == len(starts.starts) - 1
        running.cancel()
        await backend.stop()
        engine = cast(FakeEngine, backend.client)
        assert engine.stopped
        assert engine.pinged, "there would be no metrics before the first request"
        return starts, "running"

    return asyncio.run(run())


def test_a_dead_engine_is_replaced() -> None:
    made, end = supervised([5])
    assert (end, made.starts) == ("running", [0, 1])
    assert made.said == [
        "engine_died: died at 5; starting it again",
        "engine_restarted: the engine is running again",
    ]


def test_deaths_that_are_rare_are_all_mended() -> None:
    made, end = supervised([WINDOW_S / (MOST_DEATHS - 1) + 0.1] * 10)
    assert (end, made.starts) == ("running", list(range(11)))


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    made, end = supervised([0.0, *[WINDOW_S / (MOST_DEATHS - 1)] * 10])
    assert made.starts == [0, 1, 2]
    assert made.said[-1] == "engine_died: died at 60"
    assert end == "the engine died 3 times within 60 s and is not started again"


def test_a_start_that_fails_is_a_death() -> None:
    """Also for another reason, such as memory that somebody else took."""

    def prepare(starts: FakeStarts) -> None:
        starts.failures = {1: EngineDiedError("died while loading"), 2: MemoryPlanError("no memory")}

    made, end = supervised([0.0], prepare)
    assert (made.starts, end) == ([0, 1, 2], "the engine died 3 times within 60 s and is not started again")
    assert made.said[1:] == ["engine_died: died while loading; starting it again", "engine_died: no memory"]


def test_a_first_start_that_fails_is_told_as_it_is() -> None:
    def prepare(starts: FakeStarts) -> None:
        starts.failures = {0: MemoryPlanError("no memory")}

    made, end = supervised([], prepare)
    assert (made.starts, end, made.said) == ([0], "no memory", [])


def test_a_server_that_ends_starts_no_engine() -> None:
    def prepare(starts: FakeStarts) -> None:
        starts.draining = True

    made, end = supervised([1], prepare)
    assert (made.starts, end) == ([0], "died at 1, while the server was shutting down")


@pytest.mark.parametrize(
    ("status", "failure", "words"),
    [
        (3, None, "exited with status 3"),
        (-signal.SIGSEGV, None, "was killed by SIGSEGV"),
        (-signal.SIGKILL, None, "was killed by SIGKILL (the system does so when memory runs out)"),
        (-signal.SIGRTMIN - 1, None, f"was killed by signal {signal.SIGRTMIN + 1}"),
        (0, MemoryPlanError("no memory"), "ended: no memory"),
    ],
)
def test_how_an_engine_ended(status: int, failure: Exception | None, words: str) -> None:
    assert _how_it_ended(status, failure) == words


# --- `twostep serve` ----------------------------------------------------------------------------------------------

COMMAND = Path(sys.executable).parent / "twostep"
LONG: dict[str, Any] = {"prompt": "One, two,", "max_tokens": 5000, "ignore_eos": True}


@contextmanager
def serving(folder: Path, model: str = "smollm2-135m", *arguments: str) -> Iterator["Serving"]:
    """The command, ready for requests."""
    settings = ("--port", "0", "--kv-memory", "128MiB", "--threads", "1", *arguments)
    with (folder / "log").open("w") as log, subprocess.Popen(
        [COMMAND, "serve", model, *settings], stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:  # fmt: skip
        try:
            yield Serving(process, folder / "log")
        finally:
            process.kill()


class Serving:
    """The process, and where to ask it."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        """Waits until it is ready."""
        self.process, self._log = process, log
        assert process.stdout
        found = None
        while not found:
            line = process.stdout.readline()
            assert line, self.log
            found = re.search(r" at (http://\S+), ready for requests", line)
        self.url = found[1]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def engine(self, *, but: int = 0) -> int:
        """Process id of the engine, as soon as there is one that is not this."""
        assert within(60, lambda: bool(self._engines() - {but})), self.log
        [pid] = self._engines() - {but}
        return pid

    def _engines(self) -> set[int]:
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        found = {int(pid) for pid in (task / "children").read_text().split()}
        module = b"twostep.engine.process.engine_host"
        return {pid for pid in found if module in Path(f"/proc/{pid}/cmdline").read_bytes()}

    def ask(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=20)

    def complete(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={**LONG, "max_tokens": 2, **body}, timeout=60)

    def metric(self, name: str) -> float:
        [value] = re.findall(rf"^twostep:{name}{{.*}} (\S+)$", self.ask("/metrics").text, re.MULTILINE)
        return float(value)

    def is_ready(self) -> bool:
        return self.ask("/ready").status_code == 200


@contextmanager
def streaming(url: str, **more: Any) -> Iterator[Iterator[str]]:
    """Lines of a stream whose first one is here."""
    asked = {**LONG, "stream": True, **more}
    with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/v1/completions", json=asked) as reply:
        lines = (line for line in reply.iter_lines() if line)
        assert "choices" in next(lines)
        yield lines


def text_of(lines: Iterator[str]) -> str:
    """Of the rest of a stream, which has to end as it should."""
    *chunks, last = lines
    assert last == "data: [DONE]"
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


@pytest.mark.usefixtures("default_model_path")
def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    """While the new one loads, which is stopped in the midst of it, whoever asks is told to come again, and whoever
    has a stream waits."""
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 1.2, "seed": 5}
    with serving(tmp_path, "smollm2-135m", "--record", str(tmp_path / "run.rec")) as served:
        with streaming(served.url, **asked) as lines:
            whole = text_of(lines)
        first = served.engine()
        with streaming(served.url, **asked) as lines:
            os.kill(first, signal.SIGKILL)
            second = served.engine(but=first)
            os.kill(second, signal.SIGSTOP)
            assert within(20, lambda: served.ask("/health").json() == {"status": "restarting"})
            for refused in (served.ask("/ready"), served.complete()):
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_died")
                assert int(refused.headers["retry-after"]) >= 1
            assert (served.metric("engine_up"), served.metric("engine_restarts_total")) == (0, 1)
            os.kill(second, signal.SIGCONT)
            assert text_of(lines) == whole
        explained = served.ask("/v1/requests").json()["data"][0]
        lines_of = served.ask(f"/v1/requests/{explained['id']}").json()["choices"][0]["lines"]
        assert {"on an engine that died", "engine restarted"} <= {line["what"] for line in lines_of}
        assert served.metric("requests_resumed_total") == 1
        assert within(60, served.is_ready)
        assert served.complete().status_code == 200
        assert served.ask("/health").json()["status"] == "ok"
        assert (served.metric("engine_up"), served.metric("engine_restarts_total")) == (1, 1)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
        assert f"the engine's process {first} was killed by SIGKILL" in served.log
        assert "the engine is running again; requests that continue: 1" in served.log
        assert f"{tmp_path}/run.rec: the recording ends with the engine that died" in served.log
    assert list(Recording(tmp_path / "run.rec").turns()), "what was recorded before can be read"


@pytest.mark.usefixtures("default_model_path")
def test_an_engine_that_keeps_dying_ends_the_server_with_status_1(tmp_path: Path) -> None:
    with serving(tmp_path, "smollm2-135m", "--log", "json") as served:
        pid = 0
        for _ in range(3):
            pid = served.engine(but=pid)
            os.kill(pid, signal.SIGSEGV)
        assert served.process.wait(60) == 1
        *events, last = served.log.splitlines()
        died = [json.loads(line)["message"] for line in events if line.startswith("{")]
    assert [line.partition(" was ")[2] for line in died] == [
        "killed by SIGSEGV; starting it again",
        "killed by SIGSEGV; starting it again",
        "killed by SIGSEGV",
    ]
    assert last == "twostep: the engine died 3 times within 60 s and is not started again"


@pytest.mark.usefixtures("default_model_path")
def test_an_engine_that_dies_while_the_server_ends(tmp_path: Path) -> None:
    """Requests that are to be finished are, by another engine: the status is 0."""
    with serving(tmp_path) as served, streaming(served.url, max_tokens=300) as lines:
        served.process.send_signal(signal.SIGTERM)
        assert within(20, lambda: served.ask("/ready").json()["error"]["code"] == "shutting_down")
        os.kill(served.engine(), signal.SIGKILL)
        assert text_of(lines)
        assert served.process.wait(30) == 0


def test_an_engine_that_cannot_be_started_again(default_model_path: Path, tmp_path: Path) -> None:
    """Its model's file is gone."""
    model = tmp_path / "small.gguf"
    shutil.copy(default_model_path, model)
    with serving(tmp_path, str(model)) as served:
        model.unlink()
        os.kill(served.engine(), signal.SIGKILL)
        assert served.process.wait(60) == 1
        assert served.log.count("small.gguf: cannot be opened: No such file") == 2
        assert served.log.endswith("the engine died 3 times within 60 s and is not started again\n")
