"""Requests, and their sequences: one per choice. docs/scheduling.md has the table of stages and their transitions."""

from dataclasses import dataclass, field
from enum import Enum

BLOCK_TOKENS = 16
"""Token positions in one KV block."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the scheduler needs to know of a request: counts and hashes, never tokens.

    `hashes` are those of the prompt's full blocks (see `blocks.prompt_hashes`); empty means that its KV is neither
    looked up in the prefix cache nor kept there. A lower `priority` is more urgent. The KV of the first
    `arrived_tokens` of the prompt was computed elsewhere: the executor writes it into the blocks that the first step
    names; with a window, from the first block on that the next token sees. `given` counts the output tokens that each
    choice has already: another scheduler was serving it. Empty: none has any.
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    hashes: tuple[bytes, ...] = ()
    priority: int = 0
    choices: int = 1
    arrived_tokens: int = 0
    given: tuple[int, ...] = ()


class Stage(Enum):
    """Where a sequence is. Every live one is in exactly one of these places; docs/scheduling.md has the transitions."""

    FORK_WAITING = "waits for the prefill of its request's first choice, to share its blocks"
    WAITING = "waits for a slot and blocks"
    PREFILL = "has a slot and is more than one token behind, or has drafts to verify"
    DECODE = "has a slot and is in the decode batch: every step computes one token"
    PENDING = "outcome pending until the current step completes: its last token, or drafts that are verified"
    ENDED = "gone"


class FinishReason(Enum):
    """How a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"
    FAILED = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. The KV of `computed` of its `known` tokens is in the cache.

    Each step lets a sequence catch up by some tokens, and when it has caught up, its last row of logits is sampled,
    which makes one more token known. In stage DECODE both counts are kept by `DecodeBatch`, and those here are stale.
    """

    number: int
    """In the order of arrival; ties between equals are broken by it."""
    arrival_ns: int
    request: Request
    choice: int
    known: int
    computed: int = 0
    stage: Stage = Stage.WAITING
    hashes: list[bytes] = field(default_factory=list)
    """Of its full blocks: the request's, then those of its output as they fill."""
    tables: tuple[list[int | None], ...] = ()
    """For each group of blocks: block i holds positions 16·i .. 16·i+15; None where the window has passed."""
    published: int = 0
    """Blocks offered to the prefix cache, from the first."""
    arrived: int = 0
    """Tokens whose KV arrives from elsewhere; 0 once it is in the cache, or lost."""
    drafts: int = 0
    """Drafted tokens that its next slice verifies."""
    advanced: int = 0
    """Number of the last step that computed a token of it."""
    offset: int = 0
    """In stage DECODE: `computed` less the steps of `DecodeBatch`."""
    siblings: list["Sequence"] = field(default_factory=list)
    """Choices that wait to be forked from this one."""

    @property
    def limit(self) -> int:
        """Known tokens at which it ends."""
        return self.request.prompt_tokens + self.request.max_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute until its last row is sampled."""
        return self.known + self.drafts - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the more urgent first, among equals the earlier."""
        return self.request.priority, self.number


def blocks_for(tokens: int) -> int:
    """KV blocks that hold this many token positions."""
    return -(-tokens // BLOCK_TOKENS)
