"""Steps to be timed: made of slices over a pool of KV blocks, without requests, and run by the engine's own kernels."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from twostep.core.cost import StepShape
from twostep.core.request import BLOCK_TOKENS, blocks_for
from twostep.engine.build import Kernels
from twostep.engine.step.executor import CoreStarvationMeter
from twostep.kernels.native import NativeExecutor
from twostep.kernels.sampling import SampleRow, TokenSampling
from twostep.kernels.step import Slice, StepArrays
from twostep.perf.step_time_fit import Sample

FILL_TOKENS = 256
"""Positions of KV that are computed; all other blocks are copies, so that none is a page of zeros in a cache."""


@dataclass(frozen=True)
class Trial:
    """A step to be timed. `decodes`: position of each sequence that decodes. `chunks`: start, tokens, and whether the
    last row's logits are wanted, of each slice of a prompt."""

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int, bool], ...] = ()

    @property
    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Start, tokens and rows of logits of each slice."""
        yield from ((start, 1, 1) for start in self.decodes)
        yield from ((start, tokens, int(samples)) for start, tokens, samples in self.chunks)

    @property
    def shape(self) -> StepShape:
        shape = StepShape()
        for start, tokens, rows in self.slices:
            shape = shape.with_slice(start, tokens, rows)
        return shape

    @property
    def kv_tokens(self) -> int:
        """Positions of KV of all its sequences, whole blocks."""
        return sum(blocks_for(start + tokens) for start, tokens, _ in self.slices) * BLOCK_TOKENS


class _Ready(NamedTuple):
    """A trial made ready for the kernels."""

    shape: StepShape
    arrays: StepArrays
    rows: list[SampleRow]


class TrialRunner:
    """Runs trials on `kernels`, whose KV memory it fills with values first."""

    def __init__(self, kernels: Kernels, vocab: int) -> None:
        executor = kernels.executor
        self._kernels, self._vocab = kernels, vocab
        self._blocks = executor.capabilities.blocks
        self._watch = CoreStarvationMeter(kernels.threads, kernels.lacked_ns)
        self._params = TokenSampling(seed=1)
        self._ready: dict[Trial, _Ready] = {}
        self._fill()

    def run(self, trial: Trial) -> Sample:
        """One run of the step, timed as the engine times its steps: forward and sampling."""
        if (ready := self._ready.get(trial)) is None:
            ready = self._ready[trial] = self._made_ready(trial)
        started_ns = perf_counter_ns()
        logits, starved_ns = self._watch.measure(self._kernels.executor.forward_arrays, ready.arrays)
        self._kernels.sampler.sample(logits, ready.rows)
        return Sample(ready.shape, perf_counter_ns() - started_ns, starved_ns, self._parts())

    def _parts(self) -> dict[str, float]:
        executor = self._kernels.executor
        if not isinstance(executor, NativeExecutor):
            return {}
        seconds = executor.step_seconds()
        return {name: seconds[name] * 1e9 for name in ("linear", "attention", "head")}

    def _fill(self) -> None:
        """Computes some blocks of KV and copies them to all others."""
        whole = min(FILL_TOKENS // BLOCK_TOKENS, *self._blocks)
        self.run(Trial(chunks=((0, whole * BLOCK_TOKENS, False),)))
        for group, blocks in enumerate(self._blocks):
            for block in range(whole, blocks):
                self._kernels.executor.copy_block(block % whole, block, group)

    def _made_ready(self, trial: Trial) -> _Ready:
        rng, first, slices, rows = random.Random(len(self._ready)), 0, list[Slice](), list[SampleRow]()
        for number, (start, tokens, sampled) in enumerate(trial.slices):
            needed = blocks_for(start + tokens)
            tables = [[block % count for block in range(first, first + needed)] for count in self._blocks]
            first += needed
            ids = [rng.randrange(self._vocab) for _ in range(tokens)]
            slices.append(Slice(start, ids, tables[0], (tokens - 1,) * sampled, tuple(tables[1:])))
            if sampled:
                rows.append(SampleRow(self._params, number, start + tokens))
        return _Ready(trial.shape, StepArrays.of(slices), rows)
