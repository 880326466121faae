"""Chooses one token for each row of logits. C++ does the work; `native/sampling.h` states its steps and their order."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from twostep.errors import InvalidParameterError, SamplingError
from twostep.kernels import _native
from twostep.kernels.teams import Team
from twostep.processes import Owner

MAX_LOGPROBS = 20
"""Alternatives that may be asked for, OpenAI's limit."""


@dataclass(frozen=True)
class TokenSampling:
    """How a request wants its tokens chosen; names and meanings as in OpenAI's API and vLLM.

    Raises `InvalidParameterError` that names the parameter, its value and what is allowed.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the most likely token. Any finite value from 0."""
    top_k: int = 0
    """Only the k most likely tokens; 0 is off, and so is -1, which becomes 0."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability, at least one; 0 to 1, 1 is off."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the most likely one; 0 to 1, 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies others, of tokens in prompt or output; above 0, 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token once for each time it is in the output; -2 to 2."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits, by token id; -100 to 100."""
    seed: int | None = None
    """64 bits, signed. The same seed gives the same tokens; None: `seeded()` draws one."""
    logprobs: int | None = None
    """Report the chosen token's log-probability, and this many of the most likely tokens: 0 to 20; None is off.

    They are those of the model: before mask, bias, penalties, temperature and truncation, as in vLLM.
    """

    def __post_init__(self) -> None:
        check_real("temperature", self.temperature, 0, math.inf)
        check_integer("top_k", self.top_k, -1, None)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        check_real("top_p", self.top_p, 0, 1)
        check_real("min_p", self.min_p, 0, 1)
        check_real("repetition_penalty", self.repetition_penalty, 0, math.inf, open_below=True)
        check_real("presence_penalty", self.presence_penalty, -2, 2)
        check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_bias(self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def seeded(self) -> Self:
        """These parameters with a seed, drawn from the system's entropy if there was none. Once for each request."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    @property
    def reads_history(self) -> bool:
        """Whether rows need the tokens of prompt and output."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def packed(self) -> _native.PackedSamplingParams:
        """The same for C++, made once. Raises `InvalidParameterError` if tokens are to be drawn without a seed."""
        if self.seed is None and self.temperature > 0:
            raise InvalidParameterError("seed is None; it has to be an integer where tokens are drawn (see `seeded`)")
        return _native.pack_sampling_params(
            temperature=float(self.temperature),
            top_k=int(min(self.top_k, MAX_TOKEN)),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias=[(int(token), float(bias)) for token, bias in self.logit_bias.items()],
            seed=int(self.seed or 0),
            logprobs=None if self.logprobs is None else int(self.logprobs),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Fields only: `packed` lives in this process."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class SampleRow(NamedTuple):
    """One row of logits and who asks. Arrays are C-contiguous and are only read."""

    params: TokenSampling
    choice: int
    """Which of the request's n choices."""
    position: int
    """Position in the sequence of the token to be chosen. With seed and choice it keys the random number."""
    prompt: NDArray[np.int32] | None = None
    """Token ids; needed only if `params.reads_history`."""
    output: NDArray[np.int32] | None = None
    """Token ids so far; likewise."""
    mask: NDArray[np.uint32] | None = None
    """ceil(vocab / 32) words: token i is allowed if bit i % 32 of word i // 32 is set. None: all are."""


class Sampled(NamedTuple):
    """A chosen token. Without `logprobs` asked for, the rest is None and empty."""

    token: int
    logprob: float | None
    rank: int | None
    """1 for the model's most likely token."""
    top: tuple[tuple[int, float], ...]
    """The model's most likely tokens with log-probabilities, best first; fewer than asked for if fewer are possible."""


class Sampler:
    """Samples batches on `threads` threads, without holding the interpreter's lock. One batch at a time.

    `NativeExecutor.sampler()` makes one that uses the executor's own threads between its steps.
    """

    def __init__(self, vocab: int, threads: int = 1, *, program: _native.Program | None = None) -> None:
        """On the threads of `program` if given, else its own. Memory for each: 12 bytes a token of the vocabulary."""
        check_integer("vocab", vocab, 1, MAX_TOKEN)
        check_integer("threads", threads, 1, 1024)
        self._native = _native.NativeSampler(vocab, threads if program is None else program)
        self._owner = Owner("this sampler")
        self._team = Team(self._native)

    def close(self) -> None:
        """Gives back memory and threads. It cannot be used any more."""
        self.__dict__.pop("_native", None)
        self.__dict__.pop("_team", None)

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled | SamplingError]:
        """Chooses a token for each row from logits of shape (rows, vocab), C-contiguous; they are only read.

        A row's result depends on that row alone, bit for bit. A row that cannot be sampled (NaN or +infinity in its
        logits, nothing allowed by its mask, a token that the vocabulary lacks) yields a `SamplingError` in its place;
        the others go on. Raises `ValueError` or `TypeError` for arrays of wrong shape or type, `InvalidParameterError`
        for a missing seed, `ForkedError` in a forked child.
        """
        self._owner.check()
        results = self._native.sample(logits, list(rows))
        return [SamplingError(result) if isinstance(result, str) else Sampled._make(result) for result in results]


MAX_TOKEN = 2**31 - 1
"""The highest token id that any vocabulary can have here."""


def check_integer(name: str, value: object, low: int, high: int | None, *, param: str | None = None) -> None:
    """Raises `InvalidParameterError` unless `value` is an integer in the range, ends included; `param` where `name` is
    not the parameter's bare name."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return
    allowed = f"from {low}" if high is None else f"from {low} to {high}"
    raise InvalidParameterError(f"{name} is {value!r}; it has to be an integer {allowed}", param or name)


def check_real(
    name: str, value: object, low: float, high: float, *, open_below: bool = False, param: str | None = None
) -> None:
    """Raises `InvalidParameterError` unless `value` is a finite real number in the range."""
    number = _as_float(value)
    if math.isfinite(number) and (low < number <= high or (number == low and not open_below)):
        return
    start = f"above {low}" if open_below else f"from {low}"
    allowed = f"{start}, finite" if high == math.inf else f"{start} to {high}"
    raise InvalidParameterError(f"{name} is {value!r}; it has to be a number {allowed}", param or name)


def _as_float(value: object) -> float:
    """NaN for what is no number, infinity for an integer beyond the range of floats."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise InvalidParameterError(f"logit_bias is {bias!r}; it has to map token ids to numbers", "logit_bias")
    for token, value in bias.items():
        check_integer("a token id in logit_bias", token, 0, MAX_TOKEN, param="logit_bias")
        check_real(f"logit_bias of token {token}", value, -100, 100, param="logit_bias")
