"""The process that renders one chat template, apart from the server so that the system can bound it.

A template is a program that came with a download. Jinja2's sandbox keeps it from files and objects, but one line of
it can ask for years of time or all memory, and nothing inside an interpreter can stop that reliably. So it runs here,
where the kernel limits processor time and memory, and dies alone.

Speaks JSON lines. The first it reads holds `source` and the limits, each later one the variables of a rendering. To
each of these it answers `{"text": ...}` or `{"error": ...}`, the latter with `"refusal": true` if the template raised
it itself, `"faulty": true` if it is no template.
Run as a file and free of imports from Twostep: it must start quickly.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from math import ceil
from typing import Any, BinaryIO, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RefusalError(TemplateError):
    """What a template raises by `raise_exception`."""


class Renderer:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._source: str = settings["source"]
        self._cpu_s: int = settings["cpu_s"]
        self._text_characters: int = settings["text_characters"]
        limit_cpu(self._cpu_s)
        with suppress(Exception):  # compiled before the first request comes, which hears of what is wrong
            _ = self._template

    def answer(self, line: bytes) -> dict[str, Any]:
        """The reply to one request, whatever the template does short of breaking a limit of the kernel."""
        limit_cpu(self._cpu_s)
        try:
            template = self._template
        except Exception as error:
            return {"error": described(error), "faulty": True}
        try:
            return self._checked(template.render(json.loads(line)))
        except RefusalError as error:
            return {"error": str(error), "refusal": True}
        except Exception as error:
            return {"error": described(error)}

    @cached_property
    def _template(self) -> Template:
        return environment().from_string(self._source)

    def _checked(self, text: str) -> dict[str, Any]:
        if len(text) > self._text_characters:
            return {"error": f"gives {len(text)} characters, limit {self._text_characters}"}
        return {"text": text}


def described(error: Exception) -> str:
    """In one line, not too long a one."""
    return "needs too much memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"[:1000]


def limit_cpu(seconds: int) -> None:
    """From now on; the kernel ends the process when they are used up."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = ceil(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def environment() -> ImmutableSandboxedEnvironment:
    """As in Hugging Face's `apply_chat_template`, which templates are written for."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise RefusalError(message)


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    settings = json.loads(requests.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory_bytes = settings["memory_bytes"] if hard == resource.RLIM_INFINITY else min(settings["memory_bytes"], hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    renderer = Renderer(settings)
    for line in requests:
        answers.write(json.dumps(renderer.answer(line)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
