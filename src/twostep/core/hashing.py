"""Names of KV blocks by what is in them: chained hashes, so that equal names mean equal prefixes.

A block's hash covers its own tokens and its parent's hash, hence every position from 0 on; the root covers what else
decides the KV: model, KV format, and a salt that keeps tenants apart. Keyed, so that nobody can construct a
collision with another's prompt.
"""

from array import array
from collections.abc import Sequence
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
