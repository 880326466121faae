"""The decoding sequences: counted once a step for all, found when a block or their end is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.core.request import Request, Sequence, Stage
from twostep.core.standing import Standing


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
    standing, naive = Standing(), dict[int, int]()
    for number, (computed, after) in enumerate(members):
        while standing.steps < after and standing.steps < steps:
            advance(standing, naive)
        standing.join(seq := decoding(number, computed))
        naive[seq.number] = computed
        standing.check()
    for seq in list(standing.members):
        if seq.number in leaving:
            standing.leave(seq)
            computed = naive.pop(seq.number)
            assert (seq.computed, seq.known) == (computed, computed + 1)
            standing.check()
    assert standing.context_tokens == sum(computed + 1 for computed in naive.values())
    assert {seq.number for seq in standing.starting_a_block()} == {n for n, c in naive.items() if c % 16 == 0}


def advance(standing: Standing, naive: dict[int, int]) -> None:
    standing.advance()
    for number in naive:
        naive[number] += 1
    assert {seq.number: standing.computed(seq) for seq in standing.members} == naive


def test_a_member_is_found_finishing_after_the_step_that_gives_its_last_token() -> None:
    standing = Standing()
    standing.join(early := decoding(1, 20, left=1))
    standing.join(late := decoding(2, 30, left=3))
    ends = {}
    for step in range(1, 4):
        standing.advance()
        for seq in standing.finishing():
            ends[seq.number] = step
            standing.leave(seq)
    assert ends == {1: 1, 2: 3}
    assert (early.known, late.known) == (early.limit, late.limit)
    assert len(standing) == 0


def test_who_is_further_behind_does_not_join() -> None:
    seq = decoding(1, 20)
    seq.computed -= 1
    with pytest.raises(AssertionError, match="one token behind"):
        Standing().join(seq)


def test_joining_marks_the_stage() -> None:
    standing = Standing()
    standing.join(seq := decoding(1, 20))
    assert seq.stage is Stage.STANDING
