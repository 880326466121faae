"""KV memory as a thing that is owned: its layout, blocks that leave and arrive as bytes, memory that others can map."""

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.compare import run_prompt
from support.networks import FAMILY, with_traits
from support.tiny import TINY, tiny_network

from twostep.errors import BlockImportError, UnsupportedError
from twostep.kernels import _native
from twostep.kernels.kv_image import HEADER, pack_block
from twostep.kernels.native import NativeExecutor
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.step import Executor, Slice
from twostep.spec.kv_layout import KvGroup, KvLayout, grouped
from twostep.spec.memory import MemoryDemand, plan_share, plan_stated

NETWORK = with_traits(tiny_network(replace(TINY["F16"], layers=3)), FAMILY)
"""Heads of 24, which are padded to 32; three groups of one layer each."""
LAYOUT = NETWORK.kv_layout
IDS = [i * 7 % 33 for i in range(32)]
MAKE = {
    "native": lambda: NativeExecutor(NETWORK, [4, 5, 6], threads=1),
    "shareable": lambda: NativeExecutor(NETWORK, [4, 5, 6], threads=1, shareable_kv=True),
    "reference": lambda: ReferenceExecutor(NETWORK, [4, 5, 6]),
}


@pytest.fixture(params=MAKE)
def executor(request: pytest.FixtureRequest) -> Executor:
    return MAKE[request.param]()  # type: ignore[no-any-return]


def prefill(executor: Executor, tables: tuple[list[int], ...] = ([0, 1], [2, 3], [4, 5])) -> None:
    executor.forward([Slice(0, IDS, tables[0], [], tables[1:])])


def follow(executor: Executor, tables: tuple[list[int], ...]) -> bytes:
    """The logits of a token after the prompt, whose KV is read from there."""
    first, *more = ([*table, min({0, 1, 2, 3} - set(table))] for table in tables)
    return executor.forward([Slice(32, [5], first, [0], tuple(more))]).tobytes()


# --- the layout


def test_layers_are_grouped_by_window() -> None:
    assert grouped([4, None, 4, 8, None]) == (KvGroup((1, 4)), KvGroup((0, 2), 4), KvGroup((3,), 8))
    assert grouped([None, None]) == (KvGroup((0, 1)),)


def test_sizes_of_blocks() -> None:
    layout = KvLayout(grouped([None, 4, 4]), kv_heads=2, head_dim=24)
    assert (layout.padded_head_dim, layout.layers, layout.windows) == (32, 3, (None, 4))
    assert [layout.block_bytes(group) for group in (0, 1)] == [2 * 2 * 32 * 16 * 2, 2 * 2 * 2 * 32 * 16 * 2]
    assert layout.pool_bytes([3, 5]) == 3 * layout.block_bytes(0) + 5 * layout.block_bytes(1)
    assert replace(layout, scale_bytes=64).block_bytes(0) == layout.block_bytes(0) + 2 * 64


def test_names_and_digests_differ_wherever_layouts_do() -> None:
    plain = KvLayout(grouped([None, 4]), 2, 24)
    others = [
        replace(plain, kv_heads=1),
        replace(plain, head_dim=32),
        replace(plain, scale_bytes=4),
        replace(plain, block_tokens=32),
        replace(plain, version=plain.version + 1),
        replace(plain, groups=grouped([4, None])),
        replace(plain, groups=grouped([None, 5])),
        replace(plain, groups=grouped([None, None])),
    ]
    for one, other in combinations([plain, *others], 2):
        assert one.name != other.name
        assert one.digest != other.digest
    assert plain.digest == KvLayout(grouped([None, 4]), 2, 24).digest


def test_the_digest_is_the_same_everywhere() -> None:
    """Workers of one version compare it, and prefix hashes contain the name: a change of either is a new version."""
    layout = KvLayout(grouped([None, 4]), 2, 24)
    assert layout.name == "kv2: 2 heads x 24 float16, blocks of 16, layers 0 all positions; layers 1 window 4"
    assert layout.digest.hex() == "ac3fe95614edb525b07dee90f175a7a5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": ()}, "each layer has to be in one group"),
        ({"groups": (KvGroup((0, 1)), KvGroup((1,), 4))}, "each layer has to be in one group"),
        ({"groups": (KvGroup((1,)),)}, "each layer has to be in one group"),
        ({"groups": (KvGroup((0,)), KvGroup(()))}, "each group needs a layer"),
        ({"groups": (KvGroup((0,), 0),)}, "a window has at least 1 position"),
        ({"kv_heads": 0}, "have to be positive"),
        ({"scale_bytes": -1}, "have to be positive"),
        ({"element": "int8"}, "KV elements are float16, not 'int8'"),
    ],
)
def test_layouts_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(KvLayout(grouped([None]), 2, 24), **change)  # type: ignore[arg-type]


def test_the_pool_has_the_bytes_of_the_layout() -> None:
    assert MAKE["native"]().kv_bytes == MAKE["shareable"]().kv_bytes == LAYOUT.pool_bytes([4, 5, 6])


def test_windows_get_no_more_blocks_than_their_sequences_can_hold() -> None:
    """Two sequences hold at most 23 + 16 + 16 positions, 4 blocks, each: the rest is for full attention."""
    demand = MemoryDemand(NETWORK.shape, LAYOUT, 0, step_tokens=16, logit_rows=2, sequences=2, rotations=2)
    assert demand.group_blocks(100) == (100, 8, 10)
    assert demand.group_blocks(3) == (3, 3, 3)
    for room in (0, LAYOUT.pool_bytes([3, 3, 3]), LAYOUT.pool_bytes([50, 8, 10]) + 1):
        blocks = demand.blocks_within(room)
        assert demand.kv_bytes(blocks) <= room < demand.kv_bytes(blocks + 1)
    assert plan_stated(demand, 10**9, LAYOUT.pool_bytes([50, 8, 10])).group_blocks == (50, 8, 10)
    assert plan_share(demand, 10**9, 0.5).kv_bytes <= 5 * 10**8


# --- blocks as bytes


def test_a_block_arrives_as_it_left(executor: Executor) -> None:
    """In other places of the same executor, and of a fresh one."""
    prefill(executor)
    expected = follow(executor, ([0, 1], [2, 3], [4, 5]))
    images = [[executor.export_block(block, g) for block in pair] for g, pair in enumerate([(0, 1), (2, 3), (4, 5)])]
    targets = ([2, 1], [0, 1], [2, 1])
    for group, (pair, places) in enumerate(zip(images, targets, strict=True)):
        for image, place in zip(pair, places, strict=True):
            assert len(image) == HEADER + LAYOUT.block_bytes(group)
            executor.import_block(image, place, group)
            assert executor.export_block(place, group) == image
    assert follow(executor, targets) == expected


def test_native_and_reference_exchange_blocks() -> None:
    """They have one format, though another arrangement in memory: what one computed, the other reads."""
    native, reference = MAKE["native"](), MAKE["reference"]()
    prefill(native)
    for group, blocks in enumerate([(0, 1), (2, 3), (4, 5)]):
        for block in blocks:
            image = native.export_block(block, group)
            reference.import_block(memoryview(image), block, group)
            assert reference.export_block(block, group) == image
    tables = ([0, 1], [2, 3], [4, 5])
    logits = [np.frombuffer(follow(executor, tables), np.float32) for executor in (native, reference)]
    np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-3)


def damaged(image: bytes, group: int) -> Iterator[tuple[bytes, str]]:
    for at in (0, 4):
        yield flipped(image, at), "does not begin as a KV block of version 1 does"
    yield flipped(image, 8), "has KV layout"
    yield flipped(image, 24), "belongs to group"
    for at in (36, 59, 60, 63, 64, 1000, len(image) - 1):
        yield flipped(image, at), "the checksum does not match"
    for wrong in (b"", image[:10], image[:-1], image + b"\0"):
        yield wrong, f"the block has {len(wrong)} bytes; one of group {group} has {len(image)}"
    other = replace(LAYOUT, version=LAYOUT.version + 1)
    yield pack_block(other, group, image[HEADER:]), f"layout {other.digest.hex()}; this cache has {LAYOUT.digest.hex()}"
    infinite = np.frombuffer(image[HEADER:], np.float16).copy()
    infinite[7] = np.inf
    yield pack_block(LAYOUT, group, infinite.tobytes()), "not finite"
    infinite[7] = np.nan
    yield pack_block(LAYOUT, group, infinite.tobytes()), "not finite"


def flipped(image: bytes, at: int) -> bytes:
    return image[:at] + bytes([image[at] ^ 16]) + image[at + 1 :]


def test_what_is_damaged_or_of_another_kind_is_refused_and_changes_nothing(executor: Executor) -> None:
    prefill(executor)
    image = executor.export_block(3, 1)
    before = executor.export_block(1, 1)
    for data, message in damaged(image, 1):
        with pytest.raises(BlockImportError, match=message):
            executor.import_block(data, 1, 1)
        assert executor.export_block(1, 1) == before
    with pytest.raises(BlockImportError, match="the block belongs to group 1, not to group 2"):
        executor.import_block(image, 1, 2)
    executor.import_block(image, 1, 1)
    assert executor.export_block(1, 1) == image


@pytest.mark.parametrize(
    ("block", "group", "message"),
    [
        (4, 0, r"block 4 is outside the cache \(0 to 3\)"),
        (-1, 0, "block -1 is outside the cache"),
        (0, 3, r"group 3 is outside the KV cache \(0 to 2\)"),
        (0, -1, "group -1 is outside the KV cache"),
    ],
)
def test_blocks_that_do_not_exist(executor: Executor, block: int, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"export_block: {message}"):
        executor.export_block(block, group)
    with pytest.raises(ValueError, match=f"import_block: {message}"):
        executor.import_block(b"", block, group)
    with pytest.raises(ValueError, match=f"copy_block: {message}"):
        executor.copy_block(block, 1, group)


def test_a_cache_of_another_type_cannot_exchange_blocks() -> None:
    unrounded = ReferenceExecutor(NETWORK, 4, kv="float32")
    assert not unrounded.capabilities.transfers
    with pytest.raises(UnsupportedError, match="only float16 KV can be exported"):
        unrounded.export_block(0)


def test_a_block_is_copied_in_its_group_alone(executor: Executor) -> None:
    prefill(executor)
    source, others = executor.export_block(2, 1), [executor.export_block(1, g) for g in (0, 2)]
    executor.copy_block(2, 1, 1)
    assert executor.export_block(1, 1) == source
    assert [executor.export_block(1, g) for g in (0, 2)] == others


# --- the checksum

CHECK = b"123456789"


@pytest.mark.parametrize("function", [_native.crc32c, _native.crc32c_portable])
def test_check_values_of_crc32c(function: object) -> None:
    """Of the catalogue of CRC algorithms, and of RFC 3720, B.4."""
    crc = function  # type: ignore[assignment]
    assert crc(CHECK) == 0xE3069283
    assert crc(bytes(32)) == 0x8A9136AA
    assert crc(b"\xff" * 32) == 0x62A8AB43
    assert crc(bytes(range(32))) == 0x46DD794E
    assert crc(b"") == 0


@given(st.binary(max_size=200), st.integers(0, 200))
def test_checksums_of_parts(data: bytes, cut: int) -> None:
    whole = _native.crc32c(data)
    assert whole == _native.crc32c_portable(data)
    assert whole == _native.crc32c(data[cut:], _native.crc32c(data[:cut]))


# --- shareable memory


def test_another_mapping_sees_the_blocks() -> None:
    """Groups lie one after the other; a peer that maps the file reads what was computed, and what it writes is used."""
    executor = MAKE["shareable"]()
    assert executor.capabilities.shareable
    prefill(executor)
    size = executor.kv_bytes
    assert os.fstat(executor.kv_file_descriptor).st_size == size
    offset = LAYOUT.pool_bytes([4, 0, 0]) + 3 * LAYOUT.block_bytes(1)
    with mmap.mmap(executor.kv_file_descriptor, size) as peer:
        block = executor.export_block(3, 1)[HEADER:]
        assert peer[offset : offset + len(block)] == block
        peer[offset : offset + 2] = struct.pack("<e", 1.5)
    assert executor.export_block(3, 1)[HEADER : HEADER + 2] == struct.pack("<e", 1.5)


def test_nobody_can_change_the_size_of_shared_memory() -> None:
    """A peer that shortened the file would kill this process at its next read."""
    executor = MAKE["shareable"]()
    descriptor = MAKE["shareable"]().kv_file_descriptor
    for size in (0, executor.kv_bytes + 4096):
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(executor.kv_file_descriptor, size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # of an executor that is gone


def test_private_memory_has_no_descriptor_and_the_same_bits() -> None:
    private, shared = MAKE["native"](), MAKE["shareable"]()
    assert (private.kv_file_descriptor, private.capabilities.shareable) == (None, False)
    plain = tiny_network(TINY["Q8_0"])
    logits = [
        run_prompt(NativeExecutor(plain, 4, threads=2, shareable_kv=shareable), range(40), [3, 37])
        for shareable in (False, True)
    ]
    assert logits[0].tobytes() == logits[1].tobytes()
    assert shared.kv_file_descriptor >= 0
    assert Path(f"/proc/self/fd/{shared.kv_file_descriptor}").readlink().name.startswith("memfd:twostep-kv")
