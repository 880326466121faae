"""Tools that a body offers, and what the answer is held to by them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twostep.engine.refusals import shown
from twostep.engine.text.structured_output import StructuredOutput, with_json_options
from twostep.errors import InvalidParameterError
from twostep.openai_api.errors import ApiError
from twostep.openai_api.fields import Fields
from twostep.openai_api.tool_calls import CLOSE, OPEN

MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_FORCED_CALLS = 16
"""Of one answer that has to call a tool and may call several: a small model might never stop."""

_TEXT = r"TEXT: /(.|\n)*/ & ~/\s*(```(json)?\s*)?\{(.|\n)*/"
"""Free text around calls that are bound. What begins like a call without tags has to be one."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that says nothing of them, as in OpenAI's API."""
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Function:
    """A tool. `parameters` is a JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True)
class Tools:
    """What an answer may call: `auto` leaves it to the model, `forced` means at least one call."""

    definitions: Sequence[Mapping[str, Any]]
    """All tools as the body has them, for the model to read."""
    functions: tuple[Function, ...]
    mode: Literal["auto", "forced"]
    parallel: bool
    """Several calls in one answer."""

    def form(self, content: StructuredOutput | None) -> StructuredOutput | None:
        """What the answer is held to, where its content has to have this form; None: nothing.

        Calls that are forced are those of the grammar. Left to the model they are free text, unless `strict` asks for
        arguments that keep to the schema, a single call is asked for, or content has a form too.
        """
        if self.mode == "forced":
            return _grammar(f"start: {self._calls}", self._call_rules())
        if content is not None:
            return _grammar(f"start: {self._calls} | content", [*self._call_rules(), *_content_rules(content)])
        if self.parallel and not any(function.strict for function in self.functions):
            return None
        called = f'called: head "\\n" ({self._any}) "\\n{CLOSE}"'
        bare = f'bare: "```json\\n"? ({self._any}) "\\n```"?'
        start = "start: called* TEXT | bare" if self.parallel else "start: TEXT | called | bare"
        return _grammar(start, [_TEXT, f'head[lazy]: TEXT "{OPEN}"', called, bare, *self._function_rules()])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions that may be called."""
        return tuple(function.name for function in self.functions)

    @property
    def _calls(self) -> str:
        return f'call ("\\n" call){{0,{MAX_FORCED_CALLS - 1}}}' if self.parallel else "call"

    @property
    def _any(self) -> str:
        return " | ".join(f"f{number}" for number in range(len(self.functions)))

    def _call_rules(self) -> Iterator[str]:
        yield f'call: "{OPEN}\\n" ({self._any}) "\\n{CLOSE}"'
        yield from self._function_rules()

    def _function_rules(self) -> Iterator[str]:
        """Each call as templates write it: its schema is one by itself, so that references in it hold."""
        for number, function in enumerate(self.functions):
            bound = self.mode == "forced" or function.strict
            schema = {**(function.parameters if bound else {}), "type": "object"}
            begin = json.dumps(f'{{"name": "{function.name}", "arguments": ')
            yield f'f{number}: {begin} %json {with_json_options(schema)} "}}"'


def read_tools(fields: Fields) -> Tools | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` ask for; None: nothing is to be called, and the model hears
    of no tools. Raises `ApiError`."""
    definitions = fields.take("tools", [])
    functions = _functions(definitions)
    parallel = fields.flag("parallel_tool_calls", True)
    choice = fields.take("tool_choice", "auto")
    if choice == "none" or (choice == "auto" and not functions):
        return None
    if choice == "auto":
        return Tools(definitions, functions, "auto", parallel)
    if choice == "required" and functions:
        return Tools(definitions, functions, "forced", parallel)
    name = _chosen(choice)
    named = tuple(function for function in functions if function.name == name)
    if not named:
        names = ", ".join(function.name for function in functions) or "none"
        raise ApiError(f"tool_choice is {shown(choice)}; the tools are: {names}", param="tool_choice")
    return Tools(definitions, named, "forced", parallel=False)


def _chosen(choice: object) -> str | None:
    """The function that has to be called, None for `required`."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str):
        return name
    allowed = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
    raise ApiError(f"tool_choice is {shown(choice)}; it has to be {allowed}", param="tool_choice")


def _functions(tools: object) -> tuple[Function, ...]:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ApiError(f"tools is {shown(tools)}; it has to be a list of at most {MAX_TOOLS} tools", param="tools")
    functions = tuple(_function(tool, f"tools[{number}]") for number, tool in enumerate(tools))
    names = [function.name for function in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ApiError(f"tools has {min(twice)!r} more than once; names have to differ", param="tools")
    return functions


def _function(tool: object, where: str) -> Function:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        raise _refused(where, tool, "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}")
    name, strict = function.get("name"), function.get("strict") or False
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refused(f"{where}.function.name", name, "1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
    if not isinstance(strict, bool):
        raise _refused(f"{where}.function.strict", strict, "true or false")
    parameters = NO_PARAMETERS if function.get("parameters") is None else function["parameters"]
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise _refused(f"{where}.function.parameters", parameters, "a JSON schema of type 'object'")
    return Function(name, parameters, strict)


def _grammar(start: str, rules: Sequence[str] | Iterator[str]) -> StructuredOutput:
    try:
        return StructuredOutput("grammar", "\n".join(["%llguidance {}", start, *rules]))
    except InvalidParameterError as error:
        raise ApiError(f"tools, as a grammar: {error}", param="tools") from None


def _content_rules(content: StructuredOutput) -> Iterator[str]:
    schema = json.loads(content.text) if content.kind == "json_schema" else None
    if not isinstance(schema, dict):
        problem = f"tools are offered and content asked for by a {content.kind}; it has to be a JSON schema, an object"
        raise ApiError(problem, param="tools")
    yield f"content: %json {with_json_options(schema)}"


def _refused(where: str, value: object, allowed: str) -> ApiError:
    return ApiError(f"{where} is {shown(value)}; it has to be {allowed}", param="tools")
