"""What a body wants answered, as token ids: a conversation by the model's template, or raw prompts."""

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from twostep.engine.refusals import shown
from twostep.engine.text.conversation import read_messages
from twostep.model.loaded import LoadedModel
from twostep.model.template import RenderedPrompt
from twostep.model.tokenizer import Tokenizer
from twostep.openai_api.errors import ApiError
from twostep.openai_api.fields import Fields
from twostep.openai_api.room import Room
from twostep.openai_api.tool_messages import called_messages, knows_tools, with_tools_said
from twostep.openai_api.tools import Tools

MAX_PROMPTS = 1024
"""Prompts of one completions body."""

Tokens = tuple[int, ...]
TextCheck = Callable[[str, str], None]
"""Raises an error if the text that the field of this name gives is too long."""


def chat_prompt(
    fields: Fields, model: LoadedModel, tools: Tools | None = None, check_text: TextCheck | None = None
) -> Tokens:
    """Tokens of `messages`. The template writes the beginning-of-sequence token, unless `add_special_tokens` asks for
    one more, as in vLLM. Control tokens in the request are text, unless `parse_special` is true. `tools` are said by
    the template, or in the system message if it knows none. `check_text` is asked before the text is tokenised."""
    asked = called_messages(read_messages(fields.take("messages"), "messages"), model.template)
    variables = {**_reasoning(fields), **_template_variables(fields.take("chat_template_kwargs", {}))}
    known = tools is not None and knows_tools(model.template)
    messages = with_tools_said(asked, tools) if tools and not known else asked
    render = partial(
        model.template.render,
        tools=tools.definitions if tools and known else None,
        variables=variables,
        added=len(messages) - len(asked),
    )
    goes_on = fields.flag("continue_final_message")
    generation = fields.flag("add_generation_prompt", not goes_on)
    if goes_on and generation:
        problem = "continue_final_message and add_generation_prompt are both true; an answer either goes on or begins"
        raise ApiError(problem, param="continue_final_message")
    prompt = _unfinished(messages, render) if goes_on else render(messages, add_generation_prompt=generation)
    if check_text:
        check_text(prompt.text, "messages")
    add_bos, parse_special = fields.flag("add_special_tokens"), fields.flag("parse_special")
    tokens = model.tokenizer.encode_given(prompt.text, [] if parse_special else prompt.given, add_bos=add_bos)
    return _not_empty(tokens, "messages")


def _unfinished(messages: list[dict[str, Any]], render: Callable[..., RenderedPrompt]) -> RenderedPrompt:
    """The conversation up to the end of the last message's content, without what the template writes after it."""
    *before, last = messages
    if not last["content"]:
        problem = "continue_final_message is true; the last message has no content to go on from"
        raise ApiError(problem, param="messages")
    if last.get("tool_calls"):
        problem = "continue_final_message is true; the calls of the last message, which end it, would be lost"
        raise ApiError(problem, param="continue_final_message")
    mark = secrets.token_hex(16)
    marked = [*before, {**last, "content": last["content"] + mark}]
    prompt = render(marked, add_generation_prompt=False).before(mark)
    if prompt is None:
        problem = "continue_final_message is true; the chat template does not show the last message's content as it is"
        raise ApiError(problem, param="continue_final_message")
    return prompt


def completion_prompts(fields: Fields, tokenizer: Tokenizer, room: Room | None = None) -> tuple[Tokens, ...]:
    """Tokens of each prompt: text, as the model's file says with or without a beginning of sequence, or token ids.
    What is beyond `room` is refused before anything is tokenised."""
    prompt = fields.take("prompt")
    add_bos = None if fields.flag("add_special_tokens", True) else False
    parse_special = fields.flag("parse_special", True)
    several = isinstance(prompt, list) and prompt and not _is_id(prompt[0])
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(f"prompt has {len(prompts)} members; at most {MAX_PROMPTS} are allowed", param="prompt")
    if room:
        for member in prompts:
            _check_length(member, room)
    return tuple(_tokens(member, tokenizer, add_bos, parse_special) for member in prompts)


def _check_length(prompt: object, room: Room) -> None:
    if isinstance(prompt, str):
        room.check_text(prompt, "prompt")
    elif isinstance(prompt, list):
        room.check_ids(prompt, "prompt")


def _tokens(prompt: object, tokenizer: Tokenizer, add_bos: bool | None, parse_special: bool) -> Tokens:
    if isinstance(prompt, str):
        return _not_empty(tokenizer.encode_raw(prompt, parse_special=parse_special, add_bos=add_bos), "prompt")
    allowed = "a string, a list of token ids, or a list of these"
    return _not_empty(token_ids(prompt, "prompt", tokenizer, allowed), "prompt")


def token_ids(ids: object, param: str, tokenizer: Tokenizer, allowed: str = "a list of token ids") -> list[int]:
    """The field `param`, checked. Raises `ApiError`."""
    if not isinstance(ids, list) or not all(_is_id(member) for member in ids):
        raise ApiError(f"{param} is {shown(ids)}; it has to be {allowed}", param=param)
    for id_ in ids:
        if not 0 <= id_ < tokenizer.vocab_size:
            raise ApiError(f"{param} has token {id_}; the vocabulary is 0 to {tokenizer.vocab_size - 1}", param=param)
    return ids


def _not_empty(tokens: list[int], param: str) -> Tokens:
    if not tokens:
        raise ApiError(f"{param} gives no token of this model's vocabulary; at least one is needed", param=param)
    return tuple(tokens)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reasoning(fields: Fields) -> dict[str, Any]:
    """The effort by OpenAI's name, or as others have it, in the variables by which templates know it."""
    effort, other = fields.take("reasoning_effort"), fields.take("reasoning", {})
    if not isinstance(other, Mapping):
        raise ApiError(f"reasoning is {shown(other)}; it has to be an object with effort", param="reasoning")
    effort = other.get("effort") if effort is None else effort
    if not isinstance(effort, str | None):
        raise ApiError(f"reasoning_effort is {shown(effort)}; it has to be a string", param="reasoning_effort")
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _template_variables(variables: object) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(variables, Mapping):
        raise ApiError(f"{name} is {shown(variables)}; it has to be an object", param=name)
    for key in ("messages", "tools", "add_generation_prompt"):
        if key in variables:
            raise ApiError(f"{name} has {key}; that is a field of its own", param=name)
    return variables
