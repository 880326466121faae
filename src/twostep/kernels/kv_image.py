"""A block of KV as bytes to send: a header that says what it is, a checksum, then the block as it lies in memory.

The header has `HEADER` bytes, little-endian: the magic `2SKV`, 4 bytes version of this header, 16 bytes digest of the
KV layout, 4 bytes group, 8 bytes length of the block, 24 bytes of zeros, 4 bytes CRC-32C of all other bytes. The native
executor does the same in `native/kv_pool.cpp`.
"""

import struct
from math import inf

import numpy as np

from twostep.errors import BlockImportError
from twostep.kernels import _native
from twostep.spec.kv_layout import KvLayout

Buffer = bytes | bytearray | memoryview

MAGIC = b"2SKV"
HEADER_VERSION = 1
_FIELDS = struct.Struct("<4sI16sIQ24s")
_CHECKSUM = struct.Struct("<I")
HEADER = _FIELDS.size + _CHECKSUM.size


def pack_block(layout: KvLayout, group: int, block: bytes) -> bytes:
    """Header and block."""
    fields = _FIELDS.pack(MAGIC, HEADER_VERSION, layout.digest, group, len(block), bytes(24))
    return fields + _CHECKSUM.pack(_native.crc32c(block, _native.crc32c(fields))) + block


def unpack_block(layout: KvLayout, group: int, data: Buffer) -> bytes:
    """The block in `data`. Raises `BlockImportError` unless it is a whole, undamaged block of this layout and group."""
    data = bytes(data)
    length = layout.block_bytes(group)
    if len(data) != HEADER + length:
        raise BlockImportError(f"the block has {len(data)} bytes; one of group {group} has {HEADER + length}")
    magic, version, digest, its_group, its_length, _ = _FIELDS.unpack_from(data)
    if (magic, version) != (MAGIC, HEADER_VERSION):
        raise BlockImportError(f"the data does not begin as a KV block of version {HEADER_VERSION} does")
    if digest != layout.digest:
        raise BlockImportError(f"the block has KV layout {digest.hex()}; this cache has {layout.digest.hex()}")
    if (its_group, its_length) != (group, length):
        raise BlockImportError(f"the block belongs to group {its_group}, not to group {group}")
    checksum = _native.crc32c(data[HEADER:], _native.crc32c(data[: _FIELDS.size]))
    if (checksum,) != _CHECKSUM.unpack_from(data, _FIELDS.size):
        raise BlockImportError("the checksum does not match: the block was damaged on its way")
    block = data[HEADER:]
    if not (np.abs(np.frombuffer(block, np.float16)) < inf).all():
        raise BlockImportError("the block holds numbers that are not finite")
    return block
