"""What an executor is asked to compute in one step, and the protocol that every executor answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from twostep.spec.kv_layout import KvLayout

Ints = NDArray[np.int32]

BLOCK_TOKENS = 16
"""Token positions in one KV block."""


@dataclass(frozen=True)
class Slice:
    """Consecutive tokens of one sequence: positions `start` .. `start + len(tokens) - 1`.

    `blocks` is the sequence's block table: block i holds positions 16·i .. 16·i+15; it covers at least
    `start + len(tokens)` positions, and positions before `start` were computed by earlier steps.
    `logits` are the indices into `tokens` whose next-token logits are wanted, ascending.

    Where the network's KV layout has several groups, `blocks` is the table of the first group and `more_blocks` has
    those of the others. Entries of blocks that the window of a group has passed are not read.
    """

    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    logits: Sequence[int] = ()
    more_blocks: tuple[Sequence[int], ...] = ()

    @property
    def tables(self) -> tuple[Sequence[int], ...]:
        """Block tables by group."""
        return (self.blocks, *self.more_blocks)

    @property
    def blocks_needed(self) -> int:
        """Entries of each table that positions up to the last token need."""
        return -(-(self.start + len(self.tokens)) // BLOCK_TOKENS)


@dataclass(frozen=True)
class StepArrays:
    """A whole step as arrays that may be kept from step to step: preparing one then costs what changed.

    All are one-dimensional, contiguous and int32; they are only read, never copied, and must not change while the step
    runs. A slice means the same as `Slice`; slice s owns rows `sum(counts[:s])` and the `counts[s]` following ones.
    """

    tokens: Ints
    """Token ids, one a row of the step."""
    starts: Ints
    """By slice: the position of its first token."""
    counts: Ints
    """By slice: its tokens, at least 1. They add up to the rows."""
    tables: tuple[Ints, ...]
    """By group of the KV layout: all block tables, anywhere in the array; a 2-D array of tables is passed as
    `array.reshape(-1)`, which copies nothing.

    Of a table, entries up to (start + count - 1) // 16 are read, from the first block that the window of the group
    shows to the slice's first token. What lies between tables is ignored.
    """
    table_starts: Ints
    """By slice: the index at which its table begins in each array of `tables`. Slices may share a table's entries."""
    logit_rows: Ints
    """Rows whose next-token logits are wanted: indices into `tokens`, ascending, each at most once."""

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> Self:
        """The same step; the slices are as `check_step` requires."""
        counts = [len(piece.tokens) for piece in slices]
        first_rows = accumulate(counts, initial=0)
        table_starts = list(accumulate((piece.blocks_needed for piece in slices), initial=0))
        groups = len(slices[0].tables) if slices else 1
        wanted = [first + i for first, piece in zip(first_rows, slices, strict=False) for i in piece.logits]
        return cls(
            _ints([token for piece in slices for token in piece.tokens]),
            _ints([piece.start for piece in slices]),
            _ints(counts),
            tuple(
                _ints([block for piece in slices for block in piece.tables[g][: piece.blocks_needed]])
                for g in range(groups)
            ),
            _ints(table_starts[:-1]),
            _ints(wanted),
        )

    def slices(self) -> Iterator[Slice]:
        """The same step, slice by slice; the arrays are as `check_arrays` requires."""
        ends = self.counts.cumsum()
        for first, end, start, table in zip(ends - self.counts, ends, self.starts, self.table_starts, strict=True):
            low, high = np.searchsorted(self.logit_rows, (first, end))
            blocks = -(-(int(start) + int(end - first)) // BLOCK_TOKENS)
            tables = [array[table : table + blocks].tolist() for array in self.tables]
            tokens, logits = self.tokens[first:end].tolist(), (self.logit_rows[low:high] - first).tolist()
            yield Slice(int(start), tokens, tables[0], logits, tuple(tables[1:]))


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


@dataclass(frozen=True)
class Capabilities:
    """What a kernel executor can do beyond `forward`. What needs more is refused when an engine is made."""

    layout: KvLayout
    """Of its KV memory: element type, groups of layers, windows."""
    blocks: tuple[int, ...]
    """Blocks of its KV memory, by group."""
    drafts: bool
    """A slice may have logits of several rows, so that drafted tokens can be verified."""
    transfers: bool
    """`export_block` and `import_block` work: KV can leave, and KV computed elsewhere can arrive."""
    shareable: bool
    """Other processes can map its KV memory."""


class Executor(Protocol):
    """Runs steps of one network over one paged KV cache.

    Not thread-safe: one call at a time. Where threads could destroy each other's results (the native executor), a call
    made while another runs raises `RuntimeError` and changes nothing.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; does not change."""
        ...

    def forward(self, slices: Sequence[Slice]) -> NDArray[np.float32]:
        """Computes one step; any mixture of prefill slices and decodes, each sequence at most once.

        Writes the slices' K and V to the cache. Returns logits, shape (rows asked for, vocab), in the order of the
        slices; the array may be reused by the next call. Raises `ValueError` that names the slice and its fault
        (token out of the vocabulary, block out of the cache, table too short), before anything is changed.
        """
        ...

    def forward_arrays(self, step: StepArrays) -> NDArray[np.float32]:
        """`forward` without its preparation: the same step gives the same bits, from arrays that the caller keeps.

        Logits are those of `step.logit_rows`, in their order. Raises `ValueError` as `forward` does, and for arrays of
        the wrong kind or that do not fit each other, before anything is changed.
        """
        ...

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        """Copies K and V of one whole block, in all layers of its group: for a sequence that forks inside a block.

        Raises `ValueError` for a group or block that does not exist, or a block copied to itself.
        """
        ...

    def export_block(self, block: int, group: int = 0) -> bytes:
        """K and V of one block in all layers of its group, with a header that names layout and group, and a checksum.

        Any executor of the same layout imports it. Raises `ValueError` for a group or block that does not exist,
        `UnsupportedError` without `capabilities.transfers`.
        """
        ...

    def import_block(self, data: bytes | bytearray | memoryview, block: int, group: int = 0) -> None:
        """Replaces a block by what `export_block` gave, here or elsewhere.

        Raises `BlockImportError` for data that is damaged, of another length, layout or group, or not finite; for the
        rest as `export_block`. Nothing is changed then.
        """
        ...


class StepCancelledError(Exception):
    """`cancel()` stopped the step between layers. KV of its slices is undefined; earlier positions are intact."""
