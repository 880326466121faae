"""Refuses a step that an executor could not compute as the protocol promises, before anything is changed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twostep.kernels.step import BLOCK_TOKENS, Ints, Slice, StepArrays
from twostep.spec.kv_layout import KvLayout

Flags = NDArray[np.bool_]


class KvPool(NamedTuple):
    """What a check has to know of one group of blocks; `window` as in `KvGroup`."""

    blocks: int
    window: int | None

    def first_seen(self, position: int) -> int:
        """The first entry of a block table that a token at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // BLOCK_TOKENS


def check_step(slices: Sequence[Slice], vocab: int, pools: Sequence[KvPool]) -> None:
    """Raises `ValueError` that names the slice by its place in the step, and its fault."""
    for number, piece in enumerate(slices):
        for fault in _faults(piece, vocab, pools):
            raise ValueError(f"slice {number}: {fault}")
    for group in range(len(pools)):
        _check_writes(slices, group)


def _faults(piece: Slice, vocab: int, pools: Sequence[KvPool]) -> Iterator[str]:
    """The faults of a slice; each check may rely on the ones before it."""
    if len(piece.tokens) == 0:
        yield "it has no tokens"
    if piece.start < 0:
        yield f"it starts at position {piece.start}, before 0"
    yield from _outside("token", piece.tokens, vocab, "the vocabulary")
    if len(piece.tables) != len(pools):
        yield f"it has {len(piece.tables)} block tables; the KV cache has {len(pools)} groups of blocks"
    for table, pool in zip(piece.tables, pools, strict=True):
        yield from _table_faults(piece, table, pool)
    yield from _logits_faults(piece)


def _table_faults(piece: Slice, table: Sequence[int], pool: KvPool) -> Iterator[str]:
    if len(table) < piece.blocks_needed:
        held, end = len(table) * BLOCK_TOKENS, piece.start + len(piece.tokens)
        yield f"its table of {len(table)} blocks holds {held} positions, not {end}"
    seen = table[pool.first_seen(piece.start) :]
    yield from _outside("block", seen, pool.blocks, "the cache")
    if len(set(seen)) < len(seen):
        yield f"its table names a block twice: {list(seen)}"


def _logits_faults(piece: Slice) -> Iterator[str]:
    yield from _outside("logits index", piece.logits, len(piece.tokens), "its tokens")
    if len(piece.logits) > 1 and list(piece.logits) != sorted(set(piece.logits)):
        yield f"its logits indices do not ascend: {list(piece.logits)}"


def _outside(what: str, numbers: Sequence[int], limit: int, whole: str) -> Iterator[str]:
    """At most one fault, found at C speed: a step has thousands of numbers, nearly always all of them in range."""
    if len(numbers) and not (min(numbers) >= 0 and max(numbers) < limit):
        n = next(n for n in numbers if not 0 <= n < limit)
        yield f"{what} {n} is outside {whole} (0 to {limit - 1})"


def _check_writes(slices: Sequence[Slice], group: int) -> None:
    """No two slices may write one block: the second would undo the first."""
    writer: dict[int, int] = {}
    for number, piece in enumerate(slices):
        for block in piece.tables[group][piece.start // BLOCK_TOKENS : piece.blocks_needed]:
            if writer.setdefault(block, number) != number:
                raise ValueError(f"slice {number}: block {block} is also written by slice {writer[block]}")


def check_block(what: str, block: int, group: int, pools: Sequence[KvPool]) -> None:
    """Raises `ValueError`, which begins with `what`, for a block or group that does not exist."""
    for fault in _outside("group", (group,), len(pools), "the KV cache"):
        raise ValueError(f"{what}: {fault}")
    for fault in _outside("block", (block,), pools[group].blocks, "the cache"):
        raise ValueError(f"{what}: {fault}")


def check_copy(source: int, target: int, group: int, pools: Sequence[KvPool]) -> None:
    """Raises `ValueError` for a copy unless it is between two different blocks of a group."""
    check_block("copy_block", source, group, pools)
    check_block("copy_block", target, group, pools)
    if source == target:
        raise ValueError(f"copy_block: block {source} would be copied to itself")


def kv_pools(layout: KvLayout, kv_blocks: int | Sequence[int]) -> tuple[KvPool, ...]:
    """The groups of a layout with their numbers of blocks; one number is that of every group.

    Raises `ValueError` where there is not one number for each group, or one is below 1.
    """
    groups = len(layout.groups)
    blocks = (kv_blocks,) * groups if isinstance(kv_blocks, int) else tuple(kv_blocks)
    if len(blocks) != groups:
        raise ValueError(f"kv_blocks has {len(blocks)} numbers; this network has {groups} groups of KV blocks")
    if min(blocks) < 1:
        raise ValueError(f"kv_blocks is {min(blocks)}; a group of KV blocks needs at least 1")
    return tuple(KvPool(*pair) for pair in zip(blocks, layout.windows, strict=True))


def check_arrays(step: StepArrays, vocab: int, groups: int) -> None:
    """Raises `ValueError` for arrays that are not a step of so many groups of blocks; takes a handful of passes.

    The blocks that tables name are checked where they are read anyway: `native/batch.h`, or `check_step` on the slices.
    """
    if len(step.tables) != groups:
        raise ValueError(f"tables has {len(step.tables)} arrays; the KV cache has {groups} groups of blocks")
    _check_kinds(step)
    _check_slices(step)
    _check_tokens(step, vocab)
    _check_logit_rows(step)


def _check_kinds(step: StepArrays) -> None:
    vectors = [(name, array) for name, array in vars(step).items() if name != "tables"]
    for name, array in (*vectors, *(("tables", array) for array in step.tables)):
        if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"{name} has to be a contiguous int32 vector, not {array.dtype} of shape {array.shape}")
    if not len(step.starts) == len(step.counts) == len(step.table_starts):
        lengths = f"{len(step.starts)}, {len(step.counts)} and {len(step.table_starts)}"
        raise ValueError(f"starts, counts and table_starts have one entry a slice, not {lengths}")


def _check_slices(step: StepArrays) -> None:
    """They have to make up the rows, and each needs its whole table in every array of `tables`."""
    _refuse_any(step.counts < 1, "it has no tokens")
    if (rows := int(step.counts.sum(dtype=np.int64))) != len(step.tokens):
        raise ValueError(f"the slices' counts make {rows} rows, but there are {len(step.tokens)} tokens")
    _refuse_any(step.starts < 0, "it starts before position 0")
    _refuse_any(step.table_starts < 0, "its table starts before `tables` does")
    ends = np.add(step.starts, step.counts, dtype=np.int64)
    table_ends = step.table_starts + (ends + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    for array in step.tables:
        _refuse_any(table_ends > len(array), f"`tables` with its {len(array)} entries ends before its table does")


def _refuse_any(flags: Flags, fault: str) -> None:
    if flags.any():
        raise ValueError(f"slice {flags.argmax()}: {fault}")


def _check_tokens(step: StepArrays, vocab: int) -> None:
    if _within(step.tokens, vocab):
        return
    row = int(((step.tokens < 0) | (step.tokens >= vocab)).argmax())
    number = int(np.searchsorted(step.counts.cumsum(), row, side="right"))
    raise ValueError(f"slice {number}: token {step.tokens[row]} is outside the vocabulary (0 to {vocab - 1})")


def _check_logit_rows(step: StepArrays) -> None:
    rows = step.logit_rows
    if (rows[1:] <= rows[:-1]).any():
        raise ValueError("logit_rows do not ascend")
    if not _within(rows, len(step.tokens)):
        raise ValueError(f"logit_rows go from {rows[0]} to {rows[-1]}, outside the rows (0 to {len(step.tokens) - 1})")


def _within(numbers: Ints, limit: int) -> bool:
    """Whether all are from 0 up to `limit`; a negative one is beyond any limit when read as unsigned."""
    return len(numbers) == 0 or int(numbers.view(np.uint32).max()) < limit
