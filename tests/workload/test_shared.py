"""What a prefix cache can find of a workload at most, against prompts compared token by token."""

from collections.abc import Hashable, Sequence
from itertools import takewhile
from operator import eq
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from twostep.bench.load.prompts import IdSource
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.reshape import clipped


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Small, so that prompts end in the same block, before its end or beyond it."""
    block_tokens, requests = draw(st.integers(1, 5)), list[WorkloadRequest]()
    for _ in range(draw(st.integers(0, 6))):
        tokens = draw(st.integers(1, 14))
        blocks = draw(st.lists(st.integers(0, 1), max_size=-(-tokens // block_tokens)))
        requests.append(WorkloadRequest(0.0, tokens, 1, tuple(blocks)))
    return Workload(requests, block_tokens)


def tokens_of(request: WorkloadRequest, number: int, block_tokens: int) -> list[Hashable]:
    """Each names what it is: a place in a block, or something that no other prompt has."""
    known = [(block, place) for block in request.blocks for place in range(block_tokens)][: request.input_tokens]
    return known + [(number, "own", place) for place in range(request.input_tokens - len(known))]


def common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(takewhile(bool, map(eq, one, other)))


@given(workloads())
def test_exactly_what_an_earlier_prompt_begins_with(workload: Workload) -> None:
    prompts = [tokens_of(one, number, workload.block_tokens) for number, one in enumerate(workload.requests)]
    compared = [max((common(one, old) for old in prompts[:i]), default=0) for i, one in enumerate(prompts)]
    assert list(workload.shared_tokens()) == compared


@given(workloads(), st.randoms())
def test_the_sum_is_the_same_in_any_order(workload: Workload, random: Random) -> None:
    mixed = random.sample(list(workload.requests), len(workload.requests))
    assert sum(Workload(mixed, workload.block_tokens).shared_tokens()) == sum(workload.shared_tokens())


def test_prompts_clipped_within_a_block_share_what_is_left_of_it() -> None:
    """As the Mooncake trace for a small machine: prompts that began with the same block of 512 tokens still do."""
    trace = Workload([WorkloadRequest(0.0, 5000, 1, (7, 8 + number)) for number in range(3)], 512)
    short = clipped(trace, 500, None, lambda line: None)
    assert list(short.shared_tokens()) == [0, 500, 500]
    prompts = [IdSource(32_000, 512, "salt").prompt(number, one) for number, one in enumerate(short.requests)]
    assert prompts[0] == prompts[1] == prompts[2]
