"""Converts a body's messages or prompts to token ids: by the model's chat template, or as raw prompts.

`PromptBounds` limits their length before tokenizing, as tokenizing a prompt that cannot fit takes seconds.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostep.engine.refusals import shown
from twostep.engine.text.conversation import read_messages
from twostep.errors import ContextLengthError
from twostep.model.loaded import LoadedModel
from twostep.model.template import RenderedPrompt
from twostep.model.tokenizer import Tokenizer
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.fields import Fields
from twostep.openai_api.tools import Tools, called_messages, knows_tools, with_tools_in_system_message


@dataclass(frozen=True)
class PromptBounds:
    """Upper bounds. A prompt beyond them never fits; whether one within them fits, the engine checks.

    Bytes that do not become tokens, because the normalizer composes them or the vocabulary lacks them, count too: such
    a text may be refused for its bytes although its tokens would fit.
    """

    tokens: int
    """Limit of prompt and answer together."""
    token_bytes: int
    """Bytes of the longest token in the vocabulary."""

    @classmethod
    def of(cls, tokens: int, tokenizer: Tokenizer) -> "PromptBounds":
        return cls(tokens, tokenizer.longest_token_bytes)

    def check_ids(self, ids: list[object], param: str) -> None:
        """Raises `ContextLengthError`."""
        if len(ids) > self.tokens:
            problem = f"{param} has {len(ids)} tokens; prompt and answer together may have at most {self.tokens}"
            raise ContextLengthError(problem)

    def check_text(self, text: str, param: str) -> None:
        """Raises `ContextLengthError`."""
        length, most = text_bytes(text), self.tokens * self.token_bytes
        if length > most:
            tokens = f"{self.tokens} tokens of at most {self.token_bytes} bytes each, {most} bytes in all"
            problem = f"{param} has {length} bytes; prompt and answer together may have at most {tokens}"
            raise ContextLengthError(problem)


def text_bytes(text: str) -> int:
    """Length of `text` in UTF-8; surrogates are allowed."""
    return len(text.encode(errors="surrogatepass"))


MAX_PROMPTS = 1024
"""Limit of prompts in one completions body."""

Tokens = tuple[int, ...]
TextCheck = Callable[[str, str], None]
"""Raises an error if the text of the field with this name is too long."""


def chat_prompt(
    fields: Fields, model: LoadedModel, tools: Tools | None = None, check_text: TextCheck | None = None
) -> Tokens:
    """Tokens of `messages`. The template writes the beginning-of-sequence token; `add_special_tokens` adds another, as
    in vLLM. Control tokens in messages are plain text unless `parse_special` is true. The template lists `tools`; if it
    does not support them, the system message does. `check_text` is called with the text before it is tokenized."""
    conversation = called_messages(read_messages(fields.take("messages"), "messages"), model.template)
    variables = {**_reasoning(fields), **_template_variables(fields.take("chat_template_kwargs", {}))}
    known = tools is not None and knows_tools(model.template)
    messages = with_tools_in_system_message(conversation, tools) if tools and not known else conversation
    render = partial(
        model.template.render,
        tools=tools.definitions if tools and known else None,
        variables=variables,
        added=len(messages) - len(conversation),
    )
    continues = fields.flag("continue_final_message")
    generation = fields.flag("add_generation_prompt", not continues)
    if continues and generation:
        problem = "continue_final_message and add_generation_prompt are both true; only one of them may be"
        raise ApiError(problem, param="continue_final_message")
    prompt = _unfinished(messages, render) if continues else render(messages, add_generation_prompt=generation)
    if check_text:
        check_text(prompt.text, "messages")
    add_bos, parse_special = fields.flag("add_special_tokens"), fields.flag("parse_special")
    tokens = model.tokenizer.encode_given(prompt.text, [] if parse_special else prompt.given, add_bos=add_bos)
    return _not_empty(tokens, "messages")


def _unfinished(messages: list[dict[str, Any]], render: Callable[..., RenderedPrompt]) -> RenderedPrompt:
    """The conversation up to the end of the last message's content, without what the template adds after it."""
    *before, last = messages
    if not last["content"]:
        problem = "continue_final_message is true, but the last message has no content to continue"
        raise ApiError(problem, param="messages")
    if last.get("tool_calls"):
        problem = "continue_final_message is true, but the last message ends with tool calls, which cannot be continued"
        raise ApiError(problem, param="continue_final_message")
    mark = secrets.token_hex(16)
    marked = [*before, {**last, "content": last["content"] + mark}]
    prompt = render(marked, add_generation_prompt=False).before(mark)
    if prompt is None:
        problem = "continue_final_message is true, but the chat template changes the content of the last message"
        raise ApiError(problem, param="continue_final_message")
    return prompt


def completion_prompts(fields: Fields, tokenizer: Tokenizer, bounds: PromptBounds | None = None) -> tuple[Tokens, ...]:
    """Tokens of each prompt: text or token ids. Text gets a beginning-of-sequence token if the model's file says so.
    Prompts longer than `bounds` allows are refused before anything is tokenized."""
    prompt = fields.take("prompt")
    add_bos = None if fields.flag("add_special_tokens", True) else False
    parse_special = fields.flag("parse_special", True)
    several = isinstance(prompt, list) and prompt and not _is_id(prompt[0])
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(f"prompt has {len(prompts)} members; at most {MAX_PROMPTS} are allowed", param="prompt")
    if bounds:
        for member in prompts:
            _check_length(member, bounds)
    return tuple(_tokens(member, tokenizer, add_bos, parse_special) for member in prompts)


def _check_length(prompt: object, bounds: PromptBounds) -> None:
    if isinstance(prompt, str):
        bounds.check_text(prompt, "prompt")
    elif isinstance(prompt, list):
        bounds.check_ids(prompt, "prompt")


def _tokens(prompt: object, tokenizer: Tokenizer, add_bos: bool | None, parse_special: bool) -> Tokens:
    if isinstance(prompt, str):
        return _not_empty(tokenizer.encode_raw(prompt, parse_special=parse_special, add_bos=add_bos), "prompt")
    allowed = "a string, a list of token ids, or a list of these"
    return _not_empty(token_ids(prompt, "prompt", tokenizer, allowed), "prompt")


def token_ids(ids: object, param: str, tokenizer: Tokenizer, allowed: str = "a list of token ids") -> list[int]:
    """Checks the field `param`: a list of token ids. Raises `ApiError`."""
    if not isinstance(ids, list) or not all(_is_id(member) for member in ids):
        raise ApiError(f"{param} is {shown(ids)}; it has to be {allowed}", param=param)
    for id_ in ids:
        if not 0 <= id_ < tokenizer.vocab_size:
            raise ApiError(f"{param} has token {id_}; the vocabulary is 0 to {tokenizer.vocab_size - 1}", param=param)
    return ids


def _not_empty(tokens: list[int], param: str) -> Tokens:
    if not tokens:
        raise ApiError(f"{param} has no tokens of this vocabulary; at least one is needed", param=param)
    return tuple(tokens)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reasoning(fields: Fields) -> dict[str, Any]:
    """The reasoning effort, by OpenAI's name or as `reasoning.effort`, as the variables that templates use."""
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
            raise ApiError(f"{name} contains {key}; set it as a field of the request", param=name)
    return variables
