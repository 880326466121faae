"""The form that a request's answers have to have, as a value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twostep.errors import InvalidParameterError

Kind = Literal["json_schema", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "choice", "grammar")
MAX_CHARACTERS = 1 << 16
"""Of `text`. Compiling what is shorter takes a quarter second at worst, see `constraint.LIMITS`."""

JSON_OPTIONS = {"whitespace_pattern": r"\x20|\n[\x20\t]{0,32}"}
"""Where JSON allows whitespace: one space, or a new line and its indentation. Small models fall into endless blanks."""


@dataclass(frozen=True)
class StructuredOutput:
    """The language that an answer's text has to be in.

    `kind` says what `text` is: a JSON schema (the answer is JSON that follows it), a regular expression that matches
    the whole answer, a JSON list of strings of which the answer is one, or a grammar in llguidance's dialect of Lark or
    in GBNF. Raises `InvalidParameterError`; whether the text compiles is found out when the request is taken on.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _refused(f"kind is {self.kind!r}; it has to be one of {', '.join(KINDS)}")
        if not isinstance(self.text, str) or not self.text:
            raise _refused(f"text is {self.text!r:.60}; it has to be a string of at least one character")
        if len(self.text) > MAX_CHARACTERS:
            raise _refused(f"text has {len(self.text)} characters; at most {MAX_CHARACTERS} are allowed")
        if self.kind == "json_schema" and not isinstance(_json(self.text), dict | bool):
            raise _refused(f"text is {self.text:.60}; a JSON schema has to be an object, true or false")
        if self.kind == "choice" and not _is_choice(_json(self.text)):
            raise _refused(f"text is {self.text:.60}; it has to be a JSON list of at least one non-empty string")


def with_json_options(schema: Mapping[str, Any]) -> str:
    """The schema as text, with `JSON_OPTIONS` unless it has such of its own."""
    return json.dumps({"x-guidance": JSON_OPTIONS} | dict(schema))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"text is {text[:60]!r}, which is not JSON: {error}") from None


def _is_choice(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(member, str) and member for member in value)


def _refused(problem: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured: {problem}", "structured")


ANY_OBJECT = StructuredOutput("json_schema", '{"type": "object"}')
"""Any JSON object."""
