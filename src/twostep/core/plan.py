"""What one step does: the plan, what executing it needs, and what it returned. All values: immutable, comparable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from twostep.core.cost import StepShape
from twostep.core.kv_cache import Copied, Granted
from twostep.core.promise import Promise
from twostep.core.reasons import Reason
from twostep.core.request import BLOCK_TOKENS, FinishReason


class Chunk(NamedTuple):
    """`tokens` tokens of a sequence from position `start`.

    `samples`: the sequence has caught up with all its known tokens, so that the last 1 + `drafts` rows are sampled. The
    last `drafts` tokens are guesses to verify. `forks` are further choices that start from here: each samples the last
    row too.
    """

    number: int
    start: int
    tokens: int
    samples: bool
    reason: Reason
    drafts: int = 0
    forks: tuple[int, ...] = ()


class Admission(NamedTuple):
    """A waiting sequence gets a slot and blocks. Its first `cached` blocks were found in the prefix cache; the KV of
    its first `arrived` tokens was computed elsewhere and is written by the executor; `known` tokens are known."""

    number: int
    cached: int
    arrived: int
    known: int

    @property
    def start(self) -> int:
        """The first position to compute."""
        return max(self.cached * BLOCK_TOKENS, self.arrived)


class Preemption(NamedTuple):
    """A sequence returns its slot and blocks, and waits again at its old place in the queue. `lost` computed tokens
    must be computed again, except for blocks that the prefix cache still holds."""

    number: int
    lost: int
    reason: Reason


class NotAdmitted(NamedTuple):
    """A waiting sequence that was considered, and why it was not admitted."""

    number: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, decided. It is a difference to the decode batch: all `decoding` members compute one token each, except
    the preempted ones; everything else is listed."""

    step: int
    changes: int
    """The scheduler's count of changes when the plan was made; `advance` rejects a plan with another one."""
    decoding: int
    open: int = 0
    """How many admissions the batching policy allowed."""
    preemptions: tuple[Preemption, ...] = ()
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    not_admitted: tuple[NotAdmitted, ...] = ()
    shape: StepShape = field(default_factory=StepShape)
    predicted_ns: int | None = None
    """The bound of the kernels' time; None if chunks are not sized by time."""
    promise: Promise | None = None
    """What the step keeps to; None if nothing decodes in it, or chunks are not sized by time."""
    next_wake_ns: int | None = None
    """Only of an empty plan: when to plan again even if nothing arrives. None: not before the next arrival or abort."""

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        return not (self.shape.tokens or self.preemptions)

    @property
    def longest_ns(self) -> int | None:
        """The bound of the time from the tokens of the step before to those of this one; None without a promise."""
        if self.promise is None or self.predicted_ns is None:
            return None
        return self.predicted_ns + self.promise.overhead_ns

    @property
    def over_budget(self) -> bool:
        """Whether it knowingly breaks its promise: the budget is impossible for this batch, and `longest_ns` is the
        least that would be possible."""
        longest_ns = self.longest_ns
        return longest_ns is not None and self.promise is not None and longest_ns > self.promise.budget_ns


@dataclass(frozen=True, slots=True)
class Step:
    """A plan that the scheduler has applied to its state: what an executor needs to compute it.

    The executor keeps the decode batch itself: first `left` leave, then `joined` join (number, position of the token to
    compute), and each member computes one token. `granted` changes block tables before the step, `copied` after it.
    """

    plan: Plan
    left: tuple[int, ...]
    joined: tuple[tuple[int, int], ...]
    granted: tuple[Granted, ...]
    copied: tuple[Copied, ...]


class SliceOutcome(NamedTuple):
    """What a sampled slice returned; omitted when one token was sampled and decoding continues.

    `tokens`: 1 + accepted drafts. `drafts`: guesses that the sequence's next slice verifies.
    """

    tokens: int = 1
    finished: FinishReason | None = None
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor reports. `hashes`: of output blocks that this step filled, in order; without them output blocks
    do not enter the prefix cache. `starved_ns`: of the time, what the kernels were kept from the cores (estimated).

    `failed`: nothing was computed, and the content of the blocks that the step wrote is unknown; `outcomes` has FAILED
    for the sequences that caused it.
    """

    step_ns: int
    outcomes: Mapping[int, SliceOutcome] = field(default_factory=dict)
    hashes: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    failed: bool = False
    starved_ns: int = 0


class Finished(NamedTuple):
    """A sequence ended with `known` tokens; its blocks are free."""

    number: int
    reason: FinishReason
    known: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the end of a step changed beyond one more token for each sampled sequence."""

    finished: tuple[Finished, ...] = ()
    preempted: tuple[Preemption, ...] = ()
