"""Refuses a step that an executor could not compute as the protocol promises, before anything is changed."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twostep.kernels.step import BLOCK_TOKENS, Ints, Slice, StepArrays

Flags = NDArray[np.bool_]


def check_step(slices: Sequence[Slice], vocab: int, kv_blocks: int) -> None:
    """Raises `ValueError` that names the slice by its place in the step, and what is wrong with it."""
    for number, piece in enumerate(slices):
        for fault in _faults(piece, vocab, kv_blocks):
            raise ValueError(f"slice {number}: {fault}")
    _check_writes(slices)


def _faults(piece: Slice, vocab: int, kv_blocks: int) -> Iterator[str]:
    """What is wrong with a slice; each check may rely on the ones before it."""
    end = piece.start + len(piece.tokens)
    if len(piece.tokens) == 0:
        yield "it has no tokens"
    if piece.start < 0:
        yield f"it starts at position {piece.start}, before 0"
    yield from _outside("token", piece.tokens, vocab, "the vocabulary")
    if len(piece.blocks) * BLOCK_TOKENS < end:
        yield f"its table of {len(piece.blocks)} blocks holds {len(piece.blocks) * BLOCK_TOKENS} positions, not {end}"
    yield from _outside("block", piece.blocks, kv_blocks, "the cache")
    if len(set(piece.blocks)) < len(piece.blocks):
        yield f"its table names a block twice: {list(piece.blocks)}"
    yield from _logits_faults(piece)


def _logits_faults(piece: Slice) -> Iterator[str]:
    yield from _outside("logits index", piece.logits, len(piece.tokens), "its tokens")
    if len(piece.logits) > 1 and list(piece.logits) != sorted(set(piece.logits)):
        yield f"its logits indices do not ascend: {list(piece.logits)}"


def _outside(what: str, numbers: Sequence[int], limit: int, whole: str) -> Iterator[str]:
    """At most one fault, found at C speed: a step has thousands of numbers, nearly always all of them in order."""
    if len(numbers) and not (min(numbers) >= 0 and max(numbers) < limit):
        n = next(n for n in numbers if not 0 <= n < limit)
        yield f"{what} {n} is outside {whole} (0 to {limit - 1})"


def _check_writes(slices: Sequence[Slice]) -> None:
    """No two slices may write one block: the second would undo the first."""
    writer: dict[int, int] = {}
    for number, piece in enumerate(slices):
        for block in _written(piece):
            if writer.setdefault(block, number) != number:
                raise ValueError(f"slice {number}: block {block} is also written by slice {writer[block]}")


def _written(piece: Slice) -> Sequence[int]:
    last = piece.start + len(piece.tokens) - 1
    return piece.blocks[piece.start // BLOCK_TOKENS : last // BLOCK_TOKENS + 1]


def check_copy(source: int, target: int, kv_blocks: int) -> None:
    """Raises `ValueError` for a copy between blocks that are not two of the cache."""
    for fault in _outside("block", (source, target), kv_blocks, "the cache"):
        raise ValueError(f"copy_block: {fault}")
    if source == target:
        raise ValueError(f"copy_block: block {source} would be copied to itself")


def check_arrays(step: StepArrays, vocab: int) -> None:
    """Raises `ValueError` for arrays that are no step; with a handful of passes over them, whatever their length.

    Which blocks the tables name is left to who reads them anyway: `native/batch.h`, or `check_step` on the slices.
    """
    _check_kinds(step)
    _check_slices(step)
    _check_tokens(step, vocab)
    _check_logit_rows(step)


def _check_kinds(step: StepArrays) -> None:
    for name, array in vars(step).items():
        if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"{name} has to be a contiguous int32 vector, not {array.dtype} of shape {array.shape}")
    if not len(step.starts) == len(step.counts) == len(step.table_starts):
        lengths = f"{len(step.starts)}, {len(step.counts)} and {len(step.table_starts)}"
        raise ValueError(f"starts, counts and table_starts have one entry a slice, not {lengths}")


def _check_slices(step: StepArrays) -> None:
    """That they make up the rows, and that each finds its whole table in `tables`."""
    _refuse_any(step.counts < 1, "it has no tokens")
    if (rows := int(step.counts.sum(dtype=np.int64))) != len(step.tokens):
        raise ValueError(f"the slices' counts make {rows} rows, but there are {len(step.tokens)} tokens")
    _refuse_any(step.starts < 0, "it starts before position 0")
    _refuse_any(step.table_starts < 0, "its table starts before `tables` does")
    ends = np.add(step.starts, step.counts, dtype=np.int64)
    _refuse_any(
        step.table_starts + (ends + BLOCK_TOKENS - 1) // BLOCK_TOKENS > len(step.tables),
        f"`tables` with its {len(step.tables)} entries ends before its table does",
    )


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
