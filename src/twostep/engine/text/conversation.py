"""Checks conversations in OpenAI's form and converts them for chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any

from twostep.engine.refusals import parameter, refused, shown
from twostep.errors import InvalidParameterError

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's."""


def read_messages(messages: object, name: str) -> list[dict[str, Any]]:
    """Returns messages whose content is one string, which may be empty. Other keys are left to the template.

    `name` is what the user calls the list. Raises `InvalidParameterError` that names the message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise refused(name, messages, "a list of at least one message")
    return [_message(message, f"{name}[{number}]") for number, message in enumerate(messages)]


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise refused(name, message, "an object with a role and content")
    if "role" not in message:
        raise _lacking(name, "role")
    if message["role"] not in list(ROLES):
        raise refused(f"{name}.role", message["role"], f"one of {', '.join(ROLES)}")
    message = _with_refusal(message, name)
    if message.get("content") is None and not _may_be_silent(message):
        raise _lacking(name, "content")
    content = message.get("content")
    return {**message, "content": "" if _is_empty(content, message) else _text(content, f"{name}.content")}


def _with_refusal(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The message; a refusal, which clients send back as they got it, becomes its content. Templates do not know it.

    Raises `InvalidParameterError` for other fields of OpenAI's that would not be in the prompt.
    """
    for key, instead in (("audio", "only text is supported"), ("function_call", "use tool_calls")):
        if message.get(key):
            raise InvalidParameterError(f"{name} has {key}, which is not supported; {instead}", parameter(name))
    refusal = message.get("refusal")
    if not isinstance(refusal, str | None):
        raise refused(f"{name}.refusal", refusal, "a string or null")
    if refusal and message.get("content"):
        problem = f"{name} has content and a refusal; only one of the two can be in the prompt"
        raise InvalidParameterError(problem, parameter(name))
    return {**message, "content": refusal} if refusal else message


def _is_empty(content: object, message: Mapping[str, Any]) -> bool:
    """Whether the message has no content, which only some messages may lack."""
    return content is None or (content in ([], ()) and _may_be_silent(message))


def _may_be_silent(message: Mapping[str, Any]) -> bool:
    """Messages with tool calls need no content; those of assistants and tools may have an empty one."""
    return bool(message.get("tool_calls")) or (message["role"] in ("assistant", "tool") and "content" in message)


def _text(content: object, name: str) -> str:
    """Parts are joined by line ends, as in vLLM."""
    if isinstance(content, str):
        return content
    texts = [_part(part, name) for part in content] if isinstance(content, list | tuple) else []
    if not texts:
        raise refused(name, content, "a string or text parts")
    return "\n".join(texts)


def _part(part: object, name: str) -> str:
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            return str(part[kind])
    problem = f"{name} has {shown(part)}; only parts of type 'text' are supported"
    raise InvalidParameterError(problem, parameter(name))


def _lacking(name: str, key: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} has no {key}", parameter(name))
