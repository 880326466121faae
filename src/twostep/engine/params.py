"""The parameters of a request: how its tokens are sampled, and where its answers end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from twostep.engine.refusals import check_names, shown
from twostep.engine.text.structured_output import StructuredOutput
from twostep.errors import ContextLengthError, InvalidParameterError
from twostep.kernels.sampling import MAX_TOKEN, TokenSampling, check_integer

MAX_CHOICES = 128
"""Choices of one request, OpenAI's limit."""
MAX_STOPS = 32
"""Stop strings, and apart from them stop token ids, of one request. OpenAI allows 4, vLLM any number."""
MAX_STOP_CHARACTERS = 1024
"""Length of one stop string, as streams hold back a prefix of it."""
MAX_STOPS_CHARACTERS = 4096
"""Of all stop strings of a request: building their search takes 1.5 us per character, while other requests wait."""


@dataclass(frozen=True)
class SamplingParams(TokenSampling):
    """All parameters of a request; names and meanings as in OpenAI's API and vLLM.

    Raises `InvalidParameterError` that names the parameter, its value and what is allowed.
    """

    n: int = 1
    """Choices: answers to the same prompt, 1 to 128."""
    max_tokens: int | None = None
    """Most tokens of an answer, from 1; None: up to the end of the context."""
    min_tokens: int = 0
    """Before so many tokens, no token that ends the answer is sampled and no stop string counts."""
    stop: str | Sequence[str] | None = None
    """Strings that end an answer; stored as a tuple. The text ends before the first that occurs."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end an answer, besides the model's own; stored as a tuple."""
    ignore_eos: bool = False
    """The model's end-of-sequence tokens do not end an answer."""
    skip_special_tokens: bool = True
    """The text has no control tokens."""
    include_stop_str_in_output: bool = False
    """The text includes the stop string or the text of the stop token."""
    structured: StructuredOutput | None = None
    """The form of the whole text. The answer ends when its form allows nothing else, even before `min_tokens`; if
    `max_tokens` or a stop string ends it, its form may be incomplete. Not together with `ignore_eos`."""

    def __new__(cls, *_: Any, **named: Any) -> Self:
        """Checks the names first, as the constructor's own error has no hint."""
        check_names(named, [field.name for field in fields(cls)], "parameter")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None)
        check_integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problem = f"min_tokens is {self.min_tokens}; it has to be at most max_tokens, {self.max_tokens}"
            raise InvalidParameterError(problem, "min_tokens")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _check_flag(name, getattr(self, name))
        _check_structured(self.structured, self.ignore_eos)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an answer of a model with these end-of-sequence tokens."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else eos_ids.union(self.stop_token_ids)

    def forbidden_ids(self, eos_ids: frozenset[int], output_tokens: int) -> frozenset[int]:
        """Tokens that may not follow so many: those that would end the answer before `min_tokens`."""
        return self.stop_ids(eos_ids) if output_tokens < self.min_tokens else frozenset()

    def check_vocabulary(self, vocab: int) -> None:
        """Raises `InvalidParameterError` if a token id named here is outside a vocabulary of this size."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for id_ in ids:
                if id_ >= vocab:
                    raise InvalidParameterError(f"{name} has token {id_}; the vocabulary is 0 to {vocab - 1}", name)

    def answer_limit(self, prompt_tokens: int, context: int) -> int:
        """Most tokens of the answer. Raises `ContextLengthError` if prompt and answer exceed the context."""
        room = context - prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together have at most {context}, the context"
            )
        for name, asked in (("max_tokens", self.max_tokens), ("min_tokens", self.min_tokens)):
            if asked is not None and asked > room:
                left = f"the context of {context} tokens less {prompt_tokens} of the prompt"
                raise ContextLengthError(f"{name} is {asked}; at most {room} fit: {left}", name)
        return room if self.max_tokens is None else self.max_tokens


def forbid(ids: Iterable[int], vocab: int) -> NDArray[np.uint32]:
    """A mask for `SampleRow` that allows all tokens of the vocabulary but these, which must be in it."""
    mask = np.full(-(-vocab // 32), 0xFFFFFFFF, dtype=np.uint32)
    for id_ in ids:
        mask[id_ // 32] &= np.uint32(~(1 << id_ % 32) & 0xFFFFFFFF)
    return mask


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{name} is {value!r}; it has to be true or false", name)


def _check_structured(structured: object, ignore_eos: bool) -> None:
    if structured is None:
        return
    if not isinstance(structured, StructuredOutput):
        allowed = "it has to be a StructuredOutput"
        raise InvalidParameterError(f"structured is {shown(structured)}; {allowed}", "structured")
    if ignore_eos:
        problem = "ignore_eos is true and structured given; an answer ends where its form is complete, give only one"
        raise InvalidParameterError(problem, "ignore_eos")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else _bounded("stop", stop, "strings")
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            allowed = f"a string of 1 to {MAX_STOP_CHARACTERS} characters"
            raise InvalidParameterError(f"a member of stop is {shown(string)}; it has to be {allowed}", "stop")
    if (total := sum(map(len, strings))) > MAX_STOPS_CHARACTERS:
        allowed = f"at most {MAX_STOPS_CHARACTERS} in all"
        raise InvalidParameterError(f"stop has {total} characters; it has to have {allowed}", "stop")
    return strings


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    members = _bounded("stop_token_ids", ids, "token ids")
    for id_ in members:
        check_integer("a member of stop_token_ids", id_, 0, MAX_TOKEN, param="stop_token_ids")
    return tuple(int(id_) for id_ in members)


def _bounded(name: str, value: object, kind: str) -> tuple[Any, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= MAX_STOPS:
        return tuple(value)
    raise InvalidParameterError(f"{name} is {shown(value)}; it has to be a list of at most {MAX_STOPS} {kind}", name)
