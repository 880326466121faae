"""Parses tool calls in an answer's text, whole or streamed: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Qwen2.5 and other models trained on the Hermes format write this, and we ask models whose template does not support
tools for it. Small models omit the tags or write a code fence instead: an answer that begins with a call of an offered
function is parsed as a call too.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_BLANK, _NAME = "[ \t\r\n]*", r'[^"\\\x00-\x1f]+'
_HEAD_PARTS = (_BLANK, "{", _BLANK, *'"name"', _BLANK, ":", _BLANK, '"', f"({_NAME})", '"', _BLANK, ",", _BLANK,
               *'"arguments"', _BLANK, ":", _BLANK)  # fmt: skip
_FENCE_PARTS = (_BLANK, *"```", "(?:json|jso|js|j)?")
_HEAD = re.compile("".join(_HEAD_PARTS) + r"(?=\{)")
"""A call up to its arguments, in the usual order of fields; from there on arguments are streamed."""
_BARE_HEAD = re.compile(f"(?:{''.join(_FENCE_PARTS)})?{_HEAD.pattern}")
"""The same without a tag."""


def _beginning(parts: Sequence[str]) -> str:
    """A pattern that matches every prefix of the concatenated parts."""
    return "".join(f"(?:{part}" for part in parts) + ")?" * len(parts)


_BARE_BEGINNING = re.compile(f"{_beginning(_HEAD_PARTS)}|{_beginning((*_FENCE_PARTS, *_HEAD_PARTS))}")

Delta = dict[str, Any]


class ToolStream:
    """Parses one answer. The combined results of `push` and `finish` do not depend on how the text is split.

        stream = ToolStream(call_prefix(unique, index), names)
        for text in texts:
            deltas += stream.push(text)
        deltas += stream.finish()

    Each delta is that of a chunk in OpenAI's API, without the role: `{"content": ...}`, or `{"tool_calls": [...]}` with
    index, id, type and name at the start of a call and then pieces of its arguments. Calls are numbered from 0; an id
    is `id_prefix` and that number. Text that may be the beginning of a tag is withheld until that is decided;
    whitespace around calls is dropped. Text between tags that is no call is content, including the tags. A call that is
    cut off, or whose arguments are not JSON, is returned as far as it was written; the client decides.
    """

    def __init__(self, id_prefix: str, names: Collection[str] = ()) -> None:
        """`names` of the offered functions."""
        self.calls = 0
        """Number of calls begun."""
        self._id_prefix, self._names = id_prefix, names
        self._left = ""
        """Text not yet decided."""
        self._read: Callable[[list[Delta]], bool] = self._read_start
        """Consumes what is certain from `_left`; returns whether to continue with the next `_read`."""
        self._skips_blanks = False
        self._arguments = _Braces()
        self._read_after: Callable[[list[Delta]], bool] = self._read_tail

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that `text` decides."""
        self._left += text
        deltas: list[Delta] = []
        while self._read(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Returns the deltas of the remaining text at the end of the answer."""
        deltas: list[Delta] = []
        left, self._left = self._left, ""
        if self._read == self._read_head and self._whole_call(left.partition(OPEN)[2], deltas):
            return deltas
        if self._read in (self._read_start, self._read_text, self._read_head):
            self._add_content(left, deltas)
        return deltas

    # --- states: what may follow, and how it is read --------------------------------------------------------------

    def _read_start(self, deltas: list[Delta]) -> bool:
        """A call without tags, or else text."""
        head = _BARE_HEAD.match(self._left) if self._names else None
        if head and head[1] in self._names:
            self._begin(head[1], "", deltas)
            return self._read_arguments_from(head.end(), self._read_bare_tail)
        if self._names and not head and _BARE_BEGINNING.fullmatch(self._left):
            return False
        return self._switch(0, self._read_text)

    def _read_text(self, deltas: list[Delta]) -> bool:
        """Content up to an opening tag and the whitespace before it."""
        at = self._left.find(OPEN)
        content = len(self._left[:at].rstrip()) if at >= 0 else _certain(self._left)
        self._add_content(self._left[:content], deltas)
        self._left = self._left[content:]
        if at >= 0:
            self._read = self._read_head
        return at >= 0

    def _read_head(self, deltas: list[Delta]) -> bool:
        """A call up to its arguments, or up to its end if its fields are in another order, or text that is no call."""
        body = self._left.index(OPEN) + len(OPEN)
        if self._left[body:].lstrip()[:1] not in ("", "{"):
            self._add_content(self._left[:body], deltas)
            return self._switch(body, self._read_text)
        head, end = _HEAD.match(self._left, body), self._left.find(CLOSE, body)
        if head and (end < 0 or head.end() <= end):
            self._begin(head[1], "", deltas)
            return self._read_arguments_from(head.end(), self._read_tail)
        if end < 0:
            return False
        after = end + len(CLOSE)
        if not self._whole_call(self._left[body:end], deltas):
            self._add_content(self._left[:after], deltas)
        return self._switch(after, self._read_text)

    def _read_arguments(self, deltas: list[Delta]) -> bool:
        """The arguments, passed on as written."""
        length = self._arguments.read(self._left)
        self._add_arguments(self._left[:length], deltas)
        self._left = self._left[length:]
        if self._arguments.ended:
            self._read = self._read_after
        return self._arguments.ended

    def _read_tail(self, deltas: list[Delta]) -> bool:
        """Text after the arguments, up to the closing tag or the next opening tag."""
        ends = [at for at in (self._left.find(CLOSE), self._left.find(OPEN)) if at >= 0]
        if not ends:
            self._left = self._left[-len(CLOSE) :]
            return False
        end = min(ends)
        return self._switch(end + len(CLOSE) if self._left.startswith(CLOSE, end) else end, self._read_text)

    def _read_bare_tail(self, deltas: list[Delta]) -> bool:
        """Text after the arguments of a call without tags: its brace, the end of a fence, perhaps another call."""
        self._left = self._left.lstrip(" \t\r\n}`")
        return bool(self._left) and self._switch(0, self._read_start)

    def _read_arguments_from(self, after: int, read_after: Callable[[list[Delta]], bool]) -> bool:
        self._arguments, self._read_after = _Braces(), read_after
        return self._switch(after, self._read_arguments)

    def _switch(self, after: int, read: Callable[[list[Delta]], bool]) -> bool:
        """Drops the text before `after`; `read` consumes the rest."""
        self._left = self._left[after:]
        self._read = read
        return True

    # --- results --------------------------------------------------------------------------------------------------

    def _add_content(self, text: str, deltas: list[Delta]) -> None:
        """Adds content; leading whitespace is dropped right after a call."""
        content = text.lstrip() if self._skips_blanks else text
        if content:
            self._skips_blanks = False
            deltas.append({"content": content})

    def _begin(self, name: str, arguments: str, deltas: list[Delta]) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"index": self.calls, "id": f"{self._id_prefix}{self.calls}", "type": "function", "function": function}
        deltas.append({"tool_calls": [call]})
        self.calls += 1
        self._skips_blanks = True

    def _add_arguments(self, text: str, deltas: list[Delta]) -> None:
        if text:
            deltas.append({"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]})

    def _whole_call(self, body: str, deltas: list[Delta]) -> bool:
        """Adds a call that ended before it could be streamed; returns false if `body` is no call."""
        call = _json_object(body)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            return False
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._begin(name, text, deltas)
        return True


class ParsedAnswer(NamedTuple):
    """Content (None if there are only calls) and calls, as in a message."""

    content: str | None
    tool_calls: list[dict[str, Any]]


def parse_tool_calls(text: str, id_prefix: str, names: Collection[str] = ()) -> ParsedAnswer:
    """Parses a complete answer: the combined deltas of `ToolStream`."""
    stream = ToolStream(id_prefix, names)
    content, calls = "", list[dict[str, Any]]()
    for delta in (*stream.push(text), *stream.finish()):
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({name: value for name, value in piece.items() if name != "index"})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return ParsedAnswer(None if calls and not content else content, calls)


def call_prefix(unique: str, index: int) -> str:
    """The prefix of call ids of one choice."""
    return f"call_{unique}_{index}_"


def finish_reason(reason: str, calls: int) -> str:
    """OpenAI's finish reason for an answer with this many calls; a truncated answer keeps "length"."""
    return "tool_calls" if calls and reason == "stop" else reason


class _Braces:
    """Finds the end of a JSON object by its braces. `<`, which valid JSON has only in strings, ends a broken one."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> int:
        """The number of characters of `text` that belong to the object."""
        for at, character in enumerate(text):
            if self._in_string:
                self._string(character)
            elif character == "<":
                self.ended = True
                return at
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    self.ended = True
                    return at + 1
        return len(text)

    def _string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def _certain(text: str) -> int:
    """Number of characters that are content whatever follows: without trailing whitespace or the beginning of a tag."""
    for length in range(min(len(text), len(OPEN) - 1), 0, -1):
        if text.endswith(OPEN[:length]):
            return len(text[:-length].rstrip())
    return len(text.rstrip())


def _json_object(text: str) -> dict[str, Any]:
    """The object in `text`; empty if `text` is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
