"""The reference executor by itself: cutting, company and block tables change nothing, bad steps are refused.

Matrix products of other sizes sum in another order, which is felt in the last bit. Where results of different cuts are
compared, K and V are float32: rounding to float16 makes of a last bit, now and then, a thousand times as much.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import Golden, blocks_for, load_golden, run_prompt

from twostep.kernels.quantize import round_to_int8
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.step import Slice
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.network import Network

KV_BLOCKS = 32
NETWORK = load_network(read_gguf(Path(__file__).parents[1] / "data" / "stories260k.gguf"))


@pytest.fixture(scope="module")
def network() -> Network:
    return NETWORK


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load_golden("stories260k")


@pytest.fixture
def executor(network: Network) -> ReferenceExecutor:
    return exact(network)


def exact(network: Network, kv_blocks: int = KV_BLOCKS) -> ReferenceExecutor:
    return ReferenceExecutor(network, kv_blocks, kv="float32")


@st.composite
def cuts(draw: st.DrawFn, tokens: int) -> list[int]:
    """Chunk lengths that make `tokens`."""
    ends = [*sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=8))), tokens]
    return np.diff([0, *ends]).tolist()


@settings(max_examples=20, deadline=None)
@given(chunks=cuts(tokens=100))
def test_cutting_a_prompt_changes_nothing(chunks: list[int]) -> None:
    ids = load_golden("stories260k").prompts[100].ids
    whole = run_prompt(exact(NETWORK), ids, [100])
    cut = run_prompt(exact(NETWORK), ids, chunks)
    np.testing.assert_allclose(cut, whole, atol=1e-4)


def test_company_and_shuffled_tables_change_nothing(network: Network, golden: Golden) -> None:
    """Five sequences of different lengths, in uneven slices, over blocks in disorder, prefilling beside decoding."""
    lengths = {1: 1, 16: 5, 17: 16, 100: 37, 500: 90}
    blocks = np.random.default_rng(7).permutation(64).tolist()
    tables = {n: [blocks.pop() for _ in blocks_for(n)] for n in lengths}
    together = interleaved(exact(network, 64), golden, lengths, tables)
    for n in lengths:
        alone = run_prompt(exact(network), golden.prompts[n].ids, [n])
        np.testing.assert_allclose(np.concatenate(together[n]), alone, atol=1e-4, err_msg=f"prompt of {n}")


def interleaved(
    executor: ReferenceExecutor, golden: Golden, chunk: dict[int, int], tables: dict[int, list[int]]
) -> dict[int, list[np.ndarray]]:
    """Logits of every token of several prompts; each step takes the next chunk of all that are not through."""
    done = dict.fromkeys(chunk, 0)
    out: dict[int, list[np.ndarray]] = {n: [] for n in chunk}
    while unfinished := [n for n in chunk if done[n] < n]:
        pieces = [golden.prompts[n].ids[done[n] : done[n] + chunk[n]] for n in unfinished]
        slices = [Slice(done[n], p, tables[n], range(len(p))) for n, p in zip(unfinished, pieces, strict=True)]
        logits = np.split(executor.forward(slices), np.cumsum([len(p) for p in pieces])[:-1])
        for n, rows in zip(unfinished, logits, strict=True):
            out[n].append(rows)
            done[n] += len(rows)
    return out


def test_only_the_rows_asked_for(executor: ReferenceExecutor, golden: Golden) -> None:
    ids = golden.prompts[17].ids
    everything = run_prompt(executor, ids, [17])
    first, second = blocks_for(17), blocks_for(17, first=8)
    some = executor.forward([Slice(0, ids, first, [3, 16]), Slice(0, ids, second), Slice(0, ids[:1], [20], [0])])
    np.testing.assert_allclose(some, everything[[3, 16, 0]], atol=1e-4)


def test_a_step_of_nothing(executor: ReferenceExecutor, network: Network) -> None:
    assert executor.forward([]).shape == (0, network.shape.vocab)


def test_what_was_in_a_block_before_does_not_matter(
    executor: ReferenceExecutor, network: Network, golden: Golden
) -> None:
    run_prompt(executor, golden.prompts[500].ids)
    again = run_prompt(executor, golden.prompts[17].ids, [9, 8])
    fresh = run_prompt(exact(network), golden.prompts[17].ids, [9, 8])
    np.testing.assert_array_equal(again, fresh)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Slice(0, [], [0]), "slice 0: it has no tokens"),
        (Slice(-1, [1], [0]), "starts at position -1"),
        (Slice(0, [1, 512], [0]), r"token 512 is outside the vocabulary \(0 to 511\)"),
        (Slice(0, [-1], [0]), "token -1 is outside"),
        (Slice(10, [1] * 7, [0]), "its table of 1 blocks holds 16 positions, not 17"),
        (Slice(0, [1], [KV_BLOCKS]), r"block 32 is outside the cache \(0 to 31\)"),
        (Slice(0, [1], [0, -1]), "block -1 is outside"),
        (Slice(0, [1], [3, 3]), r"its table names a block twice: \[3, 3\]"),
        (Slice(0, [1, 2], [0], [2]), r"logits index 2 is outside its tokens \(0 to 1\)"),
        (Slice(0, [1, 2], [0], [1, 0]), r"logits indices do not ascend: \[1, 0\]"),
        (Slice(0, [1, 2], [0], [1, 1]), "do not ascend"),
    ],
)
def test_bad_slices_are_refused(executor: ReferenceExecutor, piece: Slice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        executor.forward([piece])


def test_two_slices_may_not_write_one_block(executor: ReferenceExecutor) -> None:
    shared_past = [Slice(16, [1], [0, 1], [0]), Slice(16, [1], [0, 2], [0])]
    assert executor.forward([Slice(0, [1] * 16, [0]), *shared_past]).shape[0] == 2
    with pytest.raises(ValueError, match="slice 1: block 1 is also written by slice 0"):
        executor.forward([Slice(16, [1], [0, 1]), Slice(16, [1], [2, 1])])


def test_a_refused_step_changes_nothing(executor: ReferenceExecutor, golden: Golden) -> None:
    ids = golden.prompts[17].ids
    expected = run_prompt(executor, ids, [16, 1])[-1:]
    with pytest.raises(ValueError, match="slice 1"):
        executor.forward([Slice(0, [1] * 16, [0]), Slice(0, [], [1])])
    np.testing.assert_array_equal(executor.forward([Slice(16, ids[16:], [0, 1], [0])]), expected)


def test_unknown_modes_are_refused(network: Network) -> None:
    with pytest.raises(ValueError, match="activations 'int4': not one of float32, int8"):
        ReferenceExecutor(network, 1, activations="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv 'int8': not one of float16, float32"):
        ReferenceExecutor(network, 1, kv="int8")  # type: ignore[arg-type]


def test_rounding_to_int8() -> None:
    """Scale 1 in the first group, 2 in the last; ties to even; zeros stay; a row's groups do not see one another."""
    x = np.zeros((2, 64), np.float32)
    x[0, :4] = [127, -127, 0.5, 1.5]
    x[1, 32:34] = [-254, 3.1]
    rounded = round_to_int8(x)
    assert rounded[0, :5].tolist() == [127, -127, 0, 2, 0]
    assert rounded[1, 32:35].tolist() == [-254, 4, 0]
    assert not rounded[0, 32:].any()
    assert not rounded[1, :32].any()


def test_activations_of_float_weights_are_not_rounded(network: Network, golden: Golden) -> None:
    ids = golden.prompts[17].ids
    plain, rounding = (run_prompt(ReferenceExecutor(network, 4, activations=a), ids) for a in ("float32", "int8"))
    np.testing.assert_array_equal(plain, rounding)
