"""Holds an executor against the golden files of the oracle (`tests/oracle/make_golden.py` says what is in them)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twostep.kernels.step import BLOCK_TOKENS, Executor, Slice

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden"
CHUNK_TOKENS = 256
"""Default slice of `run_prompt` and `perplexity`: few steps, and logits of a whole slice still fit in memory."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class GoldenPrompt:
    """The oracle's word on one prompt. Row i of `top_ids` and `top_logp` is about the token after `positions[i]`."""

    ids: list[int]
    positions: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logp: Floats
    greedy: list[int] | None


@dataclass(frozen=True)
class Golden:
    """`prompts` by length in tokens; `perplexity` is that of the longest."""

    model_file: str
    prompts: Mapping[int, GoldenPrompt]
    perplexity: float

    @property
    def text_ids(self) -> list[int]:
        return self.prompts[max(self.prompts)].ids


def load_golden(name: str) -> Golden:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        lengths = sorted(int(key.removeprefix("ids_")) for key in arrays.files if key.startswith("ids_"))
        prompts = {length: _golden_prompt(arrays, length) for length in lengths}
        return Golden(json.loads(str(arrays["about"]))["model_file"], prompts, float(arrays["perplexity"]))


def _golden_prompt(arrays: Mapping[str, NDArray[np.generic]], length: int) -> GoldenPrompt:
    ids, positions, top_ids, top_logp = (arrays[f"{k}_{length}"] for k in ("ids", "positions", "top_ids", "top_logp"))
    greedy = arrays[f"greedy_{length}"].tolist() if f"greedy_{length}" in arrays else None
    return GoldenPrompt(ids.tolist(), positions, top_ids, top_logp, greedy)


def blocks_for(tokens: int, first: int = 0) -> range:
    """A block table for so many positions, in the cache from block `first` on."""
    return range(first, first - (-tokens // BLOCK_TOKENS))


def run_prompt(
    executor: Executor, ids: Sequence[int], chunks: Sequence[int] | None = None, blocks: Sequence[int] | None = None
) -> Floats:
    """Logits after every token of a prompt, shape (tokens, vocab), computed in slices of `chunks` tokens."""
    return np.concatenate(list(_steps(executor, ids, chunks, blocks)))


def _steps(
    executor: Executor, ids: Sequence[int], chunks: Sequence[int] | None = None, blocks: Sequence[int] | None = None
) -> Iterator[Floats]:
    ends = list(accumulate(chunks)) if chunks else [*range(CHUNK_TOKENS, len(ids), CHUNK_TOKENS), len(ids)]
    assert ends[-1] == len(ids), f"chunks {chunks} do not make {len(ids)} tokens"
    table = blocks_for(len(ids)) if blocks is None else blocks
    for start, end in zip([0, *ends], ends, strict=False):
        yield executor.forward([Slice(start, ids[start:end], table, range(end - start))]).copy()


def run_golden(executor: Executor, prompt: GoldenPrompt) -> Floats:
    """Logits at the golden positions alone, in one step: shape (positions, vocab)."""
    positions = prompt.positions.tolist()
    return executor.forward([Slice(0, prompt.ids, blocks_for(len(prompt.ids)), positions)]).copy()


def continue_greedily(executor: Executor, ids: Sequence[int], count: int) -> list[int]:
    """The `count` likeliest next tokens, one after the other."""
    table = blocks_for(len(ids) + count)
    out = [int(executor.forward([Slice(0, ids, table, [len(ids) - 1])])[0].argmax())]
    while len(out) < count:
        out.append(int(executor.forward([Slice(len(ids) + len(out) - 1, out[-1:], table, [0])])[0].argmax()))
    return out


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    shifted = shifted.astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top50_error(golden: GoldenPrompt, logits: Floats) -> float:
    """Largest difference of log-probabilities over the oracle's fifty likeliest tokens of every golden position."""
    ours = np.take_along_axis(log_softmax(logits), golden.top_ids[:, :50], axis=-1)
    return float(np.abs(ours - golden.top_logp[:, :50]).max())


def top50_difference(reference: Floats, logits: Floats) -> float:
    """Largest difference of log-probabilities over the fifty likeliest tokens of every row of `reference`."""
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    top = np.argpartition(-log_p, 50, axis=-1)[:, :50]
    return float(np.abs(np.take_along_axis(log_p - log_q, top, axis=-1)).max())


def kl_per_position(golden: GoldenPrompt, logits: Floats) -> NDArray[np.float64]:
    """KL(oracle ‖ ours), all but the golden file's top tokens taken as one outcome: shape (positions,)."""
    log_p = golden.top_logp.astype(np.float64)
    log_q = np.take_along_axis(log_softmax(logits), golden.top_ids, axis=-1)
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = (np.maximum(1 - x.sum(axis=-1), 1e-12) for x in (p, q))
    return (p * (log_p - log_q)).sum(axis=-1) + rest_p * np.log(rest_p / rest_q)


def kl_divergence(reference: Floats, logits: Floats) -> NDArray[np.float64]:
    """KL(reference ‖ ours) over the whole vocabulary: shape (positions,)."""
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    return (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def perplexity(executor: Executor, ids: Sequence[int]) -> float:
    """exp of the mean of -log p(ids[i+1] | ids[..i]), as the oracle's."""
    following, losses = iter(ids[1:]), []
    for logits in _steps(executor, ids):
        losses += [-row[token] for row, token in zip(log_softmax(logits), following, strict=False)]
    return float(np.exp(np.mean(losses)))
