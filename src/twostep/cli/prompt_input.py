"""The prompt of `generate` and `chat`: checks of the options, its tokens, and the length of the answer."""

import argparse
import sys
from typing import TYPE_CHECKING

from twostep.errors import InvalidParameterError

if TYPE_CHECKING:
    from twostep.model.loaded import LoadedModel

DEFAULT_MAX_TOKENS = 512


def check_options(options: argparse.Namespace) -> None:
    """Checks that need no model. Raises `InvalidParameterError`."""
    if options.raw and options.system is not None:
        raise InvalidParameterError("--system needs the chat template, which --raw disables: give one of the two")
    if options.threads is not None and options.executor != "native":
        raise InvalidParameterError(
            "--threads is for the native executor; numpy sets the threads of the reference executor"
        )
    if options.max_tokens is not None and options.max_tokens < 1:
        raise InvalidParameterError(f"--max-tokens is {options.max_tokens}; it must be at least 1")


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
    """The tokens of the prompt. The chat template adds the beginning-of-sequence token, if any.

    Raises `InvalidParameterError` if there are none: the vocabulary may lack all characters of the prompt.
    """
    if options.raw:
        tokens = model.tokenizer.encode_raw(prompt, parse_special=options.parse_special is not False)
    else:
        template = model.template  # its process starts here and runs while the tokenizer loads
        tokenizer = model.tokenizer
        conversation = template.render(_messages(prompt, options.system), add_generation_prompt=True)
        given = [] if options.parse_special else conversation.given
        tokens = tokenizer.encode_given(conversation.text, given, add_bos=False)
    if not tokens:
        raise InvalidParameterError("the prompt has no tokens in the vocabulary of this model")
    return tokens


def print_notes(model: "LoadedModel") -> None:
    """Prints to standard error which defects of the weight file were corrected."""
    for note in model.tokenizer.vocabulary.notes():
        print(f"twostep: {model.path.name}: {note}", file=sys.stderr)


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    question = {"role": "user", "content": prompt}
    return [question] if system is None else [{"role": "system", "content": system}, question]


def answer_limit(prompt_tokens: int, asked: int | None, context: int) -> int:
    """Maximum tokens of the answer. Raises `InvalidParameterError` if prompt and answer exceed the context."""
    if prompt_tokens >= context:
        raise InvalidParameterError(f"the prompt has {prompt_tokens} tokens, but the context of the model is {context}")
    room = context - prompt_tokens
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if asked > room:
        left = f"the context has {context} tokens, the prompt takes {prompt_tokens}"
        raise InvalidParameterError(f"--max-tokens is {asked}; at most {room} fit: {left}")
    return asked
