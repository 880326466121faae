"""What one step does: the plan, and what carrying it out gave and returns. All values: immutable, comparable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from twostep.core.kv_cache import Copied, Granted
from twostep.core.reasons import Reason
from twostep.core.request import BLOCK_TOKENS, FinishReason
from twostep.core.step_time import StepShape


class Chunk(NamedTuple):
    """`tokens` tokens of a sequence from position `start`.

    The last 1 + `drafts` rows are sampled if `samples`: then the sequence has caught up. The last `drafts` tokens are
    guesses to verify. `forks` are further choices that start from here: each samples the last row too.
    """

    number: int
    start: int
    tokens: int
    samples: bool
    reason: Reason
    drafts: int = 0
    forks: tuple[int, ...] = ()


class Admission(NamedTuple):
    """A sequence gets a seat and blocks; the KV of its first `cached` tokens is here, `arrived` more are to be put."""

    number: int
    cached: int
    arrived: int
    known: int

    @property
    def start(self) -> int:
        """The first position to compute."""
        return max(self.cached * BLOCK_TOKENS, self.arrived)


class Preemption(NamedTuple):
    """A sequence gives back seat and blocks, and waits again at its old place; `lost` tokens were computed in vain,
    but for blocks that it finds again."""

    number: int
    lost: int
    reason: Reason


class Held(NamedTuple):
    """A sequence that could have been next, and why it was not admitted."""

    number: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, decided. It is a difference to the standing set: all `decoding` members compute one token each, less
    the preempted ones; everything else is listed."""

    step: int
    changes: int
    """State of the scheduler that it was made from; `advance` takes no other."""
    decoding: int
    open: int = 0
    """How many the batching policy let join."""
    preemptions: tuple[Preemption, ...] = ()
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    held: tuple[Held, ...] = ()
    shape: StepShape = field(default_factory=StepShape)
    predicted_ns: int | None = None

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        return not (self.shape.tokens or self.preemptions)


@dataclass(frozen=True, slots=True)
class Step:
    """A plan carried out on the books: what an executor needs to compute it.

    It keeps the standing set itself: first `left` go, then `joined` come (number, position of the token to compute),
    and each member computes one token. `granted` change block tables before, `copied` happens after the step.
    """

    plan: Plan
    left: tuple[int, ...]
    joined: tuple[tuple[int, int], ...]
    granted: tuple[Granted, ...]
    copied: tuple[Copied, ...]


class Outcome(NamedTuple):
    """What a sampled slice gave, where it is not one token and on it goes.

    `tokens`: 1 + accepted drafts. `drafts`: guesses that the next slice shall verify.
    """

    tokens: int = 1
    finished: FinishReason | None = None
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor reports. `hashes`: of output blocks that this step filled, in order; none: they are not kept.

    `failed`: nothing was computed, and what the step wrote is unknown; outcomes of sequences to blame have FAILED.
    """

    step_ns: int
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    hashes: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    failed: bool = False


class Finished(NamedTuple):
    """A sequence ended, its blocks are back."""

    number: int
    reason: FinishReason
    known: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a step's end changed beyond one more token for each that was sampled."""

    finished: tuple[Finished, ...] = ()
    preempted: tuple[Preemption, ...] = ()
