"""What an executor is asked to compute in one step, and the protocol that every executor answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

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


@dataclass(frozen=True)
class StepArrays:
    """A whole step as arrays that may be kept from step to step: preparing one then costs what changed.

    All are one-dimensional, contiguous and int32; they are only read, never copied, and must not change while the step
    runs. A slice has the meaning of `Slice`; slice s owns rows `sum(counts[:s])` and the `counts[s]` following ones.
    """

    tokens: Ints
    """Token ids, one a row of the step."""
    starts: Ints
    """By slice: the position of its first token."""
    counts: Ints
    """By slice: its tokens, at least 1. They add up to the rows."""
    tables: Ints
    """Block tables, wherever they lie in it; a 2-D array of tables enters as `array.reshape(-1)`, which copies nothing.

    Of a table, entries 0 .. (start + count - 1) // 16 are read; what lies between tables is not looked at.
    """
    table_starts: Ints
    """By slice: the index in `tables` at which its table begins. Slices may share a table's entries."""
    logit_rows: Ints
    """Rows whose next-token logits are wanted: indices into `tokens`, ascending, each at most once."""

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> Self:
        """The same step; the slices are as `check_step` wants them."""
        counts = [len(piece.tokens) for piece in slices]
        first_rows = accumulate(counts, initial=0)
        table_starts = list(accumulate((len(piece.blocks) for piece in slices), initial=0))
        wanted = [first + i for first, piece in zip(first_rows, slices, strict=False) for i in piece.logits]
        return cls(
            _ints([token for piece in slices for token in piece.tokens]),
            _ints([piece.start for piece in slices]),
            _ints(counts),
            _ints([block for piece in slices for block in piece.blocks]),
            _ints(table_starts[:-1]),
            _ints(wanted),
        )

    def slices(self) -> Iterator[Slice]:
        """The same step, slice by slice; the arrays are as `check_arrays` wants them."""
        ends = self.counts.cumsum()
        for first, end, start, table in zip(ends - self.counts, ends, self.starts, self.table_starts, strict=True):
            low, high = np.searchsorted(self.logit_rows, (first, end))
            blocks = -(-(int(start) + int(end - first)) // BLOCK_TOKENS)
            yield Slice(
                int(start),
                self.tokens[first:end].tolist(),
                self.tables[table : table + blocks].tolist(),
                (self.logit_rows[low:high] - first).tolist(),
            )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


class Executor(Protocol):
    """Runs steps of one network over one paged KV cache.

    Not thread-safe: one call at a time. Where threads could destroy each other's results (the native executor), a call
    made while another runs raises `RuntimeError` and changes nothing.
    """

    def forward(self, slices: Sequence[Slice]) -> NDArray[np.float32]:
        """Computes one step; any mixture of prefill slices and decodes, each sequence at most once.

        Writes the slices' K and V to the cache. Returns logits, shape (rows asked for, vocab), in the order of the
        slices; the array may be reused by the next call. Raises `ValueError` that names what is wrong with a slice
        (token out of the vocabulary, block out of the cache, table too short), before anything is changed.
        """
        ...

    def forward_arrays(self, step: StepArrays) -> NDArray[np.float32]:
        """`forward` without its preparation: the same step gives the same bits, from arrays that the caller keeps.

        Logits are those of `step.logit_rows`, in their order. Raises `ValueError` as `forward` does, and for arrays of
        the wrong kind or that do not fit each other, before anything is changed.
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copies K and V of one whole block, in all layers: what a sequence needs that forks inside a block.

        Raises `ValueError` for a block outside the cache, or copied to itself.
        """
        ...


class StepCancelledError(Exception):
    """`cancel()` stopped the step between layers. KV of its slices is undefined; earlier positions are intact."""
