"""Prompts of a workload, of the lengths and with the shared beginnings that it names, for any tokenizer."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from twostep.bench.client.target import Prompt
from twostep.bench.load.prompt_words import WORDS
from twostep.bench.load.record import Fit
from twostep.workload.workload import WorkloadRequest

FIRST_ID = 1000
"""Token ids below may be special, or single bytes."""
_KEPT_BLOCKS = 8192


class Source(Protocol):
    """Makes prompts."""

    def prompt(self, number: int, request: WorkloadRequest) -> Prompt:
        """The same for the same arguments. Equal leading blocks have equal leading content."""


@dataclass(frozen=True)
class Seeds:
    """What content is made from. Another salt gives other content everywhere."""

    salt: str

    def of_block(self, block: int) -> random.Random:
        return random.Random(f"{self.salt}/block {block}")

    def of_rest(self, number: int) -> random.Random:
        return random.Random(f"{self.salt}/request {number}")


class WordSource:
    """English words, as many as `fit` says. A prompt that the workload has as text stays as it is."""

    def __init__(self, fit: Fit, block_tokens: int, salt: str) -> None:
        self._spans = Spans(fit, block_tokens)
        self._seeds = Seeds(salt)
        self._block = lru_cache(_KEPT_BLOCKS)(self._block_words)

    def prompt(self, number: int, request: WorkloadRequest) -> str:
        if request.text is not None:
            return request.text
        total = max(1, self._spans.words(request.input_tokens))
        words = _joined(map(self._block, request.blocks), self._spans.sizes(), total)
        words += self._seeds.of_rest(number).choices(WORDS, k=total - len(words))
        return " ".join(words)

    def _block_words(self, block: int) -> list[str]:
        return self._seeds.of_block(block).choices(WORDS, k=self._spans.largest)


class IdSource:
    """Token ids from `FIRST_ID`, of a small vocabulary from its half, up to its size: lengths are exact.

    A prompt that the workload has as text stays as it is.
    """

    def __init__(self, vocabulary: int, block_tokens: int, salt: str) -> None:
        self._ids = range(min(FIRST_ID, vocabulary // 2), vocabulary)
        self._block_tokens = block_tokens
        self._seeds = Seeds(salt)
        self._block = lru_cache(_KEPT_BLOCKS)(self._block_ids)

    def prompt(self, number: int, request: WorkloadRequest) -> Prompt:
        if request.text is not None:
            return request.text
        ids = [id_ for block in request.blocks for id_ in self._block(block)][: request.input_tokens]
        return ids + self._seeds.of_rest(number).choices(self._ids, k=request.input_tokens - len(ids))

    def _block_ids(self, block: int) -> list[int]:
        return self._seeds.of_block(block).choices(self._ids, k=self._block_tokens)


class Spans:
    """Which words of a prompt stand for which of its tokens, by place alone: so the same blocks at the same places
    give the same words, though a block need not be a whole number of words."""

    def __init__(self, fit: Fit, block_tokens: int) -> None:
        self._fit, self._block_tokens = fit, block_tokens
        self.largest = int(block_tokens / fit.per_word) + 1
        """Words that a block may have at most."""

    def words(self, tokens: int) -> int:
        """In the first `tokens` tokens, of which the overhead has its part."""
        return max(0, round((tokens - self._fit.overhead) / self._fit.per_word))

    def sizes(self) -> Iterator[int]:
        """Words of the first block, the second, and so on without end."""
        before = blocks = 0
        while True:
            blocks += 1
            after = self.words(blocks * self._block_tokens)
            yield after - before
            before = after


def _joined(blocks: Iterator[Sequence[str]], sizes: Iterator[int], total: int) -> list[str]:
    """The first words of each block, as many as its size says, until there are `total`."""
    words: list[str] = []
    for block, size in zip(blocks, sizes, strict=False):
        words += block[:size]
        if len(words) >= total:
            break
    return words[:total]
