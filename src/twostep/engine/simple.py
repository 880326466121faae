"""One request alone, without a scheduler: prefill in chunks, then a token a step. The engine proper will replace it."""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twostep.errors import SamplingError
from twostep.kernels.sampling import Sampler, SampleRow, TokenSampling
from twostep.kernels.step import BLOCK_TOKENS, Executor, Slice

CHUNK_TOKENS = 512
"""Wide enough for the kernels' full speed, short enough that Ctrl-C is heard between two chunks."""

Choose = Callable[[NDArray[np.float32], Sequence[int]], int]
"""Picks the next token from logits, shape (1, vocab), given the output so far."""


def blocks_for(tokens: int) -> int:
    """KV blocks that hold this many token positions."""
    return -(-tokens // BLOCK_TOKENS)


def generate(
    executor: Executor, prompt: Sequence[int], max_tokens: int, stop_ids: Collection[int], choose: Choose
) -> Iterator[int]:
    """Yields up to `max_tokens` tokens, ends before one of `stop_ids`. `prompt` has at least one token.

    The executor's cache must have `blocks_for(len(prompt) + max_tokens)` blocks; all of them are used from block 0.
    """
    known = list(prompt)
    computed = 0
    blocks = range(blocks_for(len(prompt) + max_tokens))
    while len(known) < len(prompt) + max_tokens:
        tokens = known[computed : computed + CHUNK_TOKENS]
        complete = computed + len(tokens) == len(known)
        logits = executor.forward([Slice(computed, tokens, blocks, logits=[len(tokens) - 1] if complete else [])])
        computed += len(tokens)
        if not complete:
            continue
        token = choose(logits, known[len(prompt) :])
        if token in stop_ids:
            return
        known.append(token)
        yield token


def chooser(params: TokenSampling, prompt: Sequence[int], vocab: int) -> Choose:
    """Chooses as `params` say, which have a seed. The result raises `SamplingError` where no token can be chosen."""
    sampler = Sampler(vocab)
    prompt_ids = np.array(prompt, dtype=np.int32)

    def choose(logits: NDArray[np.float32], output: Sequence[int]) -> int:
        output_ids = np.array(output, dtype=np.int32)
        row = SampleRow(params, choice=0, position=len(prompt) + len(output), prompt=prompt_ids, output=output_ids)
        [result] = sampler.sample(logits, [row])
        if isinstance(result, SamplingError):
            raise result
        return result.token

    return choose
