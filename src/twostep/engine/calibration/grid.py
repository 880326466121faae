"""Which steps a calibration runs: at the edges where the kernels' cost jumps and one past them, and what it predicts
without having seen it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from twostep.engine.calibration.trial import Trial
from twostep.perf.step_time_fit import RowTiles, edges

ROW_TILES = {
    "avx512": RowTiles(few=12, rows=6),
    "avx2": RowTiles(few=4, rows=4),
    "portable": RowTiles(few=2, rows=2),
    "numpy": RowTiles(few=1, rows=1),
}
"""By instruction set: kRows and kTileRows of native/simd_*.h."""

WIDEST = 2048
"""Most tokens of a step."""
ONE_PAST_TILES = 16
"""In steps of up to so many tiles, one more row costs noticeably more."""
FAR = (512, 2048, 4000)
"""Positions at which later chunks of long prompts begin."""
CHUNKS = (16, 64, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 500, 1000, 2000, 4000)
MIXED = (
    (1, 1000, 1000, 256), (2, 100, 3000, 96), (4, 500, 0, 64), (4, 500, 1000, 128), (8, 1000, 0, 256),
    (16, 300, 500, 64), (16, 500, 0, 512), (32, 200, 0, 128),
)  # fmt: skip
"""Decodes, their context, and start and tokens of a chunk."""
HELD_OUT = 40
HELD_OUT_SEED = 7


@dataclass(frozen=True)
class Limits:
    """What this engine can run: tokens and sequences of a step, positions of a sequence, KV positions of all."""

    tokens: int
    sequences: int
    context: int
    kv_tokens: int

    def allow(self, trial: Trial) -> bool:
        slices = list(trial.slices)
        return (
            sum(tokens for _, tokens, _ in slices) <= self.tokens
            and len(slices) <= self.sequences
            and max(start + tokens for start, tokens, _ in slices) <= self.context
            and trial.kv_tokens <= self.kv_tokens
        )


def grid(tiles: RowTiles, limits: Limits, *, quick: bool = False) -> list[Trial]:
    """The steps to fit, each once, the cheapest first."""
    trials = dict.fromkeys((*_prefills(tiles), *_decodes(tiles), *_mixed()))
    allowed = [trial for trial in trials if limits.allow(trial)]
    allowed.sort(key=lambda trial: (trial.shape.tokens, trial.shape.pairs))
    return allowed[::2] if quick else allowed


def _prefills(tiles: RowTiles) -> Iterator[Trial]:
    """First chunks, at each edge of the rows and one past it; later chunks; several prompts at once."""
    for rows in (*edges(tiles, WIDEST), WIDEST):
        yield Trial(chunks=((0, rows, False),))
        if rows <= ONE_PAST_TILES * tiles.rows:
            yield Trial(chunks=((0, rows + 1, False),))
    for rows in (rows for wide in (3, 8) for rows in (wide * tiles.rows, wide * tiles.rows + 1)):
        yield Trial(chunks=((0, rows, False),))
    yield from (Trial(chunks=((start, tokens, True),)) for tokens in CHUNKS for start in FAR)
    yield from (Trial(chunks=((0, 16, True),) * count) for count in (1, 2, 4, 8))


def _decodes(tiles: RowTiles) -> Iterator[Trial]:
    for count in sorted({*BATCHES, 3, 6, tiles.few, tiles.few + 1}):
        yield from (Trial(decodes=(context,) * count) for context in CONTEXTS)


def _mixed() -> Iterator[Trial]:
    for decodes, context, start, tokens in MIXED:
        yield Trial(decodes=(context,) * decodes, chunks=((start, tokens, True),))


def held_out(limits: Limits, *, quick: bool = False) -> list[Trial]:
    """Random steps that are not in the grid: two of three mixed, the rest decodes or chunks only."""
    rng = random.Random(HELD_OUT_SEED)
    found = list[Trial]()
    for _ in range(100 * HELD_OUT):
        if len(found) == HELD_OUT // (2 if quick else 1):
            break
        trial = _random_trial(rng, limits, len(found) % 6)
        if limits.allow(trial):
            found.append(trial)
    return found


def _random_trial(rng: random.Random, limits: Limits, kind: int) -> Trial:
    """`kind` 0: decodes only; 1: chunks only; else both."""
    decodes, chunks = tuple[int, ...](), tuple[tuple[int, int, bool], ...]()
    if kind != 1:
        count = rng.choice((1, 2, 3, 5, 7, 9, 11, 14, 18, 23, 28))
        longest = max(18, min(3000, limits.context - 1, limits.kv_tokens // (count + 1)))
        decodes = tuple(rng.randrange(17, longest) for _ in range(count))
    if kind != 0:
        chunks = ((rng.choice((0, rng.randrange(2000))), rng.randrange(17, 481), rng.random() < 0.5),)
    return Trial(decodes, chunks)
