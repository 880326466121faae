"""The process that renders one chat template, apart from the server so that the system can bound it.

A template is a program that came with a download. Jinja2's sandbox keeps it from files and objects, but one line of
it can ask for years of time or all memory, and nothing inside an interpreter can stop that reliably. So it runs here,
where the kernel limits processor time and memory, and dies alone.

Speaks JSON lines. The first it reads holds `source`, the template's own `variables` and the limits, each later one the
variables of a rendering. To each of these it answers `{"text": ..., "given": [[start, stop], ...]}`, where `given` are
the parts of the text that came from the request, or `{"error": ...}`, the latter with `"refusal": true` if the template
raised it itself, `"faulty": true` if it is no template, `"absent": what` if something of the request is not in the
text. Imports nothing heavy from Twostep: it must start quickly.
"""

import json
import re
import resource
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import ceil
from typing import Any, BinaryIO

from jinja2 import Template

from twostep.model.template_environment import RefusalError, TracingEnvironment
from twostep.model.traced import TEMPLATE, UNKNOWN, Traced, origins_of

_TOOLS, _FIRST_CONTENT, _FIRST_CALLS = UNKNOWN + 1, UNKNOWN + 2, UNKNOWN + 3
"""Origins: tools, and content and tool calls of message 0; each later message has two more. All else is unknown."""

_DEVELOPER = re.compile("""(["'])developer\\1""")
_GIVEN = re.compile(f"[^{chr(TEMPLATE)}]+")


class Renderer:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._source: str = settings["source"]
        self._variables: dict[str, str] = settings["variables"]
        self._cpu_s: int = settings["cpu_s"]
        self._text_characters: int = settings["text_characters"]
        limit_cpu(self._cpu_s)
        with suppress(Exception):  # compiled before the first request comes, which hears of what is wrong
            _ = self._template

    def answer(self, line: bytes) -> dict[str, Any]:
        """The reply to one request, whatever the template does short of breaking a limit of the kernel."""
        limit_cpu(self._cpu_s)
        try:
            _ = self._template
        except Exception as error:
            return {"error": described(error), "faulty": True}
        try:
            return self._rendered(json.loads(line))
        except RefusalError as error:
            return {"error": str(error), "refusal": True}
        except Exception as error:
            return {"error": described(error)}

    @cached_property
    def _template(self) -> Template:
        return TracingEnvironment().from_string(self._source)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content has to be a list of parts. Found out by rendering, once, when there is something to render:
        templates differ too much in how they read content for their source to tell."""
        mark = secrets.token_hex(8)
        for in_parts in (False, True):
            if any(self._shows(mark, talk, in_parts) for talk in _talks(mark)):
                return in_parts
        return False

    def _shows(self, mark: str, messages: list[dict[str, Any]], in_parts: bool) -> bool:
        """Whether the last message's text is in the prompt as it is: not a list as Python writes it, not letters."""
        try:
            text = self._render({"messages": messages, "add_generation_prompt": True}, in_parts)
        except Exception:
            return False
        last = chr(_content(len(messages) - 1))
        runs = [match.end() - match.start() for match in re.finditer(f"{last}+", origins_of(text))]
        return len(mark) in runs if in_parts else max(runs, default=0) >= len(mark)

    def _rendered(self, variables: dict[str, Any]) -> dict[str, Any]:
        messages = variables["messages"]
        in_parts = bool(messages) and self._takes_parts
        text = self._render(variables, in_parts)
        if len(text) > self._text_characters:
            return {"error": f"gives {len(text)} characters, limit {self._text_characters}"}
        if absent := self._absent(variables, in_parts, set(map(ord, set(origins_of(text))))):
            return {"error": f"the chat template leaves out {absent}", "absent": absent}
        return {"text": text, "given": [match.span() for match in _GIVEN.finditer(origins_of(text))]}

    def _render(self, variables: Mapping[str, Any], in_parts: bool) -> str:
        messages = [self._message(number, message, in_parts) for number, message in enumerate(variables["messages"])]
        others = {name: value for name, value in variables.items() if name not in ("messages", "tools")}
        tools = _traced(variables.get("tools"), _TOOLS)
        return self._template.render(
            {**self._variables, "documents": None, **_traced(others, UNKNOWN), "messages": messages, "tools": tools}
        )

    def _message(self, number: int, message: Any, in_parts: bool) -> Any:
        if not isinstance(message, dict):
            return _traced(message, UNKNOWN)
        content, calls = _content(number), _calls(number)
        origins = {"content": content, "tool_calls": calls}
        made = {_traced(key, UNKNOWN): _traced(value, origins.get(key, UNKNOWN)) for key, value in message.items()}
        role = message.get("role")
        if isinstance(role, str) and role.isidentifier():  # templates make control tokens of roles
            made["role"] = "system" if role == "developer" and not _DEVELOPER.search(self._source) else role
        if in_parts and isinstance(made.get("content"), str):
            made["content"] = [{"type": "text", "text": made["content"]}]
        return made

    def _absent(self, variables: Mapping[str, Any], in_parts: bool, shown: set[int]) -> dict[str, Any] | None:
        """What of the request neither is in the prompt nor has another effect on it, if anything."""
        if variables.get("tools") and _TOOLS not in shown:
            return {"key": "tools"}
        messages: Sequence[Any] = variables["messages"]
        for number, message in enumerate(messages):
            if isinstance(message, dict) and message.get("tool_calls") and _calls(number) not in shown:
                return {"index": number, "key": "tool_calls"}
        suspects = [number for number in _speaking(messages) if _content(number) not in shown]
        lost = self._without_effect(variables, in_parts, suspects) if suspects else None
        return None if lost is None else {"index": lost, "key": "content"}

    def _without_effect(self, variables: Mapping[str, Any], in_parts: bool, suspects: list[int]) -> int | None:
        """The first of messages whose text is not in the prompt and whose place takes no other text either. Templates
        rightly leave out some texts, such as the reasoning in earlier answers or a word that switches reasoning off."""
        messages = list(variables["messages"])
        for number in suspects:
            messages[number] = {**messages[number], "content": secrets.token_hex(8)}
        try:
            shown = set(origins_of(self._render({**variables, "messages": messages}, in_parts)))
        except Exception:  # what makes the template fail has an effect
            return None
        return next((number for number in suspects if chr(_content(number)) not in shown), None)


def _content(number: int) -> int:
    return _FIRST_CONTENT + 2 * number


def _calls(number: int) -> int:
    return _FIRST_CALLS + 2 * number


def _speaking(messages: Sequence[Any]) -> Iterator[int]:
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str) and content.strip():
            yield number


def _talks(mark: str) -> Iterator[list[dict[str, Any]]]:
    """Conversations of which each template takes one; the last message has the text `mark`."""
    question = {"role": "user", "content": mark}
    yield [question]
    yield [{"role": "system", "content": "system"}, question]
    yield [{"role": "user", "content": "user"}, {"role": "assistant", "content": "assistant"}, question]


def _traced(value: Any, origin: int) -> Any:
    """JSON's value with all strings in it traced to `origin`."""
    match value:
        case str():
            return Traced(value, chr(origin) * len(value))
        case dict():
            return {_traced(key, origin): _traced(member, origin) for key, member in value.items()}
        case list():
            return [_traced(member, origin) for member in value]
    return value


def described(error: Exception) -> str:
    """In one line, not too long a one."""
    return "needs too much memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"[:1000]


def limit_cpu(seconds: int) -> None:
    """From now on; the kernel ends the process when they are used up."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = ceil(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


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
