"""Servers that are compared over HTTP: how each is started, and how it is asked."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks import http_load
from benchmarks.http_load import Completions, asks
from benchmarks.jobs import Job, Stall, prompt
from benchmarks.loading import COMMAND
from benchmarks.measurement import EngineError
from benchmarks.traces import Served
from twostep.config.settings import SETTINGS

START_LIMIT_S, END_LIMIT_S = 600, 15
POLL_S = 0.05
FIRST = Job(prompt(4, "first"), 1)
"""A server that answers this request has started."""


@dataclass(frozen=True)
class Launch:
    """How to start a server. `name` and `version` are for tables, `file` has its weights."""

    name: str
    version: str
    file: str
    command: Sequence[str]
    """Without `--host` and `--port`, which are appended."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that differ from this process; None: unset."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Extra fields for its requests."""


class HttpEngine:
    """A server that was started and has answered one request. Raises `EngineError` with its last line of output if that
    fails."""

    def __init__(self, launch: Launch) -> None:
        self.name, self.version, self.file = launch.name, launch.version, launch.file
        self._port = _free_port()
        self._client = Completions(launch.name, self._port, launch.further)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the server ends
        started_s = perf_counter()
        self._process = self._start(launch)
        try:
            self._wait_until_ready(launch.further)
        except BaseException:  # also for Ctrl-C: the server has its own session and would keep running
            self.close()
            raise
        self.start_s = perf_counter() - started_s
        """From the start of the process to its first complete answer."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        return self._client.closed(jobs, outstanding)

    def interrupt(self, stall: Stall) -> Served:
        return self._client.interrupt(stall)

    def overtaken(self, streams: Sequence[Job], newcomers: Sequence[Job], after: int) -> http_load.Overtaken:
        """See `http_load.overtaken`."""
        return self._client.overtaken(streams, newcomers, after)

    def close(self) -> None:
        """Ends all processes of its process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
        self._errors.close()

    def _start(self, launch: Launch) -> "subprocess.Popen[bytes]":
        environment = os.environ | launch.environment
        try:
            return subprocess.Popen(
                [*launch.command, "--host", "127.0.0.1", "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={name: value for name, value in environment.items() if value is not None},
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise EngineError(f"{launch.command[0]}: {error.strerror}") from error

    def _wait_until_ready(self, further: Mapping[str, Any]) -> None:
        deadline = perf_counter() + START_LIMIT_S
        while not self._answers(further):
            if (code := self._process.poll()) is not None:
                raise EngineError(f"{self.name}: ended with exit code {code}, last output: {self._last_line()}")
            if perf_counter() > deadline:
                raise EngineError(f"{self.name}: no answer after {START_LIMIT_S} s, last output: {self._last_line()}")
            sleep(POLL_S)

    def _answers(self, further: Mapping[str, Any]) -> bool:
        """Whether the server answers; a refused connection or status 503 means that it is not ready."""
        with suppress(EngineError):
            [reply] = http_load.closed_loop(self._port, asks([FIRST], further)).replies
            return bool(reply.body())
        return False

    def _last_line(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "nothing"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


SLOTS, SLOT_TOKENS = 16, 2304
"""Concurrent requests, and the context of each, as needed by the longest job."""


def launch_llama_server(folder: Path, version: str, threads: int, model: Path, arguments: Sequence[str] = ()) -> Launch:
    """Starts llama.cpp's server. `folder` has its programs; extra `arguments` become part of the name."""
    kind = model.stem.rpartition("-as-")[2].rpartition(".")[2]
    return Launch(
        name=" ".join(("llama-server", kind, *arguments)),
        version=version,
        file=model.name,
        command=[
            str(folder / "llama-server"), "-m", str(model), "-t", str(threads), "-tb", str(threads),
            "-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "-cb", "--cache-ram", "0", "--no-webui", *arguments,
        ],
        further={"cache_prompt": False},
    )  # fmt: skip


def launch_twostep(
    version: str, threads: int, model: Path, kv_bytes_per_token: int, arguments: Sequence[str] = ()
) -> Launch:
    """Starts Twostep with default settings except for memory; extra `arguments` become part of the name."""
    return Launch(
        name=" ".join(("Twostep", *arguments)),
        version=version,
        file=model.name,
        command=[
            sys.executable, "-c", COMMAND, "serve", str(model), "--threads", str(threads), "--max-num-seqs", str(SLOTS),
            "--max-model-len", str(SLOT_TOKENS), "--kv-memory", f"{SLOTS * SLOT_TOKENS * kv_bytes_per_token}B",
            *arguments,
        ],
        environment={setting.variable: None for setting in SETTINGS},
    )  # fmt: skip


MAKE_MODEL = Path(__file__).with_name("hf_model.py")
KV_GIB = 1
"""Whole GiB; all slots of the default model need 0.8."""


def hf_folder(python: Path, model: Path, folder: Path) -> Path:
    """The converted model in `folder`; made if missing. Raises `EngineError`."""
    target = folder / f"{model.stem}-as-bf16"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-I", str(MAKE_MODEL), str(model), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise EngineError(f"{MAKE_MODEL.name}: exit code {done.returncode}: {last}")
    return target


def launch_vllm(python: Path, version: str, threads: int, model: Path, arguments: Sequence[str] = ()) -> Launch:
    """Starts vLLM with the fastest measured settings. `model` is a folder; extra `arguments` become part of the
    name."""
    return Launch(
        name=" ".join(("vLLM bf16", *arguments)),
        version=version,
        file=model.name,
        command=[
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "default", "--dtype", "bfloat16", "--max-num-seqs", str(SLOTS), "--max-model-len", str(SLOT_TOKENS),
            "--no-enable-prefix-caching", "--disable-uvicorn-access-log", *arguments,
        ],
        environment=_vllm_environment(python, threads),
        further={"model": "default"},
    )  # fmt: skip


def _vllm_environment(python: Path, threads: int) -> dict[str, str | None]:
    """As recommended in vLLM's CPU documentation: its own OpenMP and tcmalloc, if installed."""
    tcmalloc, openmp = find_library("tcmalloc_minimal"), python.parent.parent / "lib" / "libiomp5.so"
    preload = [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.is_file() else [])]
    return {
        "LD_PRELOAD": ":".join(preload) or None,
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
