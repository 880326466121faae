"""What a user hands to `LLM`, one or many: checked, and as a list."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np

from twostep.engine.params import SamplingParams
from twostep.engine.refusals import refused
from twostep.engine.text.conversation import Message, read_messages
from twostep.errors import InvalidParameterError
from twostep.kernels.sampling import check_integer

Prompt = str | Sequence[int]
"""Text, in which the text of a control token is that token; or token ids."""


def prompts_of(prompts: object) -> list[Prompt]:
    """One prompt, or any iterable of them, arrays of token ids included. Raises `InvalidParameterError`."""
    given = _listed(prompts)
    if isinstance(given, str) or (_is_tokens(given) and given):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise refused("prompts", given, "text, token ids, or a list of these")
    return [_prompt(f"prompts[{i}]", _listed(prompt)) for i, prompt in enumerate(given)]


def params_of(params: object, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts; None: the defaults. Raises `InvalidParameterError`."""
    each = _for_each(SamplingParams() if params is None else params, count, "params")
    for asked in each:
        if not isinstance(asked, SamplingParams):
            raise refused("params", asked, "SamplingParams, or a list of as many as prompts")
    return each


def priorities_of(priorities: object, count: int) -> list[int]:
    """Priorities of each of `count` prompts. Raises `InvalidParameterError`."""
    each = _for_each(priorities, count, "priorities")
    for priority in each:
        check_integer("a priority", priority, -(2**31), 2**31 - 1, param="priorities")
    return each


def conversations_of(conversations: object) -> list[list[dict[str, Any]]]:
    """One conversation, or a list of them, as chat templates read them. Raises `InvalidParameterError`."""
    name = "conversations"
    if not isinstance(conversations, Sequence) or isinstance(conversations, str | bytes):
        raise refused(name, conversations, "a list of messages, or a list of such lists")
    if is_conversation(conversations):
        return [read_messages(conversations, name)]
    return [read_messages(messages, f"{name}[{i}]") for i, messages in enumerate(conversations)]


def is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    """Whether it begins as one; what its messages are is for `read_messages`."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def _listed(value: object) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _prompt(name: str, prompt: object) -> Prompt:
    if isinstance(prompt, str) or _is_tokens(prompt):
        return prompt
    raise refused(name, prompt, "text or a list of token ids")


def _is_tokens(value: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(isinstance(id_, Integral) and not isinstance(id_, bool) for id_ in value)


def _for_each(value: object, count: int, name: str) -> list[Any]:
    """`value` once for each prompt, or the list that it is."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        problem = f"{name} has {len(value)} entries for {count} prompts; one or as many are allowed"
        raise InvalidParameterError(problem, name)
    return list(value)
