"""One model on the native executor, driven step by step: time by part, and the operations and bytes of each run."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from twostep.core.request import blocks_for
from twostep.errors import SamplingError
from twostep.kernels.native import NativeExecutor
from twostep.kernels.sampling import Sampled, Sampler, SampleRow, TokenSampling
from twostep.kernels.step import Slice
from twostep.model.network import Network
from twostep.spec.shape import ModelShape

# --- operations and bytes: only useful work counts, not padding or rounding to tiles ----------------------------------


@dataclass(frozen=True)
class Part:
    """One sequence's share of a step: `count` tokens from position `start`, `logits` rows of them through the head."""

    start: int
    count: int
    logits: int


@dataclass(frozen=True)
class Work:
    """What some steps have to do in all. Operations count a multiplication and an addition as two."""

    linear_ops: int
    head_ops: int
    attention_flops: int
    kv_bytes: int
    """Bytes of KV cache read, each position once a slice: what memory must deliver if caches work."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.linear_ops + other.linear_ops,
            self.head_ops + other.head_ops,
            self.attention_flops + other.attention_flops,
            self.kv_bytes + other.kv_bytes,
        )


NOTHING = Work(0, 0, 0, 0)


def layer_weights(shape: ModelShape) -> int:
    """Elements of one layer's matrices: query, key, value, output, and gate, up, down."""
    attention = 2 * shape.width * (shape.heads + shape.kv_heads) * shape.head_dim
    return attention + 3 * shape.width * shape.ffn_width


def pairs(start: int, count: int) -> int:
    """Query-key pairs under the causal mask: the query at position p meets p + 1 keys."""
    return count * start + count * (count + 1) // 2


def work(shape: ModelShape, parts: Iterable[Part]) -> Work:
    """The work of one step, or of several if their parts are chained."""
    return sum((_work_of(shape, part) for part in parts), NOTHING)


def _work_of(shape: ModelShape, part: Part) -> Work:
    """Attention: a product of head_dim for the score and another for the value, 4·head_dim FLOP a pair and head."""
    return Work(
        linear_ops=2 * part.count * shape.layers * layer_weights(shape),
        head_ops=2 * part.logits * shape.vocab * shape.width,
        attention_flops=4 * shape.head_dim * shape.heads * shape.layers * pairs(part.start, part.count),
        kv_bytes=(part.start + part.count) * shape.kv_bytes_per_token(),
    )


# --- the driver -------------------------------------------------------------------------------------------------------

GREEDY = TokenSampling(temperature=0.0)
CHUNK_TOKENS = 512
"""Prompt tokens of a step."""
FILL_ROWS = 512
"""Rows of a step that fills the cache."""


@dataclass(frozen=True)
class Seconds:
    """Wall time of a run by part. `rest`: embedding, norms, quantising activations, the Python around a step."""

    linear: float
    attention: float
    head: float
    sampling: float
    rest: float

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class Run:
    """`tokens` prompt tokens computed, or output tokens made by the whole batch."""

    tokens: int
    seconds: Seconds
    work: Work


class Driver:
    """Has room for one prompt of `prompt` tokens, or for `batch` sequences of `positions` tokens each.

    Samples greedily, on all threads.
    """

    def __init__(
        self, network: Network, *, prompt: int, batch: int = 0, positions: int = 0, threads: int | None = None
    ) -> None:
        self.shape = network.shape
        self._blocks_each = blocks_for(positions)
        self._blocks = max(blocks_for(prompt), batch * self._blocks_each)
        self.executor = NativeExecutor(network, kv_blocks=self._blocks, threads=threads)
        self._watch = _Stopwatch(self.executor, self.executor.sampler())

    def prefill(self, prompt: Sequence[int]) -> Run:
        """Computes a prompt anew, in the engine's chunks, up to the choice of its first output token."""
        self._watch.start()
        done = NOTHING
        table = range(blocks_for(len(prompt)))
        for start in range(0, len(prompt), CHUNK_TOKENS):
            tokens = prompt[start : start + CHUNK_TOKENS]
            last = start + len(tokens) == len(prompt)
            logits = self._watch.forward([Slice(start, tokens, table, [len(tokens) - 1] if last else [])])
            done += work(self.shape, [Part(start, len(tokens), int(last))])
        self._choose(logits, len(prompt))
        return Run(len(prompt), self._watch.stop(), done)

    def decode(self, batch: int, context: int, steps: int) -> Run:
        """`steps` output tokens for each of `batch` sequences that have `context` tokens. `fill()` comes before."""
        self._watch.start()
        done = NOTHING
        tokens = [0] * batch
        for position in range(context, context + steps):
            slices = [Slice(position, [token], self._table(i), [0]) for i, token in enumerate(tokens)]
            tokens = self._choose(self._watch.forward(slices), position + 1)
            done += work(self.shape, [Part(position, 1, 1)] * batch)
        return Run(batch * steps, self._watch.stop(), done)

    def fill(self) -> None:
        """Writes one token into every block of the cache.

        The time of attention depends on how much memory it reads, not on what is there; but memory that was never
        written would be the system's one page of zeros, and always cached.
        """
        blocks = range(self._blocks)
        for first in range(0, len(blocks), FILL_ROWS):
            self.executor.forward([Slice(0, [0], [block]) for block in blocks[first : first + FILL_ROWS]])

    def _table(self, sequence: int) -> range:
        return range(sequence * self._blocks_each, (sequence + 1) * self._blocks_each)

    def _choose(self, logits: NDArray[np.float32], position: int) -> list[int]:
        rows = [SampleRow(GREEDY, choice=0, position=position)] * len(logits)
        return [_token(result) for result in self._watch.sample(logits, rows)]


def _token(result: Sampled | SamplingError) -> int:
    if isinstance(result, SamplingError):
        raise result
    return result.token


class _Stopwatch:
    """Adds up where the time of a run's steps went."""

    def __init__(self, executor: NativeExecutor, sampler: Sampler) -> None:
        self._executor, self._sampler = executor, sampler

    def start(self) -> None:
        self._parts = dict.fromkeys(("linear", "attention", "head"), 0.0)
        self._sampling = 0.0
        self._started = perf_counter()

    def forward(self, slices: Sequence[Slice]) -> NDArray[np.float32]:
        logits = self._executor.forward(slices)
        seconds = self._executor.step_seconds()
        for part in self._parts:
            self._parts[part] += seconds[part]
        return logits

    def sample(self, logits: NDArray[np.float32], rows: list[SampleRow]) -> list[Sampled | SamplingError]:
        started = perf_counter()
        results = self._sampler.sample(logits, rows)
        self._sampling += perf_counter() - started
        return results

    def stop(self) -> Seconds:
        total = perf_counter() - self._started
        rest = total - sum(self._parts.values()) - self._sampling
        return Seconds(**self._parts, sampling=self._sampling, rest=rest)
