"""Block tables over groups of blocks: full attention keeps every position, a sliding window frees what it passed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twostep.core.blocks import BlockPool
from twostep.core.request import BLOCK_TOKENS, blocks_for
from twostep.core.request import Sequence as Seq

Counts = tuple[int, ...]
"""Blocks, one number a group."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share block tables. `window`: positions that a token sees, itself included; None: all."""

    blocks: int
    window: int | None = None


class Granted(NamedTuple):
    """Blocks that sequence `number` got in `group`: entries `first`, `first + 1`, ... of its table."""

    number: int
    group: int
    first: int
    blocks: tuple[int, ...]


class Copied(NamedTuple):
    """A block whose content is copied to another one once the step has run: a forked sequence continues there."""

    group: int
    source: int
    target: int


class KvCache:
    """The block tables of all sequences. `ahead_tokens`: what a windowed group reserves beyond its window: a step."""

    def __init__(self, groups: Sequence[BlockGroup], ahead_tokens: int) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(group.blocks) for group in groups)
        self.windowed = any(group.window is not None for group in groups)
        self._ahead = ahead_tokens

    @property
    def free(self) -> Counts:
        return tuple(pool.free for pool in self.pools)

    # --- questions: nothing changes -------------------------------------------------------------------------------

    def most_needed(self, tokens: int) -> Counts:
        """Blocks that one sequence of `tokens` positions holds at most at one time."""
        return tuple(self._reserved(group, 0, tokens) for group in self.groups)

    def needs(self, seq: Seq, computed: int, more: int) -> Counts:
        """Blocks to take for `more` positions after the first `computed`, less those the windows give back."""
        lacking = [blocks_for(computed + more) - len(table) for table in seq.tables]
        if self.windowed:
            lacking = [count - self._passed_alone(seq, g, computed) for g, count in enumerate(lacking)]
        return tuple([max(0, count) for count in lacking])

    def match(self, hashes: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` blocks need not be computed: all that a token after them sees is here."""
        full = [pool for group, pool in zip(self.groups, self.pools, strict=True) if group.window is None]
        found = 0
        while found < limit and all(pool.find(hashes[found]) is not None for pool in full):
            found += 1
        while found and self.windowed and not self._windows_hold(hashes, found):
            found -= 1
        return found

    def needs_to_enter(self, hashes: Sequence[bytes], cached: int, start: int, tokens: int) -> Counts:
        """Free blocks that a sequence of `tokens` known takes to go on at `start` when `cached` blocks are found here.

        A found block without users counts: once used, it is free no more. With a window those in use count as well,
        since its user may be about to let it go, and that user's plan counts on it.
        """
        return tuple(
            self._reserved(group, start, tokens) - (pool.in_use(hashes[:cached]) if group.window is None else 0)
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def held_alone(self, seq: Seq, dropped: dict[tuple[int, int], int]) -> Counts:
        """Blocks that become free if `seq` leaves, after those counted in `dropped` ((group, block) -> users)."""
        freed = [0] * len(self.pools)
        for g, (pool, table) in enumerate(zip(self.pools, seq.tables, strict=True)):
            for block in table:
                if block is not None:
                    dropped[g, block] = gone = dropped.get((g, block), 0) + 1
                    freed[g] += gone == pool.users[block]
        return tuple(freed)

    def capacity(self, seq: Seq) -> int:
        """Positions of `seq` that have a block."""
        return len(min(seq.tables, key=len)) * BLOCK_TOKENS

    # --- changes --------------------------------------------------------------------------------------------------

    def adopt(self, seq: Seq, cached: int, start: int) -> None:
        """Gives `seq` those of the `cached` blocks that it sees from `start` on. Has to be called before free blocks
        are taken: cached blocks without users are among those."""
        seq.tables = tuple([None] * _first_seen(group.window, start) for group in self.groups)
        for table, pool in zip(seq.tables, self.pools, strict=True):
            for name in seq.hashes[len(table) : cached]:
                block = pool.find(name)
                assert block is not None, "a plan counted on a block that is not there"
                pool.share(block)
                table.append(block)
        seq.published = cached

    def enter(self, seq: Seq, start: int, tokens: int) -> Iterator[Granted]:
        """After `adopt`: gives `seq` room for its `tokens` positions; yields the whole tables."""
        for g, group in enumerate(self.groups):
            self._grow(seq, g, _first_seen(group.window, start) + self._reserved(group, start, tokens))
            yield Granted(seq.number, g, 0, tuple(block or 0 for block in seq.tables[g]))

    def extend(self, seq: Seq, computed: int, more: int) -> Iterator[Granted]:
        """Gives `seq` room for `more` positions after the first `computed`; frees what its windows have passed."""
        blocks = blocks_for(computed + more)
        for g, table in enumerate(seq.tables):
            if self.windowed:
                self._free_passed(seq, g, computed)
            if blocks > (first := len(table)):
                yield Granted(seq.number, g, first, self._grow(seq, g, blocks))

    def fork(self, parent: Seq, child: Seq, tokens: int) -> Iterator[Granted | Copied]:
        """Gives `child` the first `tokens` positions of `parent`: full blocks shared, the last one its own copy."""
        child.tables = tuple([] for _ in self.groups)
        full = tokens // BLOCK_TOKENS
        for g, (pool, table) in enumerate(zip(self.pools, parent.tables, strict=True)):
            for block in table[:full]:
                if block is not None:
                    pool.share(block)
            child.tables[g].extend(table[:full])
            if tokens % BLOCK_TOKENS:
                source, [target] = table[full], self._grow(child, g, full + 1)
                assert source is not None, "the window has passed a block that is not full"
                yield Copied(g, source, target)
            yield Granted(child.number, g, 0, tuple(block or 0 for block in child.tables[g]))
        child.published = full

    def publish(self, seq: Seq, computed: int) -> None:
        """Puts the whole computed blocks of `seq` into the prefix cache."""
        first, end = seq.published, min(computed // BLOCK_TOKENS, len(seq.hashes))
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.publish(table[first:end], seq.hashes[first:end])
        seq.published = max(first, end)

    def release(self, seq: Seq) -> None:
        """Frees the blocks of `seq`. Its last are allocated again first: a prefix is of use alone, they are not."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.release(reversed(table))
        seq.tables = ()
        seq.published = 0

    def _free_passed(self, seq: Seq, g: int, computed: int) -> None:
        for i, block in self._passed(seq, g, computed):
            self.pools[g].release([block])
            seq.tables[g][i] = None

    # --- windows --------------------------------------------------------------------------------------------------

    def _grow(self, seq: Seq, g: int, blocks: int) -> tuple[int, ...]:
        taken = self.pools[g].take(max(0, blocks - len(seq.tables[g])))
        seq.tables[g].extend(taken)
        return tuple(taken)

    def _reserved(self, group: BlockGroup, start: int, tokens: int) -> int:
        """Blocks for a sequence of `tokens` that continues at `start`: all, or with a window only its most at
        one time, from the first block that it sees."""
        blocks = blocks_for(tokens)
        if group.window is None:
            return blocks
        most = blocks_for(group.window + self._ahead + BLOCK_TOKENS)
        return min(blocks - _first_seen(group.window, start), most)

    def _windows_hold(self, hashes: Sequence[bytes], cached: int) -> bool:
        """Whether each windowed group holds what a token after the first `cached` blocks sees of them."""
        return all(
            pool.find(name) is not None
            for group, pool in zip(self.groups, self.pools, strict=True)
            if group.window is not None
            for name in hashes[_first_seen(group.window, cached * BLOCK_TOKENS) : cached]
        )

    def _passed(self, seq: Seq, g: int, computed: int) -> Iterator[tuple[int, int]]:
        """Entries of the table that no later token sees and that are still held, the last first: (entry, block)."""
        table = seq.tables[g]
        for i in range(_first_seen(self.groups[g].window, computed) - 1, -1, -1):
            if (block := table[i]) is None:
                return
            yield i, block

    def _passed_alone(self, seq: Seq, g: int, computed: int) -> int:
        return sum(self.pools[g].users[block] == 1 for _, block in self._passed(seq, g, computed))

    def check(self, live: Sequence[Seq]) -> None:
        """Raises `AssertionError` unless every user of a block is a table entry, and the other way round."""
        for g, pool in enumerate(self.pools):
            pool.check()
            users = [0] * pool.count
            for seq in live:
                for block in seq.tables[g] if seq.tables else ():
                    if block is not None:
                        users[block] += 1
            assert users == pool.users, f"group {g}: users of blocks are not those of the tables"


def _first_seen(window: int | None, position: int) -> int:
    """The first block that a token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // BLOCK_TOKENS
