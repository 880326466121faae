"""Policies: how many requests to admit, in which order, and how wide a prefill chunk may be.

A policy is a frozen value without state that learns. Where planning needs such state, as a time budget needs a cost
model, the scheduler builds it from the policy (`ChunkPolicy.sizer`) and owns it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostep.core.cost import CostModel, StepShape, largest_slice
from twostep.core.promise import Promise
from twostep.core.reasons import WHOLE, Reason, Why
from twostep.core.request import BLOCK_TOKENS, Sequence

MOST_PASSES = 64
"""Later ones of its priority that may be admitted before a waiting sequence."""

# --- batching: how many are admitted ------------------------------------------------------------------------------


class Batching(Protocol):
    """How many sequences may be admitted now."""

    def open(self, running: int, waiting: int, left: int, waited_ns: int) -> int:
        """`left`: what it returned for the step before, less the admissions since. `waited_ns`: how long the first
        waiting sequence has waited."""

    def opens_after_ns(self, running: int, waiting: int) -> int | None:
        """How long the first waiting sequence has to wait until `open` admits more by itself; None: time alone changes
        nothing."""


@dataclass(frozen=True)
class Continuous:
    """Every sequence that finds a slot and blocks is admitted to the next step."""

    def open(self, running: int, waiting: int, left: int, waited_ns: int) -> int:
        return waiting

    def opens_after_ns(self, running: int, waiting: int) -> int | None:
        return None


@dataclass(frozen=True)
class Static:
    """Gathers `size` sequences, or those that arrive within `patience_ns`, and finishes them before it admits others.

    The baseline to compare with: slots of sequences that ended stay empty until the last one has.
    """

    size: int
    patience_ns: int = 0

    def open(self, running: int, waiting: int, left: int, waited_ns: int) -> int:
        if running:
            return min(left, waiting)
        return min(self.size, waiting) if waiting >= self.size or waited_ns >= self.patience_ns else 0

    def opens_after_ns(self, running: int, waiting: int) -> int | None:
        return self.patience_ns if waiting and not running else None


# --- admission: which is first ------------------------------------------------------------------------------------

Order = Callable[[Sequence], tuple[int, ...]]
"""Sort key of a waiting sequence; it must not change while that waits."""


def fcfs(seq: Sequence) -> tuple[int, ...]:
    """First come, first served, whatever the priority."""
    return (seq.number,)


def by_priority(seq: Sequence) -> tuple[int, ...]:
    """The most urgent first, among equals the first arrival."""
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


class ChunkSizer(Protocol):
    """Sizes the prefill chunks of one scheduler."""

    learns: bool
    """Whether it needs the cost model to learn from every step."""

    def promise(self, decodes: StepShape, overhead_ns: int) -> Promise | None:
        """What a step keeps to in which these decode, with `overhead_ns` outside the kernels; None if it does not size
        chunks by time."""

    def grant(self, load: StepShape, start: int, wanted: int, promise: Promise | None, held: int = 0) -> Grant:
        """How many of `wanted` tokens from position `start` fit beside `load`. `promise`: other sequences decode in
        this step, and must not be delayed longer. `held`: tokens of the same slice before `start`, already in `load`.
        """

    def least_share(self, load: StepShape, start: int, most: int, promise: Promise | None, first: bool) -> int:
        """How many of the `most` tokens of a least share may be added to `load`, though `grant` might have none left.
        `first`: no prompt has a share of this step yet."""

    def predicted_ns(self, shape: StepShape) -> int | None:
        """The bound of the kernels' time for such a step; None if it does not size chunks by time."""


class ChunkPolicy(Protocol):
    """The setting: how prompts are cut. Frozen."""

    @property
    def least_tokens(self) -> int:
        """What a prompt in prefill gets every few steps even where no budget is left; 0: prompts are never cut."""

    def sizer(self, cost: CostModel | None) -> ChunkSizer:
        """A sizer for one scheduler, whose cost model this is. Raises `ValueError` if it needs one and has none."""


class _CountsTokens:
    """A policy that needs nothing but token counts is its own sizer."""

    learns = False

    def promise(self, decodes: StepShape, overhead_ns: int) -> Promise | None:
        return None

    def least_share(self, load: StepShape, start: int, most: int, promise: Promise | None, first: bool) -> int:
        """All: it delays decodes by a known number of tokens."""
        return most

    def predicted_ns(self, shape: StepShape) -> int | None:
        return None


@dataclass(frozen=True)
class Unchunked(_CountsTokens):
    """Prompts are never cut: each is computed in one step, several together up to `budget_tokens`."""

    budget_tokens: int = sys.maxsize
    """The default leaves the limit to the step's own, `max_num_batched_tokens`."""
    least_tokens: int = 0

    def sizer(self, cost: CostModel | None) -> "Unchunked":
        return self

    def grant(self, load: StepShape, start: int, wanted: int, promise: Promise | None, held: int = 0) -> Grant:
        """The first prompt of a step is granted whatever its length: all others in the step only decode."""
        fits = load.tokens == load.logit_rows or load.tokens + wanted <= self.budget_tokens
        return Grant(wanted, WHOLE) if fits else Grant(0, Reason(Why.TOKEN_BUDGET, (self.budget_tokens,)))


@dataclass(frozen=True)
class TokenBudget(_CountsTokens):
    """A step has at most `budget_tokens`, decoded ones included."""

    budget_tokens: int
    least_tokens: int = BLOCK_TOKENS

    def sizer(self, cost: CostModel | None) -> "TokenBudget":
        return self

    def grant(self, load: StepShape, start: int, wanted: int, promise: Promise | None, held: int = 0) -> Grant:
        return _cut(start, wanted, self.budget_tokens - load.tokens, Reason(Why.TOKEN_BUDGET, (self.budget_tokens,)))


AUTO_PARTS, AUTO_LEAST_PARTS = (2, 1), (3, 2)
"""Of a step that only decodes: the automatic budget, and what it never falls below, so that prompts advance."""
AUTO_LEAST_NS, AUTO_MOST_NS = 25_000_000, 100_000_000
"""Nobody reads faster than 40 tokens a second; above a tenth of a second a stream seems to halt."""
_MS = 1_000_000


def automatic_budget_ns(decodes_ns: int, overhead_ns: int) -> int:
    """Twice what the decodes of the present batch take, so that prompts get half of the machine; at least 25 ms, at
    most 100 ms or one and a half times the decodes. In whole milliseconds."""
    alone_ns = decodes_ns + overhead_ns
    (times, by), (least_times, least_by) = AUTO_PARTS, AUTO_LEAST_PARTS
    wanted_ns = min(max(alone_ns * times // by, AUTO_LEAST_NS), AUTO_MOST_NS)
    return -(-max(wanted_ns, alone_ns * least_times // least_by) // _MS) * _MS


@dataclass(frozen=True)
class TimeBudget:
    """The time between two tokens of a sequence that decodes is predicted to be at most `budget_ns`; without decodes a
    step is predicted to end within `ceiling_ns`. None: the budget is chosen for each step, `automatic_budget_ns`.

    With no decodes to delay, wide chunks give the best TTFT; the ceiling keeps the loop responsive to aborts and
    arrivals. However slow the machine is, such a step has `alone_tokens`: in narrower steps the fixed cost would
    dominate, and a model that never sees wider ones could not learn that they are cheaper.
    """

    budget_ns: int | None
    ceiling_ns: int = 250_000_000
    least_tokens: int = BLOCK_TOKENS
    alone_tokens: int = 4 * BLOCK_TOKENS

    def sizer(self, cost: CostModel | None) -> "TimeSizer":
        if cost is None:
            raise ValueError("chunks sized by time need a cost model")
        return TimeSizer(self, cost)


class TimeSizer:
    """Sizes chunks by inverting a cost model that learns."""

    learns = True

    def __init__(self, policy: TimeBudget, cost: CostModel) -> None:
        self._policy, self._cost = policy, cost

    def promise(self, decodes: StepShape, overhead_ns: int) -> Promise | None:
        decodes_ns, budget_ns = self._cost.estimate(decodes).bound_ns, self._policy.budget_ns
        return Promise(
            automatic_budget_ns(decodes_ns, overhead_ns) if budget_ns is None else budget_ns, overhead_ns, decodes_ns
        )

    def grant(self, load: StepShape, start: int, wanted: int, promise: Promise | None, held: int = 0) -> Grant:
        policy = self._policy
        limit_ns, least = (promise.kernels_ns, 0) if promise else (policy.ceiling_ns, policy.alone_tokens - load.tokens)
        others = load.without_slice(start - held, held, 0) if held else load
        fits = largest_slice(self._cost, others, start - held, held + wanted, limit_ns) - held
        tokens = _cut(start, wanted, max(least, fits), WHOLE).tokens
        if tokens == wanted:
            return Grant(tokens, WHOLE)
        predicted_ns = self._cost.estimate(others.with_slice(start - held, held + tokens, 0)).bound_ns
        if promise:
            numbers = promise.budget_ns, predicted_ns + promise.overhead_ns
            return Grant(tokens, Reason(Why.ITL_BUDGET, numbers))
        return Grant(tokens, Reason(Why.LONGEST_STEP, (limit_ns, predicted_ns)))

    def least_share(self, load: StepShape, start: int, most: int, promise: Promise | None, first: bool) -> int:
        """As many as keep the promise, whether they end a block or not. If not even one does: to the first prompt of a
        step as many as lengthen it by an eighth, at least one."""
        if promise is None:
            return most
        if fits := largest_slice(self._cost, load, start, most, promise.kernels_ns):
            return fits
        if not first:
            return 0
        token_ns = self._cost.estimate(load.with_slice(start, 1, 1)).bound_ns
        return max(1, largest_slice(self._cost, load, start, most, promise.slowed_ns(token_ns)))

    def predicted_ns(self, shape: StepShape) -> int | None:
        return self._cost.estimate(shape).bound_ns


def _cut(start: int, wanted: int, room: int, reason: Reason) -> Grant:
    """At most `room` of `wanted`; a cut chunk ends with a block, so that whole blocks get computed."""
    if room >= wanted:
        return Grant(wanted, WHOLE)
    end = (start + max(0, room)) // BLOCK_TOKENS * BLOCK_TOKENS
    return Grant(max(0, end - start), reason)
