"""The tools that a request offers: constraints on the answer, and conversations with tools for the chat template."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twostep.engine.refusals import shown
from twostep.engine.text.structured_output import StructuredOutput, with_json_options
from twostep.errors import InvalidParameterError
from twostep.model.template import ChatTemplate
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.fields import Fields
from twostep.openai_api.tool_calls import CLOSE, OPEN

MAX_TOOLS = 128
"""As in OpenAI's API."""
MAX_FORCED_CALLS = 16
"""Limit of parallel calls in an answer that must call a tool: a small model might never stop."""

_TEXT = r"TEXT: /(.|\n)*/ & ~/\s*(```(json)?\s*)?\{(.|\n)*/"
"""Free text around constrained calls. Text that begins like a call without tags must be one."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without parameters, as in OpenAI's API."""
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Function:
    """A tool. `parameters` is a JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call. `auto`: the model decides; `forced`: at least one call."""

    definitions: Sequence[Mapping[str, Any]]
    """All tools in the body, for the chat template."""
    functions: tuple[Function, ...]
    mode: Literal["auto", "forced"]
    parallel: bool
    """Whether one answer may have several calls."""

    def form(self, content: StructuredOutput | None) -> StructuredOutput | None:
        """The form of the answer, whose content has the form `content`; None: unconstrained.

        Forced calls follow the grammar. With `auto`, calls are free text, unless `strict` requires arguments that match
        the schema, at most one call is allowed, or `content` is set.
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
        """Names of the functions that may be called."""
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
        """Each call as templates write it. Each function has its own schema, so that references in it resolve."""
        for number, function in enumerate(self.functions):
            bound = self.mode == "forced" or function.strict
            schema = {**(function.parameters if bound else {}), "type": "object"}
            begin = json.dumps(f'{{"name": "{function.name}", "arguments": ')
            yield f'f{number}: {begin} %json {with_json_options(schema)} "}}"'


def read_tools(fields: Fields) -> Tools | None:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`. None: no calls, and the model is told of no tools.
    Raises `ApiError`."""
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
    """The name of the function that must be called; None for `required`."""
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
        problem = f"tools are combined with content in the form {content.kind}; it has to be a JSON schema, an object"
        raise ApiError(problem, param="tools")
    yield f"content: %json {with_json_options(schema)}"


def _refused(where: str, value: object, allowed: str) -> ApiError:
    return ApiError(f"{where} is {shown(value)}; it has to be {allowed}", param="tools")


def knows_tools(template: ChatTemplate) -> bool:
    """Whether the template renders tools and calls itself, in the format that we parse."""
    return "tools" in template.source and OPEN in template.source


def called_messages(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Converts messages with tool calls and tool results for the template. Raises `ApiError`.

    Arguments, JSON text in OpenAI's API, become objects. If the template does not support tools, calls become text in
    the same format, and results become user messages.
    """
    known = knows_tools(template)
    return [_called_message(message, f"messages[{number}]", known) for number, message in enumerate(messages)]


def _called_message(message: Mapping[str, Any], where: str, known: bool) -> dict[str, Any]:
    if message["role"] == "tool" and not known:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    calls = _past_calls(message["tool_calls"], f"{where}.tool_calls")
    if known:
        return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    written = [f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *written])}


def _past_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _past(where, calls, "a list")
    return [_past_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _past_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _past(where, call, "an object with a function, which has a name and arguments")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, Mapping):
        raise _past(f"{where}.function.arguments", arguments, "the JSON text of an object")
    return {"name": function["name"], "arguments": parsed}


def _past(where: str, value: object, allowed: str) -> ApiError:
    return ApiError(f"{where} is {shown(value)}; it has to be {allowed}", param="messages")


def with_tools_in_system_message(messages: Sequence[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The conversation for a template without tool support: the tools are described in the system message."""
    description = _description(tools)
    first = messages[0]
    if first["role"] in ("system", "developer"):  # many templates allow only one of them
        return [{**first, "content": "\n\n".join(filter(None, [first["content"], description]))}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def _description(tools: Tools) -> str:
    return "\n".join(
        (
            "You can call these functions, each described as JSON:",
            "<tools>",
            *(json.dumps(definition, ensure_ascii=False) for definition in tools.definitions),
            "</tools>",
            "To call one, write its name and its arguments as JSON between tags, like this:",
            OPEN,
            '{"name": <name>, "arguments": <arguments as an object>}',
            CLOSE,
        )
    )
