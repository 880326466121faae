"""Small pure objects that say how to choose: whom to admit first, how many, how wide a chunk may be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostep.core.reasons import WHOLE, Reason, Why
from twostep.core.request import BLOCK_TOKENS, Sequence
from twostep.core.step_time import StepShape, StepTimeModel

MOST_PASSES = 64
"""Later ones of its priority that may be admitted before a waiting sequence."""

# --- batching: how many may join ---------------------------------------------------------------------------------


class Batching(Protocol):
    """Says how many sequences may be admitted now."""

    def open(self, running: int, waiting: int, left: int, waited_ns: int) -> int:
        """`left`: what it said in the step before, less those admitted since. `waited_ns`: how long the first waits."""


@dataclass(frozen=True)
class Continuous:
    """Whoever finds a seat and blocks joins the next step."""

    def open(self, running: int, waiting: int, left: int, waited_ns: int) -> int:
        return waiting


@dataclass(frozen=True)
class Static:
    """Gathers `size` sequences, or those that came in `patience_ns`, and finishes them before it takes others.

    The baseline to compare with; seats of sequences that ended stay empty until the last one has.
    """

    size: int
    patience_ns: int = 0

    def open(self, running: int, waiting: int, left: int, waited_ns: int) -> int:
        if running:
            return min(left, waiting)
        return min(self.size, waiting) if waiting >= self.size or waited_ns >= self.patience_ns else 0


# --- admission: who is first -------------------------------------------------------------------------------------

Order = Callable[[Sequence], tuple[int, ...]]
"""Sort key of a waiting sequence; it must not change while that waits."""


def fcfs(seq: Sequence) -> tuple[int, ...]:
    """First come, first served, whatever the priority."""
    return (seq.number,)


def by_priority(seq: Sequence) -> tuple[int, ...]:
    """The most urgent first, among equals who came first."""
    return seq.rank


@dataclass(frozen=True)
class ShortestPrefill:
    """The shortest prompt first within a priority, ageing by arrivals: each later arrival counts as a 64th of the
    longest prompt, so that no more than 64 later ones pass."""

    longest_tokens: int

    def __call__(self, seq: Sequence) -> tuple[int, ...]:
        age = seq.number * -(-self.longest_tokens // MOST_PASSES)
        return seq.request.priority, seq.request.prompt_tokens + age, seq.number


# --- chunking: how wide a slice of a prompt may be ---------------------------------------------------------------


class Grant(NamedTuple):
    """How many tokens, and what limited them."""

    tokens: int
    reason: Reason


class Chunking(Protocol):
    """Says how many tokens of a prompt join a step. Without `predict_ns` and `observe` of its own it knows no time."""

    @property
    def least_tokens(self) -> int:
        """What a prompt in prefill gets every few steps even where no budget is left; 0: prompts are never cut."""

    def grant(self, load: StepShape, start: int, wanted: int, decoding: bool) -> Grant:
        """Of `wanted` tokens from position `start`, beside what is already in the step. `decoding`: others wait."""

    def predict_ns(self, shape: StepShape) -> int | None:
        """What it expects a step to take; None: it knows no time."""
        return None

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Feedback; only `Scheduler.resolve` calls it."""
        return None


@dataclass(frozen=True)
class Unchunked(Chunking):
    """Prompts are never cut: each is computed in one step, several together up to `budget_tokens`."""

    budget_tokens: int
    least_tokens: int = 0

    def grant(self, load: StepShape, start: int, wanted: int, decoding: bool) -> Grant:
        fits = load.tokens == load.sampled or load.tokens + wanted <= self.budget_tokens  # the first one always does
        return Grant(wanted, WHOLE) if fits else Grant(0, Reason(Why.TOKEN_BUDGET, (self.budget_tokens,)))


@dataclass(frozen=True)
class TokenBudget(Chunking):
    """A step has at most `budget_tokens`, decoded ones included."""

    budget_tokens: int
    least_tokens: int = BLOCK_TOKENS

    def grant(self, load: StepShape, start: int, wanted: int, decoding: bool) -> Grant:
        return _cut(start, wanted, self.budget_tokens - load.tokens, Reason(Why.TOKEN_BUDGET, (self.budget_tokens,)))


@dataclass(frozen=True)
class TimeBudget(Chunking):
    """A step is predicted to end within `budget_ns` while others decode, else within `ceiling_ns`.

    With nobody to delay wide chunks give the best TTFT; the ceiling keeps aborts and newcomers heard. However slow the
    machine is, such a step has `alone_tokens`: in narrower ones what every step costs would be most of it, and a model
    that sees nothing wider would never learn better.
    """

    model: StepTimeModel
    budget_ns: int
    ceiling_ns: int = 250_000_000
    least_tokens: int = BLOCK_TOKENS
    alone_tokens: int = 4 * BLOCK_TOKENS

    def grant(self, load: StepShape, start: int, wanted: int, decoding: bool) -> Grant:
        budget_ns, least = (self.budget_ns, 0) if decoding else (self.ceiling_ns, self.alone_tokens - load.tokens)
        room = max(least, self.model.largest_slice(load, start, wanted, budget_ns))
        tokens = _cut(start, wanted, room, WHOLE).tokens
        if tokens == wanted:
            return Grant(tokens, WHOLE)
        predicted_ns = self.model.predict_ns(load.with_slice(start, tokens, 0))
        return Grant(tokens, Reason(Why.ITL_BUDGET if decoding else Why.LONGEST_STEP, (budget_ns, predicted_ns)))

    def predict_ns(self, shape: StepShape) -> int | None:
        return self.model.predict_ns(shape)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        self.model.observe(shape, measured_ns)


def _cut(start: int, wanted: int, room: int, reason: Reason) -> Grant:
    """At most `room` of `wanted`; a cut chunk ends with a block, so that whole blocks get done."""
    if room >= wanted:
        return Grant(wanted, WHOLE)
    end = (start + max(0, room)) // BLOCK_TOKENS * BLOCK_TOKENS
    return Grant(max(0, end - start), reason)
