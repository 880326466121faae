"""Which files of the package one streamed chat passes through, in the front end and in the engine's process.

`python -m support.chat_path` (in `tests/`) prints two lists. The way: files that are on the call stack when a body is
read or understood, a message passes between the processes, a step is planned, a kernel is called, events are made or
sent. And all files with
a function that runs between the request and its last chunk, with checks, log, metrics and helpers.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from support.http_server import within

import twostep

SOURCE = Path(twostep.__file__).parent
"""As installed: the commands run that."""
TRACER = f"""
import os, signal, sys, threading

found, way, on = set(), set(), False
MARKS = (
    "/http/request_body.py", "/openai_api/api_request.py", "/process/wire.py", "/core/scheduler.py",
    "/kernels/native.py", "/engine/collector.py", "/openai_api/responses.py", "/http/replies.py",
)

def profile(frame, event, argument):
    if on and event == "call":
        name = frame.f_code.co_filename
        found.add(name)
        if name.endswith(MARKS):
            while frame is not None:
                way.add(frame.f_code.co_filename)
                frame = frame.f_back

def path(end):
    return os.path.join(os.environ["CHAT_PATH"], str(os.getpid()) + end)

def begin(*_):
    global on
    on = True
    open(path(".begun"), "w").close()

def end(*_):
    global on
    on = False
    with open(path(".part"), "w") as file:
        for kind, names in (("way", way), ("all", found | way)):
            file.writelines(f"{{kind}} {{name}}\\n" for name in names if name.startswith({str(SOURCE)!r}))
    os.rename(path(".part"), path(".ended"))

signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
threading.setprofile(profile)
sys.setprofile(profile)
"""


def chat_path(model: str) -> dict[str, list[str]]:
    """The "way" and "all": paths within the package, sorted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACER)
        variables = {**os.environ, "PYTHONPATH": name, "CHAT_PATH": name}
        command = [Path(sys.executable).parent / "twostep", "serve", model, "--port", "0", "--kv-memory", "128MiB"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **pipes, text=True, env=variables) as serving:
            try:
                return _ask(serving, folder)
            finally:
                serving.terminate()


def _ask(serving: "subprocess.Popen[str]", folder: Path) -> dict[str, list[str]]:
    assert serving.stdout
    url = next(found[1] for line in serving.stdout if (found := re.search(r" at (http://\S+), ready", line)))
    children = Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()
    processes = [serving.pid, *map(int, children)]
    chat(url)  # what is made once is no part of the way
    _signal(processes, signal.SIGUSR1, folder, ".begun")
    chat(url)
    _signal(processes, signal.SIGUSR2, folder, ".ended")
    lines = {line for pid in processes for line in (folder / f"{pid}.ended").read_text().splitlines()}
    found: dict[str, list[str]] = {"way": [], "all": []}
    for line in sorted(lines):
        kind, _, file = line.partition(" ")
        found[kind].append(str(Path(file).relative_to(SOURCE)))
    return found


def _signal(processes: list[int], number: signal.Signals, folder: Path, answer: str) -> None:
    """Waits until each has written its file."""
    for pid in processes:
        os.kill(pid, number)
    assert within(20, lambda: all((folder / f"{pid}{answer}").exists() for pid in processes))


def chat(url: str) -> None:
    """One short streamed chat, to its end."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.text.endswith("data: [DONE]\n\n")


if __name__ == "__main__":
    for kind, files in chat_path("smollm2-135m").items():
        print(f"{kind}: {len(files)} files", *files, sep="\n  ")
