"""The decoding sequences: counted once a step for all, found when a block or their end is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.core.decode_batch import DecodeBatch
from twostep.core.request import Request, Sequence, Stage


def decoding(number: int, computed: int, left: int = 100) -> Sequence:
    """One token behind, with `left` tokens of its answer still to sample."""
    request = Request(str(number), computed, 1 + left)
    return Sequence(number, 0, request, 0, computed + 1, computed)


@given(
    members=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), max_size=8),
    leaving=st.sets(st.integers(0, 7)),
    steps=st.integers(0, 40),
)
def test_counts_are_those_of_sequences_stepped_one_by_one(
    members: list[tuple[int, int]], leaving: set[int], steps: int
) -> None:
    batch, naive = DecodeBatch(), dict[int, int]()
    for number, (computed, after) in enumerate(members):
        while batch.steps < after and batch.steps < steps:
            advance(batch, naive)
        batch.join(seq := decoding(number, computed))
        naive[seq.number] = computed
        batch.check()
    for seq in list(batch.members):
        if seq.number in leaving:
            batch.leave(seq)
            computed = naive.pop(seq.number)
            assert (seq.computed, seq.known) == (computed, computed + 1)
            batch.check()
    assert batch.context_tokens == sum(computed + 1 for computed in naive.values())
    assert {seq.number for seq in batch.starting_a_block()} == {n for n, c in naive.items() if c % 16 == 0}


def advance(batch: DecodeBatch, naive: dict[int, int]) -> None:
    batch.advance()
    for number in naive:
        naive[number] += 1
    assert {seq.number: batch.computed(seq) for seq in batch.members} == naive


def test_a_member_is_found_finishing_after_the_step_that_gives_its_last_token() -> None:
    batch = DecodeBatch()
    batch.join(early := decoding(1, 20, left=1))
    batch.join(late := decoding(2, 30, left=3))
    ends = {}
    for step in range(1, 4):
        batch.advance()
        for seq in batch.finishing():
            ends[seq.number] = step
            batch.leave(seq)
    assert ends == {1: 1, 2: 3}
    assert (early.known, late.known) == (early.limit, late.limit)
    assert len(batch) == 0


def test_who_is_further_behind_does_not_join() -> None:
    seq = decoding(1, 20)
    seq.computed -= 1
    with pytest.raises(AssertionError, match="one token behind"):
        DecodeBatch().join(seq)


def test_joining_marks_the_stage() -> None:
    batch = DecodeBatch()
    batch.join(seq := decoding(1, 20))
    assert seq.stage is Stage.DECODE
