"""Kinds of generated workloads: lengths and shared prefixes of requests, independent of their arrival times.

Defaults suit a model with some hundred million parameters on two cores. The same seed gives the same workload. Lengths
and arrivals use separate random streams, so that changing the rate does not change the requests.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, islice
from math import log
from random import Random
from typing import Any, NamedTuple, Protocol

from twostep.errors import InvalidParameterError
from twostep.workload.arrivals import Arrivals
from twostep.workload.checked_fields import check_within
from twostep.workload.definition import Workload, WorkloadRequest

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 4096

SPREAD = 0.8
"""Standard deviation of the logarithm of lengths. Real prompts and answers are roughly log-normal."""

LONGEST = 8
"""Maximum length as a multiple of the median; longer ones (1 in 200) are redrawn."""

MOST_REQUESTS = 1_000_000
MOST_LENGTH = 10_000_000


class WorkloadKind(Protocol):
    """A kind of workload. Parameters are dataclass fields with help text in their metadata."""

    @property
    def requests_per_arrival(self) -> float:
        """Mean requests per arrival: a session has several turns."""
        ...

    def requests(self, times: Iterator[float], wanted: int, rng: Random) -> Iterable[WorkloadRequest]:
        """Yields `wanted` requests that arrive at `times`."""
        ...


def make_workload(kind: WorkloadKind, arrivals: Arrivals, requests: int, seed: int = 0) -> Workload:
    """Generates `requests` requests of this kind. Rates of `arrivals` count requests. Raises
    `InvalidParameterError`."""
    check_within("requests", requests, 1, MOST_REQUESTS)
    stretch = kind.requests_per_arrival
    times = (round(time_s * stretch, 6) for time_s in arrivals.times(Random(f"{seed} arrivals")))
    made = list(kind.requests(times, requests, Random(f"{seed} requests")))
    source = f"made up by Twostep: {kind}, {arrivals}, {requests} requests, seed {seed}"
    return Workload(made, BLOCK_TOKENS, type(kind).__name__.lower(), source)


def _parameter(default: Any, help_: str) -> Any:
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True)
class Chat:
    """Conversations with a common system prompt. The prompt of each turn is the previous prompt, its answer, and new
    text; it arrives some time after that answer has ended.

    Answers in later prompts are generated content, not the real answers: a prefix cache finds the previous prompt, but
    not the answer of the server.
    """

    turns: float = _parameter(4.0, "mean turns per conversation (geometric)")
    system_tokens: int = _parameter(256, "length of the common system prompt")
    user_tokens: int = _parameter(40, "median length of the user text in a turn")
    answer_tokens: int = _parameter(90, "median length of answers")
    think_s: float = _parameter(5.0, "mean time from the end of an answer to the next turn (exponential)")
    context_tokens: int = _parameter(CONTEXT_TOKENS, "maximum context; a conversation ends before it is exceeded")

    def __post_init__(self) -> None:
        check_within("turns", self.turns, 1, 1000)
        check_within("system_tokens", self.system_tokens, 0, self.context_tokens)
        check_within("think_s", self.think_s, 0, 1e6)
        _check_fits(
            self.context_tokens, self.system_tokens, user_tokens=self.user_tokens, answer_tokens=self.answer_tokens
        )

    @property
    def requests_per_arrival(self) -> float:
        return self.turns

    def requests(self, times: Iterator[float], wanted: int, rng: Random) -> Iterable[WorkloadRequest]:
        """In the order of arrival if answers took no time. The last sessions may be cut short."""
        unused = count(self.system_tokens // BLOCK_TOKENS)
        turns: list[_Turn] = []
        while len(turns) < wanted:
            turns += self._session(next(times), len(turns), rng, unused)
        return _following(sorted(turns)[:wanted])

    def _session(self, start_s: float, session: int, rng: Random, unused: Iterator[int]) -> "Iterator[_Turn]":
        blocks = list(range(self.system_tokens // BLOCK_TOKENS))
        at_s = wait_s = start_s
        history_tokens = self.system_tokens
        for number in range(self._turn_count(rng)):
            input_tokens = history_tokens + _length(rng, self.user_tokens)
            output_tokens = _length(rng, self.answer_tokens)
            history_tokens = input_tokens + output_tokens
            if history_tokens > self.context_tokens:
                return
            blocks += islice(unused, -(-input_tokens // BLOCK_TOKENS) - len(blocks))
            request = WorkloadRequest(wait_s, input_tokens, output_tokens, tuple(blocks))
            yield _Turn(at_s, session, number, request)
            wait_s = round(rng.expovariate(1 / self.think_s), 6) if self.think_s else 0.0
            at_s += wait_s

    def _turn_count(self, rng: Random) -> int:
        return next(number for number in count(1) if rng.random() * self.turns < 1)


class _Turn(NamedTuple):
    """A turn; sorts by its arrival if answers took no time."""

    at_s: float
    session: int
    number: int
    request: WorkloadRequest


def _following(turns: Iterable[_Turn]) -> Iterator[WorkloadRequest]:
    """Links each turn to the previous turn of its session."""
    last: dict[int, int] = {}
    for number, turn in enumerate(turns):
        yield replace(turn.request, after=last.get(turn.session))
        last[turn.session] = number


@dataclass(frozen=True)
class Rag:
    """Questions about documents of unequal popularity: the share of the k-th most popular one is proportional to
    1 / k to the power of `zipf`."""

    documents: int = _parameter(50, "number of documents")
    zipf: float = _parameter(1.0, "exponent of the popularity; 0: all equally popular")
    document_tokens: int = _parameter(1500, "median length of documents")
    instruction_tokens: int = _parameter(64, "length of the common instruction before each document")
    question_tokens: int = _parameter(30, "median length of questions, after the document")
    answer_tokens: int = _parameter(50, "median length of answers")
    context_tokens: int = _parameter(CONTEXT_TOKENS, "maximum length of prompt and answer")

    def __post_init__(self) -> None:
        check_within("documents", self.documents, 1, 1_000_000)
        check_within("zipf", self.zipf, 0, 10)
        check_within("instruction_tokens", self.instruction_tokens, 0, self.context_tokens)
        whole = self.instruction_tokens + self.document_tokens
        check_within("document_tokens", self.document_tokens, 1, self.context_tokens)
        _check_fits(self.context_tokens, whole, question_tokens=self.question_tokens, answer_tokens=self.answer_tokens)

    @property
    def requests_per_arrival(self) -> float:
        return 1.0

    def requests(self, times: Iterator[float], wanted: int, rng: Random) -> Iterator[WorkloadRequest]:
        shared = list(self._shared(rng))
        weights = list(accumulate(rank**-self.zipf for rank in range(1, self.documents + 1)))
        for time_s in islice(times, wanted):
            [document] = rng.choices(shared, cum_weights=weights)
            input_tokens = document.tokens + _length(rng, self.question_tokens)
            yield WorkloadRequest(time_s, input_tokens, _length(rng, self.answer_tokens), document.blocks)

    def _shared(self, rng: Random) -> "Iterator[_Shared]":
        """The prefix of all prompts about each document."""
        instruction = tuple(range(self.instruction_tokens // BLOCK_TOKENS))
        unused = count(len(instruction))
        rest = self.instruction_tokens + LONGEST * (self.question_tokens + self.answer_tokens)
        most = min(LONGEST * self.document_tokens, self.context_tokens - rest)
        for _ in range(self.documents):
            tokens = self.instruction_tokens + _length(rng, self.document_tokens, most, SPREAD / 2)
            own = islice(unused, tokens // BLOCK_TOKENS - len(instruction))
            yield _Shared(tokens, instruction + tuple(own))


class _Shared(NamedTuple):
    tokens: int
    blocks: tuple[int, ...]
    """The full blocks of these tokens."""


@dataclass(frozen=True)
class Batch:
    """Tasks of mixed lengths without shared prefixes."""

    input_tokens: int = _parameter(300, "median length of prompts")
    answer_tokens: int = _parameter(100, "median length of answers")
    context_tokens: int = _parameter(CONTEXT_TOKENS, "maximum length of prompt and answer")

    def __post_init__(self) -> None:
        _check_fits(self.context_tokens, 0, input_tokens=self.input_tokens, answer_tokens=self.answer_tokens)

    @property
    def requests_per_arrival(self) -> float:
        return 1.0

    def requests(self, times: Iterator[float], wanted: int, rng: Random) -> Iterator[WorkloadRequest]:
        for time_s in islice(times, wanted):
            yield WorkloadRequest(time_s, _length(rng, self.input_tokens), _length(rng, self.answer_tokens))


@dataclass(frozen=True)
class Fixed:
    """Prompts and answers of given lengths without shared prefixes; uniform within a range."""

    input_tokens: tuple[int, int] = _parameter((512, 512), "a length, or LEAST-MOST")
    output_tokens: tuple[int, int] = _parameter((64, 64), "a length, or LEAST-MOST")

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            least, most = getattr(self, name)
            check_within(name, least, 1, MOST_LENGTH)
            check_within(name, most, 1, MOST_LENGTH)
            if least > most:
                raise InvalidParameterError(f"{name} is {least}-{most}; the smaller number must come first", name)

    @property
    def requests_per_arrival(self) -> float:
        return 1.0

    def requests(self, times: Iterator[float], wanted: int, rng: Random) -> Iterator[WorkloadRequest]:
        for time_s in islice(times, wanted):
            yield WorkloadRequest(time_s, rng.randint(*self.input_tokens), rng.randint(*self.output_tokens))


KINDS: dict[str, type[Chat] | type[Rag] | type[Batch] | type[Fixed]] = {
    "chat": Chat, "rag": Rag, "batch": Batch, "fixed": Fixed,
}  # fmt: skip


def _length(rng: Random, median: int, most: int | None = None, spread: float = SPREAD) -> int:
    """A log-normal length from 1 to `most`."""
    most = LONGEST * median if most is None else most
    while not 1 <= (tokens := round(rng.lognormvariate(log(median), spread))) <= most:
        pass
    return tokens


def _check_fits(context_tokens: int, before: int, **medians: int) -> None:
    """Checks that the maximum lengths for these medians, after `before` other tokens, fit into the context."""
    check_within("context_tokens", context_tokens, 1, MOST_LENGTH)
    for name, median in medians.items():
        check_within(name, median, 1, context_tokens)
    needed = before + LONGEST * sum(medians.values())
    if needed > context_tokens:
        parts = " and ".join(f"{name} {median}" for name, median in medians.items())
        allowed = f"at least {needed}: {before} before, and {LONGEST} times {parts}"
        raise InvalidParameterError(f"context_tokens is {context_tokens}; it must be {allowed}", "context_tokens")
