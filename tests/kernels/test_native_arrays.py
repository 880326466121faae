"""Steps as arrays and copied blocks, on both executors: the same bits as slices and unforked sequences give, and what
is refused."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.compare import blocks_for, run_prompt
from support.tiny import TINY, tiny_network

from twostep.kernels.native import NativeExecutor
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.step import Executor, Slice, StepArrays

NETWORK = tiny_network(TINY["Q8_0"])
KV_BLOCKS = 12
IDS = [i * 7 % 40 for i in range(60)]

MAKE: dict[str, Callable[[], Executor]] = {
    "native": lambda: NativeExecutor(NETWORK, KV_BLOCKS, threads=2),
    "reference": lambda: ReferenceExecutor(NETWORK, KV_BLOCKS),
}


@pytest.fixture(params=MAKE)
def executor(request: pytest.FixtureRequest) -> Executor:
    return MAKE[request.param]()


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def assert_same_bits(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


# --- the same step


@st.composite
def steps(draw: st.DrawFn) -> list[Slice]:
    """Slices of any lengths over blocks of their own."""
    blocks = Random(draw(st.integers(0, 99))).sample(range(KV_BLOCKS), KV_BLOCKS)
    out = []
    for _ in range(draw(st.integers(0, 4))):
        start, count = draw(st.integers(0, 30)), draw(st.integers(1, 18))
        wanted = sorted(draw(st.sets(st.integers(0, count - 1))))
        out.append(Slice(start, IDS[:count], [blocks.pop() for _ in blocks_for(start + count)], wanted))
    return out


@settings(max_examples=50, deadline=None)
@given(steps())
def test_arrays_hold_the_slices(slices: list[Slice]) -> None:
    assert list(StepArrays.of(slices).slices()) == slices


@settings(max_examples=20, deadline=None)
@given(steps())
def test_arrays_give_what_slices_give(slices: list[Slice]) -> None:
    for make in MAKE.values():
        expected = make().forward(slices).copy()
        assert_same_bits(make().forward_arrays(StepArrays.of(slices)), expected)


def test_standing_tables_are_read_in_place(executor: Executor) -> None:
    """Rows of a 2-D array, taken in any order, with rubbish after each table's end."""
    standing = np.full((3, 8), -7, np.int32)
    standing[2, :2], standing[0, :1] = (4, 5), 9
    long, short = Slice(0, IDS[:20], [4, 5], [19]), Slice(0, IDS[:3], [9], [0, 2])
    expected = executor.forward([long, short]).copy()
    step = StepArrays(
        tokens=ints(*IDS[:20], *IDS[:3]),
        starts=ints(0, 0),
        counts=ints(20, 3),
        tables=(standing.reshape(-1),),
        table_starts=ints(16, 0),
        logit_rows=ints(19, 20, 22),
    )
    assert step.tables[0].base is standing
    assert_same_bits(executor.forward_arrays(step), expected)


# --- refused

STEP = StepArrays.of([Slice(0, IDS[:20], [4, 5], [19]), Slice(0, IDS[:3], [9], [0, 2])])

REFUSED = [
    ({"tokens": np.zeros(23, np.int64)}, r"tokens has to be a contiguous int32 vector, not int64 of shape \(23,\)"),
    ({"tokens": np.zeros(46, np.int32)[::2]}, "tokens has to be a contiguous int32 vector"),
    (
        {"tables": (np.zeros((2, 2), np.int32),)},
        r"tables has to be a contiguous int32 vector, not int32 of shape \(2, 2\)",
    ),
    ({"starts": ints(0)}, "starts, counts and table_starts have one entry a slice, not 1, 2 and 2"),
    ({"counts": ints(20, 4)}, "the slices' counts make 24 rows, but there are 23 tokens"),
    ({"counts": ints(23, 0)}, "slice 1: it has no tokens"),
    ({"counts": ints(24, -1)}, "slice 1: it has no tokens"),
    ({"starts": ints(0, -1)}, "slice 1: it starts before position 0"),
    ({"starts": ints(0, 2**31 - 1)}, "slice 1: `tables` with its 3 entries ends before its table does"),
    ({"starts": ints(0, 14)}, "slice 1: `tables` with its 3 entries ends before its table does"),
    ({"table_starts": ints(0, 3)}, "slice 1: `tables` with its 3 entries ends before its table does"),
    ({"table_starts": ints(-1, 2)}, "slice 0: its table starts before `tables` does"),
    ({"tokens": ints(*IDS[:20], 1, 2, 40)}, r"slice 1: token 40 is outside the vocabulary \(0 to 39\)"),
    ({"tokens": ints(-1, *IDS[:22])}, "slice 0: token -1 is outside the vocabulary"),
    ({"logit_rows": ints(3, 3)}, "logit_rows do not ascend"),
    ({"logit_rows": ints(-1, 3)}, r"logit_rows go from -1 to 3, outside the rows \(0 to 22\)"),
    ({"logit_rows": ints(0, 23)}, "logit_rows go from 0 to 23, outside the rows"),
    ({"tables": (ints(4, 5, 12),)}, r"slice 1: block 12 is outside the cache \(0 to 11\)"),
    ({"tables": (ints(4, -1, 9),)}, "slice 0: block -1 is outside the cache"),
    ({"tables": (ints(4, 5, 4),)}, "slice 1: block 4 is also written by slice 0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_refused_step_changes_nothing(executor: Executor, change: dict[str, NDArray[np.int32]], message: str) -> None:
    last = Slice(59, IDS[59:], [4, 5, 9, 0], [0])
    executor.forward([Slice(0, IDS[:59], [4, 5, 9, 0])])
    expected = executor.forward([last]).copy()
    with pytest.raises(ValueError, match=message):
        executor.forward_arrays(replace(STEP, **change))
    assert_same_bits(executor.forward([last]), expected)


def test_slices_may_share_what_they_only_read(executor: Executor) -> None:
    executor.forward([Slice(0, IDS[:16], [3])])
    both = [Slice(16, IDS[16:17], [3, 4], [0]), Slice(16, IDS[16:17], [3, 5], [0])]
    first, second = executor.forward_arrays(StepArrays.of(both))
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_a_block_written_in_an_earlier_step_may_be_written_again() -> None:
    """However many slices lie between: the check marks writers, and its marks of old steps must not count."""
    executor = MAKE["native"]()
    for _ in range(3):
        executor.forward_arrays(StepArrays.of([Slice(0, [1], [block]) for block in range(KV_BLOCKS)]))
        with pytest.raises(ValueError, match="slice 1: block 0 is also written by slice 0"):
            executor.forward_arrays(StepArrays.of([Slice(0, [1], [0]), Slice(0, [1], [0])]))


# --- copied blocks


def test_a_sequence_forked_inside_a_block_goes_on_as_if_alone(executor: Executor) -> None:
    """Two branches share block 0 and 24 tokens; each then has its own second block, and its own future."""
    other = IDS[:24] + [(token + 1) % 40 for token in IDS[24:]]
    expected = [run_prompt(executor, ids, [24, 36])[24:] for ids in (IDS, other)]
    executor.forward([Slice(0, IDS[:24], [0, 7])])
    executor.copy_block(7, 3)
    for table, ids, logits in (([0, 7, 8, 9], IDS, expected[0]), ([0, 3, 5, 6], other, expected[1])):
        assert_same_bits(executor.forward([Slice(24, ids[24:], table, range(36))]), logits)


def test_a_copied_block_is_a_copy_of_all_layers_and_alone(executor: Executor) -> None:
    """What is written to the source afterwards does not reach the target, nor do the target's neighbours change."""
    prompt = [*range(16)]
    for block in (1, 2, 3):
        executor.forward([Slice(0, [token + block for token in prompt], [block])])
    after = [Slice(16, [5], [block, 11], [0]) for block in (1, 2, 3)]
    before = [executor.forward([piece]).copy() for piece in after]
    executor.copy_block(1, 2)
    executor.forward([Slice(0, [39] * 16, [1])])
    assert_same_bits(executor.forward([after[1]]), before[0])
    assert_same_bits(executor.forward([after[2]]), before[2])


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (12, 0, r"copy_block: block 12 is outside the cache \(0 to 11\)"),
        (0, 12, "copy_block: block 12 is outside the cache"),
        (-1, 0, "copy_block: block -1 is outside the cache"),
        (0, 2**40, "copy_block: block 1099511627776 is outside the cache"),
        (3, 3, "copy_block: block 3 would be copied to itself"),
    ],
)
def test_copies_that_are_refused(executor: Executor, source: int, target: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        executor.copy_block(source, target)
