"""JSON as it is sent: on one line for every reader, the same in pieces as at once, and never more than a slice."""

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.json_text import Many, encode, pieces, plain
from twostep.openai_api.responses import error_event
from twostep.server.http.replies import SLICE_S, JsonReply, Slices

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def with_many(value: Any) -> Any:
    """Every list of it as one whose members are made when they are read."""
    if isinstance(value, list):
        return Many(with_many(member) for member in value)
    return {key: with_many(member) for key, member in value.items()} if isinstance(value, dict) else value


@given(JSON)
def test_json_is_one_line_and_means_the_same(value: Any) -> None:
    text = encode(value)
    assert json.loads(text) == value
    assert len(text.splitlines()) <= 1
    text.encode()


@pytest.mark.parametrize("character", ["\u0085", "\u2028", "\u2029", "\ud800", "\x0b", "\x1c"])
def test_line_ends_and_surrogates_are_escaped(character: str) -> None:
    value = {character: [f"é{character}漢"]}
    assert json.loads(encode(value)) == value
    for sent in (encode(value).encode(), bytes(JsonReply(value).body), error_event(ApiError(character)).rstrip()):
        assert len(sent.decode().splitlines()) == 1
    assert "é" in encode(value), "other characters stay as short as they are"


@given(JSON)
def test_pieces_are_the_whole(value: Any) -> None:
    assert "".join(pieces(with_many(value))) == encode(value)
    assert plain(with_many(value)) == value
    assert asyncio.run(Slices().joined(with_many(value))) == encode(value).encode()


def test_a_piece_has_one_member() -> None:
    value = {"a": 1, "b": Many(iter([[2], {"c": 3}]))}
    assert list(pieces(value)) == ['{"a":', "1", ',"b":', "[[2]", ',{"c":3}', "]", "}"]


def test_large_replies_are_made_one_at_a_time_and_leave_turns_to_others() -> None:
    """However many end at once: measured in turns of the loop, not in time, which a busy machine stretches."""

    async def run() -> tuple[int, int]:
        slices, made = Slices(), 0

        def member() -> int:
            nonlocal made
            made += 1
            time.sleep(2 * SLICE_S)
            return made

        replies = [asyncio.create_task(slices.joined(Many(member() for _ in range(10)))) for _ in range(3)]
        turns, most, before = 0, 0, 3
        while not all(reply.done() for reply in replies):
            await asyncio.sleep(0)
            turns += 1
            if turns > 1:  # in the first turn each reply has a slice before it is known to be large
                most, before = max(most, made - before), made
            else:
                before = made
        return turns, most

    turns, most = asyncio.run(run())
    assert turns >= 27
    assert most == 1


def test_small_replies_do_not_wait_for_large_ones() -> None:
    async def run() -> list[str]:
        slices, ended = Slices(), []

        async def reply(name: str, members: int) -> None:
            await slices.joined(Many(time.sleep(2 * SLICE_S) for _ in range(members)))
            ended.append(name)

        await asyncio.gather(reply("large", 20), reply("larger", 40), *[reply("small", 0) for _ in range(3)])
        return ended

    assert asyncio.run(run()) == ["small"] * 3 + ["large", "larger"]


# --- packed log-probabilities -------------------------------------------------------------------------------------

ENTRIES = st.lists(
    st.builds(
        TokenLogprobs,
        st.integers(0, 1 << 20),
        st.floats(max_value=0),
        st.integers(1, 1 << 20),
        st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(max_value=0)), max_size=3).map(tuple),
    ),
    max_size=8,
)


@given(ENTRIES, st.integers(0, 9), st.integers(0, 9))
def test_packed_log_probabilities_are_a_sequence_of_what_was_added(
    entries: list[TokenLogprobs], start: int, end: int
) -> None:
    packed = PackedLogprobs(entries)
    assert list(packed) == entries
    assert packed == entries
    assert packed[start:end] == tuple(entries[start:end])
    assert list(packed.truncated(end)) == entries[:end]
    assert packed != [*entries, TokenLogprobs(0, 0.0, 1, ())]
    assert [packed[number] for number in range(-len(entries), 0)] == entries
    with pytest.raises(IndexError):
        packed[len(entries)]
