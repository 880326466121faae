"""What a user hands to `LLM`, one or many: checked, and as a list."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np

from twostep.engine.params import SamplingParams
from twostep.errors import InvalidParameterError
from twostep.kernels.sampling import check_integer

Prompt = str | Sequence[int]
"""Text, in which the text of a control token is that token; or token ids."""
Message = Mapping[str, Any]
"""In OpenAI's form: {"role": "user", "content": "..."}."""


def prompts_of(prompts: object) -> list[Prompt]:
    """One prompt, or any iterable of them, arrays of token ids included. Raises `InvalidParameterError`."""
    given = _listed(prompts)
    if isinstance(given, str) or (_is_tokens(given) and given):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise _refused("prompts", given, "text, token ids, or a list of these")
    return [_prompt(f"prompts[{i}]", _listed(prompt)) for i, prompt in enumerate(given)]


def params_of(params: object, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts; None: the defaults. Raises `InvalidParameterError`."""
    each = _for_each(SamplingParams() if params is None else params, count, "params")
    for asked in each:
        if not isinstance(asked, SamplingParams):
            raise _refused("params", asked, "SamplingParams, or a list of as many as prompts")
    return each


def priorities_of(priorities: object, count: int) -> list[int]:
    """Priorities of each of `count` prompts. Raises `InvalidParameterError`."""
    each = _for_each(priorities, count, "priorities")
    for priority in each:
        check_integer("a priority", priority, -(2**31), 2**31 - 1, param="priorities")
    return each


def conversations_of(conversations: object) -> list[Sequence[Message]]:
    """One conversation, or a list of them. Raises `InvalidParameterError`."""
    if not isinstance(conversations, Sequence) or isinstance(conversations, str | bytes):
        raise _refused("conversations", conversations, "a list of messages, or a list of such lists")
    several = [conversations] if conversations and isinstance(conversations[0], Mapping) else list(conversations)
    for i, messages in enumerate(several):
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
            raise _refused(f"conversations[{i}]", messages, "a list of at least one message")
        for message in messages:
            _check_message(message)
    return several


def _listed(value: object) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _prompt(name: str, prompt: object) -> Prompt:
    if isinstance(prompt, str) or _is_tokens(prompt):
        return prompt
    raise _refused(name, prompt, "text or a list of token ids")


def _is_tokens(value: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(isinstance(id_, Integral) and not isinstance(id_, bool) for id_ in value)


def _check_message(message: object) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _refused("a message", message, "a dictionary with a role")
    if not isinstance(message.get("content"), str | None):
        raise _refused("the content of a message", message["content"], "text")


def _for_each(value: object, count: int, name: str) -> list[Any]:
    """`value` once for each prompt, or the list that it is."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        problem = f"{name} has {len(value)} entries for {count} prompts; one or as many are allowed"
        raise InvalidParameterError(problem, name)
    return list(value)


def _refused(name: str, value: object, allowed: str) -> InvalidParameterError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return InvalidParameterError(f"{name} is {shown}; it has to be {allowed}", name.partition("[")[0])
