"""Layers with sliding windows, and what else families do differently: the reference against formulas, the native
executor against the reference, and bit for bit against itself, while others reuse blocks that windows have passed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from support.compare import blocks_for
from support.naive import naive_logits
from support.networks import FAMILY, Traits, with_traits
from support.tiny import TINY, tiny_network

from twostep.kernels import native, reference
from twostep.kernels.check import KvPool, kv_pools
from twostep.kernels.native import NativeExecutor, usable_isas
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.step import BLOCK_TOKENS, Executor, Slice, StepArrays
from twostep.model.network import Network

Floats = NDArray[np.float32]

TRAITS = {
    "window of one block": Traits(windows=(16,)),
    "window that is no multiple": Traits(windows=(None, 23)),
    "window of one token": Traits(windows=(1, None)),
    "window wider than the prompt": Traits(windows=(1000,)),
    "two windows": Traits(windows=(40, 7)),
    "norm of heads": Traits(head_norms=True),
    "rope base by layer": Traits(bases=(10_000.0, 1e6)),
    "no rotation": Traits(rotates=False),
    "norm of heads without rotation": Traits(rotates=False, head_norms=True),
    "GELU": Traits(activation="gelu_tanh"),
    "scaled embedding": Traits(embed_scale=7.5),
    "post-norms": Traits(post_norms=True),
    "softmax scale": Traits(softmax_scale=0.05),
    "all at once": FAMILY,
}
every_trait = pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
every_isa = pytest.mark.parametrize("isa", usable_isas())


@cache
def network(name: str, traits: Traits = FAMILY) -> Network:
    return with_traits(tiny_network(replace(TINY[name], layers=3)), traits)


def ids_of(network: Network, tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, network.shape.vocab, tokens).tolist()


def whole(executor: Executor, ids: Sequence[int]) -> Floats:
    """Logits of a prompt computed in one slice, with the same block numbers in each group."""
    blocks = blocks_for(len(ids))
    more = (blocks,) * (len(executor.capabilities.layout.groups) - 1)
    return executor.forward([Slice(0, ids, blocks, range(len(ids)), more)]).copy()


def relative_error(found: Floats, expected: NDArray[np.floating]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


# --- right


@every_trait
@pytest.mark.parametrize("name", ["F32", "F16"])
def test_the_reference_computes_the_formulas(name: str, traits: Traits) -> None:
    """ "F32" rotates interleaved pairs, "F16" halves, with biases."""
    made = network(name, traits)
    ids = ids_of(made, 60)
    assert relative_error(whole(ReferenceExecutor(made, 4, kv="float32"), ids), naive_logits(made, ids)) < 2e-5


def test_each_trait_changes_the_result() -> None:
    """Else the comparisons would also hold where a parameter is ignored."""
    ids = ids_of(network("F32"), 60)
    plain = naive_logits(network("F32", Traits()), ids)
    for name, traits in TRAITS.items():
        same = traits == TRAITS["window wider than the prompt"]
        assert (relative_error(naive_logits(network("F32", traits), ids), plain) < 1e-3) == same, name


@every_trait
@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q5_0"])
def test_the_native_executor_computes_what_the_reference_does(
    name: str, traits: Traits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are rounded finely, so that few activations are near an edge between two integers."""
    for module in (native, reference):
        monkeypatch.setattr(module, "fine_weights", lambda ops: {op.weight for op in ops if hasattr(op, "weight")})
    made = network(name, traits)
    ids = ids_of(made, 90)
    expected = whole(ReferenceExecutor(made, 6, activations="int8"), ids)
    for isa in usable_isas():
        found = whole(NativeExecutor(made, 6, threads=2, isa=isa), ids)
        of_rows = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
        assert np.median(of_rows) < 1.5e-4, isa
        assert of_rows.max() < 1e-3, isa


# --- bit for bit, while blocks are freed and reused


@dataclass
class Running:
    """A sequence on its way, with the tables of all groups; entries that its windows have passed are -1."""

    ids: list[int]
    slices: list[tuple[int, int]]
    tables: list[list[int]] = field(default_factory=list)


class Blocks:
    """Gives blocks out as the engine does: what a window has passed is free again, at once for others."""

    def __init__(self, pools: Sequence[KvPool], random: Random) -> None:
        self.pools = pools
        self.free = [random.sample(range(pool.blocks), pool.blocks) for pool in pools]
        self.reused = 0

    def slice(self, sequence: Running) -> Slice:
        start, end = sequence.slices.pop(0)
        sequence.tables = sequence.tables or [[] for _ in self.pools]
        for pool, free, table in zip(self.pools, self.free, sequence.tables, strict=True):
            for entry in range(min(pool.first_seen(start), len(table))):
                if table[entry] >= 0:
                    free.append(table[entry])
                    self.reused += 1
                    table[entry] = -1
            while len(table) * BLOCK_TOKENS < end:
                table.append(free.pop())
        first, *more = [list(table) for table in sequence.tables]
        return Slice(start, sequence.ids[start:end], first, range(end - start), tuple(more))


def sequences(made: Network, lengths: Sequence[int], cuts: Sequence[int], random: Random) -> Iterator[Running]:
    for seed, length in enumerate(lengths):
        ends = [0]
        while ends[-1] < length:
            ends.append(min(length, ends[-1] + random.choice(cuts)))
        yield Running(ids_of(made, length, seed), list(pairwise(ends)))


def check_bits(
    made: Network, executor: NativeExecutor, lengths: Sequence[int], cuts: Sequence[int], seed: int, isa: str | None
) -> int:
    """Computes sequences in company; each has to have the bits it has alone. Returns the blocks freed on the way."""
    random = Random(seed)
    alone = [
        whole(NativeExecutor(made, -(-length // BLOCK_TOKENS), threads=1, isa=isa), ids_of(made, length, i))
        for i, length in enumerate(lengths)
    ]
    blocks = Blocks(kv_pools(made.kv_layout, executor.capabilities.blocks), random)
    running = list(enumerate(sequences(made, lengths, cuts, random)))
    while running := [(i, sequence) for i, sequence in running if sequence.slices]:
        chosen = random.sample(running, random.randint(1, len(running)))
        slices = [blocks.slice(sequence) for _, sequence in chosen]
        found = executor.forward(slices)
        expected = [alone[i][piece.start :][: len(piece.tokens)] for (i, _), piece in zip(chosen, slices, strict=True)]
        np.testing.assert_array_equal(found.view(np.uint32), np.concatenate(expected).view(np.uint32))
    return blocks.reused


@every_isa
@pytest.mark.parametrize("name", ["F32", "Q8_0", "BF16", "many heads a group"])
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_company_and_reused_blocks_change_no_bit(name: str, isa: str, threads: int) -> None:
    made = network(name)
    assert made.kv_layout.windows == (None, 23, 40)
    executor = NativeExecutor(made, [30, 16, 20], threads=threads, isa=isa)
    for seed in range(3):
        reused = check_bits(made, executor, [130, 90, 100], [1, 1, 2, 7, 16, 33], seed, isa)
        assert reused > 10


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["F16", "Q5_0"])
def test_windows_across_splits_change_no_bit(name: str, threads: int) -> None:
    """Positions 512 and 1024 begin new splits; windows of 600 and 70 begin before and after them. Single tokens share
    the splits out among threads."""
    made = network(name, replace(FAMILY, windows=(600, None, 70)))
    executor = NativeExecutor(made, [80, 70, 60], threads=threads)
    cuts = [1, 1, 1, 60, 120]
    assert check_bits(made, executor, [1150], cuts, 1, None) > 30


def test_an_executor_of_arrays_reads_the_tables_of_each_group() -> None:
    made = network("F32")
    executor, other = NativeExecutor(made, 12, threads=1), ReferenceExecutor(made, 12, activations="int8")
    ids = ids_of(made, 50)
    pieces = [
        Slice(0, ids, [3, 4, 5, 6], [49], ([0, 1, 2, 7], [8, 9, 10, 11])),
        Slice(0, ids, [7, 8, 9, 10], [49], ([3, 4, 5, 6], [4, 5, 6, 7])),
    ]
    first, second = executor.forward_arrays(StepArrays.of(pieces)).copy()
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, executor.forward(pieces[:1])[0])
    assert relative_error(first, other.forward_arrays(StepArrays.of(pieces))[0]) < 1e-4


# --- refused

PIECE = Slice(40, [1, 2], [0, 1, 2], [1], ([-1, 1, 2], [3, 4, 5]))
MAKE = {"native": NativeExecutor, "reference": ReferenceExecutor}


@pytest.fixture(params=MAKE)
def executor(request: pytest.FixtureRequest) -> Executor:
    return MAKE[request.param](network("F32"), [8, 6, 7])  # type: ignore[no-any-return]


def test_entries_that_a_window_has_passed_are_not_looked_at(executor: Executor) -> None:
    """Position 40 sees from 18 through a window of 23: block 0 is passed, though its entry is no block."""
    whole(executor, [3] * 40)
    assert np.isfinite(executor.forward([PIECE])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more_blocks": ()}, "it has 1 block tables; the KV cache has 3 groups of blocks"),
        ({"more_blocks": ([0, -1, 2], [3, 4, 5])}, r"block -1 is outside the cache \(0 to 5\)"),
        ({"more_blocks": ([-1, 1, 6], [3, 4, 5])}, r"block 6 is outside the cache \(0 to 5\)"),
        ({"more_blocks": ([-1, 1, 2], [3, 4, 7])}, r"block 7 is outside the cache \(0 to 6\)"),
        ({"more_blocks": ([-1, 1], [3, 4, 5])}, "its table of 2 blocks holds 32 positions, not 42"),
        ({"more_blocks": ([-1, 2, 2], [3, 4, 5])}, r"its table names a block twice: \[2, 2\]"),
    ],
)
def test_tables_of_other_groups_are_checked(executor: Executor, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        executor.forward([replace(PIECE, **change)])  # type: ignore[arg-type]


def test_arrays_of_other_groups_are_checked(executor: Executor) -> None:
    step = StepArrays.of([PIECE])
    with pytest.raises(ValueError, match="tables has 2 arrays; the KV cache has 3 groups"):
        executor.forward_arrays(replace(step, tables=step.tables[:2]))
    with pytest.raises(ValueError, match="`tables` with its 2 entries ends before its table does"):
        executor.forward_arrays(replace(step, tables=(*step.tables[:2], step.tables[2][:2])))
    outside = np.array([3, 4, 7], np.int32)
    with pytest.raises(ValueError, match="block 7 is outside the cache"):
        executor.forward_arrays(replace(step, tables=(*step.tables[:2], outside)))
    both = StepArrays.of([PIECE, replace(PIECE, blocks=[3, 4, 5], more_blocks=([-1, 3, 4], [0, 1, 5]))])
    with pytest.raises(ValueError, match="slice 1: block 5 is also written by slice 0"):
        executor.forward_arrays(both)


@pytest.mark.parametrize("blocks", [[8, 6], [8, 6, 7, 5], [8, 0, 7], 0])
def test_blocks_have_to_fit_the_groups(blocks: int | list[int]) -> None:
    for kind in MAKE.values():
        with pytest.raises(Exception, match="kv_blocks"):
            kind(network("F32"), blocks)
