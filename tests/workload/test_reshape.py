"""Changes of a workload: what is asked for happens, the rest stays, nothing is left out or clipped in silence."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.errors import InvalidParameterError, WorkloadError
from twostep.workload.arrivals import AtOnce, Renewal
from twostep.workload.definition import Workload, WorkloadRequest, arrival_cv, mean_rate
from twostep.workload.kinds import Batch, Chat, Rag, make_workload
from twostep.workload.reshape import Changes, reshaped

FOUR = Workload(
    [
        WorkloadRequest(0.0, 100, 10, (0, 1, 2, 3, 4, 5, 6)),
        WorkloadRequest(2.0, 40, 20, (0, 1, 7)),
        WorkloadRequest(5.0, 200, 30, (0, 1, 2, 3, 4, 5, 6, 8, 9), after=0),
        WorkloadRequest(8.0, 50, 40, (10,)),
    ],
    name="four",
    source="by hand",
)


@pytest.fixture
def said() -> list[str]:
    return []


def test_no_change_says_nothing(said: list[str]) -> None:
    assert reshaped(FOUR, Changes(), said.append) == FOUR
    assert said == []


def test_a_window_counts_from_its_begin(said: list[str]) -> None:
    kept = reshaped(FOUR, Changes(from_s=1.0, to_s=8.0), said.append)
    assert kept.requests == [replace(FOUR.requests[1], arrival_s=1.0)]
    assert said == ["1 of 4 requests kept, those from 1 s to 8 s"]
    assert kept.source == "by hand; from 1 s to 8 s"


@pytest.mark.parametrize("changes", [Changes(from_s=1e6), Changes(from_s=2.5, to_s=2.5), Changes(sample=1e-6)])
def test_a_workload_that_would_lose_all_its_requests_is_refused(changes: Changes) -> None:
    with pytest.raises(WorkloadError, match=r"none of the 4 requests is left: (those from|a sample of)"):
        reshaped(FOUR, changes, print)
    empty = replace(FOUR, requests=())
    assert reshaped(empty, changes, print).requests == []


def test_who_follows_goes_where_the_other_goes(said: list[str]) -> None:
    workload = Workload([*FOUR.requests, WorkloadRequest(1.0, 1, 1, after=1), WorkloadRequest(1.0, 1, 1, after=4)])
    kept = reshaped(workload, Changes(from_s=2.0), said.append)
    assert [request.after for request in kept.requests] == [None, None, 0, 2]
    assert [request.arrival_s for request in kept.requests] == [0.0, 6.0, 1.0, 1.0]


def test_only_the_first(said: list[str]) -> None:
    assert reshaped(FOUR, Changes(requests=3), said.append).requests == FOUR.requests[:3]
    assert said == ["3 of 4 requests kept, the first"]


def test_more_than_there_are_are_not_made_up(said: list[str]) -> None:
    assert reshaped(FOUR, Changes(requests=9), said.append).requests == FOUR.requests
    assert said == []


def test_a_sample_keeps_conversations_whole(said: list[str]) -> None:
    """By `after`, and where that is not known by what prompts begin with, beyond the system prompt of all."""
    workload = make_workload(Chat(turns=6), Renewal(3.0), 600, 1)
    unknown = replace(workload, requests=[replace(one, after=None, arrival_s=0.0) for one in workload.requests])
    for whole in (workload, unknown):
        kept = reshaped(whole, Changes(sample=0.3), said.append)
        share = len(kept.requests) / 600
        assert 0.15 < share < 0.45
        owners = {request.blocks[16]: request for request in kept.requests}
        assert [request.blocks for request in kept.requests] == [
            request.blocks for request in whole.requests if request.blocks[16] in owners
        ]
        found, before = (sum(w.shared_tokens()) / sum(r.input_tokens for r in w.requests) for w in (kept, whole))
        assert found == pytest.approx(before, rel=0.1)
    assert said[1] == f"{len(kept.requests)} of 600 requests kept, a sample of 0.3 of all conversations"


def test_a_sample_of_what_has_nothing_in_common_thins_it(said: list[str]) -> None:
    workload = make_workload(Batch(), Renewal(10.0), 4000, 1)
    thin = reshaped(workload, Changes(sample=0.25), said.append)
    assert mean_rate(thin) == pytest.approx(2.5, rel=0.15)
    assert arrival_cv(thin) == pytest.approx(1, abs=0.1)
    assert set(thin.requests) < set(workload.requests)


def test_rates_are_scaled_and_thinking_is_not(said: list[str]) -> None:
    fast = reshaped(FOUR, Changes(rate_scale=4.0), said.append)
    assert [request.arrival_s for request in fast.requests] == [0.0, 0.5, 5.0, 2.0]


@pytest.mark.parametrize("rate", [0.01, 1.0, 300.0])
def test_the_rate_is_the_one_that_was_asked_for(rate: float, said: list[str]) -> None:
    workload = make_workload(Chat(), Renewal(3.0, 2.0), 300, 1)
    assert mean_rate(reshaped(workload, Changes(rate=rate), said.append)) == pytest.approx(rate, rel=1e-3)


def test_what_comes_all_at_once_has_no_rate(said: list[str]) -> None:
    workload = make_workload(Rag(), AtOnce(), 5)
    with pytest.raises(WorkloadError, match="'rag' has no rate to change: all its requests arrive at once"):
        reshaped(workload, Changes(rate=1.0), said.append)


def test_clipping_keeps_what_is_shared_and_says_how_much_is_gone(said: list[str]) -> None:
    short = reshaped(FOUR, Changes(max_input_tokens=50, max_output_tokens=25), said.append)
    assert [request.input_tokens for request in short.requests] == [50, 40, 50, 50]
    assert [request.output_tokens for request in short.requests] == [10, 20, 25, 25]
    assert [request.blocks for request in short.requests] == [(0, 1, 2, 3), (0, 1, 7), (0, 1, 2, 3), (10,)]
    assert said == [
        "2 of 4 prompts clipped to 50 tokens, 51.3% of their tokens removed",
        "2 of 4 answers clipped to 25 tokens, 20.0% of their tokens removed",
    ]
    assert short.source == "by hand; prompts clipped to 50, answers to 25 tokens"


def test_nothing_to_clip_says_nothing(said: list[str]) -> None:
    assert reshaped(FOUR, Changes(max_input_tokens=200), said.append).requests == FOUR.requests
    assert said == []


def test_a_text_can_neither_be_clipped_nor_scaled(said: list[str]) -> None:
    workload = Workload([WorkloadRequest(0.0, 10, 2), WorkloadRequest(0.0, 20, 2, text="hello")])
    with pytest.raises(WorkloadError, match="request 1 has text; only requests without text can be clipped"):
        reshaped(workload, Changes(max_input_tokens=15), said.append)
    with pytest.raises(WorkloadError, match="request 1 has text; only requests without text can be scaled"):
        reshaped(workload, Changes(length_scale=0.5), said.append)
    assert reshaped(workload, Changes(max_input_tokens=20), said.append).requests == list(workload.requests)


def begin_alike(one: WorkloadRequest, other: WorkloadRequest) -> int:
    """Blocks."""
    pairs = list(zip(one.blocks, other.blocks, strict=False))
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(pairs))


@pytest.mark.parametrize(
    ("factor", "block_tokens", "lengths"),
    [(0.125, 64, [138, 192, 75]), (0.1, 51, [110, 154, 60]), (2.0, 1024, [2200, 3072, 1200])],
)
def test_lengths_are_scaled_with_what_is_shared(
    factor: float, block_tokens: int, lengths: list[int], said: list[str]
) -> None:
    """Two blocks of 512 shared by the first two, one by all."""
    rows = [(1100, (0, 1, 2)), (1536, (0, 1, 3)), (600, (0, 4))]
    workload = Workload([WorkloadRequest(0.0, tokens, 5, blocks) for tokens, blocks in rows], block_tokens=512)
    scaled = reshaped(workload, Changes(length_scale=factor), said.append)
    assert scaled.block_tokens == block_tokens
    assert [request.input_tokens for request in scaled.requests] == lengths
    first, second, third = scaled.requests
    assert begin_alike(first, second) * block_tokens == pytest.approx(1024 * factor, abs=block_tokens)
    assert begin_alike(first, third) * block_tokens == pytest.approx(512 * factor, abs=block_tokens)


def test_small_blocks_are_drawn_together(said: list[str]) -> None:
    workload = make_workload(Rag(instruction_tokens=256, document_tokens=1200), Renewal(1.0), 60, 1)
    half = reshaped(workload, Changes(length_scale=0.5), said.append)
    assert half.block_tokens == 16
    for one, other in combinations(range(60), 2):
        before = begin_alike(workload.requests[one], workload.requests[other])
        assert begin_alike(half.requests[one], half.requests[other]) == before // 2


@st.composite
def trees(draw: st.DrawFn) -> Workload:
    """Prompts whose numbers are names of whole prefixes, as a hash would be."""
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(draw(st.integers(2, 6))):
        content = draw(st.lists(st.integers(0, 1), max_size=12))
        prefixes = [tuple(content[: end + 1]) for end in range(len(content))]
        blocks = tuple(names.setdefault(prefix, len(names)) for prefix in prefixes)
        requests.append(WorkloadRequest(0.0, max(1, len(content) * 20 - draw(st.integers(0, 19))), 5, blocks))
    return Workload(requests, block_tokens=20)


@settings(deadline=None)
@given(workload=trees(), factor=st.floats(0.05, 20))
def test_equal_prefixes_stay_equal_and_unequal_ones_unequal(workload: Workload, factor: float) -> None:
    """To within one block, new or old, whichever is longer; where prompts still reach so far."""
    scaled = reshaped(workload, Changes(length_scale=factor), lambda line: None)
    unit = scaled.block_tokens
    for one, other in combinations(range(len(workload.requests)), 2):
        before = begin_alike(workload.requests[one], workload.requests[other]) * 20 * factor
        after = begin_alike(scaled.requests[one], scaled.requests[other]) * unit
        assert before - max(unit, 20 * factor) - 1 <= after <= before + 1e-6


@settings(deadline=None)
@given(workload=trees(), factor=st.floats(0.05, 20))
def test_scaled_workloads_hold_to_the_format(workload: Workload, factor: float) -> None:
    scaled = reshaped(workload, Changes(length_scale=factor), lambda line: None)
    for before, after in zip(workload.requests, scaled.requests, strict=True):
        assert after.input_tokens == max(1, round(before.input_tokens * factor))
        assert len(after.blocks) <= -(-after.input_tokens // scaled.block_tokens)


def test_all_changes_in_their_order(said: list[str]) -> None:
    changes = Changes(
        from_s=1.0, requests=2, length_scale=2.0, max_input_tokens=60, max_output_tokens=70, rate_scale=0.5
    )  # fmt: skip
    changed = reshaped(FOUR, changes, said.append)
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in changed.requests] == [
        (2.0, 60, 40), (14.0, 60, 70)
    ]  # fmt: skip
    assert changed.source == (
        "by hand; from 1 s; first 2 requests; lengths times 2; prompts clipped to 60, answers to 70 tokens; "
        "rate times 0.5"
    )
    assert len(said) == 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rate": 0.0}, "rate is 0; it must be from 1e-06 to 1e+06"),
        ({"requests": 0}, "requests is 0; it must be from 1 to 1e+09"),
        ({"from_s": 5.0, "to_s": 4.0}, "to_s is 4; it must be from 5 to 1e+12"),
        ({"length_scale": float("nan")}, "length_scale is nan; it must be from 1e-06 to 1e+06"),
        ({"rate": 1.0, "rate_scale": 1.0}, "rate and rate_scale both set the rate; give one of them"),
    ],
)
def test_changes_that_cannot_be(changes: dict[str, float], told: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        Changes(**changes)  # type: ignore[arg-type]
    assert str(caught.value) == told
