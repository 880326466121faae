"""The checked executor with kernels behind it: each step is also computed by a real executor over a small network, and
each row of logits has to be, bit for bit, what its tokens give alone in an empty cache.

So whatever the scheduler's tests do (preemption, prefix hits, forks, drafts, KV that arrives, windows, failed steps) is
held against the kernels as well: their tables, their groups of blocks, their copies, exports and imports.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from support.checked_executor import CheckedExecutor
from support.compare import blocks_for
from support.networks import Traits, with_traits
from support.tiny import Tiny, tiny_network

from twostep.core.kv_cache import BlockGroup
from twostep.core.plan import Step, StepResult
from twostep.core.request import BLOCK_TOKENS
from twostep.kernels.step import Executor, Slice
from twostep.model.network import Network
from twostep.model.tensor import TensorType

Make = Callable[[Network, Sequence[int]], Executor]
VOCAB = 256
SMALL = Tiny(TensorType.F32, width=16, heads=2, kv_heads=1, head_dim=8, ffn_width=16, vocab=VOCAB)


@cache
def network_with(windows: tuple[int | None, ...]) -> Network:
    """A layer for each window; all tokens have logits that differ."""
    tiny = tiny_network(replace(SMALL, layers=len(windows)))
    return with_traits(tiny, Traits(windows=windows, bases=(10_000.0, 500.0), head_norms=True))


class Piece(NamedTuple):
    """A slice as it is computed; the last 1 + `drafts` rows are wanted if `samples`."""

    number: int
    start: int
    tokens: list[int]
    wanted: int


class ComputingExecutor(CheckedExecutor):
    """`make` gives the executor under test; groups are in the order of its KV layout. `tolerance`: of logits, where an
    executor does not promise bits."""

    def __init__(self, make: Make, groups: Sequence[BlockGroup], *, tolerance: float = 0, **more: Any) -> None:
        super().__init__(groups, **more)
        self._make, self._tolerance = make, tolerance
        self._network = network_with(tuple(group.window for group in groups))
        assert self._network.kv_layout.windows == tuple(group.window for group in groups)
        self.kernels = make(self._network, [group.blocks for group in groups])
        self._pieces: list[Piece] = []
        self._copies: list[tuple[int, int, int]] = []
        self.rows: dict[tuple[int, ...], bytes] = {}
        """Logits by all tokens before them, as they were computed first."""

    # --- a step ---------------------------------------------------------------------------------------------------

    def _compute(self, step: Step) -> StepResult:
        self._pieces, self._copies = [], []
        drafts = {chunk.number: chunk.drafts if chunk.samples else -1 for chunk in step.plan.chunks}
        before = {number: list(tokens) for number, tokens in self.tokens.items()}
        result = super()._compute(step)
        if result.failed:
            self._spoil(step, before)
            return result
        pieces = [piece._replace(wanted=1 + drafts.get(piece.number, 0)) for piece in self._pieces]
        logits = iter(self.kernels.forward([self._slice(piece) for piece in pieces]).copy())
        for piece in pieces:
            for row in range(len(piece.tokens) - piece.wanted, len(piece.tokens)):
                prefix = (*before[piece.number][: piece.start], *piece.tokens[: row + 1])
                bits = next(logits).tobytes()
                known = self.rows.setdefault(prefix, bits)
                self._compare(known, bits, f"sequence {piece.number}, {len(prefix)} tokens")
        for group, source, target in self._copies:
            self.kernels.copy_block(source, target, group)
        return result

    def _slice(self, piece: Piece) -> Slice:
        first, *more = (list(table) for table in self._tables[piece.number])
        rows = range(len(piece.tokens) - piece.wanted, len(piece.tokens))
        return Slice(piece.start, piece.tokens, first, rows, tuple(more))

    def _run(self, number: int, start: int, count: int, drafts: int = 0) -> list[int]:
        guesses = super()._run(number, start, count, drafts)
        known = self.tokens[number][start : start + count - drafts]
        self._pieces.append(Piece(number, start, known + guesses, 1))
        return guesses

    def _copy(self, group: int, source: int, target: int) -> None:
        super()._copy(group, source, target)
        self._copies.append((group, source, target))

    def _spoil(self, step: Step, known: dict[int, list[int]]) -> None:
        """A failed step leaves anything in the blocks that it was to write."""
        slices = [*((n, start, 1) for n, start in self._standing.items()), *(chunk[:3] for chunk in step.plan.chunks)]
        wrong = [Piece(number, at, [(known[number][at] + 1) % VOCAB] * count, 0) for number, at, count in slices]
        self.kernels.forward([self._slice(piece) for piece in wrong])

    # --- KV from elsewhere ----------------------------------------------------------------------------------------

    def _receive(self, number: int, start: int, end: int) -> None:
        super()._receive(number, start, end)
        if start >= end:
            return
        blocks = blocks_for(end)
        other = self._make(self._network, [len(blocks)] * len(self._groups))
        more = (blocks,) * (len(self._groups) - 1)
        other.forward([Slice(0, self.tokens[number][:end], blocks, (), more)])
        for group, spec in enumerate(self._groups):
            first = 0 if spec.window is None else max(0, end - spec.window + 1)
            for entry in range(max(start, first) // BLOCK_TOKENS, len(blocks)):
                self.kernels.import_block(other.export_block(entry, group), self._tables[number][group][entry], group)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def check_logits(self) -> int:
        """Every row that was computed is what its tokens give alone. Returns the number of rows."""
        prefixes = sorted(self.rows)
        pairs = zip_longest(prefixes, prefixes[1:], fillvalue=())
        longest = [own for own, following in pairs if following[: len(own)] != own]
        for tokens in longest:
            blocks = blocks_for(len(tokens))
            alone = self._make(self._network, [len(blocks)] * len(self._groups))
            more = (blocks,) * (len(self._groups) - 1)
            logits = alone.forward([Slice(0, tokens, blocks, range(len(tokens)), more)])
            for end in range(1, len(tokens) + 1):
                bits = self.rows.get(tokens[:end])
                if bits is not None:
                    self._compare(bits, logits[end - 1].tobytes(), f"{end} tokens, computed alone")
        return len(prefixes)

    def _compare(self, found: bytes, expected: bytes, what: str) -> None:
        if found != expected:
            one, other = (np.frombuffer(bits, np.float32) for bits in (found, expected))
            error = np.abs(one - other).max()
            assert 0 < error <= self._tolerance, f"{what}: other logits, by {error}"
