"""Block tables: growth, windows, forks, and what of a prompt is found."""

import pytest

from twostep.core.blocks import prompt_hashes, root_hash
from twostep.core.kv_cache import BlockGroup, Copied, Granted, KvCache
from twostep.core.request import Request, Sequence

HASHES = prompt_hashes(root_hash("model", "f16"), range(400))
AHEAD = 64


def sequence(number: int, tokens: int, hashes: tuple[bytes, ...] = HASHES) -> Sequence:
    own = hashes[: tokens // 16]
    return Sequence(number, 0, Request(str(number), tokens, 10, own), 0, tokens, hashes=list(own))


def entered(cache: KvCache, seq: Sequence, cached: int = 0, start: int | None = None) -> list[Granted]:
    start = cached * 16 if start is None else start
    needs = cache.needs_to_enter(seq.hashes, cached, start, seq.known)
    before = cache.free
    cache.adopt(seq, cached, start)
    granted = list(cache.enter(seq, start, seq.known))
    taken = tuple(b - f for b, f in zip(before, cache.free, strict=True))
    assert all(t <= n for t, n in zip(taken, needs, strict=True)), "took more than was counted"
    return granted


def computed(cache: KvCache, seq: Sequence, chunk: int) -> None:
    """All of it, in chunks, as the scheduler does: room, then publishing."""
    for start in range(0, seq.known, chunk):
        count = min(chunk, seq.known - start)
        needs, before = cache.needs(seq, start, count), cache.free
        list(cache.extend(seq, start, count))
        assert all(b - f <= n for b, f, n in zip(before, cache.free, needs, strict=True))
        cache.publish(seq, start + count)
        cache.check([seq])


def test_a_sequence_enters_with_room_for_all_that_it_knows() -> None:
    cache = KvCache([BlockGroup(10)], AHEAD)
    [granted] = entered(cache, sequence(1, 33))
    assert (granted.number, granted.group, granted.first, len(granted.blocks)) == (1, 0, 0, 3)
    assert cache.free == (7,)


def test_it_grows_block_by_block() -> None:
    cache = KvCache([BlockGroup(10)], AHEAD)
    seq = sequence(1, 16)
    entered(cache, seq)
    assert cache.capacity(seq) == 16
    assert cache.needs(seq, 16, 1) == (1,)
    [granted] = cache.extend(seq, 16, 1)
    assert (granted.first, len(granted.blocks)) == (1, 1)
    assert list(cache.extend(seq, 17, 1)) == []
    cache.release(seq)
    assert (cache.free, seq.tables) == ((10,), ())


@pytest.mark.parametrize(("tokens", "limit", "found"), [(160, 9, 9), (40, 2, 2), (15, 0, 0), (300, 18, 10)])
def test_a_prefix_is_found_as_far_as_whole_blocks_were_published(tokens: int, limit: int, found: int) -> None:
    cache = KvCache([BlockGroup(40)], AHEAD)
    first = sequence(1, 160)
    entered(cache, first)
    computed(cache, first, 50)
    cache.release(first)
    seq = sequence(2, tokens)
    assert cache.match(seq.hashes, limit) == found
    entered(cache, seq, found)
    assert seq.published == found
    cache.check([seq])


def test_what_is_found_in_use_is_shared_and_costs_nothing() -> None:
    cache = KvCache([BlockGroup(20)], AHEAD)
    first, second = sequence(1, 160), sequence(2, 170)
    entered(cache, first)
    computed(cache, first, 160)
    assert cache.needs_to_enter(second.hashes, 10, 160, 170) == (1,)
    entered(cache, second, 10)
    assert first.tables[0][:10] == second.tables[0][:10]
    assert cache.free == (9,)
    dropped: dict[tuple[int, int], int] = {}
    assert cache.held_alone(first, dropped) == (0,)
    assert cache.held_alone(second, dropped) == (11,), "with the first gone, all are the second's alone"


def test_a_gap_ends_what_is_found() -> None:
    cache = KvCache([BlockGroup(10)], AHEAD)
    seq = sequence(1, 160)
    entered(cache, seq)
    computed(cache, seq, 160)
    cache.release(seq)
    other = sequence(2, 48, prompt_hashes(root_hash("other", "f16"), range(400)))
    entered(cache, other)
    assert cache.match(HASHES, 10) == 7, "the last three blocks of the prefix were given out first"


# --- windows ------------------------------------------------------------------------------------------------------


def test_a_window_lets_go_what_no_later_token_sees() -> None:
    cache = KvCache([BlockGroup(30), BlockGroup(12, 40)], AHEAD)
    seq = sequence(1, 400)
    entered(cache, seq)
    computed(cache, seq, 64)
    list(cache.extend(seq, 400, 1))
    full, windowed = seq.tables
    assert None not in full
    assert windowed[: (400 - 40 + 1) // 16] == [None] * 22
    assert None not in windowed[22:]


@pytest.mark.parametrize("chunk", [1, 16, 50, AHEAD])
@pytest.mark.parametrize("window", [1, 16, 17, 40, 100])
def test_a_sequence_never_holds_more_than_was_reckoned(window: int, chunk: int) -> None:
    """`most_needed` decides whether a request can ever fit: with just so many blocks it is served to its end."""
    probe = KvCache([BlockGroup(1), BlockGroup(1, window)], AHEAD)
    full, windowed = probe.most_needed(400)
    cache = KvCache([BlockGroup(full), BlockGroup(windowed, window)], AHEAD)
    seq = sequence(1, 400)
    entered(cache, seq)
    computed(cache, seq, chunk)


@pytest.mark.parametrize("window", [16, 40, 100])
def test_a_windowed_prefix_is_found_only_where_the_window_is_here(window: int) -> None:
    cache = KvCache([BlockGroup(60), BlockGroup(60, window)], AHEAD)
    seq = sequence(1, 400)
    entered(cache, seq)
    computed(cache, seq, 64)
    cache.release(seq)
    assert cache.match(HASHES, 25) == 25
    taker = sequence(2, 16 * (60 - 25 + 2), ())
    taker.tables = ([], [])
    list(cache.extend(taker, 0, 16 * 40))
    found = cache.match(HASHES, 25)
    seen = range(max(0, found * 16 - window + 1) // 16, found)
    assert all(cache.pools[1].find(HASHES[i]) is not None for i in seen)
    assert all(cache.pools[0].find(HASHES[i]) is not None for i in range(found))


@pytest.mark.parametrize("start", [0, 64, 160, 399])
def test_a_sequence_that_goes_on_in_the_middle_has_no_blocks_before_its_window(start: int) -> None:
    cache = KvCache([BlockGroup(25), BlockGroup(9, 40)], AHEAD)
    seq = sequence(1, 400)
    granted = entered(cache, seq, 0, start)
    first = max(0, start - 40 + 1) // 16
    assert seq.tables[1][:first] == [None] * first
    assert len(granted[1].blocks) == min(25, first + 8)
    list(cache.extend(seq, start, min(AHEAD, 400 - start)))
    cache.check([seq])


# --- forks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 33, 47, 48, 200])
@pytest.mark.parametrize("window", [None, 40])
def test_a_fork_shares_full_blocks_and_copies_the_last(tokens: int, window: int | None) -> None:
    cache = KvCache([BlockGroup(40, window)], AHEAD)
    parent, child = sequence(1, tokens), sequence(2, tokens)
    entered(cache, parent)
    computed(cache, parent, 64)
    free, changes = cache.free[0], list(cache.fork(parent, child, tokens))
    cache.check([parent, child])
    full = tokens // 16
    assert child.tables[0][:full] == parent.tables[0][:full]
    copies = [change for change in changes if isinstance(change, Copied)]
    if tokens % 16:
        [copied] = copies
        assert (copied.source, copied.target) == (parent.tables[0][full], child.tables[0][full])
        assert copied.source != copied.target
    else:
        assert copies == []
    assert free - cache.free[0] == len(copies)


def test_a_lost_user_of_a_block_is_found() -> None:
    cache = KvCache([BlockGroup(10)], AHEAD)
    seq = sequence(1, 40)
    entered(cache, seq)
    with pytest.raises(AssertionError, match="users of blocks"):
        cache.check([])
