"""Chat templates: messages to the text of a prompt, rendered in a process of its own (see `template_worker`)."""

import json
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

from twostep.errors import InvalidParameterError, ModelFileError, TwostepError, WorkerFailedError
from twostep.model.metadata import Metadata
from twostep.model.vocabulary import TEMPLATE_KEY
from twostep.processes import Owner, environment, keep_from_forks, python, signals_held

MAX_SOURCE_CHARACTERS = 1 << 19
LIMITS = {"cpu_s": 2, "memory_bytes": 512 << 20, "text_characters": 8 << 20}
"""What one rendering may use; real templates need a few milliseconds."""

_READ_BYTES = 1 << 16
_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt's text; `given` are the parts of it, as start and stop, that came from the request: text to tokenise
    without control tokens, which only the template may write."""

    text: str
    given: Sequence[tuple[int, int]]

    def before(self, end: str) -> "RenderedPrompt | None":
        """The prompt up to the first `end`; None if it does not have it."""
        text, found, _ = self.text.partition(end)
        parts = [(start, min(stop, len(text))) for start, stop in self.given if start < len(text)]
        return RenderedPrompt(text, parts) if found else None


class ChatTemplate:
    """One template and the process that renders it. Safe to use from several threads; they take turns.

    The process starts with the object and gets ready, in a tenth of a second, while the caller goes on. It ends with
    `close`, with the object, or with the caller's process; one that broke a limit is replaced.
    """

    def __init__(self, source: str, where: str, variables: Mapping[str, str] | None = None) -> None:
        """`where` names the template in errors; `variables`, such as `bos_token`, are there in every rendering."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ModelFileError(f"{where} has {len(source)} characters; supported: up to {MAX_SOURCE_CHARACTERS}")
        self.source = source
        self._where = where
        self._variables = dict(variables or {})
        self._lock = Lock()
        self._owner = Owner("this chat template")
        self._closed = False
        self._worker = self._new_worker()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] | None = None,
        added: int = 0,
    ) -> RenderedPrompt:
        """The prompt. Messages, tools and further `variables` must be what JSON can express.

        Content is a string, which becomes a part where the template reads parts. The role `developer` becomes `system`
        where the template does not know it. Raises `InvalidParameterError` if the template refuses the messages (roles
        out of order, say), fails on them, uses more than `LIMITS`, or leaves out a message or the tools;
        `ModelFileError` if it is no template at all; `ForkedError` in a forked child; `WorkerFailedError` if the
        process could not start or work. The first `added` messages are the caller's own and tell of tools: errors do
        not count them.
        """
        fixed = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        request = _to_json({**(variables or {}), **fixed})
        self._owner.check()  # not to wait for a lock that another thread of the parent held at the fork
        with self._lock:
            reply = self._ask(request)
            if reply.get("by_others"):
                reply = self._ask(request)
        if absent := reply.get("absent"):
            raise _left_out(absent, messages, added)
        self._check(reply)
        return RenderedPrompt(reply["text"], [(start, stop) for start, stop in reply["given"]])

    def close(self) -> None:
        """Ends the process; who waits for a rendering gets a `TwostepError`. The template can no longer be used."""
        self._closed = True
        if self._owner.here:
            self._worker.kill()  # first, so that nobody holds the lock for long
            with self._lock:
                self._worker.close()
        else:
            self._worker.close()

    def _ask(self, request: str) -> dict[str, Any]:
        """A process that ended is replaced."""
        reply = {"death": ""} if self._closed else self._worker.ask(request)
        if "death" in reply:
            if self._closed:
                raise TwostepError("this chat template is closed; its model has to be opened again")
            self._worker = self._new_worker()
        return reply

    def _new_worker(self) -> "_Worker":
        return _Worker({"source": self.source, "variables": self._variables, **LIMITS})

    def _check(self, reply: Mapping[str, Any]) -> None:
        if "text" in reply:
            return
        error = " ".join(str(reply.get("error", reply.get("death"))).split())
        if reply.get("failed"):
            raise WorkerFailedError(f"{self._where}: the process that renders it failed: {error}")
        if reply.get("faulty"):
            raise ModelFileError(f"{self._where}: {error}")
        does = "refuses" if reply.get("refusal") else "fails on"
        raise InvalidParameterError(f"the chat template {does} the messages: {error}", "messages")


def _left_out(absent: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], added: int) -> InvalidParameterError:
    index, key = absent.get("index", -1), absent.get("key")
    if index < added:  # the tools themselves, or the caller's message, which tells of them
        return InvalidParameterError("tools would be lost: the chat template leaves them out of the prompt", "tools")
    role = messages[index].get("role")
    problem = f"the chat template leaves the {key} of a message with role {role!r} in this place out of the prompt"
    return InvalidParameterError(f"messages[{index - added}].{key} would be lost: {problem}", "messages")


def _to_json(variables: Mapping[str, Any]) -> str:
    try:
        return json.dumps(variables)
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(f"the messages hold what JSON cannot express: {error}", "messages") from None


class _Worker:
    """The process: answers as in `template_worker`, or `{"death": why}`; `by_others` if somebody killed it, perhaps the
    system for want of memory, `failed` if it ended by itself, which no template makes it do."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        # Its traceback, when memory runs out, must not wait for whoever reads our stderr: the exit status tells enough.
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        # Without buffers: those have locks, which another thread may hold when the process forks.
        with signals_held(signal.SIGINT):
            self._process = subprocess.Popen(
                python(str(_WORKER)), bufsize=0, stdin=pipe, stdout=pipe, stderr=nothing, env=environment()
            )
        for end in _pipes(self._process):
            keep_from_forks(end)
        self.close = weakref.finalize(self, _end, self._process, Owner("this process"))
        self._send(json.dumps(settings))

    def kill(self) -> None:
        """It ends soon, and whoever waits for its answer is told so."""
        self._process.kill()

    def ask(self, request: str) -> dict[str, Any]:
        self._send(request)
        line = self._line()
        if not line.endswith(b"\n"):
            return {
                "death": self._verdict(),
                "by_others": self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM),
                "failed": self._process.returncode > 0,
            }
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _send(self, line: str) -> None:
        left = memoryview(line.encode() + b"\n")
        with suppress(BrokenPipeError):  # a dead process is noticed when it does not answer
            while left:
                left = left[os.write(_pipes(self._process)[0].fileno(), left) :]

    def _line(self) -> bytes:
        """One answer, with its line end; less where the process ended."""
        parts = [b""]
        while not parts[-1].endswith(b"\n"):
            parts.append(os.read(_pipes(self._process)[1].fileno(), _READ_BYTES))
            if not parts[-1]:
                break
        return b"".join(parts)

    def _verdict(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return f"takes more than {LIMITS['cpu_s']} s to render"
        return f"ended the process that renders it (exit status {code})"


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _end(process: "subprocess.Popen[bytes]", owner: Owner) -> None:
    """In a forked child the process goes on: it is not the child's."""
    if owner.here:
        process.kill()
        process.communicate()
        return
    process.returncode = 0  # to the child's mind: it neither waits for it nor complains
    for pipe in _pipes(process):
        pipe.close()


def load_template(metadata: Metadata) -> ChatTemplate:
    """The template of a file. Raises `ModelFileError` if it has none."""
    if TEMPLATE_KEY not in metadata:
        raise metadata.error(TEMPLATE_KEY, "is missing: the model has no chat template, it can only continue raw text")
    return ChatTemplate(metadata.text(TEMPLATE_KEY), metadata.where(TEMPLATE_KEY), _marks(metadata))


_MARKS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator",
    "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip
"""Variables of templates, by the keys of GGUF (which spells one of them so)."""


def _marks(metadata: Metadata) -> dict[str, str]:
    """`bos_token` and its like, by the ids that the file names."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    marks = {}
    for name, key in _MARKS.items():
        id_ = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(id_, int) and 0 <= id_ < len(tokens):
            marks[name] = tokens[id_]
    return marks
