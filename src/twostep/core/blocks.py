"""KV blocks: their names by content, and the pool that counts their users.

Names are chained hashes, so that equal names mean equal prefixes: a block's hash covers its own tokens and its parent's
hash, hence every position from 0 on; the root covers what else decides the KV: model, KV format, and a salt that keeps
tenants apart. They are keyed, so that nobody can construct a collision with the prompt of another.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from twostep.core.request import BLOCK_TOKENS

HASH_BYTES = 16


def root_hash(model: str, kv_format: str, salt: str = "", key: bytes = b"") -> bytes:
    """The parent of first blocks. `key` has at most 64 bytes; workers that exchange KV share it."""
    text = "\0".join((model, kv_format, salt)).encode(errors="surrogatepass")
    return blake2b(text, digest_size=HASH_BYTES, key=key, person=b"twostep kv root").digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block of `tokens` after `parent`."""
    return blake2b(array("i", tokens).tobytes(), digest_size=HASH_BYTES, key=parent).digest()


def prompt_hashes(root: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Hashes of all full blocks of `tokens`, in order."""
    hashes = []
    parent = root
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = block_hash(parent, tokens[start : start + BLOCK_TOKENS])
        hashes.append(parent)
    return tuple(hashes)


class BlockPool:
    """`count` blocks, each with the number of its users.

    A block without users is free. A free block is either blank or cached: it still holds the KV that its hash names,
    and a sequence with that prefix may use it again. Blank blocks are allocated first, then the cached block that was
    freed longest ago. Each hash names at most one block; a second block with the same content stays unnamed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.users = [0] * count
        self._blank = list(range(count - 1, -1, -1))
        self._cached = OrderedDict[int, bytes]()
        """Not a dict: the first entry of a dict is the slower to find, the more were removed before it."""
        self._named: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks without users."""
        return len(self._blank) + len(self._cached)

    def find(self, name: bytes) -> int | None:
        """The block that holds what `name` says. Changes nothing."""
        return self._named.get(name)

    def in_use(self, names: Iterable[bytes]) -> int:
        """How many of these, which are all here, have users."""
        return sum(self.users[self._named[name]] > 0 for name in names)

    def take(self, count: int) -> list[int]:
        """Free blocks, now with one user each and no name. Raises `IndexError` if there are not so many."""
        if count > len(self._blank):
            self._evict(count)
        taken = [self._blank.pop() for _ in range(count)]
        for block in taken:
            self.users[block] = 1
        return taken

    def _evict(self, count: int) -> None:
        """Makes cached blocks blank until so many are, those freed longest ago first; they are allocated last."""
        if count > self.free:
            raise IndexError(f"{self.free} free blocks, {count} wanted")
        for _ in range(count - len(self._blank)):
            block, name = self._cached.popitem(last=False)
            del self._named[name]
            del self._hash_of[block]
            self._blank.insert(0, block)

    def share(self, block: int) -> None:
        """Adds a user to a block that is in use or cached."""
        if self.users[block] == 0:
            del self._cached[block]
        self.users[block] += 1

    def release(self, blocks: Iterable[int | None]) -> None:
        """Removes one user of each; the earlier in `blocks`, the sooner it is allocated again."""
        for block in blocks:
            if block is not None:
                self.users[block] -= 1
                if self.users[block] == 0:
                    self._free(block)

    def publish(self, blocks: Iterable[int | None], names: Iterable[bytes]) -> None:
        """Names blocks in use, each unless another holds the same already."""
        named, hash_of = self._named, self._hash_of
        for block, name in zip(blocks, names, strict=True):
            if block is not None and name not in named and block not in hash_of:
                named[name] = block
                hash_of[block] = name

    def _free(self, block: int) -> None:
        name = self._hash_of.get(block)
        if name is None:
            self._blank.append(block)
        else:
            self._cached[block] = name

    def check(self) -> None:
        """Raises `AssertionError` where the counts do not balance."""
        free = {*self._blank, *self._cached}
        assert len(free) == len(self._blank) + len(self._cached), "a block is free twice"
        assert free == {b for b, users in enumerate(self.users) if users == 0}, "free blocks are those without users"
        assert min(self.users, default=0) >= 0, "a block has fewer than no users"
        assert self._named == {name: block for block, name in self._hash_of.items()}, "names and blocks disagree"
        kept = {block: self._hash_of.get(block) for block in self._cached}
        assert kept == self._cached, "a cached block lost its name"
        assert not any(block in self._hash_of for block in self._blank), "a blank block has a name"
