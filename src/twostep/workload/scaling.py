"""Blocks of prompts whose lengths are scaled: equal prefixes stay equal, and as long as they have to be."""

from collections.abc import Iterator
from math import ceil

from twostep.workload.workload import Workload

LEAST_BLOCK_TOKENS = 16
"""Blocks that scaling would make smaller are drawn together: no server's prefix cache has smaller ones, and the rest
of a prefix that they do not cover is at most as long."""


def scaled_blocks(workload: Workload, factor: float) -> tuple[int, list[tuple[int, ...]]]:
    """Tokens of a block, and each request's blocks, numbered anew.

    A new block holds `block_tokens / factor` old tokens. It is known by the new block before it and the old blocks that
    it touches, so that two are equal just where all old blocks up to its end are.
    """
    old_tokens = workload.block_tokens
    block_tokens = max(min(old_tokens, LEAST_BLOCK_TOKENS), round(old_tokens * factor))
    stride = block_tokens / factor / old_tokens  # old blocks in a new one
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    return block_tokens, [tuple(_renumbered(one.blocks, stride, numbers)) for one in workload.requests]


def _renumbered(
    blocks: tuple[int, ...], stride: float, numbers: dict[tuple[int, tuple[int, ...]], int]
) -> Iterator[int]:
    """New blocks that old ones cover wholly."""
    parent, new = -1, 0
    while (end := ceil((new + 1) * stride - 1e-9)) <= len(blocks):
        key = parent, blocks[int(new * stride + 1e-9) : end]
        parent = numbers.setdefault(key, len(numbers))
        yield parent
        new += 1
