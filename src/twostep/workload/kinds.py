"""Kinds of traffic that can be made up: what requests look like, whenever they arrive.

Defaults suit a model of some hundred million parameters on two cores. The same seed gives the same workload; lengths
and arrivals draw from streams of their own, so that another rate leaves the requests as they are.
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
"""Of lengths: standard deviation of their logarithm. Prompts and answers of people are about log-normal."""

LONGEST = 8
"""Times the median; longer ones are drawn again (one in 200)."""

MOST_REQUESTS = 1_000_000
MOST_LENGTH = 10_000_000


class Kind(Protocol):
    """Parameters are fields of a dataclass, with a word about each in its metadata."""

    @property
    def requests_per_arrival(self) -> float:
        """In the mean: sessions arrive with several turns each."""
        ...

    def requests(self, times: Iterator[float], wanted: int, rng: Random) -> Iterable[WorkloadRequest]:
        """So many; `times` are those of their arrivals."""
        ...


def make_workload(kind: Kind, arrivals: Arrivals, requests: int, seed: int = 0) -> Workload:
    """`requests` of this kind; all rates of `arrivals` are of requests. Raises `InvalidParameterError`."""
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
    """Conversations that begin with the same system prompt. Each turn's prompt is the one before, its answer, and
    something new; it comes some time after that answer has ended.

    The answers in later prompts are made up like all content: a server that keeps the KV of what it generated finds
    the prompt of the turn before there, not its own answer.
    """

    turns: float = _parameter(4.0, "mean number of turns of a conversation (geometric)")
    system_tokens: int = _parameter(256, "system prompt, the same for all")
    user_tokens: int = _parameter(40, "median of what a user writes in a turn")
    answer_tokens: int = _parameter(90, "median of answers")
    think_s: float = _parameter(5.0, "mean time from an answer's end to the next turn (exponential)")
    context_tokens: int = _parameter(CONTEXT_TOKENS, "a conversation ends before a turn needs more")

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
        """In the order in which they would come if answers took no time. Sessions at the end may lack turns."""
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
    """Sorted by when it would come if answers took no time."""

    at_s: float
    session: int
    number: int
    request: WorkloadRequest


def _following(turns: Iterable[_Turn]) -> Iterator[WorkloadRequest]:
    """Each turn after the one before of its session."""
    last: dict[int, int] = {}
    for number, turn in enumerate(turns):
        yield replace(turn.request, after=last.get(turn.session))
        last[turn.session] = number


@dataclass(frozen=True)
class Rag:
    """Questions about documents, some of which are asked about far more often than others: the k-th in the order of
    their popularity with a share of 1 / k to the power of `zipf`."""

    documents: int = _parameter(50, "how many there are")
    zipf: float = _parameter(1.0, "exponent of their popularity; 0: all alike")
    document_tokens: int = _parameter(1500, "median length of documents")
    instruction_tokens: int = _parameter(64, "before each document, the same for all")
    question_tokens: int = _parameter(30, "median, after the document")
    answer_tokens: int = _parameter(50, "median")
    context_tokens: int = _parameter(CONTEXT_TOKENS, "no prompt with its answer is longer")

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
        """What prompts about each document begin with."""
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
    """Those that these tokens fill."""


@dataclass(frozen=True)
class Batch:
    """Tasks of mixed lengths that have nothing in common."""

    input_tokens: int = _parameter(300, "median of prompts")
    answer_tokens: int = _parameter(100, "median of answers")
    context_tokens: int = _parameter(CONTEXT_TOKENS, "no prompt with its answer is longer")

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
    """Prompts and answers of given lengths, nothing in common; from the least to the most all are as likely."""

    input_tokens: tuple[int, int] = _parameter((512, 512), "a length, or LEAST-MOST")
    output_tokens: tuple[int, int] = _parameter((64, 64), "a length, or LEAST-MOST")

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            least, most = getattr(self, name)
            check_within(name, least, 1, MOST_LENGTH)
            check_within(name, most, 1, MOST_LENGTH)
            if least > most:
                raise InvalidParameterError(f"{name} is {least}-{most}; the least has to come before the most", name)

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
    """Log-normal, from 1 to `most`."""
    most = LONGEST * median if most is None else most
    while not 1 <= (tokens := round(rng.lognormvariate(log(median), spread))) <= most:
        pass
    return tokens


def _check_fits(context_tokens: int, before: int, **medians: int) -> None:
    """The longest that is drawn for these medians, after so many other tokens, fits."""
    check_within("context_tokens", context_tokens, 1, MOST_LENGTH)
    for name, median in medians.items():
        check_within(name, median, 1, context_tokens)
    needed = before + LONGEST * sum(medians.values())
    if needed > context_tokens:
        parts = " and ".join(f"{name} {median}" for name, median in medians.items())
        allowed = f"{needed} at least: {before} before, and {LONGEST} times {parts}"
        raise InvalidParameterError(f"context_tokens is {context_tokens}; it has to be {allowed}", "context_tokens")
