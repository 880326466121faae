"""Conversations with tools, as a model's chat template reads them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twostep.engine.refusals import shown
from twostep.model.template import ChatTemplate
from twostep.openai_api.errors import ApiError
from twostep.openai_api.tool_calls import CLOSE, OPEN
from twostep.openai_api.tools import Tools


def knows_tools(template: ChatTemplate) -> bool:
    """Whether the template itself shows tools and calls, in the format that we read."""
    return "tools" in template.source and OPEN in template.source


def called_messages(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages with calls and their results as the template reads them. Raises `ApiError`.

    Arguments, which OpenAI's API has as text, become objects. Where the template knows no tools, calls become text in
    the same format, and results what the user says.
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


def with_tools_said(messages: Sequence[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: a system message, or what it has of one, says them."""
    said = _said(tools)
    first = messages[0]
    if first["role"] in ("system", "developer"):  # many templates allow only one of them
        return [{**first, "content": "\n\n".join(filter(None, [first["content"], said]))}, *messages[1:]]
    return [{"role": "system", "content": said}, *messages]


def _said(tools: Tools) -> str:
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
