"""What an executor is asked to compute in one step, and the protocol that every executor answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16
"""Token positions in one KV block."""


@dataclass(frozen=True)
class Slice:
    """Consecutive tokens of one sequence: positions `start` .. `start + len(tokens) - 1`.

    `blocks` is the sequence's block table: block i holds positions 16·i .. 16·i+15; it covers at least
    `start + len(tokens)` positions, and positions before `start` were computed by earlier steps.
    `logits` are the indices into `tokens` whose next-token logits are wanted, ascending.
    """

    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    logits: Sequence[int] = ()


class Executor(Protocol):
    """Runs steps of one network over one paged KV cache. Not thread-safe: one step at a time."""

    def forward(self, slices: Sequence[Slice]) -> NDArray[np.float32]:
        """Computes one step; any mixture of prefill slices and decodes, each sequence at most once.

        Writes the slices' K and V to the cache. Returns logits, shape (rows asked for, vocab), in the order of the
        slices; the array may be reused by the next call. Raises `ValueError` that names what is wrong with a slice
        (token out of the vocabulary, block out of the cache, table too short), before anything is changed.
        """
        ...


class StepCancelledError(Exception):
    """`cancel()` stopped the step between layers. KV of its slices is undefined; earlier positions are intact."""
