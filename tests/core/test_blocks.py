"""A pool of blocks: who has which, what the free ones still hold, and in which order they are given out."""

import pytest

from twostep.core.blocks import BlockPool


def named(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = [pool.take(1)[0] for _ in names]
    for block, name in zip(blocks, names, strict=True):
        pool.publish([block], [name])
    return blocks


def test_every_block_is_given_out_once_and_then_none() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(1)[0] for _ in range(5)) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    with pytest.raises(IndexError, match="0 free blocks, 1 wanted"):
        pool.take(1)
    pool.check()


def test_a_block_is_free_when_its_last_user_lets_it_go() -> None:
    pool = BlockPool(2)
    block = pool.take(1)[0]
    pool.share(block)
    pool.release([block])
    assert (pool.free, pool.users[block]) == (1, 1)
    pool.release([block])
    assert (pool.free, pool.users[block]) == (2, 0)
    pool.check()


def test_a_free_block_can_be_had_back_by_its_name() -> None:
    pool = BlockPool(3)
    [block] = named(pool, b"a")
    pool.release([block])
    assert (pool.find(b"a"), pool.in_use([b"a"])) == (block, 0)
    pool.share(block)
    assert (pool.free, pool.in_use([b"a"])) == (2, 1)
    pool.check()


def test_blank_blocks_go_first_then_those_let_go_longest_ago() -> None:
    pool = BlockPool(4)
    a, b, c = named(pool, b"a", b"b", b"c")
    for block in (b, a, c):
        pool.release([block])
    pool.share(b)
    pool.release([b])
    blank = pool.take(1)[0]
    assert blank not in (a, b, c)
    assert [pool.take(1)[0], pool.take(1)[0], pool.take(1)[0]] == [a, c, b]
    assert [pool.find(name) for name in (b"a", b"b", b"c")] == [None, None, None]
    pool.check()


def test_the_end_of_a_prefix_is_given_out_before_its_beginning() -> None:
    """A table is released backwards: without its beginning the rest of a prefix is of no use."""
    pool = BlockPool(3)
    blocks = named(pool, b"1", b"2", b"3")
    pool.release(reversed(blocks))
    assert [pool.take(1)[0] for _ in range(3)] == blocks[::-1]


def test_a_name_means_one_block_and_a_block_has_one_name() -> None:
    pool = BlockPool(3)
    first, second = named(pool, b"a", b"a")
    pool.publish([first], [b"other"])
    assert (pool.find(b"a"), pool.find(b"other")) == (first, None)
    pool.release([second, None])
    pool.check()
    assert pool.free == 2


@pytest.mark.parametrize("broken", ["users", "_blank", "_named"])
def test_broken_books_are_found(broken: str) -> None:
    pool = BlockPool(3)
    named(pool, b"a")
    getattr(pool, broken).clear()
    if broken == "users":
        pool.users.extend([0, 0, 0])
    with pytest.raises(AssertionError):
        pool.check()
