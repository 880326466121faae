"""From what the command line says to what an executor is asked: the prompt's tokens and how long the answer may be."""

import argparse
import sys
from typing import TYPE_CHECKING

from twostep.errors import InvalidParameterError

if TYPE_CHECKING:
    from twostep.model.loaded import LoadedModel

DEFAULT_MAX_TOKENS = 512


def check_options(options: argparse.Namespace) -> None:
    """What needs no model to be seen. Raises `InvalidParameterError`."""
    if options.raw and options.system is not None:
        raise InvalidParameterError("--system needs the chat template, which --raw leaves out: give one of the two")
    if options.threads is not None and options.executor != "native":
        raise InvalidParameterError("--threads is for the native executor; the reference follows numpy")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise InvalidParameterError(f"--max-tokens is {options.max_tokens}; it has to be at least 1")


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt's text. Raises `InvalidParameterError` if it is empty or not UTF-8."""
    given = sys.stdin.buffer.read() if options.prompt == "-" else options.prompt.encode(errors="surrogateescape")
    try:
        prompt = given.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {given[error.start]:#04x}"
        raise InvalidParameterError(f"the prompt is not UTF-8: {byte}") from None
    if not prompt.strip():
        raise InvalidParameterError("the prompt is empty")
    return prompt


def encode(model: "LoadedModel", prompt: str, options: argparse.Namespace) -> list[int]:
    """The prompt's tokens. The chat template writes the beginning-of-sequence token itself, if there is one.

    Raises `InvalidParameterError` if there are none: the vocabulary may lack what few characters there are.
    """
    if options.raw:
        tokens = model.tokenizer.encode_raw(prompt, parse_special=options.parse_special is not False)
    else:
        template = model.template  # its process starts here and works while the tokenizer loads
        tokenizer = model.tokenizer
        conversation = template.render(_messages(prompt, options.system), add_generation_prompt=True)
        given = [] if options.parse_special else conversation.given
        tokens = tokenizer.encode_given(conversation.text, given, add_bos=False)
    if not tokens:
        raise InvalidParameterError("the prompt has nothing that this model's vocabulary knows")
    return tokens


def print_notes(model: "LoadedModel") -> None:
    """Says on standard error what was wrong with the weight file and was put right."""
    for note in model.tokenizer.vocabulary.notes():
        print(f"twostep: {model.path.name}: {note}", file=sys.stderr)


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    question = {"role": "user", "content": prompt}
    return [question] if system is None else [{"role": "system", "content": system}, question]


def answer_limit(prompt_tokens: int, asked: int | None, context: int) -> int:
    """How many tokens the answer may have. Raises `InvalidParameterError` if prompt and answer exceed the context."""
    if prompt_tokens >= context:
        raise InvalidParameterError(f"the prompt has {prompt_tokens} tokens, the model's context only {context}")
    room = context - prompt_tokens
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if asked > room:
        left = f"context of {context} tokens, {prompt_tokens} of them the prompt's"
        raise InvalidParameterError(f"--max-tokens is {asked}; at most {room} fit: {left}")
    return asked
