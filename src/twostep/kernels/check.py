"""Refuses a step that an executor could not compute as the protocol promises, before anything is changed."""

from collections.abc import Iterator, Sequence

from twostep.kernels.step import BLOCK_TOKENS, Slice


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
